"""The device worker alone, in this process: its threads, its loads, its answers while a step runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.core.request import FinishReason
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.errors import (
    ArtifactNotFoundError,
    InvalidParameterError,
    QueueFullError,
    UnavailableError,
    UsageError,
)
from lockstep.executors.constraint import Constraint
from lockstep.executors.options import ISAS
from lockstep.executors.sampling_params import SamplingParams
from lockstep.worker.messages import (
    Abort,
    AskHealth,
    AskMetrics,
    HealthReport,
    Loaded,
    LoadFailed,
    Loading,
    MetricsReport,
    Outputs,
    PrefixCacheReset,
    Refused,
    ResetPrefixCache,
    Submit,
    Unload,
    Unloaded,
)
from tests.waiting import ENDLESS_MS, Gate, until
from tests.worker.support import ENDLESS, Bench, ask, running


@pytest.fixture
def bench() -> Iterator[Bench]:
    with running() as bench:
        yield bench


def test_two_replicas_answer_side_by_side(bench: Bench) -> None:
    bench.ready("a", "stub://alpha")
    bench.ready("b", "stub://beta")
    bench.tell(*(Submit(number, "ab"[number % 2], ask("x")) for number in range(6)))
    for number in range(6):
        name = ("alpha", "beta")[number % 2]
        answer = bench.answer(number).request
        assert answer is not None
        assert answer.text == f"[stub:{name}] ok len=1 max=40"


def test_step_is_one_event_that_begins_with_the_accepted_requests(bench: Bench) -> None:
    bench.ready("a", "stub://alpha?step_ms=20")
    bench.tell(*(Submit(number, "a", ask("x")) for number in range(8)))
    for number in range(8):
        bench.answer(number)
    outputs = [event for event in bench.events if isinstance(event, Outputs)]
    assert sorted(number for event in outputs for number in event.accepted) == list(range(8))
    full = [event for event in outputs if len(event.outputs) == 8]
    assert len(full) >= 20
    seen: set[int] = set()
    for event in outputs:
        seen.update(event.accepted)
        assert {output.request_id for output in event.outputs} <= seen


def test_request_rejected_by_the_queue_is_not_accepted(bench: Bench) -> None:
    tight = LoadOptions(EngineOptions(num_blocks=256, max_num_queued_reqs=2, max_num_seqs=1))
    bench.ready("a", "stub://alpha?step_ms=100", tight)
    bench.tell(*(Submit(number, "a", ask("x", ENDLESS)) for number in range(6)))
    refused = bench.heard(Outputs, lambda event: any(output.error for output in event.outputs))
    errors = {output.request_id: output.error for output in refused.outputs if output.error is not None}
    assert errors
    assert all(isinstance(error, QueueFullError) for error in errors.values())
    assert not errors.keys() & {
        number for event in bench.events if isinstance(event, Outputs) for number in event.accepted
    }


def test_invalid_requests_are_refused_without_a_step(bench: Bench) -> None:
    bench.ready("a", "stub://alpha")
    bench.tell(
        Submit(1, "a", ask("x", SamplingParams(temperature=-1.0))),
        Submit(2, "a", ask("")),
        Submit(3, "nobody", ask("x")),
        Submit(4, "a", ask("x", SamplingParams(constraint=Constraint.regex("(")))),
    )
    refusals = {number: bench.refusal(number) for number in (1, 2, 3, 4)}
    assert isinstance(refusals[1], InvalidParameterError)
    assert refusals[1].param == "temperature"
    assert isinstance(refusals[2], InvalidParameterError)
    assert isinstance(refusals[3], UnavailableError)
    assert isinstance(refusals[4], InvalidParameterError)
    assert refusals[4].param == "constraint"


def test_metrics_and_health_are_reported_while_an_endless_step_runs(bench: Bench, gate: Gate) -> None:
    bench.ready("a", f"stub://alpha?step_ms={ENDLESS_MS}")
    told_s = time.monotonic()
    bench.tell(Submit(1, "a", ask("x", SamplingParams(max_tokens=1))))
    until(lambda: gate.num_held == 1, "the step is under way")
    held_s = time.monotonic()
    time.sleep(0.1)  # the time itself is what is told
    asked_s = time.monotonic()
    metrics, health = bench.ask(AskMetrics(), MetricsReport), bench.ask(AskHealth(), HealthReport)
    assert metrics.replicas["a"].gauges["num_requests_running"] == 1
    assert health.num_running == 1
    assert asked_s - held_s <= health.waiting_s <= time.monotonic() - told_s
    gate.open()
    bench.answer(1)
    assert bench.ask(AskHealth(), HealthReport).waiting_s == 0.0


def test_a_replica_serves_while_another_loads(bench: Bench, gate: Gate) -> None:
    bench.ready("a", "stub://alpha")
    bench.load("b", f"stub://beta?load_ms={ENDLESS_MS}")
    bench.tell(*(Submit(number, "a", ask("x")) for number in range(4)))
    for number in range(4):
        bench.answer(number)
    assert not [event for event in bench.events if isinstance(event, Loaded) and event.replica == "b"]
    gate.open()
    bench.heard(Loaded, lambda event: event.replica == "b")


def test_a_failed_load_reports_its_error_and_leaves_the_key_free(bench: Bench, tmp_path: Path) -> None:
    bench.load("a", str(tmp_path / "absent.gguf"))
    failed = bench.heard(LoadFailed)
    assert isinstance(failed.error, ArtifactNotFoundError)
    assert "absent.gguf" in str(failed.error)
    bench.ready("a", "stub://alpha")
    bench.load("a", "stub://alpha")
    again = bench.heard(LoadFailed, lambda event: event is not failed)
    assert isinstance(again.error, UsageError)


def test_loading_reports_its_stages(bench: Bench) -> None:
    loaded = bench.ready("pocket", "pocket://")
    stages = [event.stage for event in bench.events if isinstance(event, Loading)]
    assert stages[0] == "open"
    assert stages[-1] == "ready"
    assert loaded.has_hidden_states
    assert loaded.weights_bytes
    assert loaded.load_s > 0
    assert loaded.environment["executor"] == "native"
    assert loaded.machine["isa"] in ISAS


def test_unloading_ends_running_requests_and_refuses_new_ones(bench: Bench) -> None:
    bench.ready("a", "stub://alpha?step_ms=5")
    bench.tell(Submit(1, "a", ask("x", ENDLESS)))
    bench.heard(Outputs)
    bench.tell(Unload("a"))
    assert bench.answer(1).finish_reason is FinishReason.ABORT
    bench.heard(Unloaded)
    bench.tell(Submit(2, "a", ask("x")))
    assert isinstance(bench.heard(Refused).error, UnavailableError)
    bench.ready("a", "stub://alpha")


def test_unload_during_a_load_takes_effect_after_it(bench: Bench) -> None:
    bench.load("a", "stub://alpha?load_ms=300")
    bench.tell(Unload("a"))
    bench.heard(Unloaded)
    assert [type(event) for event in bench.events if not isinstance(event, Loading)] == [Loaded, Unloaded]


def test_an_abort_ends_a_request_that_is_still_being_prepared(bench: Bench) -> None:
    bench.ready("a", "stub://alpha")
    constrained = SamplingParams(max_tokens=2000, constraint=Constraint.regex("[a-z]{1000,1500}"))
    for number in range(40):
        bench.tell(Submit(number, "a", ask("x", constrained)), Abort("a", (number,)))
    _settle(bench)


def test_a_storm_of_requests_that_are_aborted_leaves_nothing(bench: Bench) -> None:
    bench.ready("a", "stub://alpha?step_ms=1")
    for number in range(500):
        bench.tell(Submit(number, "a", ask("x" * (1 + number % 50), ENDLESS)))
        if number >= 10:
            bench.tell(Abort("a", (number - 10,)))
    bench.tell(Abort("a", tuple(range(490, 500))))
    metrics = _settle(bench)
    assert not any(metrics.replicas["a"].gauges.values())
    assert not bench.worker.admission.num_preparing
    replica = bench.worker.registry.find("a")
    assert replica is not None
    assert replica.engine.take() == ([], [], [], [])


def test_prefix_cache_can_be_reset(bench: Bench) -> None:
    bench.ready("a", "stub://alpha")
    bench.tell(Submit(1, "a", ask("x" * 64)))
    bench.answer(1)
    assert bench.ask(ResetPrefixCache(), PrefixCacheReset).num_blocks > 0
    assert bench.ask(ResetPrefixCache(), PrefixCacheReset).num_blocks == 0


def _settle(bench: Bench) -> MetricsReport:
    """Ask until nothing is open any more, then for the metrics."""

    def is_idle() -> bool:
        checked = bench.checked()
        assert checked.fault == ""
        return checked.num_open == 0

    until(is_idle, "all requests have ended")
    return bench.ask(AskMetrics(), MetricsReport)


def test_a_choice_that_was_compiled_needs_no_preparing_thread_again(bench: Bench) -> None:
    bench.ready("a", "stub://alpha?field=intent&ids=billing,legal")
    choice = SamplingParams(max_tokens=20, constraint=Constraint.choice(["intent=billing", "intent=legal"]))
    texts = []
    for number in range(3):
        bench.tell(Submit(number, "a", ask("a contract", choice)))
        answer = bench.answer(number).request
        assert answer is not None
        texts.append(answer.text)
        bench.worker.admission.close()
    assert texts == ["intent=legal"] * 3
