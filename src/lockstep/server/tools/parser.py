"""Tool call parser: separates calls from content in text that arrives in pieces.

White space around calls is part of them. Text that may become a marker is held back. A call is announced with its name
and the first part of its arguments; it is complete when its arguments are. Text that starts like a call but is not one
(invalid JSON, an unknown function) becomes content in full. If such a call was already announced in a stream, the
announcement cannot be withdrawn: the stream has an incomplete call that is not in ``calls``. If the answer is cut after
an announcement, the call has a part of its arguments.

The result depends only on the text, not on how it was split, except for the sizes of the pieces.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import msgspec
from pydantic_core import from_json

from lockstep.engine.output_rules import MAX_HELD_BLANKS
from lockstep.server.tools.call_formats import CallFormat
from lockstep.server.tools.call_reader import CallReader, num_partial_chars
from lockstep.server.tools.markup_readers import reader_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """New text outside calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New output of one call."""

    index: int
    """Index of the call, in order of announcement."""
    arguments: str
    """A fragment. Together, the fragments are the arguments' JSON text as the model wrote it."""
    id: str | None = None
    """Set on the first delta of a call, like `name`."""
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call, or the received part of a call that was cut."""

    index: int
    id: str
    name: str
    arguments: str
    """JSON text of an object."""
    is_cut: bool = False
    """Whether the answer ended before the call did."""

    @property
    def arguments_object(self) -> msgspec.Raw:
        """The arguments as a JSON object. If the arguments were cut, it has the members received so far."""
        try:
            if isinstance(json.loads(self.arguments or "{}"), dict):
                return msgspec.Raw((self.arguments or "{}").encode())
        except ValueError:  # the arguments were cut
            return msgspec.Raw(json.dumps(_members_of(self.arguments)).encode())
        return msgspec.Raw(b"{}")


Delta = ContentDelta | CallDelta


class _Place(Enum):
    START = auto()
    """Only blanks so far, and the answer may start with a call."""
    TEXT = auto()
    OPENED = auto()
    """After a marker or a separator of calls."""
    CALL = auto()
    TAIL = auto()
    """After a call: its end marker, a separator or the start of another call."""
    AFTER = auto()
    """After the calls: blanks and the end marker."""


class ToolParser:
    """Parser of one answer.

    Args:
        call_format: form in which calls are written.
        names: names of the functions that can be called. Without any, everything is content.
        new_id: generates the id of a call, once per announced call.
        schemas: schemas of the arguments by function name; see `reader_of`.
        is_forced: the whole answer consists of calls, so that text that was cut is part of a call and not content.
    """

    def __init__(
        self,
        call_format: CallFormat,
        names: Collection[str],
        new_id: Callable[[], str],
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        is_forced: bool = False,
    ) -> None:
        self._format = call_format
        self._names = frozenset(names)
        self._schemas = schemas
        self._new_id = new_id
        self._is_forced = is_forced
        self._place = _Place.START if call_format.bare else _Place.TEXT
        self._text = ""
        """Text that has not been classified yet."""
        self._raw: list[str] = []
        """Text that becomes content if the call turns out to be invalid."""
        self._has_content = False
        """Whether any content other than blanks was emitted."""
        self._is_list_open = False
        self._reader: CallReader | None = None
        self._announced: ToolCall | None = None
        """The call that is being read, once its name is known, without its arguments."""
        self._num_announced = 0
        self._deltas: list[Delta] = []
        self.calls: list[ToolCall] = []
        """Complete calls so far. After `flush`, also a call that was cut, with a part of its arguments."""
        self.num_unread = 0
        """Number of times that text which started like a call could not be parsed and became content."""

    def append(self, text: str) -> list[Delta]:
        """Add text and return what is certain now. If parsing fails unexpectedly, all text is returned as content."""
        if not self._names:
            self._show(text)
            return self._take()
        self._text += text
        try:
            while self._text and self._advance():
                pass
        except Exception:  # any error: the generated text can still be returned
            log.warning("parsing the tool calls of an answer failed; its text is returned unchanged", exc_info=True)
            self._names = frozenset()
            self._give_up()
            self._show(self._text)
            self._text = ""
        return self._take()

    def flush(self, *, is_cut: bool = False) -> list[Delta]:
        """End the text and return what was held back.

        Args:
            is_cut: whether the token limit ended the answer. A call whose name is known by then becomes a call with a
                part of its arguments.
        """
        if is_cut:
            self._end_cut_call()
        if self._place in (_Place.OPENED, _Place.CALL):
            self._give_up()
        self._show(self._text if self._place is not _Place.AFTER else self._text.strip())
        self._text = ""
        return self._take()

    def _end_cut_call(self) -> None:
        """End the call in which the answer was cut.

        The name of a forced call is also known if there is only one function. If there are several, a call without its
        name is dropped.
        """
        is_forced = self._is_forced and not self._has_content  # a remote server may ignore the constraint
        if is_forced and self._announced is None and not self.calls and len(self._names) == 1:
            [name] = self._names
            self._announce(name, "")
        if self._announced is not None:
            self._end_call("" if self._reader is None else self._reader.arguments)
            self.calls[-1] = replace(self.calls[-1], is_cut=True)
        elif not is_forced:
            return
        self._forget_call()
        self._place, self._text = _Place.AFTER, ""

    def _advance(self) -> bool:
        """Classify some of the text. Return False if more text is needed."""
        return _STEPS[self._place](self)

    def _at_start(self) -> bool:
        seen = self._text.lstrip()
        num_blanks = len(self._text) - len(seen)
        if not seen and num_blanks <= MAX_HELD_BLANKS:
            return False
        if seen.startswith("{") and num_blanks <= MAX_HELD_BLANKS:
            self._open(num_blanks)
        else:
            self._place = _Place.TEXT
        return True

    def _in_text(self) -> bool:
        text, begin = self._text, self._format.begin
        at = text.find(begin)
        if at >= 0:
            shown = _shown(text, at)
            self._show(text[:shown])
            self._text = text[shown:]
            self._open(at - shown + len(begin))
            return True
        shown = _shown(text, len(text) - num_partial_chars(text, begin))
        self._show(text[:shown])
        self._text = text[shown:]
        return False

    def _open(self, length: int) -> None:
        """Enter calls after the given number of characters."""
        self._raw = [self._text[:length]]
        self._text = self._text[length:]
        self._is_list_open = not self._format.open
        self._place = _Place.OPENED

    def _opened(self) -> bool:
        seen = self._text.lstrip()
        self._raw.append(self._text[: len(self._text) - len(seen)])
        self._text = seen
        if not seen:
            return False
        if self._is_list_open:
            self._reader = reader_of(self._format, self._names, self._schemas)
            self._place = _Place.CALL
        elif seen.startswith(self._format.open):
            self._raw.append(self._format.open)
            self._text = seen.removeprefix(self._format.open)
            self._is_list_open = True
        else:
            self._give_up()
        return True

    def _in_call(self) -> bool:
        reader = self._reader
        assert reader is not None, "a call has a reader"
        end = reader.read(self._text)
        self._raw.append(self._text[:end])
        self._text = self._text[end:]
        news = reader.take()
        if news is not None:
            self._announce(*news)
        if reader.is_broken:
            self._give_up()
        elif reader.is_complete:
            self._end_call(reader.arguments)
        else:
            return False
        return True

    def _in_tail(self) -> bool:
        text, form = self._text.lstrip(), self._format
        self._text = text
        if not text:
            return False
        marks = [mark for mark in (form.close, form.end, form.between, form.begin) if mark]
        found = next((mark for mark in marks if text.startswith(mark)), None)
        if found is None and any(mark.startswith(text) for mark in marks):
            return False
        if found is not None and found in (form.close, form.end):
            self._text = text.removeprefix(found)
            self._place = _Place.AFTER
        elif found is not None:
            is_list_open = self._is_list_open
            self._open(len(found))
            self._is_list_open |= is_list_open and found == form.between
        elif form.has_lines or (form.bare and text.startswith("{")):
            self._open(0)
        else:
            self._place = _Place.TEXT
        return True

    def _after(self) -> bool:
        text, end = self._text.lstrip(), self._format.end
        self._text = text.removeprefix(end) if end else text
        if len(self._text) < len(text):
            return True
        if not text or (end and end.startswith(text)):
            return False
        self._place = _Place.TEXT
        return True

    def _announce(self, name: str, fragment: str) -> None:
        call = self._announced
        if call is None:
            self._announced = call = ToolCall(self._num_announced, self._new_id(), name, "")
            self._num_announced += 1
            self._deltas.append(CallDelta(call.index, fragment, call.id, name))
        else:
            self._deltas.append(CallDelta(call.index, fragment))

    def _end_call(self, arguments: str) -> None:
        assert self._announced is not None, "a complete call was announced"
        self.calls.append(replace(self._announced, arguments=arguments))
        self._forget_call()
        self._place = _Place.TAIL

    def _give_up(self) -> None:
        """Emit the text of an invalid call as content."""
        self.num_unread += 1
        self._show("".join(self._raw))
        self._forget_call()
        self._place = _Place.TEXT

    def _forget_call(self) -> None:
        self._reader, self._announced, self._raw = None, None, []

    def _show(self, text: str) -> None:
        if not text:
            return
        self._has_content = self._has_content or not text.isspace()
        if self._deltas and isinstance(last := self._deltas[-1], ContentDelta):
            self._deltas[-1] = ContentDelta(last.text + text)
        else:
            self._deltas.append(ContentDelta(text))

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas


_STEPS: Mapping[_Place, Callable[[ToolParser], bool]] = {
    _Place.START: ToolParser._at_start,
    _Place.TEXT: ToolParser._in_text,
    _Place.OPENED: ToolParser._opened,
    _Place.CALL: ToolParser._in_call,
    _Place.TAIL: ToolParser._in_tail,
    _Place.AFTER: ToolParser._after,
}


def _members_of(arguments: str) -> Mapping[str, Any]:
    """Members of an object whose JSON text was cut; empty if there are none."""
    try:
        members = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return members if isinstance(members, dict) else {}


def _shown(text: str, cut: int) -> int:
    """Length of the text up to ``cut`` that can be emitted whatever follows: everything but trailing blanks."""
    return max(len(text[:cut].rstrip()), cut - MAX_HELD_BLANKS)
