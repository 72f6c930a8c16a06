"""Where a device worker runs, and how: what its supervisor is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.health import HealthLimits
from lockstep.worker.logs import LogFormat
from lockstep.worker.messages import TrialOptions

if TYPE_CHECKING:
    from lockstep.worker.process import SpawnedWorker


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Where a device worker runs, and when it counts as healthy."""

    kind: Literal["thread", "process"] = "thread"
    """``process`` for servers: a native crash then ends requests, and not the server."""
    health: HealthLimits = field(default_factory=HealthLimits)
    trial: TrialOptions = field(default_factory=TrialOptions)
    """Only a worker process tries what it does not know: who chose threads has chosen to share their fate."""
    log_format: LogFormat = "text"
    log_level: str = "warning"
    """Of the worker process, which logs to standard error."""
    trace: TraceOptions | None = None
    """What is recorded; None: nothing."""
    stream_interval_s: float = 0.0
    """What streams get within less than this comes to their readers at once, except their first tokens and ends."""
    ahead: SpawnedWorker | None = None
    """The first worker's process, where it was started ahead of all else; whoever started it ends it if nobody takes
    it. None: it is started when it is needed, as its successors are."""
