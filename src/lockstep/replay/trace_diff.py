"""Two recordings, engine by engine: the first step that was decided differently."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from lockstep.core.scheduler import Scheduler
from lockstep.core.step import Reason
from lockstep.errors import TraceError
from lockstep.replay.causes import differing_fields
from lockstep.replay.divergence import Decision, Difference, difference
from lockstep.replay.inputs import differing_command
from lockstep.replay.playback import Playback, Played, played
from lockstep.replay.rerun import Obeyed, Ran
from lockstep.replay.snapshot import Snapshot, Standing
from lockstep.replay.trace import Trace
from lockstep.worker.flight.entries import Added, Command, EngineEntry

NOTHING = Decision(None, None)


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
