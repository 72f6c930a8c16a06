"""Sameness of two answers: which materials are compared, fingerprints, tolerances of vectors, first differing tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from lockstep.release.reading import Store

FNV_OFFSET = 0xCBF29CE484222325
FNV_PRIME = 0x100000001B3
"""Of FNV-1a with 64 bits (Fowler, Noll, Vo; RFC 9923)."""
_CHUNK = 256
"""Pairs whose material is in memory at one time."""


class Output(IntEnum):
    """How the two answers of a pair compare."""

    FAILED = 0
    """One side failed, or both did."""
    SAME = 1
    DIFFERS = 2
    TOLERATED = 3
    """Vectors that differ within their rule."""
    DRIFTED = 4
    """Vectors that differ beyond it."""
    INCOMPARABLE = 5
    """Unlike materials, prompts, parameters, seeds or environments."""
    NO_MATERIAL = 6
    """Of neither answer anything was kept: evidence of latency only."""
    UNRESOLVED = 7
    """Not yet compared: vectors, or a fingerprint against material."""


COMPARED = (Output.SAME, Output.DIFFERS, Output.TOLERATED, Output.DRIFTED)
DIFFERENT = (Output.DIFFERS, Output.DRIFTED)
_UNLIKE = {
    "prompt": "b.prompt_digest <> c.prompt_digest",
    "parameters": "b.params_digest <> c.params_digest",
    "seed": "b.seed <> c.seed",
    "environment": "b.environment <> c.environment",
}
"""Reasons for which two answers are incomparable, and how they show."""
_ANY = "({0}.has_tokens OR {0}.has_vector OR {0}.text_hash IS NOT NULL OR {0}.fingerprint IS NOT NULL)"
COMPARISON = f"""CASE
  WHEN NOT (b.ok AND c.ok) THEN {Output.FAILED:d}
  WHEN {" OR ".join(f"coalesce({text}, false)" for text in _UNLIKE.values())} THEN {Output.INCOMPARABLE:d}
  WHEN b.has_tokens AND c.has_tokens
    THEN CASE WHEN b.tokens_hash = c.tokens_hash THEN {Output.SAME:d} ELSE {Output.DIFFERS:d} END
  WHEN b.has_vector AND c.has_vector
    THEN CASE WHEN b.vector_hash = c.vector_hash THEN {Output.SAME:d} ELSE {Output.UNRESOLVED:d} END
  WHEN b.text_hash IS NOT NULL AND c.text_hash IS NOT NULL
    THEN CASE WHEN b.text_hash = c.text_hash THEN {Output.SAME:d} ELSE {Output.DIFFERS:d} END
  WHEN b.fingerprint IS NOT NULL AND c.fingerprint IS NOT NULL
    THEN CASE WHEN b.fingerprint = c.fingerprint THEN {Output.SAME:d} ELSE {Output.DIFFERS:d} END
  WHEN NOT {_ANY.format("b")} AND NOT {_ANY.format("c")} THEN {Output.NO_MATERIAL:d}
  WHEN (b.fingerprint IS NOT NULL AND (c.has_tokens OR c.has_vector))
    OR (c.fingerprint IS NOT NULL AND (b.has_tokens OR b.has_vector)) THEN {Output.UNRESOLVED:d}
  ELSE {Output.INCOMPARABLE:d} END"""
"""SQL over the facts of both sides, ``b`` and ``c``."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far two vectors may differ: either bound suffices, number by number. What is not named holds for all."""

    absolute: float = 0.0
    relative: float = 0.0
    """Of the baseline's number."""
    model: str | None = None
    backend: str | None = None
    """The candidate's."""
    accelerator: str | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.absolute < math.inf and 0 <= self.relative < math.inf):
            raise ValueError("absolute and relative are finite and not below 0")

    def covers(self, model: str | None, backend: str | None, accelerator: str | None) -> bool:
        """Whether it is about such answers."""
        named = ((self.model, model), (self.backend, backend), (self.accelerator, accelerator))
        return all(rule is None or rule == value for rule, value in named)

    @property
    def num_named(self) -> int:
        """How specific it is."""
        return sum(each is not None for each in (self.model, self.backend, self.accelerator))


def rule_for(
    tolerances: Sequence[Tolerance], model: str | None, backend: str | None, accelerator: str | None
) -> Tolerance | None:
    """The most specific rule, the first of equals; None: exact."""
    covering = [each for each in tolerances if each.covers(model, backend, accelerator)]
    return max(covering, key=lambda each: each.num_named) if covering else None


def fnv_of_tokens(tokens: NDArray[np.int64]) -> NDArray[np.uint64]:
    """FNV-1a-64 of each row: token ids as unsigned numbers of 32 bits, little-endian.

    Args:
        tokens: shape (answers, tokens).
    """
    return _fnv(tokens.astype("<u4"))


def fnv_of_vectors(vectors: NDArray[np.float64]) -> NDArray[np.uint64]:
    """FNV-1a-64 of each row: numbers as binary64, little-endian.

    Args:
        vectors: shape (answers, numbers).
    """
    return _fnv(vectors.astype("<f8"))


def _fnv(rows: NDArray[np.uint32] | NDArray[np.float64]) -> NDArray[np.uint64]:
    digests = np.full(len(rows), FNV_OFFSET, np.uint64)
    octets = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1) if rows.size else rows.astype(np.uint8)
    prime = np.uint64(FNV_PRIME)
    for octet in octets.T if rows.size else ():
        digests ^= octet
        digests *= prime
    return digests


def fingerprint_of(tokens: Sequence[int] | None, vector: Sequence[float] | None) -> str | None:
    """The fingerprint of an answer's material, 16 hex digits; None of none."""
    if tokens is not None:
        return f"{int(fnv_of_tokens(np.array([tokens], np.int64))[0]):016x}"
    if vector is not None:
        return f"{int(fnv_of_vectors(np.array([vector], np.float64))[0]):016x}"
    return None


def resolve(
    store: Store, output: NDArray[np.int8], tolerances: Sequence[Tolerance]
) -> tuple[NDArray[np.int8], dict[str, int], float]:
    """Compare what SQL left: vectors by their rules, fingerprints with material.

    Returns:
        The outputs, the incomparable pairs by reason, and the largest drift of a number under a rule (NaN: none).
    """
    output = output.copy()
    max_drift = math.nan
    places = np.flatnonzero(output == Output.UNRESOLVED)
    for start in range(0, len(places), _CHUNK):
        chunk = places[start : start + _CHUNK]
        wanted = ", ".join(str(int(place)) for place in chunk)
        rows = store.rows(
            "SELECT place, x.tokens, y.tokens, x.vector, y.vector, x.fingerprint, y.fingerprint,"
            " coalesce(y.model, x.model), y.backend, coalesce(y.accelerator, x.accelerator) FROM ordered o"
            f" JOIN observed_baseline x ON o.b = x.row JOIN observed_candidate y ON o.c = y.row WHERE place IN ({wanted})"
        )
        for place, b_tokens, c_tokens, b_vector, c_vector, b_print, c_print, *segment in rows:
            if b_vector is not None and c_vector is not None:
                rule = rule_for(tolerances, *segment)
                output[place], drift = _compare_vectors(b_vector, c_vector, rule)
                max_drift = float(np.fmax(max_drift, drift))
            else:
                prints = b_print or fingerprint_of(b_tokens, b_vector), c_print or fingerprint_of(c_tokens, c_vector)
                output[place] = Output.SAME if prints[0] == prints[1] else Output.DIFFERS
    return output, _incomparable(store, output), max_drift


def _compare_vectors(b: Sequence[float], c: Sequence[float], rule: Tolerance | None) -> tuple[Output, float]:
    if rule is None or len(b) != len(c):
        return Output.DIFFERS, math.nan
    baseline, candidate = np.array(b), np.array(c)
    difference = np.abs(candidate - baseline)
    is_within = (difference <= rule.absolute) | (difference <= rule.relative * np.abs(baseline))
    return (Output.TOLERATED if is_within.all() else Output.DRIFTED), float(difference.max(initial=0.0))


def _incomparable(store: Store, output: NDArray[np.int8]) -> dict[str, int]:
    """Incomparable pairs by reason, the first that holds."""
    if not (output == Output.INCOMPARABLE).any():
        return {}
    cases = " ".join(f"WHEN coalesce({text}, false) THEN 'unlike {name}'" for name, text in _UNLIKE.items())
    rows = store.rows(
        f"SELECT CASE {cases} ELSE 'unlike materials' END AS reason, count(*) FROM ordered o"
        " JOIN facts_baseline b ON o.b = b.row JOIN facts_candidate c ON o.c = c.row"
        f" WHERE {COMPARISON} = {Output.INCOMPARABLE:d} GROUP BY 1 ORDER BY 1"
    )
    return {reason: int(count) for reason, count in rows}


def first_difference(store: Store, place: int) -> dict[str, object] | None:
    """Where the tokens of a pair first differ: index and both tokens; None without tokens on both sides.

    Args:
        place: of the pair in the order of time.
    """
    rows = store.rows(
        "SELECT x.tokens, y.tokens FROM ordered o JOIN observed_baseline x ON o.b = x.row"
        f" JOIN observed_candidate y ON o.c = y.row WHERE place = {place:d}"
    )
    baseline, candidate = rows[0]
    if baseline is None or candidate is None:
        return None
    pairs = zip(baseline, candidate, strict=False)
    common = next((at for at, (b, c) in enumerate(pairs) if b != c), min(len(baseline), len(candidate)))
    token = [side[common] if common < len(side) else None for side in (baseline, candidate)]
    return {"token_index": common, "baseline_token": token[0], "candidate_token": token[1]}
