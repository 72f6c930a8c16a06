"""Recordings of simulated runs match the simulation, and are read like those of a server."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings

from lockstep.core.groups import ONE_GROUP
from lockstep.core.policy import SchedulerConfig
from lockstep.errors import TraceError, UsageError
from lockstep.replay.calibrate import calibrate
from lockstep.replay.cost import CostModel
from lockstep.replay.cost_file import MadeOn
from lockstep.replay.diff import diff_traces
from lockstep.replay.divergence import RecordedSide, SimulatedSide, compare
from lockstep.replay.live import live_requests, live_steps, workload_of
from lockstep.replay.recording import RunRecording
from lockstep.replay.simulator import Replay, Simulation
from lockstep.replay.snapshot import recorded_snapshot, simulated_snapshot
from lockstep.replay.timeline import Tick
from lockstep.replay.trace import open_trace
from lockstep.replay.trace_integrity import Kind
from lockstep.replay.verify import verify
from lockstep.replay.workload import PS_PER_MS, ArrivalUnit, Workload
from tests.replay.sample import config, request, workload
from tests.replay.strategies import configs, costs, workloads

MS = PS_PER_MS


def record(
    path: Path, load: Workload, limits: SchedulerConfig, cost: CostModel | None = None, *, run_lengths: bool = True
) -> Replay:
    with RunRecording(path, load, limits, cost or CostModel()) as recording:
        simulation = Simulation(
            load, limits, cost, watchers=[recording], on_arrival=recording.arrived, run_lengths=run_lengths
        )
        return simulation.run()


def crowd(num_requests: int = 120) -> Workload:
    """Bursts with pauses in integer milliseconds; prompts have common prefixes."""
    requests = [
        request(
            f"r{number}",
            8 + number * 37 % 90,
            2 + number * 13 % 50,
            number // 7 * 220 * MS,
            priority=number % 3 - 1,
            tenant=f"tenant {number % 2}",
            contents=tuple(100 * (number % 4) + place for place in range(-(-(8 + number * 37 % 90) // 16))),
        )
        for number in range(num_requests)
    ]
    return workload(*requests, unit=ArrivalUnit.PS, content_size=16)


LIMITS = config(num_blocks=40, max_num_seqs=5, max_num_batched_tokens=48, order="priority")
COST = CostModel(2 * MS, MS // 100, MS // 5, MS // 1000, MS // 2)


@settings(max_examples=40)
@given(workloads(), configs(), costs())
def test_recordings_of_simulations_are_verified(
    tmp_path_factory: pytest.TempPathFactory, load: Workload, limits: SchedulerConfig, cost: CostModel
) -> None:
    """All steps and turns are verified, with counted or individually planned steps, which give the same bytes."""
    path = tmp_path_factory.mktemp("runs") / "run.lstrace"
    replay = record(path, load, limits, cost)
    verification = verify(open_trace(path))
    assert verification.is_identical
    assert verification.findings == ()
    assert verification.counts["steps"] == verification.counts["turns"] == replay.totals.num_steps
    single = path.with_name("single.lstrace")
    record(single, load, limits, cost, run_lengths=False)
    assert single.read_bytes() == path.read_bytes()


def test_a_recording_of_a_simulation_is_read_as_its_workload(tmp_path: Path) -> None:
    """Lengths, arrivals, priorities, tenants and contents are equal, so the decisions are equal too."""
    path, load = tmp_path / "run.lstrace", crowd()
    replay = record(path, load, LIMITS, COST)
    again = workload_of(open_trace(path))
    pairs = list(zip(again.requests, load.requests, strict=True))
    assert [(x.num_prompt_tokens, x.num_output_tokens, x.arrival, x.priority) for x, _ in pairs] == [
        (y.num_prompt_tokens, y.num_output_tokens, y.arrival, y.priority) for _, y in pairs
    ]
    assert len({x.tenant for x, _ in pairs}) == 2
    assert {**again.config, "groups": ONE_GROUP} == asdict(LIMITS)
    assert Simulation(again, LIMITS, COST).run().fingerprint == replay.fingerprint


def test_recorded_times_equal_simulated_ones(tmp_path: Path) -> None:
    path, load = tmp_path / "run.lstrace", crowd()
    ticks: list[Tick] = []
    with RunRecording(path, load, LIMITS, COST) as recording:
        simulation = Simulation(load, LIMITS, COST, watchers=[recording, ticks.append], on_arrival=recording.arrived)
        replay = simulation.run()
    trace = open_trace(path)
    assert (trace.header.is_simulated, trace.header.machine) == (True, "")
    steps = list(live_steps(trace))
    starts_us = {step.step: step.start_us for step in steps}
    busy = [tick for tick in ticks if tick.plan is not None]
    assert len(busy) < len(steps), "some steps were counted"
    assert all(starts_us[tick.plan.step] == tick.start_ps // 10**6 for tick in busy if tick.plan is not None)
    assert any(step.is_after_idle for step in steps)
    ended = {each.seq_id: each for each in live_requests(trace)}
    for outcome in replay.outcomes:
        live = ended[outcome.seq_id]
        assert live.in_ps[:-1] == tuple(each // 10**6 * 10**6 for each in outcome.in_ps[:-1])
        assert live.num_output_tokens == outcome.num_output_tokens
        assert live.num_cached_tokens == outcome.num_cached_tokens


def test_calibrating_on_a_simulation_finds_its_prices(tmp_path: Path) -> None:
    """A run is simulated with prices, and calibration on its recording returns them."""
    path = tmp_path / "run.lstrace"
    record(path, crowd(300), LIMITS, COST)
    file = calibrate(live_steps(open_trace(path)), MadeOn("0", "none", "crowd", "", {}))
    assert file.held_out.coverage > 0.85
    assert abs(file.held_out.total_error) < 1e-3
    for name in ("constant_ps", "decode_seq_ps", "prefill_token_ps", "context_token_ps"):
        assert getattr(file, name) == pytest.approx(getattr(COST, name), rel=0.02)


def test_a_simulation_and_its_recording_are_the_same_side_of_a_comparison(tmp_path: Path) -> None:
    """Steps are compared one by one, although the simulation counts repeating steps; different limits are detected."""
    path, load = tmp_path / "run.lstrace", crowd()
    replay = record(path, load, LIMITS, COST)
    trace = open_trace(path)
    same = compare(SimulatedSide(Simulation(load, LIMITS, COST)), RecordedSide(trace, 0))
    assert (same.divergence, same.num_equal_steps) == (None, replay.totals.num_steps)
    fewer = config(num_blocks=40, max_num_seqs=4, max_num_batched_tokens=48, order="priority")
    other = compare(SimulatedSide(Simulation(load, fewer, COST)), RecordedSide(trace, 0)).divergence
    both = compare(
        SimulatedSide(Simulation(load, fewer, COST)), SimulatedSide(Simulation(load, LIMITS, COST))
    ).divergence
    assert other is not None
    assert both is not None
    assert (other.num_equal_steps, other.difference) == (both.num_equal_steps, both.difference)
    assert other.b.start_ps == both.b.start_ps


def test_a_recorded_snapshot_equals_a_simulated_one(tmp_path: Path) -> None:
    """Running and waiting sequences before a step, with their blocks, and the planner's reasons."""
    path, load = tmp_path / "run.lstrace", crowd()
    record(path, load, LIMITS, COST)
    trace = open_trace(path)
    fewer = config(num_blocks=40, max_num_seqs=4, max_num_batched_tokens=48, order="priority")
    found = compare(SimulatedSide(Simulation(load, fewer, COST)), SimulatedSide(Simulation(load, LIMITS, COST)))
    assert found.divergence is not None
    place = found.divergence.b
    simulated = simulated_snapshot("B", Simulation(load, LIMITS, COST), place)
    recorded = recorded_snapshot("B", trace, 0, found.num_equal_steps, place)
    assert recorded is not None
    assert recorded.reasons == simulated.reasons
    assert recorded.num_active == simulated.num_active
    stood = {
        seq_id: (each.state, each.priority, each.num_prompt_tokens, each.num_held_blocks)
        for seq_id, each in simulated.unfinished.items()
    }
    assert {
        seq_id: (each.state, each.priority, each.num_prompt_tokens, each.num_held_blocks)
        for seq_id, each in recorded.unfinished.items()
    } == stood
    assert recorded_snapshot("B", trace, 7, 0, place) is None, "there is no such engine"


def test_recordings_of_simulations_can_be_diffed(tmp_path: Path) -> None:
    a, b = tmp_path / "a.lstrace", tmp_path / "b.lstrace"
    record(a, crowd(), LIMITS, COST)
    record(b, crowd(), config(num_blocks=40, max_num_seqs=4, max_num_batched_tokens=48, order="priority"), COST)
    (same,) = diff_traces(open_trace(a), open_trace(a))
    assert same.diff.divergence is None
    (other,) = diff_traces(open_trace(a), open_trace(b), 0)
    assert other.diff.divergence is not None
    assert other.diff.fields == ("max_num_seqs",)
    with pytest.raises(TraceError, match="neither recording has an engine 3; they have 0"):
        diff_traces(open_trace(a), open_trace(b), 3)


def test_a_recording_of_an_interrupted_run_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "run.lstrace"
    ticks: list[Tick] = []

    def stop(tick: Tick) -> None:
        ticks.append(tick)
        if len(ticks) == 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), RunRecording(path, crowd(), LIMITS, COST) as recording:
        Simulation(crowd(), LIMITS, COST, watchers=[recording, stop], on_arrival=recording.arrived).run()
    verification = verify(open_trace(path))
    assert verification.is_identical
    assert [each.kind for each in verification.findings] == [Kind.OPEN]
    assert verification.counts["steps"] > 0


def test_a_recording_that_cannot_be_written_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write the recording"):
        RunRecording(tmp_path / "absent" / "run.lstrace", crowd(), LIMITS, COST)
