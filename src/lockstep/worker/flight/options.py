"""What a recording is to hold, and where; a value that goes to the worker with its other options."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from lockstep.worker.device_scheduler import DeviceScheduler
    from lockstep.worker.flight.recorder import Recorder

DEFAULT_MAX_MB = 256


class TraceOptions(msgspec.Struct, frozen=True):
    """What is recorded, and where."""

    directory: str
    max_bytes: int = DEFAULT_MAX_MB << 20
    """Of all recordings in the directory together; the oldest files go first."""
    has_content: bool = False
    """Also prompts and answers, so that `replay --execute` can compute them again."""


def open_recorder(options: TraceOptions, turns: DeviceScheduler) -> Recorder:
    """Who records a device. What it takes is imported by those alone who record."""
    from lockstep.worker.flight.recorder import Recorder

    return Recorder(options, turns)
