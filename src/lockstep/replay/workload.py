"""What is replayed: requests in lengths, arrivals and block contents, whatever file they came from. Values only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from lockstep.core.request import Priority

PS_PER_MS = 1_000_000_000
"""Logical time is whole picoseconds, so that a run of steps adds up to the same time as its steps one by one."""


class ArrivalUnit(Enum):
    """What the arrivals of a workload count."""

    TICKS = "ticks"
    """A request joins the queue before the step of that number; an idle tick is a tick."""
    PS = "ps"
    """Picoseconds of logical time; steps take what the cost model says, idle time is skipped."""


@dataclass(slots=True)
class WorkloadRequest:
    """One request of a workload."""

    name: Final[str]
    """Its id in the file, or its number there."""
    num_prompt_tokens: Final[int]
    max_output_tokens: Final[int]
    num_output_tokens: Final[int]
    """What it gets if nothing ends it before; at most ``max_output_tokens``."""
    arrival: Final[int]
    """From the workload's start on, in its unit; never less than that of the request before."""
    priority: Final[int] = Priority.NORMAL
    tenant: Final[str] = ""
    contents: Final[tuple[int, ...]] = ()
    """One dense id for each block of ``content_size`` tokens of the prompt, a partial last one included; equal ids are
    equal content with equal past. Blocks without an id, all of them or the last ones, share nothing."""
    place: Final[str] = ""
    """Where it stands in its file, for messages: ``trace.jsonl:17``."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, and what the file says of the scheduler that should serve them.

    ``requests`` may be iterated over more than once; when it streams from a file, each time reads the file anew.
    """

    name: str
    requests: Iterable[WorkloadRequest]
    unit: ArrivalUnit
    content_size: int = 0
    """Tokens that one id of ``contents`` stands for; 0: there are none."""
    config: Mapping[str, object] = field(default_factory=dict)
    """Fields of ``SchedulerConfig`` that the file sets; what it leaves open has its default for replays."""
    notes: tuple[str, ...] = ()
    """What whoever replays it should know of the files that it was read from: what of them is not there."""
