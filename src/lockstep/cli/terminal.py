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
"""Within which a second Ctrl-C at the prompt leaves."""
LEAVE_HINT = "(Ctrl-C once more within two seconds leaves; so do /bye and Ctrl-D)"
MAX_HISTORY_BYTES = 1 << 18
"""Beyond it the older half is forgotten when a chat begins."""
MAX_ENTRY_BYTES = 1 << 14
"""Longer messages are not remembered for the next chat."""
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
        """The next message or command; EOFError: there is none, or the user leaves."""
        ...

    def stoppable(self) -> AbstractContextManager[object]:
        """While it is open, Ctrl-C raises KeyboardInterrupt."""
        ...


def is_open(text: str) -> bool:
    """True for a text that goes on in the next line: three quotes opened it, or what it commands, and do not end."""
    begun = text.lstrip()
    begins = begun.startswith(QUOTES) or (begun.startswith("/") and f" {QUOTES}" in begun.partition("\n")[0])
    return begins and begun.count(QUOTES) % 2 == 1


def unquoted(text: str) -> str:
    """The text between three quotes, or the text itself."""
    text = text.strip()
    is_quoted = len(text) >= 2 * len(QUOTES) and text.startswith(QUOTES) and text.endswith(QUOTES)
    return text[len(QUOTES) : -len(QUOTES)].strip("\n") if is_quoted else text


class Pipe:
    """Lines of standard input, from whatever is no terminal."""

    is_terminal = False

    def read(self) -> str:
        text = input()
        while is_open(text):
            try:
                text += "\n" + input()
            except EOFError:
                raise UsageError(f"the message that {QUOTES} opened never ends; end it with {QUOTES}") from None
        return text

    def stoppable(self) -> AbstractContextManager[object]:
        return nullcontext()


class Piece(NamedTuple):
    """New text of an answer, and new thoughts."""

    text: str
    thoughts: str = ""


class AnswerWriter:
    """Writes one answer to standard output: on a terminal with dimmed thoughts and lines that break between words."""

    def __init__(self) -> None:
        self._shows_thoughts = sys.stdout.isatty()
        self._is_dim = False
        self._wrap = WordWrap(_terminal_width) if sys.stdout.isatty() else None

    def write(self, piece: Piece) -> None:
        """Write the new piece."""
        text, thoughts = piece
        if thoughts and self._shows_thoughts:
            sys.stdout.write("" if self._is_dim else _DIM)
            self._is_dim = True
            self._write(thoughts)
        if text:
            self._undim("\n\n")
        self._write(text)
        sys.stdout.flush()

    def end(self) -> None:
        """Leave the terminal as it was, wherever the answer ended."""
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
    """Lines that break between words, for text that comes in pieces.

    The word at the end is held back until the next piece shows where it ends. A word wider than a line is broken.
    A wide character, as Chinese has them, is a word.

    Args:
        width: cells of a line, read at each word because terminals change their size.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        self._word = ""

    def feed(self, text: str) -> str:
        """Take text in; returns what is to be written now."""
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
        """The word that was held back, on a new line where it does not fit."""
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
        if self._column + num_cells > self._width():  # the blank is at the end of a line, and the line break is it
            return ""
        self._column += num_cells
        return character


def _cells(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


class CtrlC:
    """Ctrl-C as a chat means it: it stops what can be stopped, and is only noted anywhere else.

    So no interrupt comes between an answer and its being remembered, nor into the drawing of the prompt.
    """

    def __init__(self) -> None:
        self._stops = False
        self._is_noted = False

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Until it is left, Ctrl-C means this. For the main thread, where Python has signals handled."""
        before = signal.signal(signal.SIGINT, self._pressed)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """While it is open, Ctrl-C raises KeyboardInterrupt, once; one that was noted before does so now."""
        try:
            self._stops = True
            self.raise_noted()
            yield
        finally:
            self._stops = False

    def raise_noted(self) -> None:
        """Take account of one that came when nothing could be stopped."""
        is_noted, self._is_noted = self._is_noted, False
        if is_noted:
            raise KeyboardInterrupt

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        if not self._stops:
            self._is_noted = True
            return
        self._stops = False
        raise KeyboardInterrupt


class Terminal:
    """A person at a terminal.

    Args:
        words: what Tab completes at the beginning of a line.
        ctrl_c: caught while this is used.
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
        """The prompt is there, and takes Ctrl-C from now on; an earlier one counts as well."""
        from prompt_toolkit.application import get_app

        try:
            self._ctrl_c.raise_noted()
        except KeyboardInterrupt as noted:
            get_app().exit(exception=noted)

    def _press(self, now_s: float) -> None:
        """Ctrl-C at the prompt, whose line is gone; EOFError: it was the second one."""
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
    output.enable_cpr = False  # it only serves menus, and terminals that do not answer get a warning
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
    """History of earlier chats: a JSON string a line, for its owner's eyes. What cannot be kept is not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = ""

    def entries(self) -> list[str]:
        """The oldest first; forgets the older half of a long history."""
        try:
            data = self._path.read_bytes()
            if len(data) > MAX_HISTORY_BYTES:
                data = data[-MAX_HISTORY_BYTES // 2 :].partition(b"\n")[2]
                self._replace(data)
        except OSError:
            return []
        read: list[str] = []
        for line in data.splitlines():
            with suppress(ValueError):  # half a line, of a disk that was full
                entry = json.loads(line)
                if isinstance(entry, str):
                    read.append(entry)
        return read

    def append(self, text: str) -> None:
        """Remember an entry; not twice in a row."""
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
        """Another chat may be adding to it: whole or not at all."""
        beside = self._path.with_suffix(f".{os.getpid()}")
        descriptor = os.open(beside, os.O_WRONLY | os.O_TRUNC | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(beside, self._path)
