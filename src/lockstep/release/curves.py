"""Plots of a verdict's page: shows the distributions of both sides' figures, and the evidence over time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lockstep.release.evidence import Evidence, Floats, Pairs
from lockstep.release.policy import Policy
from lockstep.release.sequential import WORDS, amount
from lockstep.release.verdict import SeriesSummary
from lockstep.report.document import Level, Line, Plot, Plots
from lockstep.shown import signed_percent

NUM_QUANTILES = 200
"""Maximum number of points of a distribution's line."""
DISTRIBUTIONS: Mapping[str, str] = {
    "latency_ms": "Latency",
    "ttft_ms": "Time to the first token",
    "decode_ms": "Mean gap between tokens",
}


def plots_of(policy: Policy, evidence: Evidence, series: Sequence[SeriesSummary]) -> tuple[Plots, ...]:
    """Plots of the distributions, and of the evidence over time.

    Args:
        series: series of the sequential gate; empty in threshold mode.
    """
    growths = [_growth(policy, each) for each in series]
    found = [
        Plots(tuple(_distributions(evidence.pairs)), id="distributions"),
        Plots(tuple(each for each in growths if each is not None), id="evidence-over-time"),
    ]
    return tuple(each for each in found if each.plots)


def _distributions(pairs: Pairs) -> Iterator[Plot]:
    for metric, title in DISTRIBUTIONS.items():
        lines = []
        for side, color, values in zip(("baseline", "candidate"), "ab", pairs.metrics[metric], strict=True):
            known = values[pairs.healthy & (values > 0)]
            if len(known) > 1:
                lines.append(Line(side, color, _quantiles(known)))
        if len(lines) == 2:
            summary = f"Cumulative distribution of {title.lower()} for baseline and candidate."
            yield Plot(title, summary, "ms (logarithmic)", "% of answers up to it", lines, is_log=True)


def _quantiles(values: Floats) -> list[tuple[float, float]]:
    """Points of a cumulative distribution: values with their percentages."""
    shares = np.linspace(0.0, 1.0, min(NUM_QUANTILES, len(values)))
    return list(zip(np.quantile(values, shares).tolist(), (100.0 * shares).tolist(), strict=True))


def _growth(policy: Policy, series: SeriesSummary) -> Plot | None:
    """Plot of a series: its mean over the number of pairs, with the confidence sequence and the bound."""
    is_ratio = series.unit == "ratio"

    def shown(value: float) -> float:
        return 100 * (value - 1) if is_ratio else value

    middle, band = [], []
    for point in series.curve:
        if point.effect is not None and point.lower is not None and point.upper is not None:
            middle.append((float(point.pairs), shown(point.effect)))
            band.append((float(point.pairs), shown(point.lower), shown(point.upper)))
    if not middle:
        return None
    levels = [] if series.bound is None else [Level(f"bound {amount(series.unit, series.bound)}", shown(series.bound))]
    if is_ratio:
        levels.append(Level(f"tolerance {signed_percent(policy.tolerance, 'g')}", 100 * policy.tolerance))
    name = WORDS[series.signal]
    summary = f"Mean change of {name} by the number of pairs: {amount(series.unit, series.effect)}, {series.state}."
    line = Line("mean, and its confidence sequence", "running", middle, band)
    change = "change, %" if is_ratio else f"candidate less baseline, {series.unit}"
    return Plot(f"Evidence on {name}", summary, "pairs (logarithmic)", change, (line,), levels, is_log=True)
