"""Comparison of answers: compares tokens, vectors, texts and fingerprints, and finds the first difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.release.store import Store, bools

FNV_OFFSET = 0xCBF29CE484222325
FNV_PRIME = 0x100000001B3
"""Offset and prime of FNV-1a with 64 bits (Fowler, Noll, Vo; RFC 9923)."""
CHUNK = 1024
"""Number of pairs whose output is loaded into Python at a time."""


class Output(IntEnum):
    """Result of comparing the two answers of a pair."""

    FAILED = 0
    """One or both sides failed."""
    SAME = 1
    DIFFERS = 2
    TOLERATED = 3
    """The vectors differ within their tolerance."""
    DRIFTED = 4
    """The vectors differ beyond their tolerance."""
    INCOMPARABLE = 5
    """The sides have different materials, prompts, parameters, seeds or environments."""
    NO_MATERIAL = 6
    """Neither record contains output, so the pair is evidence of latency only."""
    UNRESOLVED = 7
    """Not yet compared: vectors, or a fingerprint against material."""


COMPARED = (Output.SAME, Output.DIFFERS, Output.TOLERATED, Output.DRIFTED)
DIFFERENT = (Output.DIFFERS, Output.DRIFTED)
UNLIKE = {
    "prompt": "b.prompt_digest <> c.prompt_digest",
    "parameters": "b.params_digest <> c.params_digest",
    "seed": "b.seed <> c.seed",
    "environment": "b.environment <> c.environment",
}
"""SQL conditions under which two answers are incomparable, by reason."""
BOTH_SIDES = "ordered o JOIN facts_baseline b ON o.b = b.row JOIN facts_candidate c ON o.c = c.row"
"""SQL of the facts of both sides of each pair."""
BOTH_ANSWERS = "ordered o JOIN observed_baseline x ON o.b = x.row JOIN observed_candidate y ON o.c = y.row"
"""SQL of the answers of both sides of each pair."""
IN_SEGMENT = "JOIN in_segment ON b.label = in_segment.baseline AND c.label = in_segment.candidate"
"""SQL after `BOTH_SIDES` that adds the pair's ``segment``."""
_MATERIALS = ("tokens", "vector", "text")
"""Kinds of output, in order of preference. ``tokens`` includes the tokens of stream events. A recorded fingerprint is
used last."""


def is_unlike(names: Iterable[str] = UNLIKE) -> str:
    """SQL condition over the facts of both sides: one of these reasons applies."""
    return " OR ".join(f"coalesce({UNLIKE[name]}, false)" for name in names)


def unlike_cases(names: Iterable[str] = UNLIKE) -> str:
    """SQL branches of a CASE over the facts of both sides that return the first of these reasons that applies."""
    return " ".join(f"WHEN coalesce({UNLIKE[name]}, false) THEN 'unlike {name}'" for name in names)


def _both(material: str) -> str:
    """SQL condition: both sides have this material. Two empty ones do not count, unless both sides are known to have no
    tokens."""
    return (
        f"(b.{material}_hash IS NOT NULL AND c.{material}_hash IS NOT NULL"
        f" AND NOT (b.is_blank_{material} AND c.is_blank_{material}))"
    )


def has_material(side: str) -> str:
    """SQL condition over the facts of a side: its answer has output that can be compared."""
    parts = [f"({side}.{material}_hash IS NOT NULL AND NOT {side}.is_blank_{material})" for material in _MATERIALS]
    return f"({' OR '.join([*parts, f'{side}.fingerprint IS NOT NULL'])})"


def _equal(left: str, right: str) -> str:
    return f"CASE WHEN {left} = {right} THEN {Output.SAME:d} ELSE {Output.DIFFERS:d} END"


def _computable(given: str, other: str) -> str:
    """SQL condition: one side has a fingerprint, and the other side's output allows computing one."""
    return f"({_OURS.format(given)} AND ({other}.tokens_hash IS NOT NULL OR {other}.vector_hash IS NOT NULL))"


_OURS = "regexp_full_match({}.fingerprint, '[0-9a-f]{{16}}')"
_BY_TOKENS = f"""WHEN {_both("tokens")} THEN {_equal("b.tokens_hash", "c.tokens_hash")}"""
_BY_VECTORS = f"""WHEN {_both("vector")} THEN
    CASE WHEN b.vector_hash = c.vector_hash THEN {Output.SAME:d} ELSE {Output.UNRESOLVED:d} END"""


def comparison(by_vectors: bool = False) -> str:
    """SQL over the facts of both sides, ``b`` and ``c``, that returns an `Output`.

    Args:
        by_vectors: whether vectors have precedence over tokens.
    """
    first, second = (_BY_VECTORS, _BY_TOKENS) if by_vectors else (_BY_TOKENS, _BY_VECTORS)
    return f"""CASE
  WHEN NOT (b.ok AND c.ok) THEN {Output.FAILED:d}
  WHEN {is_unlike()} THEN {Output.INCOMPARABLE:d}
  {first}
  {second}
  WHEN {_both("text")} THEN {_equal("b.text_hash", "c.text_hash")}
  WHEN b.fingerprint IS NOT NULL AND c.fingerprint IS NOT NULL THEN {_equal("b.fingerprint", "c.fingerprint")}
  WHEN NOT {has_material("b")} AND NOT {has_material("c")} THEN {Output.NO_MATERIAL:d}
  WHEN coalesce({_computable("b", "c")}, false) OR coalesce({_computable("c", "b")}, false) THEN {Output.UNRESOLVED:d}
  ELSE {Output.INCOMPARABLE:d} END"""


TRACE = f"""CASE
  WHEN NOT (b.ok AND c.ok) THEN NULL
  WHEN b.token_trace_fingerprint IS NOT NULL AND c.token_trace_fingerprint IS NOT NULL
    THEN b.token_trace_fingerprint = c.token_trace_fingerprint
  WHEN {_both("tokens")} THEN b.tokens_hash = c.tokens_hash END"""
"""SQL: whether the token traces of a pair are equal; NULL if a side has none."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Rule for the allowed difference of two vectors. Each number must be within the absolute or the relative bound.

    A rule without a model, backend or accelerator applies to all of them.
    """

    absolute: float = 0.0
    relative: float = 0.0
    """Relative bound, as a fraction of the baseline's number."""
    model: str | None = None
    backend: str | None = None
    """Backend of the candidate."""
    accelerator: str | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.absolute < math.inf and 0 <= self.relative < math.inf):
            raise ValueError("absolute and relative must be finite and at least 0")

    def covers(self, model: str | None, backend: str | None, accelerator: str | None) -> bool:
        """True if the rule applies to such answers."""
        named = ((self.model, model), (self.backend, backend), (self.accelerator, accelerator))
        return all(rule is None or rule == value for rule, value in named)

    @property
    def num_named(self) -> int:
        """Number of conditions of the rule, which measures how specific it is."""
        return sum(each is not None for each in (self.model, self.backend, self.accelerator))


def rule_for(
    tolerances: Sequence[Tolerance], model: str | None, backend: str | None, accelerator: str | None
) -> Tolerance | None:
    """Most specific rule that applies, the first of several; None: vectors must be equal."""
    covering = [each for each in tolerances if each.covers(model, backend, accelerator)]
    return max(covering, key=lambda each: each.num_named) if covering else None


def fnv(rows: Sequence[Sequence[int]] | Sequence[Sequence[float]], kind: Literal["<u4", "<f8"]) -> NDArray[np.uint64]:
    """FNV-1a-64 of each row. Token ids are encoded as unsigned 32-bit numbers, vectors as binary64, little-endian.

    All rows are digested in parallel, one byte of each at a time.
    """
    digests = np.full(len(rows), FNV_OFFSET, np.uint64)
    octets = [np.asarray(row).astype(kind).view(np.uint8) for row in rows]
    lengths = np.array([len(each) for each in octets], np.int64)
    order = np.argsort(-lengths, kind="stable")
    padded = np.zeros((int(lengths.max(initial=0)), len(rows)), np.uint8)
    for place, row in enumerate(order):
        padded[: lengths[row], place] = octets[row]
    longest_first = digests[order]
    for at, column in enumerate(padded):
        active = int(np.searchsorted(-lengths[order], -at))  # rows that are longer than this
        longest_first[:active] ^= column[:active]
        longest_first[:active] *= np.uint64(FNV_PRIME)
    digests[order] = longest_first
    return digests


def fingerprints_of(
    materials: Sequence[tuple[Sequence[int] | None, Sequence[float] | None]],
) -> list[str | None]:
    """Fingerprints of token ids, or else of vectors, with 16 hex digits each; None for answers without either."""
    found: list[str | None] = [None] * len(materials)
    tokens = [place for place, (ids, _) in enumerate(materials) if ids is not None]
    vectors = [place for place, (ids, vector) in enumerate(materials) if ids is None and vector is not None]
    for places, digests in (
        (tokens, fnv([materials[place][0] or () for place in tokens], "<u4")),
        (vectors, fnv([materials[place][1] or () for place in vectors], "<f8")),
    ):
        for place, digest in zip(places, digests, strict=True):
            found[place] = f"{int(digest):016x}"
    return found


def resolve(
    store: Store, output: NDArray[np.int8], tolerances: Sequence[Tolerance], by_vectors: bool = False
) -> tuple[NDArray[np.int8], dict[str, int], float]:
    """Compare the unresolved pairs: vectors by their rules, and fingerprints with tokens or vectors.

    Args:
        by_vectors: the same value as in `comparison`.

    Returns:
        `Output` of each pair, the number of incomparable pairs by reason, and the largest difference of two numbers
        under a rule (NaN: none).
    """
    output = output.copy()
    max_drift = math.nan
    is_unresolved, is_incomparable = ((output == each).any() for each in (Output.UNRESOLVED, Output.INCOMPARABLE))
    if is_unresolved:
        store.run(
            "CREATE TABLE unresolved AS SELECT place, o.b, o.c"
            f" FROM {BOTH_SIDES} WHERE {comparison(by_vectors)} = {Output.UNRESOLVED:d}"
        )
        max_drift = _compare_vectors(store, output, tolerances)
        _compare_fingerprints(store, output)
    return output, _incomparable(store) if is_incomparable else {}, max_drift


_UNRESOLVED = BOTH_ANSWERS.replace("ordered", "unresolved", 1)


def _compare_vectors(store: Store, output: NDArray[np.int8], tolerances: Sequence[Tolerance]) -> float:
    """Fill in the outputs of pairs of vectors.

    Returns:
        Largest difference of two numbers under a rule; NaN: none.
    """
    kinds = (
        "coalesce(y.model, x.model) AS model, y.backend AS backend, coalesce(y.accelerator, x.accelerator) AS device"
    )
    both = f"{_UNRESOLVED} WHERE x.vector IS NOT NULL AND y.vector IS NOT NULL"
    store.run("CREATE TABLE rules (model VARCHAR, backend VARCHAR, device VARCHAR, absolute DOUBLE, relative DOUBLE)")
    segments = store.rows(f"SELECT DISTINCT {kinds} FROM {both}")
    rules = [(segment, rule_for(tolerances, *segment)) for segment in segments]
    store.insert("rules", [(*segment, rule.absolute, rule.relative) for segment, rule in rules if rule is not None])
    found = store.columns(
        "SELECT place, max(abs(c - b)) AS drift,"
        " bool_and(coalesce(abs(c - b) <= absolute OR abs(c - b) <= relative * abs(b), false)) AS is_within,"
        " any_value(is_comparable) AS is_comparable FROM (SELECT place, absolute, relative,"
        " absolute IS NOT NULL AND len(b) = len(c) AS is_comparable, unnest(b) AS b, unnest(c) AS c"
        f" FROM (SELECT place, x.vector AS b, y.vector AS c, {kinds} FROM {both}) v LEFT JOIN rules r"
        " ON v.model IS NOT DISTINCT FROM r.model AND v.backend IS NOT DISTINCT FROM r.backend"
        " AND v.device IS NOT DISTINCT FROM r.device) GROUP BY place"
    )
    is_comparable = bools(found["is_comparable"])
    outcome = np.where(bools(found["is_within"]), np.int8(Output.TOLERATED), np.int8(Output.DRIFTED))
    output[found["place"]] = np.where(is_comparable, outcome, np.int8(Output.DIFFERS))
    return float(np.max(found["drift"][is_comparable], initial=-math.inf)) if is_comparable.any() else math.nan


def _compare_fingerprints(store: Store, output: NDArray[np.int8]) -> None:
    """Fill in the outputs of pairs in which one side has a fingerprint and the other has tokens or a vector."""
    sides = ", ".join(f"{side}.tokens, {side}.vector, {side}.fingerprint" for side in "xy")
    query = f"SELECT place, {sides} FROM {_UNRESOLVED} WHERE x.vector IS NULL OR y.vector IS NULL"
    for rows in store.chunks(query, CHUNK):
        computed = fingerprints_of([row[1:3] for row in rows] + [row[4:6] for row in rows])
        for place, row in enumerate(rows):
            baseline, candidate = row[3] or computed[place], row[6] or computed[len(rows) + place]
            output[row[0]] = Output.SAME if baseline == candidate else Output.DIFFERS


def _incomparable(store: Store) -> dict[str, int]:
    """Number of incomparable pairs by reason. If several reasons apply, the first one counts."""
    rows = store.rows(
        f"SELECT CASE {unlike_cases()} ELSE 'unlike materials' END AS reason, count(*) FROM {BOTH_SIDES}"
        f" WHERE {comparison()} = {Output.INCOMPARABLE:d} GROUP BY 1 ORDER BY 1"
    )
    return {reason: int(count) for reason, count in rows}


def first_difference(store: Store, place: int) -> dict[str, object] | None:
    """First difference between the answers of a pair.

    Args:
        place: place of the pair in the order of time.

    Returns:
        Index and both tokens, or else the index in their vectors or texts; None if no difference is known.
    """
    [(b_tokens, c_tokens, b_vector, c_vector, b_text, c_text)] = store.rows(
        f"SELECT x.tokens, y.tokens, x.vector, y.vector, x.text, y.text FROM {BOTH_ANSWERS} WHERE place = {place:d}"
    )
    if b_tokens is not None and c_tokens is not None and b_tokens != c_tokens:
        at = first_unlike(b_tokens, c_tokens)
        baseline, candidate = (side[at] if at < len(side) else None for side in (b_tokens, c_tokens))
        prints = fingerprints_of([(b_tokens, None), (c_tokens, None)])
        return {
            "token_index": at,
            "baseline_token": baseline,
            "candidate_token": candidate,
            "baseline_fingerprint": prints[0],
            "candidate_fingerprint": prints[1],
        }
    for name, baseline, candidate in (
        ("vector_index", b_vector, c_vector),
        ("character_index", b_text, c_text),
    ):
        if baseline is not None and candidate is not None and baseline != candidate:
            return {name: first_unlike(baseline, candidate)}
    return None


def first_unlike(baseline: Sequence[object], candidate: Sequence[object]) -> int:
    """Index of the first element that differs; the shorter length if one is a prefix of the other."""
    pairs = enumerate(zip(baseline, candidate, strict=False))
    return next((at for at, (b, c) in pairs if b != c), min(len(baseline), len(candidate)))
