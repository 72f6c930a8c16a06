"""Core requests: describe requests by lengths and hashes, without tokens, and define the listener of commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol


class FinishReason(Enum):
    """Reason for a sequence's end. The core itself decides only LENGTH."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"


class Priority:
    """Named priorities. Any integer is a priority; lower is served first."""

    CRITICAL: Final = -2
    HIGH: Final = -1
    NORMAL: Final = 0
    LOW: Final = 1


WEIGHTS: Mapping[int, int] = {Priority.CRITICAL: 8, Priority.HIGH: 4, Priority.NORMAL: 2, Priority.LOW: 1}
"""Weights of priorities where they compete: replicas for a device's time, running sequences for decode steps.

Another priority has the weight of the nearest named one.
"""
MAX_WEIGHT: Final = max(WEIGHTS.values())


def weight_of(priority: int) -> int:
    """The weight of any priority; lower numbers weigh more."""
    return WEIGHTS[min(max(priority, Priority.CRITICAL), Priority.LOW)]


@dataclass(frozen=True, slots=True)
class Request:
    """One request. The scheduler assigns its id at ``add``."""

    num_prompt_tokens: int
    max_output_tokens: int | None = None
    """Maximum output tokens; None: as many as ``max_model_len`` leaves."""
    block_hashes: tuple[bytes, ...] = ()
    """Chained hashes of the prompt's full blocks (core/prefix.py); empty: neither reads nor fills the cache."""
    priority: int = Priority.NORMAL
    tenant: str = ""
    reads_cache: bool = True
    """False: the whole prompt is computed (prompt logprobs need every row)."""
    allows_forced: bool = True
    """False: at most one token per step (requests with logprobs)."""
    sibling_of: int | None = None
    """Id of the first of ``n`` siblings. This one is admissible when the first has committed its prompt or has
    ended."""
    snapshots: tuple[int, ...] = ()
    """Positions of the prompt after which other prompts may continue, so that windows and the states of recurrent
    layers are worth keeping there: multiples of the block size, ascending."""
    is_bulk: bool = False
    """True if its prompt yields to prompts of generation requests; see `StepBuilder.keep_back`."""


class CommandListener(Protocol):
    """Called after every command that a scheduler has executed and that may have an effect. Never raises.

    ``step`` is the number of the next plan. For a command during a step it is that of the step after.
    """

    def added(self, seq_id: int, request: Request, step: int) -> None: ...

    def aborted(self, seq_id: int, reason: FinishReason, step: int, in_step: bool) -> None:
        """``in_step``: whether a step is under way."""
        ...

    def answer_named(self, seq_id: int, hashes: Sequence[bytes], step: int, in_step: bool) -> None:
        """``in_step``: whether a step is under way."""
        ...

    def pinned(self, hashes: Sequence[bytes], borders: Sequence[int], step: int) -> None: ...

    def unpinned(self, hashes: Sequence[bytes], borders: Sequence[int], step: int) -> None: ...

    def filled(self, hashes: Sequence[bytes], start: int, group: int, step: int) -> None: ...

    def cache_reset(self, step: int) -> None: ...

    def proposed(self, drafts: Mapping[int, int], step: int) -> None: ...
