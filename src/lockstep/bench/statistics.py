"""Metrics of a run, and their text. Names, definitions and order are those of `vllm bench serve`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.bench.client import Outcome
from lockstep.errors import UsageError

METRICS: Mapping[str, str] = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
GOALS = ("ttft", "tpot", "e2el")
"""Metrics that can have a goal per request."""


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Percentiles of a text such as ``50,90,99``; UsageError if one is not from 0 to 100."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = (-1.0,)
    if not all(0 <= value <= 100 for value in values):
        raise UsageError(f"--metric-percentiles is {text!r}; it must be numbers from 0 to 100, such as 50,90,99")
    return values


def parse_metrics(text: str) -> tuple[str, ...]:
    """Metrics of a text such as ``ttft,tpot``; UsageError, with all metrics, if one does not exist."""
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in METRICS:
            raise UsageError(f"--percentile-metrics has {name!r}; the metrics are {', '.join(METRICS)}")
    return names


def figures(
    outcomes: Sequence[Outcome],
    duration_s: float,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goals: Mapping[str, float],
) -> dict[str, Any]:
    """Metrics of a run's requests by name. Failed requests count only in ``failed``."""
    done = [outcome for outcome in outcomes if outcome.is_success]
    total_input = sum(outcome.prompt_tokens for outcome in done)
    total_output = sum(outcome.output_tokens for outcome in done)
    span_s = max(duration_s, 1e-9)
    peak_tokens, peak_requests = _peaks(done)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(done) / span_s,
        "request_goodput": sum(_is_good(outcome, goals) for outcome in done) / span_s if goals else None,
        "output_throughput": total_output / span_s,
        "total_token_throughput": (total_input + total_output) / span_s,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
    }
    for name in metrics:
        result |= _distribution(name, _values_ms(name, done), percentiles)
    return result


def failures(outcomes: Sequence[Outcome]) -> list[tuple[str, int]]:
    """Reasons of failures with their counts, in the order of their first occurrence."""
    return list(Counter(outcome.error for outcome in outcomes if not outcome.is_success).items())


def per_request(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Lists with an entry per request, in the order of the data set. Times are in seconds."""
    return {
        "input_lens": [outcome.prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.output_tokens for outcome in outcomes],
        "ttfts": [outcome.ttft_s for outcome in outcomes],
        "itls": [list(outcome.itl_s) for outcome in outcomes],
        "start_times": [outcome.start_s for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }


def percentile_name(percentile: float) -> str:
    """Name of a percentile, such as ``p99`` or ``p99.9``."""
    return f"p{percentile:g}"


def _values_ms(name: str, done: Sequence[Outcome]) -> list[float]:
    if name == "ttft":
        return [outcome.ttft_s * 1e3 for outcome in done]
    if name == "tpot":
        return [outcome.tpot_s * 1e3 for outcome in done if outcome.output_tokens > 1]
    if name == "itl":
        return [gap_s * 1e3 for outcome in done for gap_s in outcome.itl_s]
    return [outcome.e2el_s * 1e3 for outcome in done]


def _distribution(name: str, values_ms: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, population standard deviation, and percentiles with linear interpolation; 0 without values."""
    values = np.array(values_ms or [0.0])
    result = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    return result | {f"{percentile_name(p)}_{name}_ms": float(np.percentile(values, p)) for p in percentiles}


def _is_good(outcome: Outcome, goals: Mapping[str, float]) -> bool:
    reached = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2el": outcome.e2el_s}
    return all(reached[name] * 1e3 <= limit_ms for name, limit_ms in goals.items())


def _peaks(done: Sequence[Outcome]) -> tuple[float, int]:
    """Maximum number of chunks that arrived in a second, and of requests that were open in a second."""
    if not done:
        return 0.0, 0
    origin_s = min(outcome.start_s for outcome in done)
    end_s = max(outcome.start_s + outcome.e2el_s for outcome in done)
    num_seconds = math.ceil(end_s - origin_s) + 1
    chunks, openings = np.zeros(num_seconds + 1), np.zeros(num_seconds + 1)
    for outcome in done:
        times = np.cumsum([outcome.start_s - origin_s + outcome.ttft_s, *outcome.itl_s])
        np.add.at(chunks, times.astype(int), 1)
        openings[int(outcome.start_s - origin_s)] += 1
        openings[int(outcome.start_s - origin_s + outcome.e2el_s) + 1] -= 1
    return float(chunks.max()), int(np.cumsum(openings).max())


MAX_SHOWN_REASONS = 5
_WIDTH = 56
_LABEL = 42
_HEAD: Mapping[str, tuple[str, str]] = {
    "completed": ("Successful requests:", "d"),
    "failed": ("Failed requests:", "d"),
    "interrupted": ("Interrupted requests:", "d"),
    "max_concurrency": ("Maximum request concurrency:", "d"),
    "request_rate": ("Request rate configured (RPS):", ".2f"),
    "duration": ("Benchmark duration (s):", ".2f"),
    "total_input_tokens": ("Total input tokens:", "d"),
    "total_output_tokens": ("Total generated tokens:", "d"),
    "request_throughput": ("Request throughput (req/s):", ".2f"),
    "request_goodput": ("Request goodput (req/s):", ".2f"),
    "output_throughput": ("Output token throughput (tok/s):", ".2f"),
    "max_output_tokens_per_s": ("Peak output chunks in a second:", ".2f"),
    "max_concurrent_requests": ("Peak concurrent requests:", "d"),
    "total_token_throughput": ("Total token throughput (tok/s):", ".2f"),
    "client_cpu_us_per_token": ("Client CPU per output token (us):", ".1f"),
    "p99_send_delay_ms": ("P99 delay of sending (ms):", ".2f"),
}
_SHORT = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}


def text_of(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """Text of a result, one metric per line."""
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]
    for key, (label, form) in _HEAD.items():
        value = result.get(key)
        if value is None or value == "inf" or (key == "interrupted" and not value):
            continue
        lines.append(f"{label:<{_LABEL}}{value:{form}}")
    for name in metrics:
        lines.append(f"{METRICS[name]:-^{_WIDTH}}")
        kinds = [("Mean", "mean"), ("Median", "median")] + [
            (percentile_name(p).upper(), percentile_name(p)) for p in percentiles
        ]
        for label, kind in kinds:
            lines.append(f"{f'{label} {_SHORT[name]} (ms):':<{_LABEL}}{result[f'{kind}_{name}_ms']:.2f}")
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def text_of_failures(reasons: Sequence[tuple[str, int]]) -> str:
    """Text of the first reasons of failures, with their counts."""
    lines = [f"  {count} x {reason}" for reason, count in reasons[:MAX_SHOWN_REASONS]]
    more = len(reasons) - MAX_SHOWN_REASONS
    return "\n".join(["Failed requests:", *lines, *([f"  and {more} other reasons"] if more > 0 else [])])
