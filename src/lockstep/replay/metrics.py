"""Metrics of a report: their full and short names, the direction in which each is better, and latency goals."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from lockstep.errors import UsageError
from lockstep.replay.report import Report
from lockstep.spelling import nearest

SHORT_FORMS = ("latency_ms", "latency_ticks")
"""Paths in which ``ttft_p99`` is searched: times in ms if there are any, otherwise in ticks."""
MORE_IS_BETTER = (
    "requests_completed",
    "decode_tokens",
    "prefix_hit_tokens",
    "prefix_hit_rate",
    "prefix_unbounded_hit_tokens",
    "prefix_unbounded_hit_rate",
    "prefill_utilization",
    "decode_utilization",
    "kv_occupancy",
    "requests_per_s",
    "output_tokens_per_s",
    "goodput.requests",
    "goodput.ratio",
    "goodput.requests_per_s",
    "fairness",
)
"""Metrics for which more is better; for all others less is better."""


def numbers_of(report: Report) -> dict[str, float]:
    """Numeric figures of a report by path, as in ``latency_ticks.ttft.p99``."""
    values = msgspec.to_builtins(report)
    for name in ("version", "config", "cost_ps", "ticks", "outcomes"):
        del values[name]
    return dict(_numbers(values))


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, value


def metric_named(name: str, names: Collection[str]) -> str:
    """Path of the metric ``name``, a path or its short form: ``ttft_p99`` for ``latency_ms.ttft.p99``.

    Raises:
        UsageError: unknown metric; the message lists the nearest names, and all.
    """
    for form in _forms_of(name):
        if form in names:
            return form
    shorts = dict.fromkeys(short_name(name) for name in names)
    near = nearest(name, [*names, *shorts], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? The metrics are" if near else "the metrics are"
    raise UsageError(f"no report has a metric {name!r}; {hint} {', '.join(shorts)}")


def check_metric(name: str) -> None:
    """Raise a UsageError, as `metric_named`, for a metric that no report has, before anything is replayed."""
    names = [path for path in _paths(Report) if path != "version"]
    if not any(form in names for form in _forms_of(name)):
        metric_named(name, names)


def _forms_of(name: str) -> tuple[str, ...]:
    """Possible paths of a name: the name itself, and those that it abbreviates."""
    measure, _, kind = name.rpartition("_")
    return name, *(f"{form}.{measure}.{kind}" for form in SHORT_FORMS)


def _paths(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Paths of the numeric figures in reports of a type."""
    for field in msgspec.structs.fields(kind):
        is_union = typing.get_origin(field.type) in (typing.Union, types.UnionType)
        for each in typing.get_args(field.type) if is_union else (field.type,):
            if each in (int, float):
                yield prefix + field.name
            elif isinstance(each, type) and issubclass(each, msgspec.Struct):
                yield from _paths(each, f"{prefix}{field.name}.")


def short_name(name: str) -> str:
    """Short name of a metric: ``ttft_p99`` for ``latency_ms.ttft.p99``."""
    for form in SHORT_FORMS:
        if name.startswith(f"{form}."):
            return name.removeprefix(f"{form}.").replace(".", "_")
    return name


def as_less_is_better(figures_of: Mapping[str, float], name: str) -> float:
    """Figure with a sign such that less is better."""
    return -figures_of[name] if name in MORE_IS_BETTER else figures_of[name]


def parse_goals(text: str, option: str, names: Sequence[str]) -> dict[str, float]:
    """Parse goals: ``ttft:500,tpot:50`` (or with spaces) become milliseconds by metric.

    Args:
        option: name of the option, for messages.
        names: allowed metrics.

    Raises:
        UsageError: the text is invalid; the message has the expected form.
    """
    goals: dict[str, float] = {}
    for pair in text.replace(",", " ").split():
        name, _, value = pair.partition(":")
        try:
            limit_ms = float(value)
        except ValueError:
            limit_ms = -1.0
        if name not in names or not 0 <= limit_ms < math.inf:
            raise UsageError(f"{option} has {pair!r}; write ttft:500,tpot:50 (milliseconds of {', '.join(names)})")
        goals[name] = limit_ms
    return goals
