"""How answers look on a terminal: thoughts dimmed and apart, content as it comes. A pipe gets content only."""

from __future__ import annotations

import sys

from lockstep.engine.outputs import TokenOutput

_DIM, _NORMAL = "\x1b[2m", "\x1b[0m"


class AnswerWriter:
    """Writes one answer to standard output."""

    def __init__(self) -> None:
        self._shows_thoughts = sys.stdout.isatty()
        self._is_dim = False

    def write(self, output: TokenOutput) -> None:
        if output.reasoning and self._shows_thoughts:
            sys.stdout.write(output.reasoning if self._is_dim else _DIM + output.reasoning)
            self._is_dim = True
        if self._is_dim and (output.text or output.is_final):
            sys.stdout.write(_NORMAL + ("\n\n" if output.text else ""))
            self._is_dim = False
        sys.stdout.write(output.text)
        sys.stdout.flush()
