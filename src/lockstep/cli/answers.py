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
        self.add(output.text, output.reasoning, is_final=output.is_final)

    def add(self, text: str, thoughts: str, *, is_final: bool) -> None:
        """What is new; the last call must be final, or the terminal stays dim."""
        if thoughts and self._shows_thoughts:
            sys.stdout.write(thoughts if self._is_dim else _DIM + thoughts)
            self._is_dim = True
        if self._is_dim and (text or is_final):
            sys.stdout.write(_NORMAL + ("\n\n" if text else ""))
            self._is_dim = False
        sys.stdout.write(text)
        sys.stdout.flush()
