"""Runs in an open loop: when requests are due, how many are open, and what is shown meanwhile."""

from __future__ import annotations

import contextlib
import io
import math
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.bench.protocol import Target
from lockstep.bench.runner import PlannedRequest, RunProgress, arrival_times, run_load, shown_progress
from tests.bench.conftest import Start
from tests.bench.standin import MODEL
from tests.terminals import Terminal


@given(st.integers(1, 200), st.floats(0.01, 1e4), st.sampled_from((0.3, 1.0, 5.0, math.inf)), st.integers(0, 2**32 - 1))
def test_times_ascend_and_the_last_is_due_at_count_over_rate(
    count: int, rate: float, burstiness: float, seed: int
) -> None:
    times = arrival_times(count, rate, burstiness, seed)
    assert len(times) == count
    assert all(0 <= before <= after for before, after in pairwise(times))
    assert times[-1] == pytest.approx(count / rate)


def test_the_same_seed_gives_the_same_times_and_another_others() -> None:
    assert arrival_times(50, 3.0, 1.0, 7) == arrival_times(50, 3.0, 1.0, 7)
    assert arrival_times(50, 3.0, 1.0, 7) != arrival_times(50, 3.0, 1.0, 8)


def test_an_infinite_rate_makes_everything_due_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, 0) == (0.0, 0.0, 0.0)
    assert arrival_times(0, 5.0, 1.0, 0) == ()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_vary_as_a_gamma_distribution_of_that_shape_does(burstiness: float) -> None:
    """Its coefficient of variation is 1 / sqrt(shape): 1 for a Poisson process."""
    times = arrival_times(20_000, 10.0, burstiness, 3)
    gaps = [after - before for before, after in pairwise((0.0, *times))]
    variation = statistics.pstdev(gaps) / statistics.fmean(gaps)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_infinite_burstiness_is_a_metronome() -> None:
    assert arrival_times(4, 2.0, math.inf, 0) == (0.5, 1.0, 1.5, 2.0)


def job(target: Target, due_s: float | None = None) -> PlannedRequest:
    body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 4, "stream": True}
    return PlannedRequest(due_s, lambda: target.post("/v1/completions", body), 3)


def test_requests_are_sent_when_they_are_due_and_counted_from_then(standin: Start) -> None:
    url, behaviour = standin()
    target = Target.parse(url)
    jobs = [job(target, due_s) for due_s in (0.0, 0.1, 0.2)]
    run = run_load([target], jobs, None, RunProgress(len(jobs)))
    assert [outcome.is_success for outcome in run.finished] == [True, True, True]
    starts = [outcome.start_s - run.finished[0].start_s for outcome in run.finished]
    assert starts == pytest.approx([0.0, 0.1, 0.2]), "latencies count from when a request was due"
    assert all(outcome.send_delay_s >= 0 for outcome in run.finished)
    assert all(after - before >= 0.05 for before, after in pairwise(behaviour.arrivals_s))
    assert run.duration_s >= 0.2


@pytest.mark.parametrize("most_bytes", [0, 1 << 28])
def test_a_run_is_the_same_whether_requests_are_prepared_and_answers_kept_or_not(
    standin: Start, most_bytes: int
) -> None:
    """Beyond the bounds requests are written just before they are due, and answers read while others come."""
    url, behaviour = standin()
    target = Target.parse(url)
    watch = RunProgress(6)
    run = run_load([target], [job(target) for _ in range(6)], 2, watch, most_bytes)
    assert [(outcome.is_success, outcome.output_tokens) for outcome in run.finished] == [(True, 4)] * 6
    assert (watch.num_done, watch.num_failed) == (6, 0)
    assert behaviour.max_open <= 2, "no more are open at once than may be"
    assert not run.was_interrupted


def test_failures_are_counted_during_the_run(standin: Start) -> None:
    url, _ = standin(fail_every=2)
    target = Target.parse(url)
    seen: list[tuple[int, int]] = []
    watch = RunProgress(4, on_report=lambda watch: seen.append((watch.num_done, watch.num_failed)))
    run = run_load([target], [job(target) for _ in range(4)], 1, watch)
    assert [outcome.is_success for outcome in run.finished].count(False) == 2
    assert seen[0] == (0, 0)
    assert seen[-1] == (4, 2)


def test_progress_is_drawn_for_a_person_only() -> None:
    for is_shown, stream in ((True, io.StringIO()), (False, Terminal())):
        with contextlib.redirect_stderr(stream), shown_progress(3, is_shown) as watch:
            watch.on_report(watch)
        assert stream.getvalue() == ""
    terminal = Terminal()
    with contextlib.redirect_stderr(terminal), shown_progress(3, True) as watch:
        watch.num_done, watch.num_failed = 2, 1
        watch.on_report(watch)
    assert "requests (1 failed)" in terminal.getvalue()
