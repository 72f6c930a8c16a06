"""Metrics of an engine: counts and measures with vLLM's names, units and buckets, so that its dashboards and alerts
apply.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import FinishReason
from lockstep.core.stats import SchedulerStats

_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = tuple(float(n) for n in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384))
_REQUEST_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_REQUEST_N = (1.0, 2.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Counts per bucket (upper bounds inclusive, last bucket unbounded), number and sum of observations."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    count: int
    sum: float


class Histogram:
    """Histogram with fixed buckets. Only one thread may write it."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def snapshot(self) -> HistogramSnapshot:
        counts = tuple(self._counts)
        return HistogramSnapshot(self._bounds, counts, sum(counts), self._sum)


HISTOGRAMS: Mapping[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": _TTFT_S,
    "inter_token_latency_seconds": _ITL_S,
    "request_time_per_output_token_seconds": _ITL_S,
    "e2e_request_latency_seconds": _REQUEST_S,
    "request_queue_time_seconds": _REQUEST_S,
    "request_inference_time_seconds": _REQUEST_S,
    "request_prefill_time_seconds": _REQUEST_S,
    "request_decode_time_seconds": _REQUEST_S,
    "iteration_tokens_total": _STEP_TOKENS,
    "request_prompt_tokens": _REQUEST_TOKENS,
    "request_generation_tokens": _REQUEST_TOKENS,
    "request_max_num_generation_tokens": _REQUEST_TOKENS,
    "request_params_max_tokens": _REQUEST_TOKENS,
    "request_params_n": _REQUEST_N,
    "request_prefill_kv_computed_tokens": _REQUEST_TOKENS,
}


@dataclass(frozen=True, slots=True)
class Labelled:
    """One metric with a value for each value of a label."""

    label: str
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """Names of the adapters of open requests, in ascending order."""

    max_loaded: int
    """Maximum number of adapters that are loaded at once."""
    running: tuple[str, ...]
    """Adapters of requests that have a slot."""
    waiting: tuple[str, ...]
    """Adapters of requests that wait for a slot."""

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels of vLLM's ``lora_requests_info``."""
        return {
            "max_lora": str(self.max_loaded),
            "running_lora_adapters": ",".join(self.running),
            "waiting_lora_adapters": ",".join(self.waiting),
        }


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """All metrics at one moment, as a plain value that can be passed between threads and processes."""

    gauges: Mapping[str, float]
    counters: Mapping[str, int]
    """Counters by name. ``request_success`` is in ``finished`` instead."""
    finished: Mapping[str, int]
    """Finished requests by reason."""
    histograms: Mapping[str, HistogramSnapshot]
    labelled_gauges: Mapping[str, Labelled] = field(default_factory=dict)
    labelled_counters: Mapping[str, Labelled] = field(default_factory=dict)
    info: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Constant facts, as the labels of a gauge with value 1."""
    adapters: AdapterUse | None = None
    """Use of adapters; None: the model was loaded without any."""

    @property
    def facts(self) -> Mapping[str, Mapping[str, str]]:
        """Constant facts, and the use of adapters, by name of the metric."""
        return self.info if self.adapters is None else {**self.info, "lora_requests_info": self.adapters.labels}


class SequenceSpan(msgspec.Struct, frozen=True):
    """Times and lengths of a sequence, on the engine's clock."""

    arrival_s: float
    scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    """Prompt tokens that were cached before its first chunk."""
    max_output_tokens: int


class EngineMetrics:
    """Counters and histograms. The engine thread writes them when tokens are produced, not when they are delivered."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_failed_steps = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        """Number of ``prompt_tokens`` that came from the prefix cache."""
        self.generation_tokens = 0
        self.admission_rejections = 0
        """Requests that the engine's thread rejected because the queue was full."""
        self.has_drafts = False
        """True if the engine drafts; otherwise there are no metrics of drafts."""
        self.num_drafts = 0
        """Number of rows with drafts."""
        self.num_draft_tokens = 0
        self.num_accepted_tokens: list[int] = []
        """Number of accepted drafts by their place in the row."""
        self.corrupted_requests = 0
        """Sequences whose logits were not finite."""
        self.finished: dict[str, int] = {}
        histograms = {name: Histogram(bounds) for name, bounds in HISTOGRAMS.items()}
        self._histograms = histograms
        self.observe_ttft_s = histograms["time_to_first_token_seconds"].observe
        self.observe_itl_s = histograms["inter_token_latency_seconds"].observe
        self.observe_step_tokens = histograms["iteration_tokens_total"].observe

    def observe_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Record the drafts of a row."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        counts = self.num_accepted_tokens
        counts += [0] * (num_drafts - len(counts))
        for place in range(num_accepted):
            counts[place] += 1

    def draft_counters(self) -> Mapping[str, int]:
        """Counters of drafts, under vLLM's names; empty if the engine does not draft."""
        if not self.has_drafts:
            return {}
        return {
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens": sum(self.num_accepted_tokens),
        }

    def accepted_by_place(self) -> Mapping[str, Labelled]:
        """Counter of accepted drafts by their place in the row, likewise."""
        if not self.has_drafts:
            return {}
        counts = {str(place): count for place, count in enumerate(list(self.num_accepted_tokens))}
        return {"spec_decode_num_accepted_tokens_per_pos": Labelled("position", counts)}

    def count_finished(self, reason: FinishReason) -> None:
        self.finished[reason.value] = self.finished.get(reason.value, 0) + 1

    def observe_finished(self, span: SequenceSpan, reason: FinishReason, now_s: float) -> None:
        """Record the durations of a sequence that ended, up to the phase that it reached."""
        self.count_finished(reason)
        histograms = self._histograms
        histograms["e2e_request_latency_seconds"].observe(now_s - span.arrival_s)
        histograms["request_prompt_tokens"].observe(span.num_prompt_tokens)
        histograms["request_generation_tokens"].observe(span.num_output_tokens)
        histograms["request_params_max_tokens"].observe(span.max_output_tokens)
        if span.scheduled_s is not None:
            histograms["request_queue_time_seconds"].observe(span.scheduled_s - span.arrival_s)
        if span.scheduled_s is not None and span.first_token_s is not None:
            decode_s = span.last_token_s - span.first_token_s
            histograms["request_inference_time_seconds"].observe(span.last_token_s - span.scheduled_s)
            histograms["request_prefill_time_seconds"].observe(span.first_token_s - span.scheduled_s)
            histograms["request_decode_time_seconds"].observe(decode_s)
            histograms["request_prefill_kv_computed_tokens"].observe(span.num_prompt_tokens - span.num_cached_tokens)
            if span.num_output_tokens > 1:
                histograms["request_time_per_output_token_seconds"].observe(decode_s / (span.num_output_tokens - 1))

    def observe_request(self, num_output_tokens: Sequence[int]) -> None:
        """Record a request that ended, with the number of tokens in each of its ``n`` sequences."""
        self._histograms["request_params_n"].observe(len(num_output_tokens))
        self._histograms["request_max_num_generation_tokens"].observe(max(num_output_tokens))

    def histograms(self) -> Mapping[str, HistogramSnapshot]:
        return {name: histogram.snapshot() for name, histogram in self._histograms.items()}


def cache_config_labels(config: SchedulerConfig, num_stages: int, max_model_len: int) -> Mapping[str, str]:
    """Settings of the KV cache, or of the pool of an encoder's activations, under vLLM's names where it has one.

    Args:
        config: limits in positions.
        num_stages: positions of each token, see `Geometry`. The block size is in tokens.
        max_model_len: context length in tokens; without text as the answer, the length of the longest text.
    """
    facts = {
        "block_size": config.block_size // num_stages,
        "num_gpu_blocks": config.num_blocks,
        "num_cpu_blocks": config.num_host_blocks,
        "enable_prefix_caching": config.enable_prefix_caching,
        "max_model_len": max_model_len,
        "preemption": config.preemption,
    }
    return {name: str(value) for name, value in facts.items()}


class Unscheduled(NamedTuple):
    """Counts of requests that were not added to the scheduler."""

    num_waiting: int
    num_rejected: int
    """Number of rejected requests since the start."""


def snapshot(
    metrics: EngineMetrics,
    stats: SchedulerStats,
    unscheduled: Unscheduled,
    info: Mapping[str, Mapping[str, str]],
    adapters: AdapterUse | None = None,
) -> MetricsSnapshot:
    """Combine the engine's and the scheduler's counts, under vLLM's names.

    Requests that wait for blocks or a slot have the reason ``capacity``; those that arrived during a step,
    ``deferred``.
    """
    by_reason = {"capacity": stats.num_queued + stats.num_preempted, "deferred": unscheduled.num_waiting}
    cached = metrics.cached_prompt_tokens
    by_source = {"local_compute": metrics.prompt_tokens - cached, "local_cache_hit": cached}
    return MetricsSnapshot(
        gauges={
            "num_requests_running": stats.num_running,
            "num_requests_waiting": sum(by_reason.values()),
            "kv_cache_usage_perc": stats.kv_usage,
        },
        counters={
            "prompt_tokens": metrics.prompt_tokens,
            "prompt_tokens_cached": cached,
            "generation_tokens": metrics.generation_tokens,
            "num_preemptions": stats.num_preemptions,
            "prefix_cache_queries": stats.prefix_queries_tokens,
            "prefix_cache_hits": stats.prefix_hits_tokens,
            "admission_rejections": metrics.admission_rejections + unscheduled.num_rejected,
            "corrupted_requests": metrics.corrupted_requests,
            "num_steps": metrics.num_steps,
            "num_failed_steps": metrics.num_failed_steps,
            **metrics.draft_counters(),
        },
        finished=dict(metrics.finished),
        histograms=metrics.histograms(),
        labelled_gauges={"num_requests_waiting_by_reason": Labelled("reason", by_reason)},
        labelled_counters={
            "prompt_tokens_by_source": Labelled("source", by_source),
            **metrics.accepted_by_place(),
        },
        info=info,
        adapters=adapters,
    )


RATIO = "_perc"
"""Suffix of gauges that are ratios."""


def merged(snapshots: Sequence[MetricsSnapshot]) -> MetricsSnapshot:
    """Combine the metrics of several engines of one model: sums, or means for ratios. Facts are those of the first
    engine."""
    first = snapshots[0]
    if len(snapshots) == 1:
        return first
    gauges = _sums([each.gauges for each in snapshots])
    return MetricsSnapshot(
        gauges={name: value / len(snapshots) if name.endswith(RATIO) else value for name, value in gauges.items()},
        counters={name: int(value) for name, value in _sums([each.counters for each in snapshots]).items()},
        finished={name: int(value) for name, value in _sums([each.finished for each in snapshots]).items()},
        histograms={name: _sum_of([each.histograms[name] for each in snapshots]) for name in first.histograms},
        labelled_gauges=_labelled_sums([each.labelled_gauges for each in snapshots]),
        labelled_counters=_labelled_sums([each.labelled_counters for each in snapshots]),
        info=first.info,
        adapters=_union([each.adapters for each in snapshots if each.adapters is not None]),
    )


def _union(uses: Sequence[AdapterUse]) -> AdapterUse | None:
    """Use of adapters by several engines; the limit is that of each one."""
    if not uses:
        return None
    running = sorted({name for each in uses for name in each.running})
    waiting = sorted({name for each in uses for name in each.waiting})
    return AdapterUse(uses[0].max_loaded, tuple(running), tuple(waiting))


def _sums(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in values for name in each)
    return {name: sum(each.get(name, 0) for each in values) for name in names}


def _labelled_sums(metrics: Sequence[Mapping[str, Labelled]]) -> dict[str, Labelled]:
    first = metrics[0]
    return {name: Labelled(first[name].label, _sums([each[name].values for each in metrics])) for name in first}


def _sum_of(histograms: Sequence[HistogramSnapshot]) -> HistogramSnapshot:
    counts = tuple(map(sum, zip(*(each.counts for each in histograms), strict=True)))
    total = sum(each.count for each in histograms)
    return HistogramSnapshot(histograms[0].bounds, counts, total, sum(each.sum for each in histograms))
