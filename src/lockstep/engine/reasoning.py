"""The thoughts of an answer told from its content, in a text that arrives in pieces.

Thoughts stand between tags at the beginning of an answer, or the template has opened them already at the end of the
prompt. Only the beginning counts: a tag that a model writes later, say in an explanation of tags, is content. White
space that touches a tag belongs to the tag. Nothing is shown that may yet become a tag, so the split depends on the
text alone and not on where it was cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

MAX_HELD_BLANKS = 256
"""White space before a closing tag that may be waited for; more of it is no formatting, and is shown."""


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """How a family of models writes that it thinks."""

    begin: str
    end: str


THINK_TAGS = (
    ThinkTags("<think>", "</think>"),
    ThinkTags("<thinking>", "</thinking>"),
    ThinkTags("<thought>", "</thought>"),
    ThinkTags("<reasoning>", "</reasoning>"),
    ThinkTags("<seed:think>", "</seed:think>"),
    ThinkTags("[THINK]", "[/THINK]"),
    ThinkTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkTags("◁think▷", "◁/think▷"),
)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What to look for in one answer."""

    tags: ThinkTags
    is_open: bool = False
    """The prompt ends inside the tags: the answer begins with thoughts."""


def tags_of_template(source: str) -> ThinkTags | None:
    """The tags that a chat template writes or cuts at; None: its model does not think, as far as one can tell."""
    return next((tags for tags in THINK_TAGS if tags.end in source), None)


class _Part(Enum):
    BEFORE = auto()
    """Blanks, or what may become the opening tag."""
    OPENED = auto()
    """Blanks after the opening tag."""
    THOUGHTS = auto()
    CLOSED = auto()
    """Blanks after the closing tag."""
    CONTENT = auto()


class ReasoningSplitter:
    """Splits one answer. `append` and `flush` return (thoughts, content) that may be shown now."""

    __slots__ = ("_held", "_is_open", "_part", "_tags")

    def __init__(self, reasoning: Reasoning) -> None:
        self._tags = reasoning.tags
        self._is_open = reasoning.is_open
        self._part = _Part.BEFORE
        self._held = ""

    def tag(self, special: str) -> str:
        """The text of a special token if it is one of the tags: of the others, none is text."""
        return special if special in (self._tags.begin, self._tags.end) else ""

    def append(self, text: str) -> tuple[str, str]:
        if self._part is _Part.CONTENT:
            return "", text
        text, self._held = self._held + text, ""
        thoughts = ""
        if self._part is _Part.BEFORE:
            text = self._begin(text)
        if self._part is _Part.OPENED:
            text = text.lstrip()
            self._part = _Part.THOUGHTS if text else _Part.OPENED
        if self._part is _Part.THOUGHTS:
            thoughts, text = self._think(text)
        if self._part is _Part.CLOSED:
            text = text.lstrip()
            self._part = _Part.CONTENT if text else _Part.CLOSED
        return thoughts, text

    def flush(self) -> tuple[str, str]:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        if self._part is _Part.BEFORE and not self._is_open:
            return "", held
        return (held.lstrip() if self._part is _Part.BEFORE else held), ""

    def _begin(self, text: str) -> str:
        """Decide whether the answer begins with thoughts, as soon as its text allows."""
        begin, seen = self._tags.begin, text.lstrip()
        if seen.startswith(begin):
            self._part = _Part.OPENED
            return seen[len(begin) :]
        if begin.startswith(seen):
            self._held = text
            return ""
        self._part = _Part.OPENED if self._is_open else _Part.CONTENT
        return text

    def _think(self, text: str) -> tuple[str, str]:
        """Thoughts up to the closing tag, and what follows it; without one, what cannot belong to it."""
        end = self._tags.end
        at = text.find(end)
        if at >= 0:
            self._part = _Part.CLOSED
            return text[: _shown(text, at)], text[at + len(end) :]
        cut = len(text) - next((n for n in range(min(len(end) - 1, len(text)), 0, -1) if text.endswith(end[:n])), 0)
        shown = _shown(text, cut)
        self._held = text[shown:]
        return text[:shown], ""


def _shown(text: str, cut: int) -> int:
    """How much of the text up to `cut` is shown whatever follows: all but its last blanks."""
    return max(len(text[:cut].rstrip()), cut - MAX_HELD_BLANKS)
