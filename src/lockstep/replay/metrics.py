"""The figures of a report as numbers by name, and which of them one wants more of. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from lockstep.errors import UsageError
from lockstep.replay.report import Report, figures

SHORT_FORMS = ("latency_ms", "latency_ticks")
"""Where ``ttft_p99`` looks for ``ttft.p99``: times in ms if there are any, else in ticks."""
MORE_IS_BETTER = (
    "requests_completed",
    "decode_tokens",
    "prefix_hit_tokens",
    "prefix_hit_rate",
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
"""Of all others one wants less."""


def numbers_of(report: Report) -> dict[str, float]:
    """Every figure that is a number, by its path."""
    return {
        name: value
        for name, value in figures(report).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def metric_named(wanted: str, names: Collection[str]) -> str:
    """The figure that somebody calls ``wanted``: its path, or ``ttft_p99`` for ``latency_ms.ttft.p99``.

    Raises:
        UsageError: there is none; the message has the nearest, and all.
    """
    measure, _, kind = wanted.rpartition("_")
    for name in (wanted, *(f"{form}.{measure}.{kind}" for form in SHORT_FORMS)):
        if name in names:
            return name
    shorts = dict.fromkeys(short_name(name) for name in names)
    near = difflib.get_close_matches(wanted, [*names, *shorts], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(f"no report has a metric {wanted!r}; {hint}There are {', '.join(shorts)}")


def short_name(name: str) -> str:
    """``ttft_p99`` for ``latency_ms.ttft.p99``."""
    for form in SHORT_FORMS:
        if name.startswith(f"{form}."):
            return name.removeprefix(f"{form}.").replace(".", "_")
    return name


def as_less_is_better(figures_of: Mapping[str, float], name: str) -> float:
    """A figure turned so that less of it is better."""
    return -figures_of[name] if name in MORE_IS_BETTER else figures_of[name]
