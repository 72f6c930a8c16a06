"""Replays for tests of rendering: one of a dozen ticks, one with preemptions, a long one."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.core.policy import SchedulerConfig
from lockstep.replay.cost import CostModel
from lockstep.replay.report import Report, report_of
from lockstep.replay.simulator import Replay, Simulation
from lockstep.replay.timeline import Watcher
from lockstep.replay.workload import PS_PER_MS, ArrivalUnit, Workload, WorkloadRequest

HOSTILE_NAMES = (
    "<script>document.title='taken'</script>",
    "</script><img src=x onerror=\"document.title='taken'\">",
    "\u2028{{ 7 * 7 }}<!--\x1b[31m|`",
    "[bold]a[/bold] \\| b",
)


def few(watchers: Sequence[Watcher] = (), names: Sequence[str] = ("a", "b", "c", "d")) -> tuple[Replay, Report]:
    """Four requests in ticks; the third waits for a place."""
    sizes = ((40, 5, 0), (30, 4, 0), (20, 3, 1), (50, 2, 7))
    requests = tuple(
        WorkloadRequest(name, prompt, output, output, arrival)
        for name, (prompt, output, arrival) in zip(names, sizes, strict=True)
    )
    config = SchedulerConfig(
        block_size=16, num_blocks=20, max_model_len=256, max_num_seqs=2, chunking=False, admission="reserve"
    )
    return _run(Workload("few.json", requests, ArrivalUnit.TICKS), config, None, watchers)


def crowded(watchers: Sequence[Watcher] = (), num_requests: int = 40) -> tuple[Replay, Report]:
    """Timed requests in a pool that is too small, with a pause after half of them."""
    half = num_requests // 2
    requests = tuple(
        WorkloadRequest(
            f"req-{number}",
            20 + number * 37 % 150,
            5 + number * 13 % 60,
            5 + number * 13 % 60,
            (number * 15 + (5000 if number >= half else 0)) * PS_PER_MS,
        )
        for number in range(num_requests)
    )
    config = SchedulerConfig(
        block_size=16, num_blocks=40, max_model_len=512, max_num_seqs=16, max_num_batched_tokens=128
    )
    cost = CostModel(2 * PS_PER_MS, PS_PER_MS // 20, PS_PER_MS // 4, PS_PER_MS // 1000)
    return _run(Workload("crowded.json", requests, ArrivalUnit.PS), config, cost, watchers)


def _run(
    workload: Workload, config: SchedulerConfig, cost: CostModel | None, watchers: Sequence[Watcher]
) -> tuple[Replay, Report]:
    replay = Simulation(workload, config, cost, watchers=watchers).run()
    return replay, report_of(replay)
