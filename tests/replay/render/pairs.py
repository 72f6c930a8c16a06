"""Two replays for the tests of comparisons."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lockstep.core.policy import SchedulerConfig
from lockstep.replay.cost import CostModel
from lockstep.replay.diff import diff_configs
from lockstep.replay.render.charts import Mark
from lockstep.replay.render.difference import finding_of
from lockstep.replay.render.pages import comparison_page
from lockstep.replay.render.side import Side
from lockstep.replay.report import report_of
from lockstep.replay.simulator import Simulation
from lockstep.replay.workload import PS_PER_MS, ArrivalUnit, Workload, WorkloadRequest

LIMITS = SchedulerConfig(block_size=16, num_blocks=40, max_model_len=512, max_num_seqs=16, max_num_batched_tokens=128)
COST = CostModel(2 * PS_PER_MS, PS_PER_MS // 20, PS_PER_MS // 4, PS_PER_MS // 1000)


def load(num_requests: int, names: tuple[str, ...] = ()) -> Workload:
    """Timed workload in a pool that is too small."""
    requests = tuple(
        WorkloadRequest(
            names[number] if number < len(names) else f"req-{number}",
            20 + number * 37 % 150,
            5 + number * 13 % 60,
            5 + number * 13 % 60,
            number * 15 * PS_PER_MS,
        )
        for number in range(num_requests)
    )
    return Workload("crowded.json", requests, ArrivalUnit.PS)


def side_of(workload: Workload, config: SchedulerConfig, cost: CostModel | None = COST) -> Side:
    side = Side()
    replay = Simulation(workload, config, cost, watchers=[side]).run()
    side.end(report_of(replay), replay.outcomes)
    return side


def write_diff(path: Path, workload: Workload, **of_b: object) -> None:
    """Page of a diff with B's different limits."""
    b = replace(LIMITS, **of_b)  # type: ignore[arg-type]  # fields of the config
    found = diff_configs(workload, LIMITS, b, COST)
    assert found.divergence is not None
    place = found.divergence.a
    mark = Mark("first difference", place.tick, place.start_ps)
    finding = finding_of(found, LIMITS, b, is_timed=True)
    path.write_text(comparison_page(side_of(workload, LIMITS), side_of(workload, b), finding, mark))
