"""Our own recordings as values: what a live run did, when, and for how long; and its requests as a workload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import FinishReason
from lockstep.replay.workload import Workload


@dataclass(frozen=True, slots=True)
class TracedEngine:
    """One engine of a recorded device."""

    number: int
    """Its number in the recording, from 0, in order of loading."""
    key: str
    """The replica that it is, as its worker calls it."""
    name: str
    """Of its model."""
    fingerprint: str
    """Of its artifact's content."""
    config: SchedulerConfig


class LiveStep(NamedTuple):
    """One recorded step."""

    engine: int
    step: int
    start_us: int
    """From the beginning of the recording."""
    duration_us: int
    gap_us: int
    """Between the end of the device's turn before and the start of this one, idle time included."""
    is_after_idle: bool
    """Whether nobody had work in that gap: it says nothing of what a step costs."""
    num_prefill_tokens: int
    num_decode_seqs: int
    """Rows that decode, or replay what was decoded."""
    num_context_tokens: int
    """start + length, summed over rows: see `CostModel`."""
    num_decoded_tokens: int
    """Output tokens that it brought."""


class LiveRequest(NamedTuple):
    """What became of one recorded sequence. Times are from the beginning of the recording; -1: it never came so far."""

    engine: int
    seq_id: int
    arrival_us: int
    admitted_us: int
    """Begin of the step that admitted it."""
    first_token_us: int
    """End of the step that brought its first token."""
    finished_us: int
    """End of its last step, or when a command ended it."""
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    reason: FinishReason


class Trace:
    """A recording: a file, or a directory of them. Nothing is held but its engines; every reading starts anew."""

    engines: tuple[TracedEngine, ...]


def open_trace(path: str | Path) -> Trace:
    """Find the files of a recording and read what they say of its engines.

    Raises:
        TraceError: it is none, of a newer version, or damaged.
    """
    raise NotImplementedError


def live_steps(trace: Trace, engine: int | None = None) -> Iterator[LiveStep]:
    """Every recorded step, in order; None: of all engines."""
    raise NotImplementedError


def live_requests(trace: Trace, engine: int | None = None) -> Iterator[LiveRequest]:
    """Every request that came during the recording and ended, in the order in which they ended."""
    raise NotImplementedError


def workload_of(trace: Trace, engine: int = 0) -> Workload:
    """An engine's requests with their real output lengths, in picoseconds from the first one's arrival; those that were
    aborted get the tokens that they got."""
    raise NotImplementedError
