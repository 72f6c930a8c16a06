"""Parent-death signal of our processes: ends a child with its parent. Imported first, so it imports little."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Number of the prctl option that sets the parent-death signal, from linux/prctl.h."""


def die_with_parent(parent_pid: int) -> None:
    """Have Linux kill this process when the thread that started it ends, even if this process is stuck in native code.

    Args:
        parent_pid: id of the parent process; if it is gone already, this process exits at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)


def signal_name(number: int) -> str:
    """Readable name of a signal, e.g. ``signal 9 (SIGKILL)``."""
    with contextlib.suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"
