"""Counting repeated steps instead of planning them changes no figure and no tick's record."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings

from lockstep.core.policy import SchedulerConfig
from lockstep.replay.cost import CostModel
from lockstep.replay.report import report_of, to_json
from lockstep.replay.simulator import Simulation
from lockstep.replay.timeline import Tick, TickRecorder
from lockstep.replay.workload import Workload
from tests.replay.sample import config, request, workload
from tests.replay.strategies import configs, costs, workloads


@settings(max_examples=150)
@given(workloads(), configs(), costs())
def test_run_lengths_change_nothing(load: Workload, limits: SchedulerConfig, cost: CostModel) -> None:
    recorders = TickRecorder(), TickRecorder()
    simulations = [
        Simulation(load, limits, cost, watchers=[recorder], run_lengths=each)
        for each, recorder in zip((True, False), recorders, strict=True)
    ]
    replays = [simulation.run() for simulation in simulations]
    reports = [
        to_json(report_of(each, {"ttft": 0.5, "tpot": 0.01, "e2e": 2.0}, recorder))
        for each, recorder in zip(replays, recorders, strict=True)
    ]
    assert reports[0] == reports[1]
    assert replays[0].outcomes == replays[1].outcomes
    assert replays[0].stats == replays[1].stats
    assert replays[0].gaps.by_us == replays[1].gaps.by_us
    assert replays[0].stats.num_held_blocks == 0
    assert all((each.finished_tick >= 0) != bool(each.refusal) for each in replays[0].outcomes)
    simulations[0].scheduler.check()


def count_ticks(load: Workload, **limits: Any) -> tuple[int, int]:
    """(ticks, number of values for them)."""
    told: list[Tick] = []
    replay = Simulation(load, config(**limits), watchers=(told.append,)).run()
    return replay.num_ticks, len(told)


def test_decoding_is_counted_between_block_borders() -> None:
    """300 tokens of one request in blocks of 100 need a handful of values; a queue behind it changes nothing."""
    alone = workload(request("a", 10, 300))
    num_ticks, num_told = count_ticks(alone, block_size=100)
    assert num_ticks == 300
    assert num_told < 12
    behind = workload(request("a", 10, 300), request("b", 10, 1))
    num_ticks, num_told = count_ticks(behind, block_size=100, max_num_seqs=1)
    assert num_ticks == 301
    assert num_told < 14
