"""Progress of a request through its calls: records when and where its computation began, and what it waited for.

The handlers of its calls write it on the event loop, from the reports of their worker, and it is read there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep.core.policy import SchedulerConfig
from lockstep.engine.outputs import Started, WaitReason
from lockstep.system import SYSTEM

MAX_SEQUENCES = 8
"""Maximum number of sequences that are recorded for one request."""
MAX_WAITS = 32
"""Maximum number of wait reasons that are recorded for one request, over all of its models."""
LOADING, PLACE = "LOADING", "PLACE"
"""Wait reasons before the call reaches a worker: a model that is not loaded, and a slot among a model's sessions."""


class RecordedSequence(NamedTuple):
    """Sequence of a call in the recording of its device."""

    model: str
    replica: str
    seq_id: int
    step: int
    """Step in which its computation began."""


class Wait(NamedTuple):
    """One reason for which a request waited."""

    model: str
    reason: WaitReason
    """The reason as last reported."""
    first_s: float
    last_s: float
    """Times on the clock of the progress."""
    config: SchedulerConfig | None
    """Configuration of the scheduler that reported it."""
    num_stages: int = 1
    """Positions of each prompt token at this model."""


@dataclass(slots=True)
class CallProgress:
    """Progress of one request, shared by its calls. Times are those of the monotonic clock."""

    started_s: float | None = None
    """Start of the first step that computed one of its tokens, set when that step has ended."""
    sequences: list[RecordedSequence] = field(default_factory=list)
    waits: dict[tuple[str, str], Wait] = field(default_factory=dict)
    """Wait reasons by model and limit, in order of the first report."""
    clock: Callable[[], float] = SYSTEM.now_s

    def waits_for(
        self, model: str, reason: WaitReason, config: SchedulerConfig | None = None, num_stages: int = 1
    ) -> None:
        """Record the reason why a call waits."""
        key, now_s = (model, reason.limit), self.clock()
        before = self.waits.get(key)
        if before is not None or len(self.waits) < MAX_WAITS:
            first_s = before.first_s if before else now_s
            self.waits[key] = Wait(model, reason, first_s, now_s, config, num_stages)


@dataclass(slots=True)
class CallObserver:
    """Observer of one call at a worker, which records its progress."""

    progress: CallProgress
    model: str
    replica: str
    config: SchedulerConfig
    submitted_s: float
    num_stages: int = 1

    def started(self, started: Started) -> None:
        """Record that its computation has begun."""
        progress = self.progress
        if progress.started_s is None:
            progress.started_s = self.submitted_s + started.queue_s
        if len(progress.sequences) < MAX_SEQUENCES:
            progress.sequences.append(RecordedSequence(self.model, self.replica, started.seq_id, started.step))

    def waits_for(self, reason: WaitReason) -> None:
        """Record the reason why it is passed over."""
        self.progress.waits_for(self.model, reason, self.config, self.num_stages)
