"""Streams for tests of what only a person at a terminal sees."""

from __future__ import annotations

import io


class Terminal(io.StringIO):
    """A stream that says that it is a terminal, for `contextlib.redirect_stdout` and `redirect_stderr`."""

    def isatty(self) -> bool:
        return True
