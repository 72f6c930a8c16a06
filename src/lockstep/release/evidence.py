"""Evidence of a release: what pairs of answers show, as columns of numbers in the order of time.

Facts of each observation are computed by DuckDB, a scalar per request, however long its answer is; the columns of pairs
are NumPy's. Order, sums and percentiles depend on times and keys alone, never on the order of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import EvidenceError
from lockstep.release.agreement import compare_field
from lockstep.release.facts import LABELS, compute_facts, digest_of, event_faults, is_deterministic, names_of, num_empty
from lockstep.release.gaps import P95, pooled_p95
from lockstep.release.joining import Joining, join
from lockstep.release.observation import METRICS, SIDES, LeftOutReason, Side
from lockstep.release.outputs import BOTH_SIDES, IN_SEGMENT, TRACE, comparison, has_material, resolve
from lockstep.release.policy import Policy
from lockstep.release.statistics import nearest_rank
from lockstep.release.store import Store, bools, floats
from lockstep.release.verdict import ALL

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

SEGMENT_FIELDS: Mapping[str, str] = {
    "model": "coalesce(c.model, b.model)",
    "baseline_backend": "b.backend",
    "candidate_backend": "c.backend",
    "accelerator": "coalesce(c.accelerator, b.accelerator)",
    "label": "coalesce(b.segment, c.segment)",
}
"""What cuts traffic into segments, and how a pair has it."""
MAX_SEGMENTS = 200
"""Those with the most pairs have figures of their own."""
UNITS_APART = 200.0
"""Times by which numbers differ that are seconds on one side and milliseconds on the other, at least."""
MIN_PAIRS_OF_UNITS = 5
OUTPUT_TOKENS = "num_tokens"
"""The number of an answer's tokens, beside its `METRICS`."""
_NUMBERS = (*(each.name for each in METRICS), OUTPUT_TOKENS)
BUFFERED = 0.9
"""From this part of the whole time on, a first token came with the others."""


class TrafficSegment(NamedTuple):
    """Traffic of one kind."""

    model: str | None
    baseline_backend: str | None
    candidate_backend: str | None
    accelerator: str | None
    label: str | None

    @property
    def name(self) -> str:
        """Words for it: model, backends, accelerator, label."""
        backends = f"{self.baseline_backend or '?'} -> {self.candidate_backend or '?'}"
        parts = (self.model, backends if self.baseline_backend or self.candidate_backend else None)
        return ", ".join(part for part in (*parts, self.accelerator, self.label) if part) or ALL


@dataclass(frozen=True, slots=True)
class Pairs:
    """Columns of all pairs, ordered by time, then key. NaN: a side does not say."""

    ts: Floats
    is_timed: bool
    """Whether all of them have a time."""
    ok: tuple[Bools, Bools]
    metrics: Mapping[str, tuple[Floats, Floats]]
    """Of `METRICS` and `OUTPUT_TOKENS`, of both sides."""
    output: NDArray[np.int8]
    """Of `Output`."""
    segment: NDArray[np.int32]
    """Places in ``segments``; -1: one of the many that have no figures of their own."""
    segments: tuple[TrafficSegment, ...]
    routed: tuple[Bools, Bools]
    """Whether route and scheduler are known."""
    streamed: tuple[Bools, Bools]
    """Whether times of tokens are known."""
    missing_at: NDArray[np.int64]
    """For each record without a partner, in the order of time: pairs before it."""
    missing: Floats
    """1: the candidate lacks it; -1: the baseline does."""

    def __len__(self) -> int:
        return len(self.ts)

    @property
    def healthy(self) -> Bools:
        """Both sides answered."""
        return self.ok[0] & self.ok[1]

    def known(self, metric: str) -> Bools:
        """Both sides answered, and have the number."""
        baseline, candidate = self.metrics[metric]
        known: Bools = self.healthy & ~np.isnan(baseline) & ~np.isnan(candidate)
        return known


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that a gate judges by."""

    joining: Joining
    notes: tuple[str, ...]
    """Sentences on how records were joined."""
    pairs: Pairs
    decode_p95: Mapping[int, tuple[float, float]]
    """Of all gaps between tokens of both sides, by segment; -1: of all of them."""
    names: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
    """Values of `NAMED` of both sides' pairs, sorted."""
    is_deterministic: tuple[bool, bool]
    """Whether each side's engine promises equal answers in any batch."""
    faults: tuple[tuple[Side, LeftOutReason, int], ...]
    """Parts of records that were left out."""
    digests: tuple[str, str]
    """Of each side's records, in whatever order they stand."""
    incomparable: Mapping[str, int]
    """Pairs whose answers were not compared, by reason."""
    max_drift: float
    """Largest difference of two numbers of a pair of vectors; NaN: there are none under a rule."""
    store: Store
    without_output: tuple[NDArray[np.intp], NDArray[np.intp]]
    """Places of pairs whose answer of a side, which succeeded, carries no output material."""
    num_empty: tuple[int, int]
    """Records of each side that would be successful answers if they were not empty."""
    traces: tuple[int, int] = (0, 0)
    """Pairs with traces of tokens on both sides: those whose are equal, and those whose are not."""

    def mask_of(self, segment: str) -> Bools:
        """Pairs of the segment of that name; all of them where none has it."""
        numbers = [number for number, each in enumerate(self.pairs.segments) if each.name == segment]
        mask: Bools = np.isin(self.pairs.segment, numbers) if numbers else np.ones(len(self.pairs), np.bool_)
        return mask

    def keys(self, where: NDArray[np.intp]) -> list[str]:
        """Ids of pairs, by their places."""
        if not len(where):
            return []
        wanted = ", ".join(str(int(place)) for place in where)
        return [key for (key,) in self.store.rows(f"SELECT key FROM ordered WHERE place IN ({wanted}) ORDER BY place")]


NAMED = tuple(each for each in LABELS if each not in ("segment", "deterministic"))
"""Labels whose values a verdict lists."""
MAX_NAMES = 100


def gather(store: Store, policy: Policy | None = None) -> Evidence:
    """Pair the observations of a store and compare the answers.

    Args:
        policy: the sameness of answers is taken from it: its field, its rules for vectors, and what decides.

    Raises:
        EvidenceError: a number is none, or less than nothing.
    """
    policy = policy or Policy()
    for side in SIDES:
        compute_facts(store, side)
    joining, notes = join(store)
    store.run(_ORDERED)
    segments = _segments(store)
    by_vectors = policy.compares_vectors
    columns = _in_order(store.columns(_COLUMNS.format(output=comparison(by_vectors))))
    if policy.agreement_field:
        max_drift = math.nan
        output, incomparable = compare_field(store, policy.agreement_field)
    else:
        output, incomparable, max_drift = resolve(
            store, columns["output"].astype(np.int8), policy.numeric_tolerances, by_vectors
        )
    ts = floats(columns["ts"])
    missing_at, missing = _missing(store, ts)
    pairs = Pairs(
        ts=ts,
        is_timed=not np.isnan(ts).any(),
        ok=(bools(columns["b_ok"]), bools(columns["c_ok"])),
        metrics={name: (floats(columns[f"b_{name}"]), floats(columns[f"c_{name}"])) for name in _NUMBERS},
        output=output,
        segment=columns["segment"].astype(np.int32),
        segments=segments,
        routed=(bools(columns["b_routed"]), bools(columns["c_routed"])),
        streamed=(bools(columns["b_streamed"]), bools(columns["c_streamed"])),
        missing_at=missing_at,
        missing=missing,
    )
    _check_units(store, pairs)
    baseline, candidate = SIDES
    return Evidence(
        joining=joining,
        notes=tuple(notes),
        pairs=pairs,
        decode_p95=pooled_p95(store),
        names={
            each: (names_of(store, baseline, each, MAX_NAMES), names_of(store, candidate, each, MAX_NAMES))
            for each in NAMED
        },
        is_deterministic=(is_deterministic(store, baseline), is_deterministic(store, candidate)),
        faults=tuple(fault for side in SIDES for fault in event_faults(store, side)),
        digests=(digest_of(store, baseline), digest_of(store, candidate)),
        incomparable=incomparable,
        max_drift=max_drift,
        store=store,
        without_output=(np.flatnonzero(bools(columns["b_bare"])), np.flatnonzero(bools(columns["c_bare"]))),
        num_empty=(num_empty(store, baseline), num_empty(store, candidate)),
        traces=_traces(store),
    )


def _check_units(store: Store, pairs: Pairs) -> None:
    """Refuse times of unlike units: no change of a server makes most answers so many times as late.

    Tokens that came at once, out of a buffer, have gaps of any size.
    """
    buffered = np.zeros(len(pairs), np.bool_)
    for first, whole in zip(pairs.metrics["ttft_ms"], pairs.metrics["latency_ms"], strict=True):
        buffered |= first >= BUFFERED * whole
    for name in ("latency_ms", "ttft_ms", "decode_ms"):
        usable = pairs.healthy & ~buffered if name == "decode_ms" else pairs.healthy
        baseline, candidate = (each[usable] for each in pairs.metrics[name])
        is_known = (baseline > 0) & (candidate > 0)
        if is_known.sum() >= MIN_PAIRS_OF_UNITS:
            ratio = float(np.median(candidate[is_known] / baseline[is_known]))
            if not 1 / UNITS_APART < ratio < UNITS_APART:
                names = " and ".join(dict.fromkeys(map(str, store.paths.values()))) or "input"
                field = "mean of token_latencies_ms" if name == "decode_ms" else name
                told = f"the candidate's {field} is {ratio:.3g} times the baseline's in the median pair"
                raise EvidenceError(f"{names}: {told}; both have to be milliseconds")


def _in_order(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Columns in the order of ``place``."""
    order = np.argsort(columns["place"])
    return {name: column[order] for name, column in columns.items() if name != "place"}


_ORDERED = """
CREATE TABLE ordered AS
  SELECT row_number() OVER (ORDER BY coalesce(b.ts, c.ts) NULLS LAST, key, key_name, b.digest, c.digest) - 1 AS place,
    p.b, p.c, key_name, coalesce(key, printf('unnamed %016x', xor(b.digest, c.digest))) AS key
  FROM pairs p JOIN facts_baseline b ON p.b = b.row JOIN facts_candidate c ON p.c = c.row
"""
_SIDE_COLUMNS = ", ".join(
    f"{side}.{name} AS {side}_{name}" for side in "bc" for name in ("ok", "routed", "streamed", *_NUMBERS)
)
_BARE = ", ".join(f"{side}.ok AND NOT {has_material(side)} AS {side}_bare" for side in "bc")
_COLUMNS = f"""
SELECT place, coalesce(b.ts, c.ts) AS ts, {_SIDE_COLUMNS}, {_BARE}, {{output}} AS output, segment
FROM {BOTH_SIDES} {IN_SEGMENT}
"""


def _segments(store: Store) -> tuple[TrafficSegment, ...]:
    """Number the segments, in the order of their names; leaves a table ``in_segment``."""
    values = ", ".join(f"{text} AS {name}" for name, text in SEGMENT_FIELDS.items())
    names = ", ".join(SEGMENT_FIELDS)
    same = " AND ".join(f"kinds.{name} IS NOT DISTINCT FROM segments.{name}" for name in SEGMENT_FIELDS)
    store.run(
        "CREATE TABLE kinds AS SELECT baseline, candidate, num_pairs, " + values + " FROM"
        f" (SELECT b.label AS baseline, c.label AS candidate, count(*) AS num_pairs FROM {BOTH_SIDES} GROUP BY ALL)"
        " JOIN labels_baseline b ON baseline = b.label JOIN labels_candidate c ON candidate = c.label;"
        f"CREATE TABLE segments AS SELECT row_number() OVER (ORDER BY {names}) - 1 AS segment, {names} FROM"
        f" (SELECT {names} FROM kinds GROUP BY ALL ORDER BY sum(num_pairs) DESC, {names} LIMIT {MAX_SEGMENTS});"
        "CREATE TABLE in_segment AS SELECT baseline, candidate, coalesce(segment, -1)::INTEGER AS segment"
        f" FROM kinds LEFT JOIN segments ON {same}"
    )
    return tuple(TrafficSegment(*row) for row in store.rows(f"SELECT {names} FROM segments ORDER BY segment"))


def _traces(store: Store) -> tuple[int, int]:
    """Pairs whose traces of tokens are equal, and those whose are not."""
    equal = f"count(*) FILTER ({TRACE})"
    [(same, differing)] = store.rows(f"SELECT {equal}, count(*) FILTER (NOT ({TRACE})) FROM {BOTH_SIDES}")
    return int(same), int(differing)


def _missing(store: Store, ts: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Records without a partner between the pairs, in the order of time."""
    found = store.columns(
        "SELECT ts, sign FROM (SELECT ts, 1 AS sign FROM keys_baseline UNION ALL SELECT ts, -1 AS sign FROM"
        " keys_candidate) WHERE ts IS NOT NULL ORDER BY ts, sign"
    )
    return np.searchsorted(ts, found["ts"]).astype(np.int64), found["sign"].astype(np.float64)


def p95(values: Floats) -> float:
    """95th percentile by nearest rank of the numbers that there are."""
    return nearest_rank(values[~np.isnan(values)], P95)
