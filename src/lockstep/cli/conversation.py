"""A conversation at the terminal, whoever answers: the prompt, the commands and what is shown after each answer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Protocol, TypeVar

from lockstep.cli.answers import AnswerWriter
from lockstep.errors import LockstepError, UsageError

CHAT_HELP = "Type a message. /clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."

Answer = TypeVar("Answer", covariant=True)


class Session(Protocol[Answer]):
    """Who answers, and remembers."""

    @property
    def has_history(self) -> bool:
        """False: each message is completed on its own."""
        ...

    def clear(self) -> None:
        """Forget the conversation."""
        ...

    def answer(self, text: str, writer: AnswerWriter | None) -> Answer:
        """Stream the answer through the writer; Ctrl-C ends it early and keeps what came."""
        ...


def prompt_of(said: str) -> str:
    """What ``-p`` means; ``-`` is standard input. UsageError: it is not in UTF-8."""
    return whole_text(sys.stdin.read() if said == "-" else said, "the prompt")


def system_of(said: str | None) -> str | None:
    """What ``--system`` means; UsageError: it is not in UTF-8."""
    return None if said is None else whole_text(said, "--system")


def whole_text(text: str, what: str) -> str:
    """The text; UsageError where a byte of it was none of the terminal's encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = ascii(text[error.start : error.end])
        raise UsageError(f"{what} is not UTF-8 at character {error.start} ({shown}); write it in UTF-8") from None
    return text


def converse(session: Session[Answer], figures: Callable[[Answer], str] | None) -> None:
    """Talk until the end of input.

    Args:
        figures: a line to print after each answer.

    Raises:
        LockstepError: a message was refused and nobody is at the terminal to read why.
    """
    with contextlib.suppress(ImportError):  # where it exists, importing it gives input() line editing and history
        import_module("readline")
    interactive = sys.stdin.isatty()
    if interactive:
        print(CHAT_HELP, file=sys.stderr)
        if not session.has_history:
            print("There is no chat template: each message is completed on its own.", file=sys.stderr)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            if interactive:
                print(file=sys.stderr)
            return
        if line == "/exit":
            return
        if line == "/clear":
            session.clear()
        elif line:
            try:
                _say(session, line, figures)
            except LockstepError as error:
                if not interactive:
                    raise
                print(f"error: {error}", file=sys.stderr)


def _say(session: Session[Answer], line: str, figures: Callable[[Answer], str] | None) -> None:
    answer = session.answer(line, AnswerWriter())
    print(flush=True)
    if figures is not None:
        print(figures(answer), file=sys.stderr)
