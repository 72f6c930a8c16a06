"""Values of one step: defines the frozen plan, its result, and the events that follow.

The plan is stored in columns (one tuple per field, aligned by index) because building an object per chunk would cost
more than the decisions themselves. It only describes the step: the engine adds token ids, and the executor executes it.
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
    """True if the logits of the chunk's last token are sampled, and those before each of its drafts."""


@dataclass(slots=True)
class StepPlan:
    """Everything that must happen in one step, in this order: evict, swap out, swap in, copy, forward."""

    step: Final[int]
    """Number of the step, from 0; the batch id."""
    evicted: Final[tuple[int, ...]]
    """Device blocks whose cached content is evicted."""
    swap_out: Final[tuple[tuple[int, int], ...]]
    """Copies to host memory, as pairs of device block and host block."""
    swap_in: Final[tuple[tuple[int, int], ...]]
    """Copies back to the device, as pairs of host block and device block."""
    copies: Final[tuple[tuple[int, int], ...]]
    """Copies on the device, as pairs of source block and destination block."""
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
    """Number of the step's tokens that belong to prompts."""
    other_tables: Final[tuple[tuple[tuple[int, ...], ...], ...]] = ()
    """By row, a table for each KV group after the first one (`lockstep.core.groups`); empty: there is one group.

    For a group with a window: the number of a column, at or before the first one that the row's tokens see, then the
    blocks of this column and of all after it up to the row's last token. For states: the blocks of the state before the
    row's first token, if there is a token before it, and then those of the state after its last token. If these are the
    same blocks, they are listed once."""
    drafts: Final[tuple[int, ...]] = ()
    """By row, the number of its last tokens that are drafts: tokens that the sequence may get in this step, which are
    computed before that is known. They are part of the row's length. Empty: there are none in the step."""

    @property
    def has_work(self) -> bool:
        """True if the forward pass computes any token."""
        return bool(self.seq_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.seq_ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the forward pass computes."""
        return sum(self.lengths)

    @property
    def has_prefill(self) -> bool:
        """True if any prompt tokens are computed."""
        return self.num_prompt_tokens > 0

    @property
    def has_decode(self) -> bool:
        """True if a sequence decodes, or replays what was decoded."""
        return self.num_tokens > self.num_prompt_tokens

    @property
    def num_samples(self) -> int:
        """Number of sequences that sample in this step."""
        return sum(self.samples)

    def chunks(self) -> Iterator[Chunk]:
        """The rows as objects, in plan order."""
        return map(Chunk._make, zip(self.seq_ids, self.starts, self.lengths, self.tables, self.samples, strict=True))


class StepResult(NamedTuple):
    """The result of a plan: one entry per sampling row, in plan order. It has counts and endings, never token
    values."""

    num_tokens: tuple[int, ...]
    """Number of tokens that each sampling sequence got: 1, the accepted drafts, and the grammar-forced ones."""
    finishes: tuple[FinishReason | None, ...]
    """Reason for which the sequence ends with its last token, or None."""
    num_accepted: tuple[int, ...] = ()
    """Number of drafts of each sampling sequence that are equal to the first tokens that it got, and fewer than these;
    empty: 0 for all."""


class Finish(NamedTuple):
    """A sequence that ended."""

    seq_id: int
    reason: FinishReason


class StepEvents(NamedTuple):
    """Events of a committed step."""

    step: int
    finished: tuple[Finish, ...]
    num_tokens: tuple[int, ...] = ()
    """Number of tokens that each sampling sequence got, in plan order: the result's counts, limited by the output
    limit."""
    num_accepted: tuple[int, ...] = ()
    """Number of accepted drafts of each; empty: 0 for all."""


class Limit(Enum):
    """Limit for which a step passes a sequence over, or shortens its chunk."""

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
    """Reason to pass a sequence over or to shorten its chunk, at the time of the planner's decision."""

    seq_id: int
    limit: Limit
    used: int = 0
    most: int = 0
    """Maximum of the limit."""
    needed: int = 0
    """Number of blocks that it needs."""
    others: tuple[int, ...] = ()
    """Ids of the sequences that the limit involves."""


Explain = Callable[[Reason], None]
"""Callback for reasons."""
