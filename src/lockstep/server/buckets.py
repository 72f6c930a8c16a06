"""Histograms as Prometheus wants them."""

from __future__ import annotations

from itertools import accumulate

from lockstep.engine.metrics import HistogramSnapshot


def cumulative(histogram: HistogramSnapshot) -> list[tuple[str, float]]:
    """Prometheus' buckets: how many observations were at most each bound, the last one without bound."""
    bounds = [*(repr(float(bound)) for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
