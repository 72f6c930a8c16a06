"""Prompts of given lengths: units (token ids, or words) drawn by key and seed, calibrated on the server before a run.

Equal segments are equal tokens. Calibration is not timed.
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
"""Common words: in most vocabularies each is one token with the space before it."""


@dataclass(frozen=True, slots=True)
class Units:
    """Content of segments: token ids or words."""

    ids: tuple[int, ...] = ()
    """Ordinary token ids; prompts are lists of them where these are known."""
    words: tuple[str, ...] = ()
    """Texts that are put side by side, where there are no ids."""
    tokens_per_word: float = 1.0
    method: str = ""
    """Origin of token counts: exact, or estimated."""

    def fill(self, segments: Sequence[TokenSegment], seed: int, *, more_tokens: int = 0) -> list[int] | str:
        """The prompt of these segments: token ids, or text.

        Args:
            more_tokens: the last segment is longer by so many (or shorter, if negative), never shorter than one.
        """
        last = segments[-1]
        adjusted = [*segments[:-1], TokenSegment(last.key, max(1, last.num_tokens + more_tokens))]
        if self.ids:
            return [self.ids[i] for part in adjusted for i in _draw(part, len(self.ids), part.num_tokens, seed)]
        counts = [max(1, round(part.num_tokens / self.tokens_per_word)) for part in adjusted]
        drawn = zip(adjusted, counts, strict=True)
        return "".join(self.words[i] for part, count in drawn for i in _draw(part, len(self.words), count, seed))


def _draw(segment: TokenSegment, num_units: int, count: int, seed: int) -> list[int]:
    """Indices of units; a longer draw of one key begins with the shorter one."""
    indices: list[int] = np.random.default_rng([seed, 3, *segment.key]).integers(0, num_units, count).tolist()
    return indices


@dataclass(frozen=True, slots=True)
class Asking:
    """Body of every request of a run, beside its prompt and length."""

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
    """Prompt of a sample's recipe: messages and texts as they are, segments filled.

    Args:
        corrections: tokens by which the last segment of a key must be longer for the whole to be exact.
    """
    segments = [part for part in sample.recipe if isinstance(part, TokenSegment)]
    if not segments:
        return sample.recipe
    return units.fill(segments, seed, more_tokens=corrections.get(segments[-1].key, 0))


MIN_UNITS = 8
"""Fewer words that are one token each, and the vocabulary is taken for one of characters."""
MAX_CORRECTIONS = 4
"""Rounds in which one prompt's length is corrected."""
TRUSTED_AFTER = 8
"""So many prompts in a row that came out right at once, and the others are believed."""
_CHARACTERS = tuple("abcdefghijklmnopqrstuvwxyz")
_PROBE_WORDS = (48, 144)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Units of a run's prompts, and corrections of their lengths."""

    units: Units
    corrections: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Tokens to add to a prompt, by the key of its last segment."""


def calibrate(remote: RemoteServer, asking: Asking, path: str, samples: Sequence[Sample], seed: int) -> Calibration:
    """Find units for the samples' segments: token ids, else words counted by ``/tokenize``, else by ``usage``."""
    if not any(isinstance(part, TokenSegment) for sample in samples for part in sample.recipe):
        return Calibration(Units(method="as given"))
    ids = _ids(remote, asking.model, " " + " ".join(WORDS))
    if ids is None:
        return Calibration(_by_usage(remote, asking, path))
    if not asking.is_chat and _takes_ids(remote, asking, path, ids):
        return Calibration(Units(ids=tuple(sorted(set(ids))), method="exact: token ids"))
    words = tuple(f" {word}" for word in WORDS if len(_ids(remote, asking.model, f" {word}") or ()) == 1)
    if len(words) < MIN_UNITS:
        words = _CHARACTERS
    units = Units(words=words, method="exact: words counted by /tokenize")
    return Calibration(units, _corrections(remote, asking.model, units, samples, seed))


def _ids(remote: RemoteServer, model: str, text: str) -> list[int] | None:
    """Token ids of a text alone; None where the server has no ``/tokenize`` as we know it."""
    answer = remote.try_post("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    return tokens if isinstance(tokens, list) and all(isinstance(token, int) for token in tokens) else None


def _takes_ids(remote: RemoteServer, asking: Asking, path: str, ids: list[int]) -> bool:
    return remote.try_post(path, _plain(asking.body(ids[:8], 1))) is not None


def _corrections(
    remote: RemoteServer, model: str, units: Units, samples: Sequence[Sample], seed: int
) -> dict[tuple[int, ...], int]:
    corrections: dict[tuple[int, ...], int] = {}
    right = 0
    for sample in samples:
        if right >= TRUSTED_AFTER:
            break
        wanted, key = sample.input_tokens, _last_key(sample)
        if wanted is None or key is None:
            continue
        for attempt in range(MAX_CORRECTIONS):
            missing = wanted - len(_ids(remote, model, prompt_of(sample, units, seed, corrections)) or ())
            if missing == 0:
                right = right + 1 if attempt == 0 else 0
                break
            corrections[key] = corrections.get(key, 0) + missing
    return corrections


def _last_key(sample: Sample) -> tuple[int, ...] | None:
    last = sample.recipe[-1]
    return last.key if isinstance(last, TokenSegment) else None


def _by_usage(remote: RemoteServer, asking: Asking, path: str) -> Units:
    """Words, and their tokens by the difference that more of them make: a template's own tokens cancel out."""
    counts: list[int] = []
    for num_words in _PROBE_WORDS:
        text = " " + " ".join(WORDS[i % len(WORDS)] for i in range(num_words))
        counts.append(_prompt_tokens(remote.post(path, _plain(asking.body(text, 1)))))
    rate = (counts[1] - counts[0]) / (_PROBE_WORDS[1] - _PROBE_WORDS[0])
    if rate <= 0:
        raise RemoteError(
            f"{remote.target.url} counts the tokens of prompts neither in usage nor by /tokenize; "
            "random ones cannot be sized: give prompts by --dataset jsonl:FILE"
        )
    words = tuple(f" {word}" for word in WORDS)
    return Units(words=words, tokens_per_word=rate, method=f"estimated: {rate:.2f} tokens a word by usage")


def _plain(body: dict[str, Any]) -> dict[str, Any]:
    """The same request, not streamed."""
    return {name: value for name, value in body.items() if name not in ("stream", "stream_options", "ignore_eos")}


def _prompt_tokens(answer: Any) -> int:
    usage = answer.get("usage") if isinstance(answer, dict) else None
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) else 0
