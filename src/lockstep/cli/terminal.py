"""Input and output of a chat: a terminal, with history, editing, Ctrl-C and wrapped lines, or a pipe, line by line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lockstep.errors import UsageError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

QUOTES = '"""'
LEAVE_S = 2.0
"""Seconds within which a second Ctrl-C at the prompt ends the chat."""
LEAVE_HINT = "(to exit: Ctrl-C again within two seconds, /bye or Ctrl-D)"
MAX_HISTORY_BYTES = 1 << 18
"""Size of the history file above which its older half is deleted when a chat begins."""
MAX_ENTRY_BYTES = 1 << 14
"""Maximum size of a message in the history; longer ones are not stored."""
_PROMPT, _CONTINUED = "> ", "... "
_DIM, _NORMAL = "\x1b[2m", "\x1b[0m"
_TAB_CELLS = 8


class Reader(Protocol):
    """Source of a chat's messages."""

    @property
    def is_terminal(self) -> bool:
        """True if standard input and output are a terminal."""
        ...

    def read(self) -> str:
        """The next message or command; EOFError at the end of input, or if the user exits."""
        ...

    def stoppable(self) -> AbstractContextManager[object]:
        """Context in which Ctrl-C raises KeyboardInterrupt."""
        ...


def is_open(text: str) -> bool:
    """True if a text continues in the next line: three quotes begin it, or a command's value, and are not closed."""
    begun = text.lstrip()
    begins = begun.startswith(QUOTES) or (begun.startswith("/") and f" {QUOTES}" in begun.partition("\n")[0])
    return begins and begun.count(QUOTES) % 2 == 1


def unquoted(text: str) -> str:
    """The text without enclosing triple quotes, if it has them."""
    text = text.strip()
    is_quoted = len(text) >= 2 * len(QUOTES) and text.startswith(QUOTES) and text.endswith(QUOTES)
    return text[len(QUOTES) : -len(QUOTES)].strip("\n") if is_quoted else text


class Pipe:
    """Messages from standard input that is not a terminal, one per line."""

    is_terminal = False

    def read(self) -> str:
        text = input()
        while is_open(text):
            try:
                text += "\n" + input()
            except EOFError:
                raise UsageError(f"a message begins with {QUOTES} and has no end; end it with {QUOTES}") from None
        return text

    def stoppable(self) -> AbstractContextManager[object]:
        return nullcontext()


class Piece(NamedTuple):
    """New text of an answer, and new text of its reasoning."""

    text: str
    reasoning: str = ""


class AnswerWriter:
    """Writes one answer to standard output. A terminal also gets the reasoning, dimmed, and breaks between words."""

    def __init__(self) -> None:
        self._shows_reasoning = sys.stdout.isatty()
        self._is_dim = False
        self._wrap = WordWrap(_terminal_width) if sys.stdout.isatty() else None

    def write(self, piece: Piece) -> None:
        """Write a piece of the answer."""
        text, reasoning = piece
        if reasoning and self._shows_reasoning:
            sys.stdout.write("" if self._is_dim else _DIM)
            self._is_dim = True
            self._write(reasoning)
        if text:
            self._undim("\n\n")
        self._write(text)
        sys.stdout.flush()

    def end(self) -> None:
        """End the answer, and reset the terminal's style."""
        self._undim("")
        self._flush()
        sys.stdout.flush()

    def _undim(self, then: str) -> None:
        if self._is_dim:
            self._flush()
            sys.stdout.write(_NORMAL)
            self._write(then)
            self._is_dim = False

    def _write(self, text: str) -> None:
        sys.stdout.write(text if self._wrap is None else self._wrap.feed(text))

    def _flush(self) -> None:
        sys.stdout.write("" if self._wrap is None else self._wrap.flush())


def _terminal_width() -> int:
    return shutil.get_terminal_size().columns


class WordWrap:
    """Breaks lines between words, for text that arrives in pieces.

    The last word is retained until the next piece shows its end. A word wider than a line is broken. A wide character,
    for example a Chinese one, is a word.

    Args:
        width: returns the cells of a line. It is called for each word, because the size of a terminal may change.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        self._word = ""

    def feed(self, text: str) -> str:
        """Add text; returns the text to write now."""
        parts: list[str] = []
        for character in text:
            if character.isspace():
                parts += [self.flush(), self._space(character)]
            elif _cells(character) > 1:
                parts.append(self.flush())
                self._word = character
                parts.append(self.flush())
            else:
                self._word += character
                if len(self._word) >= self._width():
                    parts.append(self.flush())
        return "".join(parts)

    def flush(self) -> str:
        """Return the retained word, on a new line if it does not fit."""
        word, self._word = self._word, ""
        num_cells = _cells(word)
        is_broken = self._column > 0 and self._column + num_cells > self._width()
        self._column = num_cells if is_broken else self._column + num_cells
        return f"\n{word}" if is_broken and word else word

    def _space(self, character: str) -> str:
        if character in "\r\n":
            self._column = 0
            return character
        num_cells = _TAB_CELLS - self._column % _TAB_CELLS if character == "\t" else 1
        if self._column + num_cells > self._width():  # a blank at the end of a line: the line break replaces it
            return ""
        self._column += num_cells
        return character


def _cells(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


class CtrlC:
    """Handler of Ctrl-C in a chat: it raises KeyboardInterrupt in stoppable sections, and is pending elsewhere.

    An interrupt therefore cannot come between an answer and its storage, or while the prompt is drawn.
    """

    def __init__(self) -> None:
        self._stops = False
        self._is_pending = False

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Install the handler while the context is open. Only for the main thread, which handles Python's signals."""
        before = signal.signal(signal.SIGINT, self._pressed)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Context in which Ctrl-C raises KeyboardInterrupt, once. A pending Ctrl-C raises it at the beginning."""
        try:
            self._stops = True
            self.raise_pending()
            yield
        finally:
            self._stops = False

    def raise_pending(self) -> None:
        """Raise KeyboardInterrupt if a Ctrl-C is pending."""
        is_pending, self._is_pending = self._is_pending, False
        if is_pending:
            raise KeyboardInterrupt

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        if not self._stops:
            self._is_pending = True
            return
        self._stops = False
        raise KeyboardInterrupt


class Terminal:
    """Messages from a user at a terminal.

    Args:
        words: commands that Tab completes at the beginning of a line.
        ctrl_c: handler of Ctrl-C, which must be installed.
    """

    is_terminal = True

    def __init__(self, words: Sequence[str], ctrl_c: CtrlC) -> None:
        self._ctrl_c = ctrl_c
        self._history = HistoryFile(_history_path())
        self._session = _session(words, self._history.entries())
        self._pressed_s = -LEAVE_S

    def read(self) -> str:
        while True:
            try:
                text = self._session.prompt(pre_run=self._begin)
            except KeyboardInterrupt:
                self._press(time.monotonic())
                continue
            self._pressed_s = -LEAVE_S
            self._history.append(text)
            return text

    def stoppable(self) -> AbstractContextManager[object]:
        return self._ctrl_c.stoppable()

    def _begin(self) -> None:
        """Apply a pending Ctrl-C to the new prompt, which handles later ones itself."""
        from prompt_toolkit.application import get_app

        try:
            self._ctrl_c.raise_pending()
        except KeyboardInterrupt as pending:
            get_app().exit(exception=pending)

    def _press(self, now_s: float) -> None:
        """Handle Ctrl-C at the prompt, which discards the line; EOFError at the second one."""
        if now_s - self._pressed_s < LEAVE_S:
            raise EOFError
        self._pressed_s = now_s
        print(LEAVE_HINT, file=sys.stderr)


def _session(words: Sequence[str], entries: list[str]) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.output import create_output

    output: Any = create_output(stdout=sys.stdout if sys.stdout.isatty() else sys.stderr)
    output.enable_cpr = False  # only menus need it, and some terminals print a warning for it
    return PromptSession(
        _PROMPT,
        history=InMemoryHistory(entries),
        multiline=Condition(lambda: is_open(get_app().current_buffer.text)),
        prompt_continuation=_CONTINUED,
        completer=WordCompleter(list(words), sentence=True),
        complete_while_typing=False,
        reserve_space_for_menu=0,
        output=output,
    )


def _history_path() -> Path:
    import platformdirs

    return platformdirs.user_state_path("lockstep") / "chat_history.jsonl"


class HistoryFile:
    """History of earlier chats: a JSON string per line, readable by the user alone. Errors of the disk are ignored."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = ""

    def entries(self) -> list[str]:
        """All entries, the oldest first. Deletes the older half of a long history."""
        try:
            data = self._path.read_bytes()
            if len(data) > MAX_HISTORY_BYTES:
                data = data[-MAX_HISTORY_BYTES // 2 :].partition(b"\n")[2]
                self._replace(data)
        except OSError:
            return []
        read: list[str] = []
        for line in data.splitlines():
            with suppress(ValueError):  # a truncated line, from a full disk
                entry = json.loads(line)
                if isinstance(entry, str):
                    read.append(entry)
        return read

    def append(self, text: str) -> None:
        """Append an entry, unless it repeats the previous one."""
        line = json.dumps(text).encode() + b"\n"
        if not text.strip() or text == self._last or len(line) > MAX_ENTRY_BYTES:
            return
        self._last = text
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(line)

    def _replace(self, data: bytes) -> None:
        """Replace the file atomically, because another chat may append to it."""
        beside = self._path.with_suffix(f".{os.getpid()}")
        descriptor = os.open(beside, os.O_WRONLY | os.O_TRUNC | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(beside, self._path)
