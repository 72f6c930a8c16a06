"""From recipes to prompts: units (token ids, or words) drawn by key and seed; equal segments are equal tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.bench.samples import Sample, Segment

WORDS = (
    *("time", "people", "way", "water", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("program", "question", "work", "number", "night", "point", "home", "room", "mother", "area", "money", "story"),
    *("fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind"),
    *("head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law", "car"),
    *("city", "name", "team", "minute", "idea", "body", "back", "parent", "face", "level", "office", "door", "health"),
)
"""Common words: in most vocabularies each is one token with the space before it."""


@dataclass(frozen=True, slots=True)
class Units:
    """What segments are filled with."""

    ids: tuple[int, ...] = ()
    """Ordinary token ids; prompts are lists of them where these are known."""
    words: tuple[str, ...] = ()
    """Texts that are put side by side, where there are no ids."""
    tokens_per_word: float = 1.0
    method: str = ""
    """How token counts were come by: exact, or estimated."""

    def fill(self, segments: Sequence[Segment], seed: int, *, more_tokens: int = 0) -> list[int] | str:
        """The prompt of these segments: token ids, or text.

        Args:
            more_tokens: the last segment is longer by so many (or shorter, if negative), never shorter than one.
        """
        last = segments[-1]
        adjusted = [*segments[:-1], Segment(last.key, max(1, last.num_tokens + more_tokens))]
        if self.ids:
            return [self.ids[i] for part in adjusted for i in _draw(part, len(self.ids), part.num_tokens, seed)]
        counts = [max(1, round(part.num_tokens / self.tokens_per_word)) for part in adjusted]
        drawn = zip(adjusted, counts, strict=True)
        return "".join(self.words[i] for part, count in drawn for i in _draw(part, len(self.words), count, seed))


def _draw(segment: Segment, num_units: int, count: int, seed: int) -> list[int]:
    """Indices of units; a longer draw of one key begins with the shorter one."""
    indices: list[int] = np.random.default_rng([seed, 3, *segment.key]).integers(0, num_units, count).tolist()
    return indices


@dataclass(frozen=True, slots=True)
class Asking:
    """How every request of a run is asked, beside its prompt and length."""

    model: str
    is_chat: bool
    temperature: float | None = 0.0
    ignore_eos: bool = False
    extra: tuple[tuple[str, Any], ...] = ()
    """Further fields of the body; they win over ours."""

    def body(self, prompt: Any, output_tokens: int) -> dict[str, Any]:
        """The request as JSON: ``prompt`` is text, token ids or messages."""
        body: dict[str, Any] = {"model": self.model}
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        else:
            body["prompt"] = prompt
        body["max_tokens"] = output_tokens
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | {"stream": True, "stream_options": {"include_usage": True}} | dict(self.extra)


def prompt_of(sample: Sample, units: Units, seed: int, corrections: dict[tuple[int, ...], int]) -> Any:
    """What a sample's recipe becomes: messages and texts as they are, segments filled.

    Args:
        corrections: tokens by which the last segment of a key must be longer for the whole to be exact.
    """
    segments = [part for part in sample.recipe if isinstance(part, Segment)]
    if not segments:
        return sample.recipe
    return units.fill(segments, seed, more_tokens=corrections.get(segments[-1].key, 0))
