"""Histograms count as Prometheus does; durations are those of the engine's clock."""

from __future__ import annotations

from lockstep.core.request import FinishReason
from lockstep.engine.metrics import HISTOGRAMS, EngineMetrics, Histogram, SequenceSpan


def test_bounds_are_inclusive_and_the_last_bucket_is_open() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 99.0):
        histogram.observe(value)
    snapshot = histogram.snapshot()
    assert (snapshot.counts, snapshot.count, snapshot.sum) == ((2, 2, 1), 5, 104.0)


def test_all_bounds_ascend() -> None:
    assert all(list(bounds) == sorted(set(bounds)) for bounds in HISTOGRAMS.values())


def test_a_finished_sequence_is_observed_as_far_as_it_got() -> None:
    metrics = EngineMetrics()
    metrics.observe_finished(SequenceSpan(10.0, 11.0, 13.0, 17.0, 5, 3), FinishReason.STOP, 17.0)
    metrics.observe_finished(SequenceSpan(10.0, None, None, 0.0, 5, 0), FinishReason.ABORT, 12.0)
    sums = {name: (h.count, h.sum) for name, h in metrics.histograms().items()}
    assert sums["e2e_request_latency_seconds"] == (2, 9.0)
    assert sums["request_queue_time_seconds"] == (1, 1.0)
    assert sums["request_prefill_time_seconds"] == (1, 2.0)
    assert sums["request_decode_time_seconds"] == (1, 4.0)
    assert sums["request_time_per_output_token_seconds"] == (1, 2.0)
    assert metrics.finished == {"stop": 1, "abort": 1}
