"""Somebody at a real terminal of which a command is the foreground process."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from lockstep.cli.main import main as lockstep
from tests.processes import Program
from tests.waiting import HANG_S

CTRL_C, CTRL_D = "\x03", "\x04"
_ESCAPES = re.compile(r"\x1b\[(?!2m|0m)[0-9;?]*[a-zA-Z]")
"""All but those that dim a text."""


class Person:
    """Types, and sees what the terminal shows.

    Args:
        home: where the state of this user's programs lies.
        words: what `lockstep` is called with.
        main: what is run in its place.
        columns: width of the terminal; None: it has none, so that nothing is wrapped before 80 cells.
    """

    def __init__(
        self, home: Path, *words: str, main: Callable[[], None] = lockstep, columns: int | None = None
    ) -> None:
        self._terminal, inner = pty.openpty()
        if columns is not None:
            fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environment = {**os.environ, "XDG_STATE_HOME": str(home), "TERM": "xterm"}
        environment.pop("COLUMNS", None)  # some shells export it, and it goes before the terminal's own width
        self._program = Program(words, (inner, inner, inner), environment, main=main, is_on_terminal=True)
        os.close(inner)
        self._unread = ""
        self.greeting = self.sees("/bye or Ctrl-D exits.")

    def types(self, text: str) -> None:
        """A line, and Enter."""
        self.presses(text + "\r")

    def presses(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def sees(self, text: str) -> str:
        """Wait until a text is shown; returns what was shown before it, of what was not looked at yet."""
        while text not in self._unread:
            assert self._reads(), f"no {text!r} in {self._unread!r}"
        before, _, self._unread = self._unread.partition(text)
        return before

    def leaves(self, *keys: str) -> int:
        """Say goodbye; returns the exit code, when all is read."""
        for key in keys or ("/bye\r",):
            self.presses(key)
        while self._reads():
            pass
        return self._program.wait()

    @property
    def has_seen(self) -> str:
        """What was shown and not looked at."""
        return self._unread

    def _reads(self) -> bool:
        """Whether anything more is shown."""
        assert select.select([self._terminal], [], [], HANG_S)[0], f"nothing more after {self._unread!r}"
        try:
            part = os.read(self._terminal, 65_536)
        except OSError:  # Linux: the other side of a terminal is gone
            part = b""
        self._unread = _ESCAPES.sub("", self._unread + part.decode(errors="replace"))
        return bool(part)

    def __enter__(self) -> Person:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._program.send_signal(signal.SIGKILL)
        self._program.wait()
        os.close(self._terminal)


def pause(duration_s: float) -> None:
    """Let the other side go on to a moment that nothing shows."""
    time.sleep(duration_s)
