"""Curves of a verdict's page: how both sides' figures are distributed, and how the evidence grew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from lockstep.release.evidence import Evidence, Floats, Pairs
from lockstep.release.policy import Policy
from lockstep.release.sequential import RATIOS, follow
from lockstep.release.statistics import Track
from lockstep.report.document import Level, Line, Plot, Plots

NUM_QUANTILES = 200
"""Points of a distribution's line."""
DISTRIBUTIONS: Mapping[str, str] = {
    "latency_ms": "Latency",
    "ttft_ms": "Time to the first token",
    "decode_ms": "Mean gap between tokens",
}
MAX_POINTS = 400
"""Of a line over pairs: the last ones of a long series are kept."""


def plots_of(policy: Policy, evidence: Evidence) -> tuple[Plots, ...]:
    """Plots of distributions, and of evidence where pairs have times."""
    found = [
        Plots(tuple(_distributions(evidence.pairs)), id="distributions"),
        Plots(tuple(_tracks(policy, evidence)), id="evidence-over-time"),
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
            yield Plot(title, summary, "ms, logarithmic", "% of pairs up to it", lines, is_log=True)


def _quantiles(values: Floats) -> list[tuple[float, float]]:
    """Percentages against the values that they are at."""
    shares = np.linspace(0.0, 1.0, min(NUM_QUANTILES, len(values)))
    return list(zip(np.quantile(values, shares).tolist(), (100.0 * shares).tolist(), strict=True))


def _tracks(policy: Policy, evidence: Evidence) -> Iterator[Plot]:
    findings = follow(policy, evidence)
    for (signal, segment), (_, track) in findings.tracks.items():
        if segment == "all" and signal in RATIOS:
            plot = _track(policy, signal, track, findings.looks)
            if plot is not None:
                yield plot


def _track(policy: Policy, signal: str, track: Track, all_looks: NDArray[np.int64]) -> Plot | None:
    """A ratio over the pairs with its confidence sequence, in percent, against margin and tolerance."""
    known = np.flatnonzero(np.isfinite(track.half_width))[-MAX_POINTS:]
    if not len(known):
        return None
    looks = all_looks[known].tolist()
    middle, low, high = (
        (100.0 * np.expm1(values[known])).tolist()
        for values in (track.mean, track.mean - track.half_width, track.mean + track.half_width)
    )
    line = Line(
        "mean change, and its confidence sequence",
        "b",
        list(zip(looks, middle, strict=True)),
        list(zip(looks, low, high, strict=True)),
    )
    levels = (
        Level(f"margin {100 * policy.margin:g} %", 100 * policy.margin),
        Level(f"tolerance {100 * policy.tolerance:g} %", 100 * policy.tolerance),
    )
    title = f"Evidence on {signal}"
    summary = f"Mean change of {signal} by the number of pairs, at last {middle[-1]:.3g} percent."
    return Plot(title, summary, "pairs, logarithmic", "change, %", (line,), levels, is_log=True)
