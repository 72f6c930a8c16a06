"""Output rules of a sequence: apply stop strings, banned tokens and reasoning tags, and collect data of the prompt.

Each sequence has its own rules. They depend only on tokens and text, not on how these were divided into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.task import Pooling
from lockstep.executors.logits import TokenLogprobs, token_logprobs


class StopStrings:
    """Finds stop strings in a text that arrives in pieces.

    Exactly the longest suffix of the text that may still become a stop string is held back. The stop string that is
    completed first wins; of two that end together, the longer one. The result depends only on the text and not on how
    it was divided, so a streamed answer equals the whole answer.
    """

    __slots__ = ("_beginnings", "_firsts", "_held", "_max_held", "_shows_stop", "_stops")

    def __init__(self, stops: Sequence[str], *, shows_stop: bool = False) -> None:
        assert all(stops), "an empty stop string would stop at once; validation rejects it"
        self._stops = tuple(dict.fromkeys(stops))
        self._firsts = frozenset(stop[0] for stop in stops)
        self._shows_stop = shows_stop
        """True if the stop string itself is part of the output."""
        self._beginnings = frozenset(stop[:length] for stop in stops for length in range(1, len(stop)))
        self._max_held = max(map(len, stops)) - 1
        self._held = ""

    def append(self, text: str) -> tuple[str, str | None]:
        """Append text. Returns the text that may be shown now, and the stop string that it completed; later text is
        dropped."""
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
        """Release the text that was held back. Called when no more text comes."""
        held, self._held = self._held, ""
        return held


Runs = tuple[tuple[int, ...], ...]


class BadWords:
    """Token sequences that the output must not contain.

    The last token of a banned sequence is excluded if the output ends with all its other tokens. Only these token
    sequences are banned: the same word may still appear with another tokenisation.
    """

    __slots__ = ("_longer", "_single")

    def __init__(self, runs: Runs) -> None:
        self._single = tuple(run[0] for run in runs if len(run) == 1)
        self._longer: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        """Banned sequences of several tokens, by next-to-last token: pairs of all tokens but the last, and the last."""
        for run in runs:
            if len(run) > 1:
                self._longer.setdefault(run[-2], []).append((run[:-1], run[-1]))

    def after(self, tokens: Sequence[int], begin: int) -> tuple[int, ...]:
        """The tokens that may not come next.

        Args:
            tokens: all tokens of the sequence so far.
            begin: start of its output; the rule does not apply to tokens before it.
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
"""Maximum white space before a possible closing tag that is held back. More of it is not formatting, and is shown."""


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """Tags that mark the reasoning of a family of models."""

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
    ThinkTags("<|channel>thought", "<channel|>"),
)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning tags of one answer, and whether the prompt has opened them."""

    tags: ThinkTags
    is_open: bool = False
    """True if the prompt ends inside the tags, so that the answer begins with reasoning."""


def tags_of_template(source: str) -> ThinkTags | None:
    """The reasoning tags that a chat template writes or splits at; None: the template has none."""
    return next((tags for tags in THINK_TAGS if tags.end in source), None)


class _Part(Enum):
    BEFORE = auto()
    """Blanks, or a possible prefix of the opening tag."""
    OPENED = auto()
    """Blanks after the opening tag."""
    THOUGHTS = auto()
    CLOSED = auto()
    """Blanks after the closing tag."""
    CONTENT = auto()


class ReasoningSplitter:
    """Splits one answer into reasoning and content. `append` and `flush` return the text of each that may be shown now.

    Reasoning is enclosed in tags at the beginning of an answer, or the template has already opened it at the end of the
    prompt. Only the beginning counts: a tag that a model writes later, for example in an explanation of tags, is
    content. White space next to a tag belongs to the tag. Text that may still become a tag is held back.
    """

    __slots__ = ("_held", "_is_open", "_part", "_tags")

    def __init__(self, reasoning: Reasoning) -> None:
        self._tags = reasoning.tags
        self._is_open = reasoning.is_open
        self._part = _Part.BEFORE
        self._held = ""

    def tag(self, special: str) -> str:
        """The text of a special token if a tag begins with it; empty for others, which have no text."""
        return special if special and any(tag.startswith(special) for tag in (self._tags.begin, self._tags.end)) else ""

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
            thoughts, text = self._split_reasoning(text)
        if self._part is _Part.CLOSED:
            text = text.lstrip()
            self._part = _Part.CONTENT if text else _Part.CLOSED
        return thoughts, text

    def flush(self) -> tuple[str, str]:
        """Release the text that was held back. Called when no more text comes."""
        held, self._held = self._held, ""
        if self._part is _Part.BEFORE and not self._is_open:
            return "", held
        return (held.lstrip() if self._part is _Part.BEFORE else held), ""

    def _begin(self, text: str) -> str:
        """Decide whether the answer begins with reasoning, as soon as its text allows."""
        begin, seen = self._tags.begin, text.lstrip()
        if seen.startswith(begin):
            self._part = _Part.OPENED
            return seen[len(begin) :]
        if begin.startswith(seen):
            self._held = text
            return ""
        self._part = _Part.OPENED if self._is_open else _Part.CONTENT
        return text

    def _split_reasoning(self, text: str) -> tuple[str, str]:
        """Return the reasoning before the closing tag and the text after it; without a tag, the text that cannot be
        part of one."""
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
    """Length of the text up to `cut` that can be shown now: all but its trailing blanks."""
    return max(len(text[:cut].rstrip()), cut - MAX_HELD_BLANKS)


class Pooler:
    """Pools the hidden states of a prompt into one vector: the mean over its tokens, the first one, or the last one.

    States come in position order, chunk by chunk. They come again if a preempted prompt is recomputed; each position
    counts once. Sums are float64 in position order, so a vector does not depend on how its prompt was divided into
    chunks.

    Args:
        num_prompt_tokens: number of tokens whose states are pooled.
        first: position of the first one. In a model with several stages, the states are those of the last stage.
    """

    __slots__ = ("_begin", "_end", "_num_tokens", "_pooling", "_seen", "_sum")

    def __init__(self, pooling: Pooling, num_prompt_tokens: int, first: int = 0) -> None:
        self._pooling = pooling
        self._num_tokens = num_prompt_tokens
        self._begin = first + num_prompt_tokens - 1 if pooling == "last" else first
        self._end = first + 1 if pooling == "cls" else first + num_prompt_tokens
        self._seen = self._begin
        self._sum: npt.NDArray[np.float64] | None = None

    def rows_of(self, start: int, length: int) -> range:
        """Offsets in a chunk whose hidden states are still needed."""
        end = min(start + length, self._end)
        return range(max(self._seen, start) - start, max(end, start) - start)

    def add(self, start: int, offsets: range, states: npt.NDArray[np.float32]) -> None:
        """Add the states [len(offsets), hidden_size] of the offsets that ``rows_of`` returned."""
        for state in states.astype(np.float64):
            self._sum = state if self._sum is None else self._sum + state
        if len(offsets):
            self._seen = start + offsets.stop

    def vector(self) -> npt.NDArray[np.float32]:
        """The pooled vector, [hidden_size]. The whole prompt must have been added."""
        assert self._sum is not None, "no hidden state was collected"
        assert self._seen == self._end, f"{self._seen} of {self._end} positions were collected"
        vector = self._sum / self._num_tokens if self._pooling == "mean" else self._sum
        return vector.astype(np.float32)


class PromptLogprobs:
    """Log-probabilities of a prompt's own tokens, collected while the prompt is computed.

    The logits of a position give the log-probability of the next token, so the first token has none. Rows come in
    position order, chunk by chunk. If a preempted prompt is recomputed, they are not requested again.

    Args:
        prompt_ids: the whole prompt.
        count: number of most likely tokens to report for each position; 0: none.
    """

    __slots__ = ("_count", "_entries", "_prompt_ids")

    def __init__(self, prompt_ids: Sequence[int], count: int) -> None:
        self._prompt_ids = prompt_ids
        self._count = count
        self._entries: list[TokenLogprobs | None] = [None]

    def rows_of(self, start: int, length: int) -> range:
        """Offsets in a chunk whose logits are still needed."""
        end = min(start + length, len(self._prompt_ids) - 1)
        return range(max(len(self._entries) - 1, start) - start, max(end, start) - start)

    def add(self, rows: npt.NDArray[np.float32]) -> int | None:
        """Add the logits [len(offsets), vocab] of the offsets that ``rows_of`` returned last.

        Returns:
            The first position whose logits are not finite, after which nothing is collected; None: all are finite.
        """
        for row in rows:
            position = len(self._entries) - 1
            if not np.isfinite(np.maximum.reduce(row)):
                return position
            self._entries.append(token_logprobs(row, self._prompt_ids[position + 1], self._count))
        return None

    def entries(self) -> tuple[TokenLogprobs | None, ...] | None:
        """One entry per prompt token; None until the whole prompt is computed."""
        return tuple(self._entries) if len(self._entries) == len(self._prompt_ids) else None
