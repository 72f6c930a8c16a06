"""Parent-death signal of our processes: a child ends with its parent. Imported first, so it is light."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def die_with_parent(parent_pid: int) -> None:
    """Ask Linux to kill this process when the thread that started it ends, also while it is stuck in native code.

    Args:
        parent_pid: who started it; if that one is gone already, this process ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)


def signal_name(number: int) -> str:
    """A signal for people, e.g. ``signal 9 (SIGKILL)``."""
    with contextlib.suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"
