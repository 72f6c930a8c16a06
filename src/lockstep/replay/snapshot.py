"""Snapshots of one side at one step, for explanations: who stood where, and why the planner passed whom over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.core.policy import SchedulerConfig
from lockstep.core.scheduler import Scheduler
from lockstep.core.sequence import SequenceState
from lockstep.core.step import Reason
from lockstep.replay.divergence import Decision, Place
from lockstep.replay.simulator import Simulation
from lockstep.replay.workload import WorkloadRequest


@dataclass(frozen=True, slots=True)
class Standing:
    """One unfinished sequence before a step."""

    index: int
    """Of its request in the workload."""
    name: str
    state: SequenceState
    priority: int
    tenant: str
    num_prompt_tokens: int
    num_held_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One side at one step."""

    label: str
    """``A`` or ``B``."""
    config: SchedulerConfig
    decision: Decision
    standings: Mapping[int, Standing]
    """By id, those that arrived for this step included."""
    num_active: int
    """Running after admission."""
    num_free_blocks: int
    """Not held while the step runs: free, or only cached."""
    num_free_host_blocks: int
    """Before the step."""
    reasons: Sequence[Reason] = ()
    """What the planner told of the step."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Why requests were refused on arriving for this step, by their names."""

    def name(self, seq_id: int) -> str:
        """How to call a sequence: as its request's file does."""
        standing = self.standings.get(seq_id)
        return f"#{seq_id}" if standing is None else standing.name

    def reasons_of(self, seq_id: int) -> list[Reason]:
        """What was told of one sequence."""
        return [reason for reason in self.reasons if reason.seq_id == seq_id]

    def num_in_state(self, state: SequenceState) -> int:
        """Sequences that were in that state before the step."""
        return sum(standing.state is state for standing in self.standings.values())


def snapshot(label: str, simulation: Simulation, requests: Sequence[WorkloadRequest], place: Place) -> Snapshot:
    """One side where it stood, run again up to there.

    Args:
        simulation: a fresh one, of the side.
        requests: those of its workload.
        place: where the side stood.
    """
    while simulation.tick < place.run_tick and simulation.step() is not None:
        pass
    simulation.run_lengths = False
    while simulation.tick < place.tick and simulation.step() is not None:
        pass
    scheduler = simulation.scheduler
    before = simulation.replay().outcomes
    standings = {
        outcome.seq_id: standing
        for index, outcome in enumerate(before)
        if (standing := _standing(scheduler, outcome.seq_id, index, requests[index])) is not None
    }
    num_free_host_blocks = scheduler.stats().num_free_host_blocks
    reasons: list[Reason] = []
    simulation.explain = reasons.append
    tick = simulation.step()
    arrived = simulation.replay().outcomes[len(before) :]
    for index, outcome in enumerate(arrived, start=len(before)):
        if not outcome.refusal:
            request = requests[index]
            standings[outcome.seq_id] = Standing(
                index, request.name, SequenceState.WAITING, request.priority, request.tenant, request.num_prompt_tokens
            )
    return Snapshot(
        label=label,
        config=simulation.config,
        decision=place.decision,
        standings=standings,
        num_active=0 if tick is None else tick.num_active,
        num_free_blocks=simulation.config.num_blocks - (0 if tick is None else tick.num_used_blocks),
        num_free_host_blocks=num_free_host_blocks,
        reasons=reasons,
        refusals={outcome.name: outcome.refusal for outcome in arrived if outcome.refusal},
    )


def _standing(scheduler: Scheduler, seq_id: int, index: int, request: WorkloadRequest) -> Standing | None:
    """None: it has ended."""
    view = scheduler.view(seq_id)
    if view is None:
        return None
    asked = request.priority, request.tenant, request.num_prompt_tokens
    return Standing(index, request.name, view.state, *asked, len(view.table))
