"""Rules on an answer as it comes: where it stops, which tokens must not follow, which part of it is thoughts, and what
is collected of its prompt. Each sequence has its own; all of them depend on tokens and text alone, and not on how these
were cut into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

import numpy as np
import numpy.typing as npt

from lockstep.executors.logits import TokenLogprobs, token_logprobs


class StopStrings:
    """Stop strings in a text that arrives in pieces: found across borders, and shown only where that is wanted.

    Exactly the longest end of the text that may yet become a stop string is held back. The first one to be complete
    wins; of two that end together, the longer. That depends on the text alone and not on where it was cut, so a
    streamed answer is the answer.
    """

    __slots__ = ("_beginnings", "_firsts", "_held", "_max_held", "_shows_stop", "_stops")

    def __init__(self, stops: Sequence[str], *, shows_stop: bool = False) -> None:
        assert all(stops), "an empty stop string would stop at once; validation refuses it"
        self._stops = tuple(dict.fromkeys(stops))
        self._firsts = frozenset(stop[0] for stop in stops)
        self._shows_stop = shows_stop
        """True if the stop string is let through as well."""
        self._beginnings = frozenset(stop[:length] for stop in stops for length in range(1, len(stop)))
        self._max_held = max(map(len, stops)) - 1
        self._held = ""

    def append(self, text: str) -> tuple[str, str | None]:
        """Take text; returns what may be shown now, and the stop string that it completed (nothing after it counts)."""
        if not self._held and self._firsts.isdisjoint(text):
            return text, None
        whole = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := whole.find(stop)) >= 0]
        if found:
            end, at, stop = min(found)
            self._held = ""
            return whole[: end if self._shows_stop else at], stop
        cut = max(0, len(whole) - self._max_held)
        while cut < len(whole) and whole[cut:] not in self._beginnings:
            cut += 1
        self._held = whole[cut:]
        return whole[:cut], None

    def flush(self) -> str:
        """Release what was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


Runs = tuple[tuple[int, ...], ...]


class BadWords:
    """Runs of tokens that one sequence must not complete.

    A run's last token may not come where the output ends with all others of it. So it is runs that are banned, not
    spellings: a word whose tokens are cut otherwise still comes.
    """

    __slots__ = ("_longer", "_single")

    def __init__(self, runs: Runs) -> None:
        self._single = tuple(run[0] for run in runs if len(run) == 1)
        self._longer: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        """By the token before the last: the run without its last token, and that."""
        for run in runs:
            if len(run) > 1:
                self._longer.setdefault(run[-2], []).append((run[:-1], run[-1]))

    def after(self, tokens: Sequence[int], begin: int) -> tuple[int, ...]:
        """The tokens that may not follow.

        Args:
            tokens: of the sequence so far.
            begin: where its output begins; rules do not apply to what stands before.
        """
        if len(tokens) <= begin:
            return self._single
        completing = [
            last
            for head, last in self._longer.get(tokens[-1], ())
            if len(tokens) - begin >= len(head) and tuple(tokens[-len(head) :]) == head
        ]
        return (*self._single, *completing)


MAX_HELD_BLANKS = 256
"""White space before a closing tag that may be waited for; more of it is no formatting, and is shown."""


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """Tags by which a family of models marks its thoughts."""

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
    """Thoughts of one answer: their tags, and whether they are open at its beginning."""

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
    """Splits one answer into thoughts and content. `append` and `flush` return what may be shown now of each.

    Thoughts stand between tags at the beginning of an answer, or the template has opened them already at the end of the
    prompt. Only the beginning counts: a tag that a model writes later, say in an explanation of tags, is content. White
    space that touches a tag belongs to the tag. Nothing is shown that may yet become a tag.
    """

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
        """Release what was held back, when no more text comes."""
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
    """Length of the text up to `cut` that is shown whatever follows: all but its last blanks."""
    return max(len(text[:cut].rstrip()), cut - MAX_HELD_BLANKS)


Pooling = Literal["mean", "last"]
POOLINGS: tuple[Pooling, ...] = ("mean", "last")


class Pooler:
    """One vector from the hidden states of a prompt: the mean over its positions, or the last one.

    States come in position order, chunk by chunk, and again where a preempted prompt is recomputed; each position
    counts once. Sums are float64 in position order, so a vector does not depend on how its prompt was cut into chunks.

    Args:
        num_prompt_tokens: positions that the vector is made of.
    """

    __slots__ = ("_num_positions", "_pooling", "_seen", "_sum")

    def __init__(self, pooling: Pooling, num_prompt_tokens: int) -> None:
        self._pooling = pooling
        self._num_positions = num_prompt_tokens
        self._seen = 0
        self._sum: npt.NDArray[np.float64] | None = None

    def rows_of(self, start: int, length: int) -> range:
        """Offsets in a chunk whose hidden states are still wanted."""
        end = min(start + length, self._num_positions)
        first = self._seen if self._pooling == "mean" else max(self._seen, self._num_positions - 1)
        return range(max(first, start) - start, max(end, start) - start)

    def add(self, start: int, offsets: range, states: npt.NDArray[np.float32]) -> None:
        """Take the states [len(offsets), hidden_size] that ``rows_of`` requested."""
        for state in states.astype(np.float64):
            self._sum = state if self._sum is None else self._sum + state
        if len(offsets):
            self._seen = start + offsets.stop

    def vector(self) -> npt.NDArray[np.float32]:
        """[hidden_size].

        A pooler that has not seen the whole prompt has no vector; asking is a programming error.
        """
        assert self._sum is not None, "no hidden state was collected"
        assert self._seen == self._num_positions, f"{self._seen} of {self._num_positions} positions were collected"
        vector = self._sum / self._num_positions if self._pooling == "mean" else self._sum
        return vector.astype(np.float32)


class PromptLogprobs:
    """Log-probabilities of a prompt's own tokens, collected while the prompt is computed.

    The logits of a position judge the token after it; the first token has none before it. Rows come in position order,
    chunk by chunk, and where a preempted prompt is recomputed they are not requested again.

    Args:
        prompt_ids: the whole prompt.
        count: how many of the most likely tokens are wanted beside each; 0: none.
    """

    __slots__ = ("_count", "_entries", "_prompt_ids")

    def __init__(self, prompt_ids: Sequence[int], count: int) -> None:
        self._prompt_ids = prompt_ids
        self._count = count
        self._entries: list[TokenLogprobs | None] = [None]

    def rows_of(self, start: int, length: int) -> range:
        """Offsets in a chunk whose logits are still wanted."""
        end = min(start + length, len(self._prompt_ids) - 1)
        return range(max(len(self._entries) - 1, start) - start, max(end, start) - start)

    def add(self, rows: npt.NDArray[np.float32]) -> int | None:
        """Take the logits [len(offsets), vocab] that ``rows_of`` requested last.

        Returns:
            The position whose logits are not finite, where one is: nothing is known of what follows it. Else None.
        """
        for row in rows:
            position = len(self._entries) - 1
            if not np.isfinite(np.maximum.reduce(row)):
                return position
            self._entries.append(token_logprobs(row, self._prompt_ids[position + 1], self._count))
        return None

    def entries(self) -> tuple[TokenLogprobs | None, ...] | None:
        """One per prompt token; None while the prompt is not computed to its end."""
        return tuple(self._entries) if len(self._entries) == len(self._prompt_ids) else None
