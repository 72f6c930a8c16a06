"""Two configs on one workload, or two workloads: where they part, why, and on how few requests that shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.core.policy import SchedulerConfig
from lockstep.replay.causes import Cause, differing_fields, find_cause, taken_over
from lockstep.replay.cost import CostModel
from lockstep.replay.inputs import differing_request
from lockstep.replay.reproducer import Pair, Reproducer, Search
from lockstep.replay.side_by_side import Divergence, Place, compare
from lockstep.replay.simulator import Simulation
from lockstep.replay.snapshot import Snapshot, snapshot
from lockstep.replay.workload import ArrivalUnit, Workload, WorkloadRequest

MAX_CAUSE_WORK = 8_000_000
"""What finding the fields that decide may cost, counted as ``Comparison.work``."""


@dataclass(frozen=True, slots=True)
class Diff:
    """What comparing came to."""

    fields: tuple[str, ...]
    """Of the configs, that differ."""
    num_requests: int
    num_equal_steps: int
    divergence: Divergence | None
    """None: every step is the same on both sides; nothing below is known then."""
    a: Snapshot | None = None
    b: Snapshot | None = None
    cause: Cause | None = None
    num_arrived: int = 0
    """Requests that had come by then."""
    reproducer: Reproducer | None = None
    input: str = ""
    """What the two sides were asked differently first, in words; empty: nothing."""


def diff_configs(
    workload: Workload,
    a: SchedulerConfig,
    b: SchedulerConfig,
    cost: CostModel | None = None,
    *,
    reproduces: bool = True,
) -> Diff:
    """Run a workload on two configs, and explain the first step that they decide differently.

    Args:
        reproduces: whether to look for a few requests that show the same.
    """
    requests = tuple(workload.requests)
    workload = replace(workload, requests=requests)
    names = differing_fields(a, b)
    found = compare(Simulation(workload, a, cost), Simulation(workload, b, cost))
    divergence = found.divergence
    if divergence is None:
        return Diff(names, len(requests), found.num_equal_steps, None)
    arrived = _arrived(workload, requests, divergence.a)
    start = replace(workload, requests=arrived)
    here = snapshot("A", Simulation(start, a, cost), arrived, divergence.a)
    there = snapshot("B", Simulation(start, b, cost), arrived, divergence.b)
    cause = _cause(start, a, b, cost, divergence)
    reproducer = _reproducer(start, arrived, Pair(a, b, cost), cause, divergence, here, there) if reproduces else None
    return Diff(names, len(requests), found.num_equal_steps, divergence, here, there, cause, len(arrived), reproducer)


def diff_workloads(
    a: Workload, config_a: SchedulerConfig, b: Workload, config_b: SchedulerConfig, cost: CostModel | None = None
) -> Diff:
    """Run two workloads, and tell the first step that is decided differently. Sequences are matched by their number."""
    sides = [replace(workload, requests=tuple(workload.requests)) for workload in (a, b)]
    found = compare(Simulation(sides[0], config_a, cost), Simulation(sides[1], config_b, cost))
    requests_a, requests_b = (tuple(side.requests) for side in sides)
    names, divergence = differing_fields(config_a, config_b), found.divergence
    asked = "one has arrivals in ticks, and the other in time"
    if a.unit is b.unit:
        asked = differing_request(requests_a, requests_b, a.unit)
    if divergence is None:
        return Diff(names, len(requests_a), found.num_equal_steps, None, input=asked)
    here = snapshot("A", Simulation(sides[0], config_a, cost), requests_a, divergence.a)
    there = snapshot("B", Simulation(sides[1], config_b, cost), requests_b, divergence.b)
    num_arrived = len(_arrived(a, requests_a, divergence.a))
    return Diff(names, len(requests_a), found.num_equal_steps, divergence, here, there, None, num_arrived, input=asked)


def _arrived(workload: Workload, requests: Sequence[WorkloadRequest], place: Place) -> tuple[WorkloadRequest, ...]:
    """Those that had come when the step began."""
    now = place.tick if workload.unit is ArrivalUnit.TICKS else place.start_ps
    return tuple(request for request in requests if request.arrival <= now)


def _cause(
    start: Workload, a: SchedulerConfig, b: SchedulerConfig, cost: CostModel | None, divergence: Divergence
) -> Cause:
    """Which of B's fields let A decide all steps up to this one, and this one, as B does."""
    num_steps = divergence.num_equal_steps + 1
    work = 0

    def decides_as_b(config: SchedulerConfig) -> bool:
        nonlocal work
        found = compare(Simulation(start, config, cost), Simulation(start, b, cost), num_steps)
        work += found.work
        return found.divergence is None or found.divergence.num_equal_steps > divergence.num_equal_steps

    return find_cause(a, b, decides_as_b, lambda: work < MAX_CAUSE_WORK)


def _reproducer(
    start: Workload,
    arrived: tuple[WorkloadRequest, ...],
    pair: Pair,
    cause: Cause,
    divergence: Divergence,
    here: Snapshot,
    there: Snapshot,
) -> Reproducer:
    pairs = [pair]
    if cause.names and cause.names != differing_fields(pair.a, pair.b):
        alone = taken_over(pair.a, pair.b, cause.names)
        pairs += [replace(pair, b=alone)] if alone is not None else []
    refused = here.decision.refused + there.decision.refused
    unfinished = dict.fromkeys(standing.index for standing in here.standings.values())
    unfinished.update(dict.fromkeys(index for index, request in enumerate(arrived) if request.name in refused))
    return Search(start, arrived, pairs, divergence).run(tuple(unfinished))
