"""Scrapes of `/metrics`: values by name and labels at one moment, and rates between two of them. Pure.

A counter that is lower than before was started anew with its server: all of it was counted since then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_PREFIXES = (
    "lockstep:generation_tokens_total",
    "lockstep:prompt_tokens_total",
    "lockstep:prefix_cache_",
    "lockstep:kv_cache_usage_perc",
    "lockstep:cache_config_info",
    "lockstep:time_to_first_token_seconds_bucket",
    "lockstep:num_requests_",
    "lockstep:kv_store_",
    "lockstep:cluster_requests_total",
    "process_start_time_seconds",
)
"""Lines that are read; the others are many times as many."""
_TTFT = "lockstep:time_to_first_token_seconds_bucket"


class Sample(NamedTuple):
    """One line of a scrape."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Scrape:
    """Values of one moment.

    Args:
        at_s: when it was taken, by a clock that never goes back.
        samples: by the name of their line.
    """

    at_s: float
    samples: Mapping[str, Sequence[Sample]]

    @classmethod
    def parse(cls, text: str, at_s: float) -> Scrape:
        """Read the text format of Prometheus; ValueError if it is something else."""
        from prometheus_client.parser import text_string_to_metric_families

        lines = "".join(f"{line}\n" for line in text.split("\n") if line.startswith(_PREFIXES))
        samples: dict[str, list[Sample]] = {}
        for family in text_string_to_metric_families(lines):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(Sample(sample.labels, sample.value))
        return cls(at_s, samples)

    def of(self, name: str, **labels: str) -> list[Sample]:
        """Samples that have these labels, and maybe others."""
        return [
            sample
            for sample in self.samples.get(name, ())
            if all(sample.labels.get(key) == value for key, value in labels.items())
        ]

    def total(self, name: str, **labels: str) -> float | None:
        """Sum of the samples that have these labels; None: there are none."""
        found = self.of(name, **labels)
        return math.fsum(sample.value for sample in found) if found else None


class EngineFigures(NamedTuple):
    """An engine at one moment, and its rates since the one before. None: not known, or nothing happened."""

    tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    """Cached ones included."""
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    hit_share: float | None = None
    """Of the prompt tokens that were looked up in the prefix cache."""
    kv_share: float | None = None
    """Of the pool's blocks that are in use."""
    num_blocks: int | None = None


class StoreTier(NamedTuple):
    """A tier of the store of KV outside of the device."""

    name: str
    num_bytes: int
    budget_bytes: int
    num_blocks: int
    num_loaded: int
    """Blocks that came back from it since the start, and so on."""
    num_evicted: int
    num_rejected: int


def engine_figures(before: Scrape | None, after: Scrape, model: str) -> EngineFigures:
    """Figures of the engine that is known under a model's id."""
    usage = after.total("lockstep:kv_cache_usage_perc", model_name=model)
    config = after.of("lockstep:cache_config_info", model_name=model)
    num_blocks = sum(int(sample.labels["num_gpu_blocks"]) for sample in config if "num_gpu_blocks" in sample.labels)
    queries = increase(before, after, "lockstep:prefix_cache_queries_total", model_name=model)
    hits = increase(before, after, "lockstep:prefix_cache_hits_total", model_name=model)
    buckets = _bucket_increases(before, after, model)
    return EngineFigures(
        rate(before, after, "lockstep:generation_tokens_total", model_name=model),
        rate(before, after, "lockstep:prompt_tokens_total", model_name=model),
        quantile(buckets, 0.5),
        quantile(buckets, 0.95),
        hits / queries if queries and hits is not None else None,
        usage,
        num_blocks or None,
    )


def store_tiers(scrape: Scrape) -> list[StoreTier]:
    """Tiers in the server's order; none where nothing is kept outside of the device."""
    names = [sample.labels.get("tier", "") for sample in scrape.of("lockstep:kv_store_budget_bytes")]

    def value(name: str, tier: str) -> int:
        return int(scrape.total(f"lockstep:kv_store_{name}", tier=tier) or 0)

    return [
        StoreTier(
            tier,
            *(value(name, tier) for name in ("bytes", "budget_bytes", "blocks")),
            *(value(f"{name}_total", tier) for name in ("loaded", "evicted", "rejected")),
        )
        for tier in names
    ]


def increase(before: Scrape | None, after: Scrape, name: str, **labels: str) -> float | None:
    """Growth of a counter between two scrapes; None: there is one scrape only, or no such counter."""
    now = after.total(name, **labels)
    if before is None or now is None:
        return None
    then = before.total(name, **labels) or 0.0
    return now - then if now >= then else now


def rate(before: Scrape | None, after: Scrape, name: str, **labels: str) -> float | None:
    """Growth of a counter a second."""
    grown = increase(before, after, name, **labels)
    if before is None or grown is None or after.at_s <= before.at_s:
        return None
    return grown / (after.at_s - before.at_s)


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """Value below which this share of a histogram lies, as Prometheus' ``histogram_quantile`` estimates it.

    Args:
        buckets: upper bounds, which ascend, and how many values are not above them.

    Returns:
        None without values; the last finite bound where it lies above that.
    """
    num_values = buckets[-1][1] if buckets else 0.0
    if num_values <= 0:
        return None
    rank = share * num_values
    low, below = 0.0, 0.0
    for bound, cumulative in buckets:
        if cumulative >= rank and cumulative > below:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (cumulative - below)
        low, below = bound, cumulative
    return None


def _bucket_increases(before: Scrape | None, after: Scrape, model: str) -> list[tuple[float, float]]:
    """Cumulative counts of times to first token between two scrapes, by upper bound."""
    if before is None:
        return []
    then, now = _buckets(before, model), _buckets(after, model)
    is_anew = any(now.get(bound, 0.0) < count for bound, count in then.items())
    return [(bound, count - (0.0 if is_anew else then.get(bound, 0.0))) for bound, count in sorted(now.items())]


def _buckets(scrape: Scrape, model: str) -> dict[float, float]:
    counts: dict[float, float] = {}
    for labels, value in scrape.of(_TTFT, model_name=model):
        bound = float(labels.get("le", "inf"))
        counts[bound] = counts.get(bound, 0.0) + value
    return counts
