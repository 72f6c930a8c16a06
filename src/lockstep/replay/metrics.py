"""Metrics of a report by name: full and short names, the direction in which each is better, and goals for latencies."""

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
"""Paths in which ``ttft_p99`` is looked for: times in ms if there are any, else in ticks."""
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
"""Metrics that are better when they are more; all others when they are less."""


def numbers_of(report: Report) -> dict[str, float]:
    """Every figure that is a number, by its path, as in ``latency_ticks.ttft.p99``."""
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
    """The path of the metric ``name``, which may be the path itself or short: ``ttft_p99`` for ``latency_ms.ttft.p99``.

    Raises:
        UsageError: there is no such metric; the message lists the nearest names, and all.
    """
    for form in _forms_of(name):
        if form in names:
            return form
    shorts = dict.fromkeys(short_name(name) for name in names)
    near = nearest(name, [*names, *shorts], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? There are" if near else "there are"
    raise UsageError(f"no report has a metric {name!r}; {hint} {', '.join(shorts)}")


def check_metric(name: str) -> None:
    """UsageError, as `metric_named`, for what no report can have: known before anything is replayed."""
    names = [path for path in _paths(Report) if path != "version"]
    if not any(form in names for form in _forms_of(name)):
        metric_named(name, names)


def _forms_of(name: str) -> tuple[str, ...]:
    """The path itself, and those that a short name stands for."""
    measure, _, kind = name.rpartition("_")
    return name, *(f"{form}.{measure}.{kind}" for form in SHORT_FORMS)


def _paths(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Every figure that such a report may have and that is a number, by its path."""
    for field in msgspec.structs.fields(kind):
        is_union = typing.get_origin(field.type) in (typing.Union, types.UnionType)
        for each in typing.get_args(field.type) if is_union else (field.type,):
            if each in (int, float):
                yield prefix + field.name
            elif isinstance(each, type) and issubclass(each, msgspec.Struct):
                yield from _paths(each, f"{prefix}{field.name}.")


def short_name(name: str) -> str:
    """``ttft_p99`` for ``latency_ms.ttft.p99``."""
    for form in SHORT_FORMS:
        if name.startswith(f"{form}."):
            return name.removeprefix(f"{form}.").replace(".", "_")
    return name


def as_less_is_better(figures_of: Mapping[str, float], name: str) -> float:
    """A figure turned so that less of it is better."""
    return -figures_of[name] if name in MORE_IS_BETTER else figures_of[name]


def parse_goals(text: str, option: str, names: Sequence[str]) -> dict[str, float]:
    """``ttft:500,tpot:50`` (or with spaces) as milliseconds by metric.

    Args:
        option: the option that has the text, for messages.
        names: metrics that can be goals.

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
            raise UsageError(f"{option} has {pair!r}; write ttft:500,tpot:50 with {', '.join(names)} in milliseconds")
        goals[name] = limit_ms
    return goals
