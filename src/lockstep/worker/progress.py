"""Progress of a request through its calls: when it began to be computed, where, and what it waited for before.

Written on the event loop by the handlers of its calls, from the reports of their worker, and read there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep.core.policy import SchedulerConfig
from lockstep.engine.outputs import Started, WaitReason

MAX_PLACES = 8
"""Sequences that are remembered of one request."""
MAX_WAITS = 32
"""Reasons that are, over all of its models."""
LOADING, PLACE = "LOADING", "PLACE"
"""Limits before a worker has a call: a model that is not loaded, and a place among a model's sessions."""


class RecordedSequence(NamedTuple):
    """Sequence of a call in the recording of its device."""

    model: str
    replica: str
    seq_id: int
    step: int
    """In which something of it was computed first."""


class Wait(NamedTuple):
    """One reason for which a request waited."""

    model: str
    reason: WaitReason
    """As last reported."""
    first_s: float
    last_s: float
    """On the clock of the progress."""
    config: SchedulerConfig | None
    """Of the scheduler that reported it."""


@dataclass(slots=True)
class CallProgress:
    """Progress of one request; its calls share it. Times on the monotonic clock."""

    started_s: float | None = None
    """Begin of the first step that computed something of it; known when that step has ended."""
    places: list[RecordedSequence] = field(default_factory=list)
    waits: dict[tuple[str, str], Wait] = field(default_factory=dict)
    """By model and limit, in the order in which they were met."""
    clock: Callable[[], float] = time.monotonic

    def waits_for(self, model: str, reason: WaitReason, config: SchedulerConfig | None = None) -> None:
        """A call waits, and this is why."""
        key, now_s = (model, reason.limit), self.clock()
        before = self.waits.get(key)
        if before is not None or len(self.waits) < MAX_WAITS:
            self.waits[key] = Wait(model, reason, before.first_s if before else now_s, now_s, config)


@dataclass(slots=True)
class CallStation:
    """One call at a worker, which tells it what becomes of it there."""

    progress: CallProgress
    model: str
    replica: str
    config: SchedulerConfig
    submitted_s: float

    def started(self, started: Started) -> None:
        """Something of it is being computed."""
        progress = self.progress
        if progress.started_s is None:
            progress.started_s = self.submitted_s + started.queue_s
        if len(progress.places) < MAX_PLACES:
            progress.places.append(RecordedSequence(self.model, self.replica, started.seq_id, started.step))

    def waits_for(self, reason: WaitReason) -> None:
        """It is passed over."""
        self.progress.waits_for(self.model, reason, self.config)
