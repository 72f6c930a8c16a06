"""What one side's scheduler stood before when it decided a step: the facts that reasons are told from. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.core.policy import SchedulerConfig
from lockstep.core.sequence import SequenceState
from lockstep.replay.divergence import Decision


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
    max_output_tokens: int
    num_computed: int
    num_held_blocks: int
    num_host_blocks: int
    num_cached_tokens: int
    """What the prefix cache would give it now, if it waits."""
    num_needed_blocks: int
    """Available blocks that admitting or resuming it uses up; 0 for whoever runs."""

    @property
    def prompt_left(self) -> int:
        """Prompt tokens to compute, hits taken off."""
        return max(0, self.num_prompt_tokens - self.num_computed - self.num_cached_tokens)


@dataclass(frozen=True, slots=True)
class Situation:
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

    refusals: Mapping[str, str] = field(default_factory=dict)
    """Why requests were refused on arriving for this step, by their names."""

    def name(self, seq_id: int) -> str:
        """How to call a sequence: as its request's file does."""
        standing = self.standings.get(seq_id)
        return f"#{seq_id}" if standing is None else standing.name

    def num_in_state(self, state: SequenceState) -> int:
        """Sequences that were in that state before the step."""
        return sum(standing.state is state for standing in self.standings.values())
