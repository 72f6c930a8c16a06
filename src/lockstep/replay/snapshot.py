"""Snapshots of one side before one step: its sequences, and the planner's reasons for sequences that wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.core.policy import SchedulerConfig
from lockstep.core.scheduler import Scheduler
from lockstep.core.sequence import SequenceState
from lockstep.core.step import Reason
from lockstep.replay.divergence import SidePosition, StepDecision
from lockstep.replay.playback import Playback, played
from lockstep.replay.played_sequences import PlayedSequences
from lockstep.replay.rerun import DecidedStep
from lockstep.replay.simulator import Simulation
from lockstep.replay.timeline import RequestOutcome
from lockstep.replay.trace import Trace


@dataclass(frozen=True, slots=True)
class UnfinishedSequence:
    """One unfinished sequence before a step."""

    index: int
    """Index of its request in the workload; for recordings, its sequence id."""
    outcome: RequestOutcome
    """Outcome of its request so far."""
    state: SequenceState
    num_held_blocks: int = 0

    @property
    def name(self) -> str:
        return self.outcome.name

    @property
    def priority(self) -> int:
        return self.outcome.priority

    @property
    def num_prompt_tokens(self) -> int:
        return self.outcome.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One side at one step."""

    label: str
    """Label of the side: ``A`` or ``B``."""
    config: SchedulerConfig
    decision: StepDecision
    unfinished: Mapping[int, UnfinishedSequence]
    """Unfinished sequences by id, including those that arrived for this step."""
    num_active: int
    """Number of running sequences after admission."""
    num_free_blocks: int
    """Number of blocks not in use during the step: free or cached."""
    num_free_host_blocks: int
    """Number of free host blocks before the step."""
    reasons: Sequence[Reason] = ()
    """The planner's reasons in this step."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Reasons for refusals of requests that arrived for this step, by request name."""

    def name(self, seq_id: int) -> str:
        """Name of a sequence's request in the file."""
        sequence = self.unfinished.get(seq_id)
        return f"#{seq_id}" if sequence is None else sequence.name

    def reasons_of(self, seq_id: int) -> list[Reason]:
        """The planner's reasons for one sequence."""
        return [reason for reason in self.reasons if reason.seq_id == seq_id]

    def num_in_state(self, state: SequenceState) -> int:
        """Number of sequences in a state before the step."""
        return sum(sequence.state is state for sequence in self.unfinished.values())


def simulated_snapshot(label: str, simulation: Simulation, place: SidePosition) -> Snapshot:
    """Snapshot of a simulation, run again up to a position.

    Args:
        simulation: a new simulation of the side.
        place: position of the snapshot.
    """
    while simulation.tick < place.run_tick and simulation.step() is not None:
        pass
    simulation.run_lengths = False
    while simulation.tick < place.tick and simulation.step() is not None:
        pass
    scheduler, config = simulation.scheduler, simulation.config
    outcomes = simulation.replay().outcomes
    unfinished = _unfinished(scheduler, enumerate(outcomes))
    num_free_host_blocks = scheduler.stats().num_free_host_blocks
    reasons: list[Reason] = []
    simulation.explain = reasons.append
    tick = simulation.step()
    arrived = simulation.replay().outcomes[len(outcomes) :]
    for index, outcome in enumerate(arrived, start=len(outcomes)):
        if not outcome.refusal:
            unfinished[outcome.seq_id] = UnfinishedSequence(index, outcome, SequenceState.WAITING)
    return Snapshot(
        label=label,
        config=config,
        decision=place.decision,
        unfinished=unfinished,
        num_active=0 if tick is None else tick.num_active,
        num_free_blocks=config.num_blocks - (0 if tick is None else tick.num_used_blocks),
        num_free_host_blocks=num_free_host_blocks,
        reasons=reasons,
        refusals={outcome.name: outcome.refusal for outcome in arrived if outcome.refusal},
    )


def recorded_snapshot(label: str, trace: Trace, engine: int, num_steps: int, place: SidePosition) -> Snapshot | None:
    """Snapshot of a recorded engine after ``num_steps`` steps, before the next one; None: no such engine.

    Sequences added before the recording have no entry in ``unfinished``.
    """
    playback, sequences = Playback(trace.entries()), PlayedSequences()
    unfinished: dict[int, UnfinishedSequence] = {}
    reasons: list[Reason] = []
    num_seen = num_ended = num_free_host_blocks = 0
    for event in played(trace, playback):
        if isinstance(event, DecidedStep) and event.engine == engine:
            num_seen, num_ended = num_seen + 1, len(event.finished)
        if num_seen > num_steps:
            break
        deque(sequences.take(event), maxlen=0)
        rerun = playback.engines.get(engine)
        if num_seen == num_steps and rerun is not None:
            rerun.explain = reasons.append
            here = (each.outcome for each in sequences.open.values() if each.engine.number == engine)
            unfinished = _unfinished(rerun.scheduler, ((outcome.seq_id, outcome) for outcome in here))
            num_free_host_blocks = rerun.scheduler.stats().num_free_host_blocks
    rerun = playback.engines.get(engine)
    if rerun is None:
        return None
    stats = rerun.scheduler.stats()
    return Snapshot(
        label=label,
        config=rerun.config,
        decision=place.decision,
        unfinished=unfinished,
        num_active=stats.num_running + num_ended,
        num_free_blocks=stats.num_blocks - stats.num_held_blocks,
        num_free_host_blocks=num_free_host_blocks,
        reasons=reasons,
    )


def _unfinished(scheduler: Scheduler, numbered: Iterable[tuple[int, RequestOutcome]]) -> dict[int, UnfinishedSequence]:
    """Sequences that have not ended."""
    views = ((index, outcome, scheduler.view(outcome.seq_id)) for index, outcome in numbered)
    return {
        outcome.seq_id: UnfinishedSequence(index, outcome, view.state, len(view.table))
        for index, outcome, view in views
        if view is not None
    }
