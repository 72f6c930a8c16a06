"""Snapshots of one side at one step, for explanations: standings of sequences, and why the planner passed them over."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.core.policy import SchedulerConfig
from lockstep.core.scheduler import Scheduler
from lockstep.core.sequence import SequenceState
from lockstep.core.step import Reason
from lockstep.replay.divergence import DivergencePoint, StepDecision
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
    """Of its request in the workload; of a recording, its id."""
    outcome: RequestOutcome
    """Of its request so far."""
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
    """``A`` or ``B``."""
    config: SchedulerConfig
    decision: StepDecision
    standings: Mapping[int, UnfinishedSequence]
    """By id, those that arrived for this step included."""
    num_active: int
    """Running after admission."""
    num_free_blocks: int
    """Not held while the step runs: free, or only cached."""
    num_free_host_blocks: int
    """Before the step."""
    reasons: Sequence[Reason] = ()
    """Of the planner, for the step."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Why requests were refused on arriving for this step, by their names."""

    def name(self, seq_id: int) -> str:
        """Name of a sequence: that of its request in the file."""
        standing = self.standings.get(seq_id)
        return f"#{seq_id}" if standing is None else standing.name

    def reasons_of(self, seq_id: int) -> list[Reason]:
        """The planner's reasons about one sequence."""
        return [reason for reason in self.reasons if reason.seq_id == seq_id]

    def num_in_state(self, state: SequenceState) -> int:
        """Sequences that were in that state before the step."""
        return sum(standing.state is state for standing in self.standings.values())


def simulated_snapshot(label: str, simulation: Simulation, place: DivergencePoint) -> Snapshot:
    """A simulation where it stood, run again up to there.

    Args:
        simulation: a fresh one, of the side.
        place: where the side stood.
    """
    while simulation.tick < place.run_tick and simulation.step() is not None:
        pass
    simulation.run_lengths = False
    while simulation.tick < place.tick and simulation.step() is not None:
        pass
    scheduler, config = simulation.scheduler, simulation.config
    outcomes = simulation.replay().outcomes
    standings = _standings(scheduler, enumerate(outcomes))
    num_free_host_blocks = scheduler.stats().num_free_host_blocks
    reasons: list[Reason] = []
    simulation.explain = reasons.append
    tick = simulation.step()
    arrived = simulation.replay().outcomes[len(outcomes) :]
    for index, outcome in enumerate(arrived, start=len(outcomes)):
        if not outcome.refusal:
            standings[outcome.seq_id] = UnfinishedSequence(index, outcome, SequenceState.WAITING)
    return Snapshot(
        label=label,
        config=config,
        decision=place.decision,
        standings=standings,
        num_active=0 if tick is None else tick.num_active,
        num_free_blocks=config.num_blocks - (0 if tick is None else tick.num_used_blocks),
        num_free_host_blocks=num_free_host_blocks,
        reasons=reasons,
        refusals={outcome.name: outcome.refusal for outcome in arrived if outcome.refusal},
    )


def recorded_snapshot(label: str, trace: Trace, engine: int, num_steps: int, place: DivergencePoint) -> Snapshot | None:
    """An engine of a recording as it stood after so many steps, before the next; None: there was no such engine.

    Sequences that came before the recording have no entry in ``standings``.
    """
    playback, sequences = Playback(trace.entries()), PlayedSequences()
    standings: dict[int, UnfinishedSequence] = {}
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
            standings = _standings(rerun.scheduler, ((outcome.seq_id, outcome) for outcome in here))
            num_free_host_blocks = rerun.scheduler.stats().num_free_host_blocks
    rerun = playback.engines.get(engine)
    if rerun is None:
        return None
    stats = rerun.scheduler.stats()
    return Snapshot(
        label=label,
        config=rerun.config,
        decision=place.decision,
        standings=standings,
        num_active=stats.num_running + num_ended,
        num_free_blocks=stats.num_blocks - stats.num_held_blocks,
        num_free_host_blocks=num_free_host_blocks,
        reasons=reasons,
    )


def _standings(scheduler: Scheduler, numbered: Iterable[tuple[int, RequestOutcome]]) -> dict[int, UnfinishedSequence]:
    """Standings of those that have not ended."""
    views = ((index, outcome, scheduler.view(outcome.seq_id)) for index, outcome in numbered)
    return {
        outcome.seq_id: UnfinishedSequence(index, outcome, view.state, len(view.table))
        for index, outcome, view in views
        if view is not None
    }
