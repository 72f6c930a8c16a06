"""Values of one step: the frozen plan, the result that answers it, the events that follow.

The plan is stored in columns (one tuple per field, aligned by position) because building an object per chunk would
cost more than the decisions themselves. It describes and never does; the engine adds token ids, the executor acts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from lockstep.core.request import FinishReason


class Chunk(NamedTuple):
    """One row of a plan, for readers that want objects."""

    seq_id: int
    start: int
    """Position of the chunk's first token in its sequence."""
    length: int
    table: tuple[int, ...]
    """Device block ids; covers at least ``start + length`` positions."""
    samples: bool
    """True if the chunk's last token's logits are sampled."""


@dataclass(slots=True)
class StepPlan:
    """Everything that must happen in one step, in this order: evict, swap out, swap in, copy, forward."""

    step: Final[int]
    """Number of the step, from 0; the batch id."""
    evicted: Final[tuple[int, ...]]
    """Device blocks whose cached content is given up."""
    swap_out: Final[tuple[tuple[int, int], ...]]
    """(device block, host block) to copy to host memory."""
    swap_in: Final[tuple[tuple[int, int], ...]]
    """(host block, device block) to copy back."""
    copies: Final[tuple[tuple[int, int], ...]]
    """(source device block, destination device block)."""
    seq_ids: Final[tuple[int, ...]]
    starts: Final[tuple[int, ...]]
    lengths: Final[tuple[int, ...]]
    tables: Final[tuple[tuple[int, ...], ...]]
    samples: Final[tuple[bool, ...]]
    admitted: Final[tuple[int, ...]] = ()
    """Ids that left the queue for this step."""
    resumed: Final[tuple[int, ...]] = ()
    """Ids that run again from this step on; they may have no row in it yet."""
    preempted: Final[tuple[int, ...]] = ()
    """Ids that lost blocks in this step and wait until they get them back."""
    num_prompt_tokens: Final[int] = 0
    """Number of the tokens that are prompt."""

    @property
    def has_work(self) -> bool:
        """True if anything is forwarded."""
        return bool(self.seq_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.seq_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward pass computes."""
        return sum(self.lengths)

    @property
    def has_prefill(self) -> bool:
        """True if a prompt moves on."""
        return self.num_prompt_tokens > 0

    @property
    def has_decode(self) -> bool:
        """True if a sequence decodes, or replays what was decoded."""
        return self.num_tokens > self.num_prompt_tokens

    @property
    def num_samples(self) -> int:
        """Sequences that sample in this step."""
        return sum(self.samples)

    def chunks(self) -> Iterator[Chunk]:
        """The rows as objects, in plan order."""
        return map(Chunk._make, zip(self.seq_ids, self.starts, self.lengths, self.tables, self.samples, strict=True))


class StepResult(NamedTuple):
    """The answer to a plan: one entry per sampling row, in plan order. Lengths and endings, never token values."""

    num_tokens: tuple[int, ...]
    """Tokens that each sampling sequence got: 1, or 1 + the grammar-forced ones."""
    finishes: tuple[FinishReason | None, ...]
    """Reason for which the sequence ends with its last token, or None."""


class Finish(NamedTuple):
    """A sequence that ended."""

    seq_id: int
    reason: FinishReason


class StepEvents(NamedTuple):
    """Events that a commit made known."""

    step: int
    finished: tuple[Finish, ...]
    num_tokens: tuple[int, ...] = ()
    """Tokens that each sampling sequence got, in plan order: the result's counts, cut at the output limit."""


class Limit(Enum):
    """Limit by which a step passes a sequence over, or cuts its chunk."""

    SEQS = "sequences that run"
    PLACES = "rows of the step"
    WIDTH = "places to sample"
    TOKENS = "budget"
    PREFILL = "prefill budget"
    CHUNK = "tokens of a chunk"
    BLOCKS = "blocks"
    STALLED = "running sequences without room"
    PREEMPTED = "preempted sequences that come back first"
    OVERTAKEN = "waiting sequences that no other may pass any more"
    VICTIM = "blocks that it lost in this step"
    SIBLING = "the prompt of its first sibling"


class Reason(NamedTuple):
    """Reason to pass a sequence over or to cut its chunk, as the planner saw it when it decided so."""

    seq_id: int
    limit: Limit
    used: int = 0
    most: int = 0
    """Bound of what the limit counts."""
    needed: int = 0
    """Blocks."""
    others: tuple[int, ...] = ()
    """Ids of the sequences that the limit names."""


Explain = Callable[[Reason], None]
"""Callback for reasons."""
