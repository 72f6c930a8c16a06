"""Differences of two configs, workloads or recordings: where they part, why, and on how few requests that shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from lockstep.core.policy import SchedulerConfig
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import Reason
from lockstep.errors import TraceError
from lockstep.replay.causes import Cause, differing_fields, find_cause, taken_over
from lockstep.replay.cost import CostModel
from lockstep.replay.divergence import Decision, Difference, Divergence, Place, compare, difference
from lockstep.replay.explain import called
from lockstep.replay.playback import Playback, Played, played
from lockstep.replay.reproducer import Pair, Reproducer, Search
from lockstep.replay.rerun import Obeyed, Ran
from lockstep.replay.simulator import Simulation
from lockstep.replay.snapshot import Snapshot, Standing, snapshot
from lockstep.replay.trace import Trace
from lockstep.replay.workload import PS_PER_MS, ArrivalUnit, Workload, WorkloadRequest
from lockstep.worker.flight.entries import Aborted, Added, CacheReset, Command, EngineEntry, Pinned, Swept

MAX_CAUSE_WORK = 8_000_000
"""What finding the fields that decide may cost, counted as ``Comparison.work``."""


NOTHING = Decision(None, None)
_FIELDS = (
    ("num_prompt_tokens", "prompt tokens"),
    ("max_output_tokens", "output tokens at most"),
    ("num_output_tokens", "output tokens"),
    ("priority", "as its class"),
    ("tenant", "as its tenant"),
)


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


@dataclass(frozen=True, slots=True)
class EngineDiff:
    """One engine of both recordings. Sequences are matched by their ids."""

    engine: int
    name_a: str
    name_b: str
    """Of the models; empty: the recording has no such engine."""
    fields: tuple[str, ...]
    """Of the configs, that differ."""
    num_equal_steps: int
    difference: Difference | None
    a: Snapshot | None = None
    b: Snapshot | None = None
    input: str = ""
    """What the two were told differently first, in words; empty: nothing, up to the difference."""


def diff_traces(a: Trace, b: Trace, engine: int | None = None) -> tuple[EngineDiff, ...]:
    """Compare the engines of two recordings that have the same number.

    Args:
        engine: only the one of this number; None: all.

    Raises:
        TraceError: one has holes, cannot be read on, is not what this version decides, or neither has the engine.
    """
    for trace in (a, b):
        trace.check_unbroken("diff")
    engines_a, engines_b = ({each.number: each for each in trace.engines} for trace in (a, b))
    numbers = sorted({*engines_a, *engines_b})
    if engine is not None:
        if engine not in numbers:
            raise TraceError(f"no engine {engine} is in either recording; there are {', '.join(map(str, numbers))}")
        numbers = [engine]
    return tuple(_diff(number, a, engines_a.get(number), b, engines_b.get(number)) for number in numbers)


def _diff(number: int, a: Trace, engine_a: EngineEntry | None, b: Trace, engine_b: EngineEntry | None) -> EngineDiff:
    names = ["" if engine is None else engine.name for engine in (engine_a, engine_b)]
    fields = () if engine_a is None or engine_b is None else differing_fields(engine_a.config, engine_b.config)
    num_equal = 0
    for ran_a, ran_b in zip_longest(_steps(a, number), _steps(b, number)):
        decision_a, decision_b = _decision(ran_a), _decision(ran_b)
        found = difference(decision_a, decision_b)
        if found is not None:
            here, there = (
                _snapshot(label, trace, number, num_equal, decision)
                for label, trace, decision in (("A", a, decision_a), ("B", b, decision_b))
            )
            told = differing_command(_commands(a, number, num_equal), _commands(b, number, num_equal))
            return EngineDiff(number, names[0], names[1], fields, num_equal, found, here, there, told)
        num_equal += 1
    return EngineDiff(number, names[0], names[1], fields, num_equal, None)


def _steps(trace: Trace, engine: int) -> Iterator[Ran]:
    for event in played(trace):
        if isinstance(event, Played) and event.ran.engine == engine:
            yield event.ran


def _commands(trace: Trace, engine: int, num_steps: int) -> Iterator[Command]:
    """What the engine was told before it had decided so many steps, and the next."""
    num_seen = 0
    for event in played(trace):
        if isinstance(event, Obeyed) and event.engine == engine:
            yield event.command
        elif isinstance(event, Played) and event.ran.engine == engine:
            num_seen += 1
            if num_seen > num_steps:
                return


def _decision(ran: Ran | None) -> Decision:
    return NOTHING if ran is None else Decision(ran.plan, ran.events)


def _snapshot(label: str, trace: Trace, engine: int, num_steps: int, decision: Decision) -> Snapshot | None:
    """One engine as it stood after so many steps, before the next; None: there was no such engine."""
    playback = Playback(trace.entries())
    added: dict[int, Added] = {}
    standings: dict[int, Standing] = {}
    reasons: list[Reason] = []
    num_seen = num_ended = num_free_host_blocks = 0
    for event in played(trace, playback):
        if isinstance(event, Obeyed) and event.engine == engine and isinstance(event.command, Added):
            added[event.command.seq_id] = event.command
        elif isinstance(event, Played) and event.ran.engine == engine:
            num_seen += 1
            num_ended = len(event.ran.finished)
        if num_seen > num_steps:
            break
        rerun = playback.engines.get(engine)
        if num_seen == num_steps and rerun is not None:
            rerun.explain = reasons.append
            standings = _standings(rerun.scheduler, added)
            num_free_host_blocks = rerun.scheduler.stats().num_free_host_blocks
    rerun = playback.engines.get(engine)
    if rerun is None:
        return None
    stats = rerun.scheduler.stats()
    return Snapshot(
        label=label,
        config=rerun.config,
        decision=decision,
        standings=standings,
        num_active=stats.num_running + num_ended,
        num_free_blocks=stats.num_blocks - stats.num_held_blocks,
        num_free_host_blocks=num_free_host_blocks,
        reasons=reasons,
    )


def _standings(scheduler: Scheduler, added: dict[int, Added]) -> dict[int, Standing]:
    """Of those whose coming was recorded."""
    views = {seq_id: view for seq_id in added if (view := scheduler.view(seq_id)) is not None}
    return {
        seq_id: Standing(
            seq_id,
            str(seq_id),
            view.state,
            added[seq_id].request.priority,
            str(added[seq_id].tenant),
            view.num_prompt_tokens,
            len(view.table),
        )
        for seq_id, view in views.items()
    }


def differing_request(a: Iterable[WorkloadRequest], b: Iterable[WorkloadRequest], unit: ArrivalUnit) -> str:
    """The first request that two workloads of one unit do not share; empty: there is none."""
    for number, (x, y) in enumerate(zip_longest(a, b), 1):
        if x is None or y is None:
            longer, request, shorter = ("A", x, "B") if y is None else ("B", y, "A")
            return f"{longer} has {called(request.name)} as its request {number}, and {shorter} has no more"
        if x.name != y.name:
            return f"their request {number} is another: {called(x.name)} in A, and {called(y.name)} in B"
        told = [
            f"{getattr(x, field)} {words} in A, and {getattr(y, field)} in B"
            for field, words in _FIELDS
            if getattr(x, field) != getattr(y, field)
        ]
        if x.arrival != y.arrival:
            told.append(f"it arrives at {_time(x.arrival, unit)} in A, and at {_time(y.arrival, unit)} in B")
        if x.contents != y.contents:
            told.append("its prompt has another content")
        if told:
            return f"what is asked differs first in {called(x.name)}: {'; '.join(told)}"
    return ""


def differing_command(a: Iterable[Command], b: Iterable[Command]) -> str:
    """The first command that two recordings of an engine do not share, or have at another step; empty: none."""
    for x, y in zip_longest(a, b):
        if x is not None and y is not None and x != y:
            return f"they were told other things: first A of {_said(x)}, and B of {_said(y)}"
        if x is None or y is None:
            longer, command, shorter = ("A", x, "B") if y is None else ("B", y, "A")
            return f"they were told other things: first {longer} of {_said(command)}, and {shorter} nothing more"
    return ""


def _time(arrival: int, unit: ArrivalUnit) -> str:
    return f"tick {arrival:,}" if unit is ArrivalUnit.TICKS else f"{arrival / PS_PER_MS:,.3f} ms"


def _said(command: Command) -> str:
    at = f"before step {command.step:,}"
    match command:
        case Added():
            most = command.request.max_output_tokens
            output = "as many output tokens as fit" if most is None else f"{most:,} output tokens at most"
            tokens = f"{command.request.num_prompt_tokens:,} prompt tokens and {output}"
            return f"{called(str(command.seq_id))} of {tokens}, class {command.request.priority}, {at}"
        case Aborted():
            return f"the end of {called(str(command.seq_id))} ({command.reason.value}) {at}"
        case Pinned():
            return f"{len(command.contents):,} blocks to keep for a session {at}"
        case Swept():
            return f"{len(command.contents):,} blocks of a session to give up {at}"
        case CacheReset():
            return f"the prefix cache to forget {at}"
