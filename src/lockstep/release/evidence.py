"""Evidence of a release: pairs the observations of both sides as columns of numbers, in the order of time.

DuckDB computes the facts of each observation: scalars whose size does not depend on the length of the answer. The
columns of pairs are NumPy arrays. Order, sums and percentiles depend only on times and keys, never on the order of
rows.
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
from lockstep.release.facts import (
    LABELS,
    NUM_DRAWN,
    compute_facts,
    digest_of,
    event_faults,
    is_deterministic,
    names_of,
    num_empty,
)
from lockstep.release.gaps import MAX_SORTED, P95, pooled_p95
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
"""Fields that divide the traffic into segments, with the SQL of a pair's value."""
MAX_SEGMENTS = 200
"""Maximum number of segments with figures; the segments with the most pairs are chosen."""
UNITS_APART = 200.0
"""Minimum ratio of times that are in seconds on one side and in milliseconds on the other."""
MIN_PAIRS_OF_UNITS = 5
"""Minimum number of pairs for the check of units."""
OUTPUT_TOKENS = "num_tokens"
"""Name of the number of output tokens, which is not one of the `METRICS`."""
_NUMBERS = (*(each.name for each in METRICS), OUTPUT_TOKENS)
BUFFERED = 0.9
"""Fraction of the total time from which a first token counts as buffered with the others."""


class TrafficSegment(NamedTuple):
    """Segment of the traffic: requests with the same model, backends, accelerator and label."""

    model: str | None
    baseline_backend: str | None
    candidate_backend: str | None
    accelerator: str | None
    label: str | None

    @property
    def name(self) -> str:
        """Name of the segment: model, backends, accelerator, label."""
        backends = f"{self.baseline_backend or '?'} -> {self.candidate_backend or '?'}"
        parts = (self.model, backends if self.baseline_backend or self.candidate_backend else None)
        return ", ".join(part for part in (*parts, self.accelerator, self.label) if part) or ALL


@dataclass(frozen=True, slots=True)
class Pairs:
    """Columns of all pairs, ordered by time, then key. NaN: the value is unknown."""

    ts: Floats
    is_timed: bool
    """True if all pairs have a time."""
    ok: tuple[Bools, Bools]
    """Whether each side answered."""
    metrics: Mapping[str, tuple[Floats, Floats]]
    """Values of `METRICS` and `OUTPUT_TOKENS` of both sides, by name."""
    output: NDArray[np.int8]
    """Values of `Output`."""
    segment: NDArray[np.int32]
    """Indexes in ``segments``; -1: a segment without figures."""
    segments: tuple[TrafficSegment, ...]
    routed: tuple[Bools, Bools]
    """Whether route and scheduler of each side are known."""
    streamed: tuple[Bools, Bools]
    """Whether token times of each side are known."""
    missing_at: NDArray[np.int64]
    """Number of pairs before each record without a partner, in the order of time."""
    missing: Floats
    """Side that lacks each of these records: 1 for the candidate, -1 for the baseline."""

    def __len__(self) -> int:
        return len(self.ts)

    @property
    def healthy(self) -> Bools:
        """Mask of the pairs that both sides answered."""
        return self.ok[0] & self.ok[1]

    def known(self, metric: str) -> Bools:
        """Mask of the pairs that both sides answered and in which both have a value of the metric."""
        baseline, candidate = self.metrics[metric]
        known: Bools = self.healthy & ~np.isnan(baseline) & ~np.isnan(candidate)
        return known


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence that the gate judges."""

    joining: Joining
    notes: tuple[str, ...]
    """Remarks on how records were joined."""
    pairs: Pairs
    decode_p95: Mapping[int, tuple[float, float]]
    """95th percentile of all gaps between tokens of each side, by index of the segment; -1: all pairs."""
    names: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
    """Values of the labels `NAMED` in both sides' pairs, sorted."""
    is_deterministic: tuple[bool, bool]
    """Whether each side's engine guarantees equal answers in any batch."""
    faults: tuple[tuple[Side, LeftOutReason, int], ...]
    """Parts of records that were left out: the side, the reason, and the number of records."""
    digests: tuple[str, str]
    """Digest of each side's records, independent of their order."""
    incomparable: Mapping[str, int]
    """Number of pairs whose answers were not compared, by reason."""
    max_drift: float
    """Largest difference of two numbers of a pair of vectors; NaN: no rule applies to any pair."""
    store: Store
    without_output: tuple[NDArray[np.intp], NDArray[np.intp]]
    """Places of pairs in which a side's answer succeeded but its record contains no output."""
    num_empty: tuple[int, int]
    """Number of each side's answers that failed only because they are empty."""
    traces: tuple[int, int] = (0, 0)
    """Number of pairs whose token traces are equal, and number of pairs whose token traces differ."""

    def mask_of(self, segment: str) -> Bools:
        """Mask of the pairs of a segment; all pairs if no segment has this name."""
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
"""Maximum number of values of a label in a verdict."""


@dataclass(frozen=True, slots=True)
class GapSampling:
    """Limits of what is read of the gaps between tokens; the percentiles are exact with any."""

    num_drawn: int = NUM_DRAWN
    """Approximate number of answers whose gaps are kept with their facts."""
    max_sorted: int = MAX_SORTED
    """Maximum number of a side's gaps that are sorted or sampled."""


def gather(store: Store, policy: Policy | None = None, sampling: GapSampling | None = None) -> Evidence:
    """Pair the observations of a store and compare the answers.

    Args:
        sampling: limits of what is read of gaps between tokens.
        policy: policy that defines how answers are compared: the field, the rules for vectors, and their precedence.

    Raises:
        EvidenceError: a number is invalid or negative, or the sides use different units.
    """
    policy, sampling = policy or Policy(), sampling or GapSampling()
    for side in SIDES:
        compute_facts(store, side, sampling.num_drawn)
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
        decode_p95=pooled_p95(store, sampling.max_sorted),
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
    """Reject times with different units. No change of a server slows most answers down by such a factor.

    Gaps between tokens of buffered answers are ignored, because they can have any size.
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
                message = f"the candidate's {field} is {ratio:.3g} times the baseline's in the median pair"
                raise EvidenceError(f"{names}: {message}; both must be in milliseconds")


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
    """Number the segments in the order of their names, and create the table ``in_segment``."""
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
    """Number of pairs whose token traces are equal, and number of pairs whose token traces differ."""
    equal = f"count(*) FILTER ({TRACE})"
    [(same, differing)] = store.rows(f"SELECT {equal}, count(*) FILTER (NOT ({TRACE})) FROM {BOTH_SIDES}")
    return int(same), int(differing)


def _missing(store: Store, ts: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Records without a partner, in the order of time, as in `Pairs.missing_at` and `Pairs.missing`."""
    found = store.columns(
        "SELECT ts, sign FROM (SELECT ts, 1 AS sign FROM keys_baseline UNION ALL SELECT ts, -1 AS sign FROM"
        " keys_candidate) WHERE ts IS NOT NULL ORDER BY ts, sign"
    )
    return np.searchsorted(ts, found["ts"]).astype(np.int64), found["sign"].astype(np.float64)


def p95(values: Floats) -> float:
    """95th percentile by nearest rank of the values that are not NaN."""
    return nearest_rank(values[~np.isnan(values)], P95)
