"""Prompts of given lengths, made of units (token ids or words) that are drawn by key and seed.

Equal segments have equal tokens. The lengths are calibrated with the server before a run, which is not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.bench.remote import RemoteServer
from lockstep.bench.samples import Sample, TokenSegment
from lockstep.errors import RemoteError

_VOCABULARY = (
    "time people way water day man thing woman life child world school state"  # plain: words of prompts
    " family student group country problem hand part place case week company system"
    " program question work number night point home room mother area money story"
    " fact month lot right study book eye job word business issue side kind"
    " head house service friend father power hour game line end member law car"
    " city name team minute idea body back parent face level office door health"
)
WORDS = tuple(_VOCABULARY.split())
"""Common words, each of which is one token together with the space before it in most vocabularies."""


@dataclass(frozen=True, slots=True)
class Units:
    """Units that segments are filled with: token ids or words."""

    ids: tuple[int, ...] = ()
    """Ordinary token ids; empty: prompts are text."""
    words: tuple[str, ...] = ()
    """Words that are concatenated if there are no ids."""
    tokens_per_word: float = 1.0
    method: str = ""
    """Method of counting tokens, for messages: exact or estimated."""

    def fill(self, segments: Sequence[TokenSegment], seed: int, *, more_tokens: int = 0) -> list[int] | str:
        """Prompt of the segments, as token ids or text.

        Args:
            more_tokens: tokens to add to the last segment; if negative, to remove, down to one token.
        """
        last = segments[-1]
        adjusted = [*segments[:-1], TokenSegment(last.key, max(1, last.num_tokens + more_tokens))]
        if self.ids:
            return [self.ids[i] for part in adjusted for i in _draw(part, len(self.ids), part.num_tokens, seed)]
        counts = [max(1, round(part.num_tokens / self.tokens_per_word)) for part in adjusted]
        drawn = zip(adjusted, counts, strict=True)
        return "".join(self.words[i] for part, count in drawn for i in _draw(part, len(self.words), count, seed))


def _draw(segment: TokenSegment, num_units: int, count: int, seed: int) -> list[int]:
    """Indices of a segment's units. A longer segment of the same key begins with the shorter one."""
    indices: list[int] = np.random.default_rng([seed, 3, *segment.key]).integers(0, num_units, count).tolist()
    return indices


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """Body of all requests of a run, without their prompts and lengths."""

    model: str
    is_chat: bool
    temperature: float | None = 0.0
    ignore_eos: bool = False
    extra: tuple[tuple[str, Any], ...] = ()
    """Further fields of the body, which override the others."""

    def body(self, prompt: Any, output_tokens: int) -> dict[str, Any]:
        """Body of a request, for JSON; ``prompt`` is text, token ids or messages."""
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
    """Prompt of a sample: its messages or text unchanged, or its segments filled with units.

    Args:
        corrections: tokens to add to a prompt for its exact length, by the key of its last segment.
    """
    segments = [part for part in sample.recipe if isinstance(part, TokenSegment)]
    if not segments:
        return sample.recipe
    return units.fill(segments, seed, more_tokens=corrections.get(segments[-1].key, 0))


MIN_UNITS = 8
"""Minimum number of words that are one token each; with fewer, prompts are made of single characters."""
MAX_CORRECTIONS = 4
"""Maximum attempts at correcting the length of one prompt."""
TRUSTED_AFTER = 8
"""Number of consecutive prompts with the exact length at once, after which no further prompts are checked."""
_CHARACTERS = tuple("abcdefghijklmnopqrstuvwxyz")
_PROBE_WORDS = (48, 144)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Units of a run's prompts, and corrections of their lengths."""

    units: Units
    corrections: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Tokens to add to a prompt, by the key of its last segment."""


def calibrate(
    remote: RemoteServer, template: RequestTemplate, path: str, samples: Sequence[Sample], seed: int
) -> Calibration:
    """Select units for the samples' segments.

    The units are token ids if the server accepts them, otherwise words whose tokens ``/tokenize`` counts, otherwise
    words whose tokens are estimated from ``usage``.
    """
    if not any(isinstance(part, TokenSegment) for sample in samples for part in sample.recipe):
        return Calibration(Units(method="as given"))
    ids = _ids(remote, template.model, " " + " ".join(WORDS))
    if ids is None:
        return Calibration(_by_usage(remote, template, path))
    if not template.is_chat and _accepts_ids(remote, template, path, ids):
        return Calibration(Units(ids=tuple(sorted(set(ids))), method="exact: token ids"))
    words = tuple(f" {word}" for word in WORDS if len(_ids(remote, template.model, f" {word}") or ()) == 1)
    if len(words) < MIN_UNITS:
        words = _CHARACTERS
    units = Units(words=words, method="exact: words counted by /tokenize")
    return Calibration(units, _corrections(remote, template.model, units, samples, seed))


def _ids(remote: RemoteServer, model: str, text: str) -> list[int] | None:
    """Token ids of a text; None if the server has no ``/tokenize`` with the expected answer."""
    answer = remote.try_post("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    return tokens if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens) else None


def _accepts_ids(remote: RemoteServer, template: RequestTemplate, path: str, ids: list[int]) -> bool:
    return remote.try_post(path, _plain(template.body(ids[:8], 1))) is not None


def _corrections(
    remote: RemoteServer, model: str, units: Units, samples: Sequence[Sample], seed: int
) -> dict[tuple[int, ...], int]:
    corrections: dict[tuple[int, ...], int] = {}
    num_exact = 0
    for sample in samples:
        if num_exact >= TRUSTED_AFTER:
            break
        num_tokens, key = sample.input_tokens, _last_key(sample)
        if num_tokens is None or key is None:
            continue
        for attempt in range(MAX_CORRECTIONS):
            missing = num_tokens - len(_ids(remote, model, prompt_of(sample, units, seed, corrections)) or ())
            if missing == 0:
                num_exact = num_exact + 1 if attempt == 0 else 0
                break
            corrections[key] = corrections.get(key, 0) + missing
    return corrections


def _last_key(sample: Sample) -> tuple[int, ...] | None:
    last = sample.recipe[-1]
    return last.key if isinstance(last, TokenSegment) else None


def _by_usage(remote: RemoteServer, template: RequestTemplate, path: str) -> Units:
    """Words, with their tokens estimated from two prompts of different length, so that the template's tokens cancel."""
    counts: list[int] = []
    for num_words in _PROBE_WORDS:
        text = " " + " ".join(WORDS[i % len(WORDS)] for i in range(num_words))
        counts.append(_prompt_tokens(remote.post(path, _plain(template.body(text, 1)))))
    rate = (counts[1] - counts[0]) / (_PROBE_WORDS[1] - _PROBE_WORDS[0])
    if rate <= 0:
        raise RemoteError(
            f"{remote.target.url} reports prompt tokens neither in usage nor by /tokenize, so random prompts cannot "
            "have given lengths; use --dataset jsonl:FILE"
        )
    method = f"estimated: {rate:.2f} tokens per word from usage"
    return Units(words=tuple(f" {word}" for word in WORDS), tokens_per_word=rate, method=method)


def _plain(body: dict[str, Any]) -> dict[str, Any]:
    """Body of a request without streaming."""
    return {name: value for name, value in body.items() if name not in ("stream", "stream_options", "ignore_eos")}


def _prompt_tokens(answer: Any) -> int:
    usage = answer.get("usage") if isinstance(answer, dict) else None
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) else 0
