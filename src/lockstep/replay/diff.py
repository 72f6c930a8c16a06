"""Diff of two configs, workloads or recordings: finds the first step that differs.

Workloads are simulated, recordings are read. For two configs on one workload it also finds the cause (the config fields
that decide) and a reproducer (a few requests that show the same).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

from lockstep.core.policy import SchedulerConfig
from lockstep.errors import TraceError
from lockstep.replay.answer_differences import AnswerDifferences, answer_differences
from lockstep.replay.causes import (
    Cause,
    Pair,
    Reproducer,
    ReproducerSearch,
    differing_fields,
    find_cause,
    taken_over,
)
from lockstep.replay.cost import CostModel
from lockstep.replay.divergence import Divergence, RecordedSide, SimulatedSide, compare
from lockstep.replay.explain import called
from lockstep.replay.playback import played
from lockstep.replay.rerun import AppliedCommand, DecidedStep
from lockstep.replay.simulator import Simulation
from lockstep.replay.snapshot import Snapshot, recorded_snapshot, simulated_snapshot
from lockstep.replay.trace import Trace
from lockstep.replay.workload import PS_PER_MS, ArrivalUnit, Workload, WorkloadRequest
from lockstep.worker.flight.entries import (
    Aborted,
    Added,
    CacheReset,
    Command,
    EngineEntry,
    Filled,
    Named,
    Pinned,
    Proposed,
    Unpinned,
)

MAX_CAUSE_WORK = 8_000_000
"""Maximum work of the search for the deciding config fields, in units of ``Comparison.work``."""
_COMPARED_FIELDS = (
    ("num_prompt_tokens", "prompt tokens"),
    ("max_output_tokens", "maximum output tokens"),
    ("num_output_tokens", "output tokens"),
    ("priority", "priority"),
    ("tenant", "tenant"),
)


@dataclass(frozen=True, slots=True)
class Diff:
    """First step that two sides, A and B, decide differently, with its explanation."""

    fields: tuple[str, ...]
    """Names of the config fields that differ."""
    num_equal_steps: int
    divergence: Divergence | None
    """Divergence of the sides; None: all steps are equal."""
    a: Snapshot | None = None
    """State of side A at the divergence; None: no divergence, or A has no such step."""
    b: Snapshot | None = None
    """State of side B, likewise."""
    input_difference: str = ""
    """First difference between the sides' requests or commands, as a sentence; empty: none."""
    num_requests: int = 0
    """Requests of workload A; 0 for recordings."""
    num_arrived: int = 0
    """Requests of workload A that had arrived at the divergence."""
    cause: Cause | None = None
    """Config fields that make B decide as it does; only from `diff_configs`."""
    reproducer: Reproducer | None = None
    """A few requests that show the same divergence; only from `diff_configs`."""


class EngineDiff(NamedTuple):
    """Diff of one engine's steps in two recordings. Sequences are matched by their ids."""

    engine: int
    name_a: str
    name_b: str
    """Names of the models that the engine serves in A and in B; empty: the recording has no such engine."""
    diff: Diff
    answers: AnswerDifferences | None = None
    """Comparison of the answers; None: all steps are equal, or a recording has no such engine."""


def diff_configs(
    workload: Workload,
    a: SchedulerConfig,
    b: SchedulerConfig,
    cost: CostModel | None = None,
    *,
    reproduces: bool = True,
) -> Diff:
    """Simulate a workload with two configs, and explain the first step that they decide differently.

    Args:
        reproduces: search for a few requests that show the same divergence.
    """
    requests = tuple(workload.requests)
    workload = replace(workload, requests=requests)
    found = _diff(workload, a, workload, b, cost)
    if found.divergence is None:
        return found
    arrived = requests[: found.num_arrived]
    workload = replace(workload, requests=arrived)
    cause = _cause(workload, a, b, cost, found.divergence)
    reproducer = _reproducer(workload, arrived, Pair(a, b, cost), cause, found) if reproduces else None
    return replace(found, cause=cause, reproducer=reproducer)


def diff_workloads(
    a: Workload, config_a: SchedulerConfig, b: Workload, config_b: SchedulerConfig, cost: CostModel | None = None
) -> Diff:
    """Simulate two workloads, and find the first step that differs. Sequences are matched by their number."""
    side_a, side_b = (replace(workload, requests=tuple(workload.requests)) for workload in (a, b))
    input_difference = "the arrivals of one are in ticks, those of the other in time"
    if a.unit is b.unit:
        input_difference = differing_request(side_a.requests, side_b.requests, a.unit)
    return replace(_diff(side_a, config_a, side_b, config_b, cost), input_difference=input_difference)


def _diff(
    a: Workload, config_a: SchedulerConfig, b: Workload, config_b: SchedulerConfig, cost: CostModel | None
) -> Diff:
    """Simulate both sides up to the first step that differs, without the cause."""
    side_a, side_b = SimulatedSide(Simulation(a, config_a, cost)), SimulatedSide(Simulation(b, config_b, cost))
    found = compare(side_a, side_b)
    divergence, requests = found.divergence, tuple(a.requests)
    diff = Diff(differing_fields(config_a, config_b), found.num_equal_steps, divergence, num_requests=len(requests))
    if divergence is None:
        return diff
    now = divergence.a.tick if a.unit is ArrivalUnit.TICKS else divergence.a.start_ps
    return replace(
        diff,
        a=simulated_snapshot("A", Simulation(a, config_a, cost), divergence.a),
        b=simulated_snapshot("B", Simulation(b, config_b, cost), divergence.b),
        num_arrived=sum(request.arrival <= now for request in requests),
    )


def _cause(
    workload: Workload, a: SchedulerConfig, b: SchedulerConfig, cost: CostModel | None, divergence: Divergence
) -> Cause:
    """Config fields of B that make A decide like B, up to and including the step of the divergence."""
    num_steps = divergence.num_equal_steps + 1
    work = 0

    def decides_as_b(config: SchedulerConfig) -> bool:
        nonlocal work
        side_a, side_b = (SimulatedSide(Simulation(workload, each, cost)) for each in (config, b))
        found = compare(side_a, side_b, num_steps)
        work += found.work
        return found.divergence is None or found.divergence.num_equal_steps > divergence.num_equal_steps

    return find_cause(a, b, decides_as_b, lambda: work < MAX_CAUSE_WORK)


def _reproducer(
    workload: Workload, arrived: tuple[WorkloadRequest, ...], pair: Pair, cause: Cause, found: Diff
) -> Reproducer:
    assert found.divergence is not None
    assert found.a is not None
    assert found.b is not None
    pairs = [pair]
    if cause.names and cause.names != found.fields:
        alone = taken_over(pair.a, pair.b, cause.names)
        pairs += [replace(pair, b=alone)] if alone is not None else []
    refused = found.a.decision.refused + found.b.decision.refused
    unfinished = dict.fromkeys(sequence.index for sequence in found.a.unfinished.values())
    unfinished.update(dict.fromkeys(index for index, request in enumerate(arrived) if request.name in refused))
    return ReproducerSearch(workload, arrived, pairs, found.divergence).run(tuple(unfinished))


def diff_traces(a: Trace, b: Trace, engine: int | None = None, max_steps: int | None = None) -> tuple[EngineDiff, ...]:
    """Compare the engines with the same number in two recordings.

    Args:
        engine: number of the only engine to compare; None: all.
        max_steps: maximum number of equal steps to compare; None: all.

    Raises:
        TraceError: a recording has gaps, is damaged, differs from this version's decisions, or neither has the engine.
    """
    for trace in (a, b):
        trace.check_unbroken("diff")
    engines_a, engines_b = ({each.number: each for each in trace.engines} for trace in (a, b))
    numbers = sorted({*engines_a, *engines_b})
    if engine is not None:
        if engine not in numbers:
            raise TraceError(f"neither recording has an engine {engine}; they have {', '.join(map(str, numbers))}")
        numbers = [engine]
    return tuple(
        _diff_engine(number, a, engines_a.get(number), b, engines_b.get(number), max_steps) for number in numbers
    )


def _diff_engine(
    number: int,
    a: Trace,
    engine_a: EngineEntry | None,
    b: Trace,
    engine_b: EngineEntry | None,
    max_steps: int | None,
) -> EngineDiff:
    name_a, name_b = ("" if engine is None else engine.name for engine in (engine_a, engine_b))
    fields = () if engine_a is None or engine_b is None else differing_fields(engine_a.config, engine_b.config)
    found = compare(RecordedSide(a, number), RecordedSide(b, number), max_steps)
    divergence, num_equal = found.divergence, found.num_equal_steps
    diff = Diff(fields, num_equal, divergence)
    if divergence is not None:
        diff = replace(
            diff,
            a=recorded_snapshot("A", a, number, num_equal, divergence.a),
            b=recorded_snapshot("B", b, number, num_equal, divergence.b),
            input_difference=differing_command(_commands(a, number, num_equal), _commands(b, number, num_equal)),
        )
    has_both = divergence is not None and engine_a is not None and engine_b is not None
    answers = answer_differences(a, b, number) if has_both and max_steps is None else None
    return EngineDiff(number, name_a, name_b, diff, answers)


def _commands(trace: Trace, engine: int, num_steps: int) -> Iterator[Command]:
    """Commands that an engine received before step ``num_steps``, counted from 0."""
    num_seen = 0
    for event in played(trace):
        if isinstance(event, AppliedCommand) and event.engine == engine:
            yield event.command
        elif isinstance(event, DecidedStep) and event.engine == engine:
            num_seen += 1
            if num_seen > num_steps:
                return


def differing_request(a: Iterable[WorkloadRequest], b: Iterable[WorkloadRequest], unit: ArrivalUnit) -> str:
    """First request that differs between two workloads with one unit, as a sentence; empty: none."""
    for number, (x, y) in enumerate(zip_longest(a, b), 1):
        if x is None or y is None:
            longer, request, shorter = ("A", x, "B") if y is None else ("B", y, "A")
            return f"request {number} is {called(request.name)} in {longer} and missing in {shorter}"
        if x.name != y.name:
            return f"request {number} is {called(x.name)} in A and {called(y.name)} in B"
        differing = [
            f"{words}: {getattr(x, field)} in A and {getattr(y, field)} in B"
            for field, words in _COMPARED_FIELDS
            if getattr(x, field) != getattr(y, field)
        ]
        if x.arrival != y.arrival:
            differing.append(f"it arrives at {_time_of(x.arrival, unit)} in A and at {_time_of(y.arrival, unit)} in B")
        if x.contents != y.contents:
            differing.append("its prompt has different content")
        if differing:
            return f"the inputs differ first in {called(x.name)}: {'; '.join(differing)}"
    return ""


def differing_command(a: Iterable[Command], b: Iterable[Command]) -> str:
    """First command that differs between two recordings of an engine, as a sentence; empty: none."""
    for x, y in zip_longest(a, b):
        if x is not None and y is not None and x != y:
            return f"their commands differ first in {_command_text(x)} in A and {_command_text(y)} in B"
        if x is None or y is None:
            longer, command, shorter = ("A", x, "B") if y is None else ("B", y, "A")
            return f"their commands differ: {shorter} ends, and {longer} has {_command_text(command)}"
    return ""


def _time_of(arrival: int, unit: ArrivalUnit) -> str:
    return f"tick {arrival:,}" if unit is ArrivalUnit.TICKS else f"{arrival / PS_PER_MS:,.3f} ms"


def _command_text(command: Command) -> str:
    at = f"before step {command.step:,}"
    match command:
        case Added():
            most = command.request.max_output_tokens
            output = "as many output tokens as fit" if most is None else f"{most:,} output tokens at most"
            tokens = f"{command.request.num_prompt_tokens:,} prompt tokens and {output}"
            return f"{called(str(command.seq_id))} of {tokens}, priority {command.request.priority}, {at}"
        case Aborted():
            return f"the end of {called(str(command.seq_id))} ({command.reason.value}) {at}"
        case Named():
            return f"{len(command.contents):,} blocks of the answer of {called(str(command.seq_id))} to publish {at}"
        case Pinned():
            return f"{len(command.contents):,} blocks to retain for a session {at}"
        case Unpinned():
            return f"{len(command.contents):,} blocks of a session to release {at}"
        case Filled():
            return f"{len(command.contents):,} blocks of a chain to load {at}"
        case CacheReset():
            return f"a reset of the prefix cache {at}"
        case Proposed():
            counts = ", ".join(f"{count} for {called(str(seq_id))}" for seq_id, count in command.drafts)
            return f"drafts ({counts}) {at}"
