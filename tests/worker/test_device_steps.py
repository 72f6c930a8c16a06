"""What a device worker does between and about steps: turns, sessions, reports."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from msgspec.structs import replace

from lockstep.core.request import Priority
from lockstep.worker.messages import (
    AskSessions,
    EndSession,
    Outputs,
    Prioritise,
    SessionsChanged,
    SessionsReport,
    Submit,
    Sweep,
    SweepReport,
    Unload,
    Unloaded,
    WatchSteps,
)
from tests.worker.support import ENDLESS, Bench, Ticking, ask, running


@pytest.fixture
def bench() -> Iterator[Bench]:
    with running() as bench:
        yield bench


def test_replicas_take_turns_by_the_weights_of_their_classes() -> None:
    """On a clock on which every step takes the same, steps are shared as time is: 4 to 1, then 1 to 1."""
    with running(Ticking()) as bench:
        bench.ready("a", "stub://alpha?step_ms=1", priority=Priority.CRITICAL)
        bench.ready("b", "stub://beta?step_ms=1")
        bench.tell(Submit(0, "a", ask("x", ENDLESS)), Submit(1, "b", ask("x", ENDLESS)))
        assert 3.5 <= _steps_per_step(bench, 300) <= 4.6
        bench.tell(Prioritise("b", Priority.CRITICAL), Prioritise("nobody", Priority.LOW))
        assert 0.8 <= _steps_per_step(bench, 300) <= 1.25
        bench.tell(Unload("b"))
        bench.heard(Unloaded)
        assert bench.worker.registry.claimed == {"a": Priority.CRITICAL}


def _steps_per_step(bench: Bench, num_steps: int) -> float:
    """Steps of request 0 for one of request 1, of so many that come from now on."""
    begin = len(bench.events) + 50
    bench.heard(Outputs, lambda event: len(bench.events) > begin + num_steps)
    steps = [event.outputs[0].request_id for event in bench.events[begin:] if isinstance(event, Outputs)]
    return steps.count(0) / steps.count(1)


def test_sessions_are_reported_listed_evicted_and_ended(bench: Bench) -> None:
    bench.ready("a", "stub://alpha")
    for number, session in enumerate(("one", "two", "three")):
        bench.tell(Submit(number, "a", replace(ask("x" * 16 * (number + 1)), session_id=session)))
        bench.answer(number)
    (listed,) = bench.ask(AskSessions(), SessionsReport).replicas.values()
    assert [(report.session_id, report.num_blocks, report.num_busy) for report in listed] == [
        ("one", 2, 0),
        ("two", 3, 0),
        ("three", 4, 0),
    ]
    assert bench.ask(Sweep("a", "two"), SweepReport) == SweepReport(1, 1)
    assert bench.ask(EndSession("a", "one"), SweepReport) == SweepReport(1, 1)
    assert bench.ask(Sweep("nobody"), SweepReport) == SweepReport(0, 0)
    bench.tell(Unload("a"))
    bench.heard(Unloaded)
    said = [event for event in bench.events if isinstance(event, SessionsChanged)]
    assert all(event.replica == "a" for event in said)
    assert [
        (change.session_id, change.what, change.num_tokens, change.reason) for e in said for change in e.changes
    ] == [
        ("one", "admitted", 0, None),
        ("one", "kept", 32, None),
        ("two", "admitted", 0, None),
        ("two", "kept", 48, None),
        ("three", "admitted", 0, None),
        ("three", "kept", 64, None),
        ("two", "swept", 16, "idle"),
        ("one", "swept", 16, "ended"),
        ("three", "swept", 64, "unloaded"),
    ]


def test_steps_are_reported_at_a_bounded_rate_and_only_while_watched() -> None:
    """On a clock on which a step takes a millisecond and two look at it, 50 a second are one of ten."""
    with running(Ticking()) as bench:
        bench.ready("a", "stub://alpha")
        bench.tell(Submit(0, "a", ask("x" * 30, ENDLESS)))
        bench.heard(Outputs, lambda event: len(bench.events) > 100)
        assert not [event for event in bench.events if isinstance(event, Outputs) and event.step]
        bench.tell(WatchSteps(1e9))
        begin = len(bench.events)
        bench.heard(Outputs, lambda event: len(bench.events) > begin + 300)
        bench.tell(WatchSteps(0))
        reports = [event.step for event in bench.events if isinstance(event, Outputs) and event.step]
        assert len(reports) > 3
        gaps = [later.step - report.step for report, later in pairwise(reports)]
        assert [gap - 1 for gap in gaps] == [report.num_unreported for report in reports[1:]]
        assert min(gaps) >= 3
        assert all((report.replica, report.num_sequences, report.num_samples) == ("a", 1, 1) for report in reports)
        assert {report.num_tokens for report in reports} == {1}
        assert all(0 < report.duration_s < 1 for report in reports)
