"""Cluster stats: computes each engine's rates and latencies over the last seconds, and reports the KV store tiers.

Counters and histograms count from the start, so rates are differences between two moments. A moment is recorded when
stats are read, and all readers share the recorded moments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from lockstep.engine.kv_tiers import TierStats
from lockstep.engine.metrics import MetricsSnapshot
from lockstep.system import SYSTEM

DEFAULT_WINDOW_S = 30.0
MAX_WINDOW_S = 3_600.0
MAX_MOMENTS = 64
"""Number of recorded moments; one takes about 20 kB with 26 engines."""
MIN_SPACING_S = 1.0
"""Minimum interval in seconds between two recorded moments, however often stats are read."""
COUNTERS = (
    *("generation_tokens", "prompt_tokens", "prefix_cache_queries", "prefix_cache_hits"),
    *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
)
"""Counters of an engine, in the order of `Counts`."""
TTFT = "time_to_first_token_seconds"


class EngineStats(msgspec.Struct, frozen=True):
    """One engine's current state, and its rates over the window. Null values are unknown, or have no data."""

    model: str
    """Id of the engine's first model; models that share the engine are included."""
    tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    """Rate of prompt tokens, including cached ones."""
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    hit_share: float | None = None
    """Share of the looked-up prompt tokens that were found in the prefix cache."""
    kv_share: float | None = None
    """Share of the KV pool's blocks that are in use."""
    num_blocks: int | None = None
    num_waiting: int = 0
    """Number of requests that wait for their first step, or to be resumed."""
    draft_share: float | None = None
    """Share of the verified drafts that were accepted."""


class StoreTier(msgspec.Struct, frozen=True):
    """One tier of the KV store outside of the device. Counters count from the start."""

    name: str
    num_blocks: int
    num_bytes: int
    budget_bytes: int
    num_evicted: int
    num_loaded: int
    num_rejected: int
    num_checked: int


class ClusterStats(msgspec.Struct, frozen=True):
    """Stats of all engines at one moment."""

    window_s: float | None
    """Window of the rates in seconds; null: this is the first reading."""
    uptime_s: float | None
    requests_per_s: float | None
    engines: tuple[EngineStats, ...]
    tiers: tuple[StoreTier, ...]
    """Tiers of the KV store; empty if KV is not stored outside of the device."""


class Counts(NamedTuple):
    """Counters of one engine."""

    tokens: int = 0
    prompt_tokens: int = 0
    queries: int = 0
    hits: int = 0
    drafts: int = 0
    accepted: int = 0
    ttft: tuple[int, ...] = ()
    """Counts of the time-to-first-token histogram, by bucket."""


class Moment(NamedTuple):
    """Counters of all engines at one moment."""

    at_s: float
    num_requests: int
    engines: Mapping[str, Counts]


class History:
    """Recorded moments, oldest first. Event loop only."""

    def __init__(self, now_s: Callable[[], float] = SYSTEM.now_s) -> None:
        self.now_s = now_s
        self.started_s = now_s()
        self._kept: deque[Moment] = deque(maxlen=MAX_MOMENTS)

    def before(self, moment: Moment, window_s: float) -> Moment | None:
        """Moment against which rates are computed: the oldest one in the window, else the last one before it, unless it
        is too old. Records the new moment."""
        inside = (each for each in self._kept if moment.at_s - each.at_s <= window_s)
        found = next(inside, self._kept[-1] if self._kept else None)
        if not self._kept or moment.at_s - self._kept[-1].at_s >= MIN_SPACING_S:
            self._kept.append(moment)
        is_old = found is not None and moment.at_s - found.at_s > 2 * max(window_s, MIN_SPACING_S)
        return None if is_old else found


def stats_of(
    history: History,
    metrics: Mapping[str, MetricsSnapshot],
    tiers: Mapping[str, TierStats],
    num_requests: int,
    window_s: float,
) -> ClusterStats:
    """Compute the current stats, with rates over at most about ``window_s``."""
    counts = {model: _counts(snapshot) for model, snapshot in metrics.items()}
    after = Moment(history.now_s(), num_requests, counts)
    before = history.before(after, window_s)
    elapsed_s = None if before is None or after.at_s <= before.at_s else after.at_s - before.at_s
    then = {} if before is None else before.engines
    return ClusterStats(
        elapsed_s,
        after.at_s - history.started_s,
        None if before is None or elapsed_s is None else (num_requests - before.num_requests) / elapsed_s,
        tuple(
            _engine(model, snapshot, then.get(model, Counts()), counts[model], elapsed_s)
            for model, snapshot in metrics.items()
        ),
        tuple(StoreTier(name, **stats._asdict()) for name, stats in tiers.items()),
    )


def _counts(snapshot: MetricsSnapshot) -> Counts:
    histogram = snapshot.histograms.get(TTFT)
    tokens, prompts, queries, hits, drafts, accepted = (snapshot.counters.get(name, 0) for name in COUNTERS)
    ttft = () if histogram is None else tuple(histogram.counts)
    return Counts(tokens, prompts, queries, hits, drafts, accepted, ttft)


def _engine(model: str, snapshot: MetricsSnapshot, then: Counts, now: Counts, elapsed_s: float | None) -> EngineStats:
    """Stats of one engine. If its counters are lower than before, the engine was restarted, and all of them count."""
    kv_share = snapshot.gauges.get("kv_cache_usage_perc")
    num_blocks = snapshot.info.get("cache_config_info", {}).get("num_gpu_blocks")
    blocks = None if num_blocks is None else int(num_blocks)
    num_waiting = int(snapshot.gauges.get("num_requests_waiting", 0))
    if elapsed_s is None:
        return EngineStats(model, kv_share=kv_share, num_blocks=blocks, num_waiting=num_waiting)
    ttft_then = then.ttft or (0,) * len(now.ttft)
    is_restarted = now.tokens < then.tokens or any(a < b for a, b in zip(now.ttft, ttft_then, strict=True))
    if is_restarted:
        then, ttft_then = Counts(), (0,) * len(now.ttft)
    queries, hits = now.queries - then.queries, now.hits - then.hits
    drafts, accepted = now.drafts - then.drafts, now.accepted - then.accepted
    bounds = snapshot.histograms[TTFT].bounds if now.ttft else ()
    ttft = [a - b for a, b in zip(now.ttft, ttft_then, strict=True)]
    return EngineStats(
        model,
        (now.tokens - then.tokens) / elapsed_s,
        (now.prompt_tokens - then.prompt_tokens) / elapsed_s,
        quantile(bounds, ttft, 0.5),
        quantile(bounds, ttft, 0.95),
        hits / queries if queries > 0 else None,
        kv_share,
        blocks,
        num_waiting,
        accepted / drafts if drafts > 0 else None,
    )


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Quantile of a histogram, as estimated by ``histogram_quantile`` of Prometheus.

    Args:
        bounds: upper bounds of the buckets, ascending; the last bucket has none.
        counts: number of values in each bucket.
        share: share of the values that lie below the quantile.

    Returns:
        The quantile; the last bound if the quantile lies above it; None if there are no values.
    """
    rank = share * sum(counts)
    if rank <= 0:
        return None
    low, below = 0.0, 0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= rank:
            return low + (bound - low) * (rank - below) / count
        low, below = bound, below + count
    return low
