"""What every test may rely on."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Ctrl-C reaches the processes that tests start, also where the tests themselves run in a shell's background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
