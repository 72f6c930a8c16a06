"""How a run is told: a bar while it lasts, then the figures as text, in the order that `vllm bench serve` has."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lockstep.bench.runner import Watch
from lockstep.bench.statistics import METRICS, percentile_name

SHOWN_REASONS = 5
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
    """The figures of a result, one a line."""
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
    """The first reasons of failure and how often each came."""
    lines = [f"  {count} x {reason}" for reason, count in reasons[:SHOWN_REASONS]]
    more = len(reasons) - SHOWN_REASONS
    return "\n".join(["Failed requests:", *lines, *([f"  and {more} other reasons"] if more > 0 else [])])


@contextmanager
def progress(num_jobs: int, is_wanted: bool) -> Iterator[Watch]:
    """A bar on the terminal's standard error, drawn when the run says so: a thread of its own would cost the run."""
    watch = Watch(num_jobs)
    if not is_wanted or not sys.stderr.isatty():
        yield watch
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bars:
        task = bars.add_task("requests", total=num_jobs)

        def draw(watch: Watch) -> None:
            failed = f" ({watch.num_failed} failed)" if watch.num_failed else ""
            bars.update(task, completed=watch.num_done, description=f"requests{failed}")
            bars.refresh()

        watch.on_report = draw
        yield watch
