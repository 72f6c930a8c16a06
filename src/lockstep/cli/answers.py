"""One answer at the terminal, whoever gives it: its pieces as they come, what is shown of them, and its figures.

On a terminal thoughts are dimmed and apart; a pipe gets content only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lockstep.executors.sampling_params import SamplingParams

_DIM, _NORMAL = "\x1b[2m", "\x1b[0m"

Message = dict[str, str]


class Piece(NamedTuple):
    """What is new of an answer."""

    text: str
    thoughts: str = ""


@dataclass(slots=True)
class Answer:
    """An answer as far as it came; who gives it fills in what is known of it."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None
    total_s: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """After the first token; None where that cannot be known."""
        if self.output_tokens is None or self.output_tokens < 2 or self.ttft_s is None or self.total_s is None:
            return None
        return (self.output_tokens - 1) / max(self.total_s - self.ttft_s, 1e-9)

    @property
    def figures(self) -> str:
        """A line of them."""
        rate = self.tokens_per_s
        cached = "" if self.cached_tokens is None else f" ({self.cached_tokens} cached)"
        return (
            f"{_shown(self.prompt_tokens)} prompt tokens{cached}, {_shown(self.output_tokens)} new, "
            f"{'unknown' if rate is None else f'{rate:.1f}'} tokens/s, "
            f"first after {(self.ttft_s or 0.0) * 1e3:.0f} ms, ended by {self.finish_reason or 'nothing'}"
        )


def _shown(count: int | None) -> str:
    return "unknown" if count is None else str(count)


class Answerer(Protocol):
    """A model, here or elsewhere. It remembers no conversation."""

    @property
    def knows_roles(self) -> bool:
        """False: the last message is completed as it is."""
        ...

    def ask(self, messages: Sequence[Message], params: SamplingParams, answer: Answer) -> Generator[Piece]:
        """Give the answer to a conversation in pieces; closing it, or an interrupt in it, ends the generation."""
        ...


class AnswerWriter:
    """Writes one answer to standard output."""

    def __init__(self) -> None:
        self._shows_thoughts = sys.stdout.isatty()
        self._is_dim = False

    def write(self, piece: Piece) -> None:
        """What is new."""
        text, thoughts = piece
        if thoughts and self._shows_thoughts:
            sys.stdout.write(thoughts if self._is_dim else _DIM + thoughts)
            self._is_dim = True
        if text:
            self._undim("\n\n")
        sys.stdout.write(text)
        sys.stdout.flush()

    def end(self) -> None:
        """Leave the terminal as it was, wherever the answer ended."""
        self._undim("")
        sys.stdout.flush()

    def _undim(self, then: str) -> None:
        if self._is_dim:
            sys.stdout.write(_NORMAL + then)
            self._is_dim = False


def write_answer(
    answerer: Answerer,
    messages: Sequence[Message],
    params: SamplingParams,
    answer: Answer,
    writer: AnswerWriter | None,
) -> None:
    """Ask, and write what comes; also of an answer that is interrupted or fails, all that was written is in it."""
    started_s = time.perf_counter()
    try:
        with closing(answerer.ask(messages, params, answer)) as pieces:
            for piece in pieces:
                if answer.ttft_s is None and any(piece):
                    answer.ttft_s = time.perf_counter() - started_s
                answer.text += piece.text
                if writer is not None:
                    writer.write(piece)
    finally:
        if answer.total_s is None:
            answer.total_s = time.perf_counter() - started_s
        if writer is not None:
            writer.end()
