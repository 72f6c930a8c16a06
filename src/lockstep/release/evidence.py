"""Evidence of a release: what pairs of answers show, as columns of numbers in the order of time.

Facts of each observation are computed by DuckDB, a scalar per request, however long its answer is; the columns of pairs
are NumPy's. Order, sums and percentiles depend on times and keys alone, never on the order of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import EvidenceError
from lockstep.release.joining import NAME, OK, Joining, join
from lockstep.release.observation import NAMES, SIDES, Reason, Side
from lockstep.release.outputs import BOTH_SIDES, COMPARISON, TRACE, Tolerance, resolve
from lockstep.release.statistics import nearest_rank
from lockstep.release.store import Store

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
BUCKETS_PER_OCTAVE = 64
"""Of gaps between tokens: how finely the first of two passes counts them."""
P95 = 0.95
METRICS = ("latency_ms", "ttft_ms", "decode_ms", "kv_pressure", "queue_depth")
"""Numbers of one answer; ``decode_ms`` is the mean gap between its tokens."""


class Segment(NamedTuple):
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
        return ", ".join(part for part in (*parts, self.accelerator, self.label) if part) or "all"


@dataclass(frozen=True, slots=True)
class Pairs:
    """Columns of all pairs, ordered by time, then key. NaN: a side does not say."""

    ts: Floats
    is_timed: bool
    """Whether all of them have a time."""
    ok: tuple[Bools, Bools]
    metrics: Mapping[str, tuple[Floats, Floats]]
    """Of `METRICS`, of both sides."""
    output: NDArray[np.int8]
    """Of `Output`."""
    segment: NDArray[np.int32]
    """Places in ``segments``; -1: one of the many that have no figures of their own."""
    segments: tuple[Segment, ...]
    routed: tuple[Bools, Bools]
    """Whether route and scheduler are known."""
    streamed: tuple[Bools, Bools]
    """Whether times of tokens are known."""
    missing_at: NDArray[np.int64]
    """For each record without a partner, in the order of time: pairs before it."""
    missing: Floats
    """1: the candidate lacks it; -1: the baseline does."""
    traces: NDArray[np.int8]
    """1: the traces of tokens are equal; 0: they are not; -1: a side has none."""

    def __len__(self) -> int:
        return len(self.ts)

    @property
    def healthy(self) -> Bools:
        """Both sides answered."""
        return self.ok[0] & self.ok[1]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that a gate judges by."""

    joining: Joining
    pairs: Pairs
    decode_p95: Mapping[int, tuple[float, float]]
    """Of all gaps between tokens of both sides, by segment; -1: of all."""
    names: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
    """Values of `NAMED` of both sides' pairs, sorted."""
    is_deterministic: tuple[bool, bool]
    """Whether each side's engine promises equal answers in any company."""
    faults: tuple[tuple[Side, Reason, int], ...]
    """Parts of records that were left out."""
    digests: tuple[str, str]
    """Of each side's records, in whatever order they stand."""
    incomparable: Mapping[str, int]
    """Pairs whose answers were not compared, by reason."""
    max_drift: float
    """Largest difference of two numbers of a pair of vectors; NaN: there are none under a rule."""
    store: Store

    def keys(self, where: NDArray[np.intp]) -> list[str]:
        """Ids of pairs, by their places."""
        if not len(where):
            return []
        wanted = ", ".join(str(int(place)) for place in where)
        return [key for (key,) in self.store.rows(f"SELECT key FROM ordered WHERE place IN ({wanted}) ORDER BY place")]


NAMED = ("model", "model_version", "route_id", "replica_id", "scheduler", "backend", "accelerator", "artifact")


def gather(store: Store, tolerances: Sequence[Tolerance] = ()) -> Evidence:
    """Pair the observations of a store and compare the answers.

    Raises:
        EvidenceError: a number is none, or less than nothing.
    """
    for side in SIDES:
        store.run(_FACTS.format(side=side))
        _check(store, side)
    joining = join(store)
    store.run(_ORDERED)
    segments = _segments(store)
    columns = store.columns(_COLUMNS)
    output, incomparable, max_drift = resolve(store, columns["output"].astype(np.int8), tolerances)
    ts = _floats(columns["ts"])
    missing_at, missing = _missing(store, ts)
    pairs = Pairs(
        ts=ts,
        is_timed=not np.ma.is_masked(columns["ts"]),
        ok=(_bools(columns["b_ok"]), _bools(columns["c_ok"])),
        metrics={name: (_floats(columns[f"b_{name}"]), _floats(columns[f"c_{name}"])) for name in METRICS},
        output=output,
        segment=columns["segment"].astype(np.int32),
        segments=segments,
        routed=(_bools(columns["b_routed"]), _bools(columns["c_routed"])),
        streamed=(_bools(columns["b_streamed"]), _bools(columns["c_streamed"])),
        missing_at=missing_at,
        missing=missing,
        traces=np.ma.filled(np.ma.asarray(columns["trace"]).astype(np.int8), -1),
    )
    return Evidence(
        joining=joining,
        pairs=pairs,
        decode_p95=_decode_p95(store),
        names={name: (_names(store, name, "b"), _names(store, name, "c")) for name in NAMED},
        is_deterministic=(_is_deterministic(store, "b"), _is_deterministic(store, "c")),
        faults=_faults(store),
        digests=(_digest(store, "baseline"), _digest(store, "candidate")),
        incomparable=incomparable,
        max_drift=max_drift,
        store=store,
    )


_EVENTS = "list_sort(stream_events)"
_ANY_TOKENS = "output_tokens IS DISTINCT FROM 0"
_HASHED = "CASE WHEN {0} IS NOT NULL THEN hash({0}) END AS {0}"
_FACTS = f"""
CREATE VIEW timed_{{side}} AS
  SELECT *, {_EVENTS} AS events,
    coalesce(len(list_distinct(list_transform(stream_events, lambda e: e.index))) < len(stream_events), false)
      AS doubled,
    coalesce(len(list_filter(range(2, len(stream_events) + 1), lambda i:
      ({_EVENTS})[i].elapsed_ms < ({_EVENTS})[i - 1].elapsed_ms)) > 0, false) AS falling
  FROM {{side}};
CREATE VIEW observed_{{side}} AS
  SELECT * EXCLUDE (events),
    coalesce(token_ids, CASE
      WHEN NOT doubled AND list_bool_and(list_transform(events, lambda e: e.token_id IS NOT NULL))
      THEN list_transform(events, lambda e: e.token_id) END) AS tokens,
    coalesce(token_latencies_ms, CASE WHEN NOT (doubled OR falling) THEN
      list_transform(range(2, len(events) + 1), lambda i: events[i].elapsed_ms - events[i - 1].elapsed_ms) END) AS gaps,
    coalesce(ttft_ms, CASE WHEN NOT (doubled OR falling) THEN events[1].elapsed_ms END) AS first_ms
  FROM timed_{{side}};
CREATE TABLE facts_{{side}} AS
  SELECT row, ts, {OK} AS ok, model, model_version, artifact, deterministic, backend, accelerator, route_id, replica_id,
    scheduler, segment, {_HASHED.format("prompt_digest")}, {_HASHED.format("params_digest")}, seed,
    {_HASHED.format("environment")}, latency_ms, first_ms AS ttft_ms,
    list_avg(gaps) AS decode_ms, kv_used / nullif(kv_total, 0) AS kv_pressure, queue_depth,
    coalesce(len(gaps) > 0 OR len(stream_events) = 1 AND NOT doubled, false) AS streamed,
    route_id IS NOT NULL AND scheduler IS NOT NULL AS routed,
    hash(tokens) AS tokens_hash, tokens IS NOT NULL AS has_tokens, len(tokens) = 0 AND {_ANY_TOKENS} AS is_blank_tokens,
    hash(vector) AS vector_hash, vector IS NOT NULL AS has_vector, len(vector) = 0 AS is_blank_vector,
    hash(text) AS text_hash, text IS NOT NULL AS has_text, text = '' AND {_ANY_TOKENS} AS is_blank_text,
    fingerprint, token_trace_fingerprint, doubled, falling,
    hash({", ".join(f'"{name}"' for name in NAMES if name != "side")}) AS digest
  FROM observed_{{side}}
"""
_ORDERED = """
CREATE TABLE ordered AS
  SELECT row_number() OVER (ORDER BY coalesce(b.ts, c.ts) NULLS LAST, key, key_name, b.digest, c.digest) - 1 AS place,
    p.b, p.c, coalesce(key, printf('unnamed %016x', xor(b.digest, c.digest))) AS key
  FROM pairs p JOIN facts_baseline b ON p.b = b.row JOIN facts_candidate c ON p.c = c.row
"""
_SEGMENT_VALUES = ", ".join(f"{text} AS {name}" for name, text in SEGMENT_FIELDS.items())
_SEGMENT_NAMES = ", ".join(SEGMENT_FIELDS)
_SIDE_COLUMNS = ", ".join(
    f"{side}.{name} AS {side}_{name}" for side in "bc" for name in ("ok", "routed", "streamed", *METRICS)
)
_COLUMNS = f"""
SELECT coalesce(b.ts, c.ts) AS ts, {_SIDE_COLUMNS}, {COMPARISON} AS output, {TRACE} AS trace, s.segment
FROM {BOTH_SIDES} JOIN in_segment s USING (place) ORDER BY place
"""


def _segments(store: Store) -> tuple[Segment, ...]:
    """Number the segments, in the order of their names; leaves a table ``in_segment``."""
    store.run(
        f"CREATE TABLE cut AS SELECT place, {_SEGMENT_VALUES} FROM {BOTH_SIDES};"
        f"CREATE TABLE segments AS SELECT row_number() OVER (ORDER BY {_SEGMENT_NAMES}) - 1 AS segment,"
        f" {_SEGMENT_NAMES} FROM (SELECT {_SEGMENT_NAMES} FROM cut GROUP BY ALL"
        f" ORDER BY count(*) DESC, {_SEGMENT_NAMES} LIMIT {MAX_SEGMENTS});"
        "CREATE TABLE in_segment AS SELECT place, coalesce(segment, -1) AS segment FROM cut LEFT JOIN segments ON "
        + " AND ".join(f"cut.{name} IS NOT DISTINCT FROM segments.{name}" for name in SEGMENT_FIELDS)
    )
    return tuple(Segment(*row) for row in store.rows(f"SELECT {_SEGMENT_NAMES} FROM segments ORDER BY segment"))


_FAULTS: Mapping[str, tuple[str, str]] = {
    **{
        name: (f"{name} < 0 OR NOT isfinite({name})", "has to be a finite number, 0 or above")
        for name in ("latency_ms", "ttft_ms", "queue_depth", "kv_used", "kv_total")
    },
    "ts": ("NOT isfinite(ts)", "has to be a finite number"),
    "token_latencies_ms": (
        "list_min(token_latencies_ms) < 0 OR NOT isfinite(list_max(token_latencies_ms))",
        "has to be finite numbers, 0 or above",
    ),
    "stream_events": (
        "len(list_filter(stream_events, lambda e: e.elapsed_ms < 0 OR NOT isfinite(e.elapsed_ms))) > 0",
        "has an elapsed_ms that is below 0 or no finite number",
    ),
    "vector": ("NOT (isfinite(list_max(vector)) AND isfinite(list_min(vector)))", "has to be finite numbers"),
    "logprobs": ("NOT (isfinite(list_max(logprobs)) AND isfinite(list_min(logprobs)))", "has to be finite numbers"),
    "health": ("health NOT IN ('ready', 'degraded', 'down')", "is ready, degraded or down"),
    "kv_total": ("kv_used > kv_total", "is less than kv_used; both have to be of one unit"),
}
"""Conditions that no observation meets, by field, and what is right."""


def _check(store: Store, side: Side) -> None:
    """Refuse numbers that are none, less than nothing, or of another unit than their neighbours."""
    counts = ", ".join(f"count(*) FILTER ({condition})" for condition, _ in _FAULTS.values())
    [found] = store.rows(f"SELECT {counts} FROM {side}")
    for count, (name, (condition, right)) in zip(found, _FAULTS.items(), strict=True):
        if count:
            [[request]] = store.rows(f"SELECT min({NAME}) FROM {side} WHERE {condition}")
            of = f" of request {request}" if request else ""
            raise EvidenceError(f"{store.paths.get(side, side)}: the {side}'s {name}{of} {right}")


def _decode_p95(store: Store) -> dict[int, tuple[float, float]]:
    """95th percentiles of gaps, pooled over healthy pairs: counted coarsely first, then found among the few that count.

    However many gaps there are, two passes over them and one bucket's worth of memory.
    """
    results: dict[int, list[float]] = {}
    for number, side in enumerate(SIDES):
        gaps = (
            f"SELECT s.segment, unnest(gaps) AS gap FROM ordered o JOIN observed_{side} x ON o.{side[0]} = x.row"
            f" JOIN facts_baseline b ON o.b = b.row JOIN facts_candidate c ON o.c = c.row"
            " JOIN in_segment s USING (place) WHERE b.ok AND c.ok AND gaps IS NOT NULL"
        )
        bucket = f"floor(log2(greatest(gap, 1e-9)) * {BUCKETS_PER_OCTAVE})::INTEGER"
        rows = store.rows(f"SELECT segment, {bucket} AS bucket, count(*) FROM ({gaps}) GROUP BY ALL ORDER BY ALL")
        counts: dict[int, list[tuple[int, int]]] = {}
        whole: dict[int, int] = {}
        for segment, place, count in rows:
            counts.setdefault(segment, []).append((place, count))
            whole[place] = whole.get(place, 0) + count
        counts = {each: found for each, found in counts.items() if each >= 0}
        counts[-1] = sorted(whole.items())
        wanted = {segment: _bucket_of(found) for segment, found in counts.items() if found}
        if not wanted:
            continue
        buckets = ", ".join(str(each) for each in sorted({place for place, _ in wanted.values()}))
        found = store.columns(
            f"SELECT segment, bucket, gap FROM (SELECT segment, gap, {bucket} AS bucket FROM ({gaps}))"
            f" WHERE bucket IN ({buckets})"
        )
        for segment, (place, rank) in wanted.items():
            is_in = found["bucket"] == place
            values = found["gap"][is_in if segment < 0 else is_in & (found["segment"] == segment)]
            results.setdefault(segment, [math.nan, math.nan])[number] = float(np.partition(values, rank)[rank])
    return {segment: (found[0], found[1]) for segment, found in sorted(results.items())}


def _bucket_of(counts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The bucket that the percentile is in, and its place among that bucket's values."""
    rank = max(1, math.ceil(P95 * sum(count for _, count in counts) - 1e-9)) - 1
    for bucket, count in counts:
        if rank < count:
            return bucket, rank
        rank -= count
    raise AssertionError("a rank is below the number of values")


def _missing(store: Store, ts: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Records without a partner between the pairs, in the order of time."""
    found = store.columns(
        "SELECT ts, sign FROM (SELECT ts, 1 AS sign FROM keys_baseline UNION ALL SELECT ts, -1 AS sign FROM"
        " keys_candidate) WHERE ts IS NOT NULL ORDER BY ts, sign"
    )
    return np.searchsorted(ts, found["ts"]).astype(np.int64), found["sign"].astype(np.float64)


def _names(store: Store, name: str, side: str) -> tuple[str, ...]:
    rows = store.rows(
        f"SELECT DISTINCT {side}.{name} FROM {BOTH_SIDES} WHERE {side}.{name} IS NOT NULL ORDER BY 1 LIMIT 100"
    )
    return tuple(value for (value,) in rows)


def _is_deterministic(store: Store, side: str) -> bool:
    """Whether all of a side's answers are of engines that promise it."""
    return bool(
        store.rows(f"SELECT coalesce(bool_and(coalesce({side}.deterministic, false)), false) FROM {BOTH_SIDES}")[0][0]
    )


def _faults(store: Store) -> tuple[tuple[Side, Reason, int], ...]:
    found = []
    for side in SIDES:
        for column, reason in (("doubled", Reason.DOUBLED_INDEX), ("falling", Reason.FALLING_STAMPS)):
            count = store.number(f"SELECT count(*) FROM facts_{side} WHERE {column}")
            if count:
                found.append((side, reason, count))
    return tuple(found)


def _digest(store: Store, side: Side) -> str:
    """A sum over the records, so that their order does not count."""
    [[total]] = store.rows(f"SELECT sum(digest::HUGEINT) FROM facts_{side}")
    return f"{int(total or 0) % (1 << 64):016x}"


def _floats(column: Any) -> Floats:
    """A column of numbers, NaN where there is none."""
    return np.ma.filled(np.ma.asarray(column).astype(np.float64), math.nan)


def _bools(column: Any) -> Bools:
    return np.ma.filled(np.ma.asarray(column).astype(np.bool_), False)


def p95(values: Floats) -> float:
    """95th percentile by nearest rank of the numbers that there are."""
    return nearest_rank(values[~np.isnan(values)], P95)


def summary_names() -> Mapping[str, str]:
    """Metrics with the unit of each."""
    return {name: "ms" if name.endswith("_ms") else "" for name in METRICS}
