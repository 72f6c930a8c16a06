"""State of a scheduler and of a fingerprint: stores exactly what decides all later steps, as plain values.

`Scheduler.state` and `Fingerprint.state` return it, and `from_state` continues from it like the original. A recording
that begins in the middle starts with such a state. It omits what follows from the rest (reference counts, running
lists, the queue), what only saves work (a run of repeating steps, caches of a planner) and results that were not read
yet. So two schedulers that make the same decisions for ever have the same state, whatever queries they have answered.

Block hashes and tenants are listed once, in the order of their first use. All other values refer to them by index, so
that a writer of states may use other names for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final, NamedTuple

from lockstep.core.groups import KVGroup, SavedBlocks, restored_blocks, saved_blocks
from lockstep.core.request import FinishReason, Request
from lockstep.core.sequence import Sequence, SequenceState
from lockstep.core.stats import Counters
from lockstep.core.step import StepPlan

STATE_VERSION: Final = 6
"""Version of the types below, increased with every change. States of different versions cannot be compared."""


class SavedSequence(NamedTuple):
    """An unfinished sequence; see `lockstep.core.sequence.Sequence`."""

    seq_id: int
    request: Request
    """The request, without block hashes and tenant."""
    contents: tuple[int, ...]
    """Indices of its block hashes."""
    tenant: int
    state: SequenceState
    max_known: int
    num_prefill: int
    num_computed: int
    num_known: int
    forced: tuple[tuple[int, int], ...]
    """Output segments longer than one token, as pairs of first position and length, ascending."""
    table: tuple[int, ...]
    host_table: tuple[int, ...]
    others: SavedBlocks
    """Its blocks in each KV group after the first one; see `lockstep.core.groups.saved_blocks`."""
    host_others: SavedBlocks
    stops: tuple[int, ...]
    num_published: int
    num_cached_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_skips: int
    arrival_step: int
    admitted_step: int
    first_token_step: int
    last_sampled_step: int
    virtual_time: int


class KVState(NamedTuple):
    """Block pools and prefix cache. The holders of blocks are in the sequences."""

    free: tuple[int, ...]
    """Free device blocks in the order of release: the last one is handed out first. The same holds for
    `free_on_host`."""
    cached: tuple[int, ...]
    """Cached device blocks in the order of release: the first one is handed out first."""
    pinned: tuple[int, ...]
    """Cached device blocks that are handed out last."""
    num_allocated: int
    free_on_host: tuple[int, ...]
    leaving_host: tuple[int, ...]
    """Host blocks that the current step reads, and that are free after it."""
    published: tuple[tuple[int, int, int], ...]
    """Block, content and KV group, in order of publishing."""
    pins: tuple[tuple[int, int, int], ...]
    """Content, KV group and number of its pins."""
    moved_out: tuple[int, ...]
    """Ids of sequences that the current step moves to the host, completely or in part."""
    moved_in: tuple[tuple[int, int], ...]
    """Sequences that the current step moves back, as pairs of id and number of blocks already on the device before."""


class SchedulerState(NamedTuple):
    """A scheduler between two steps, or during one."""

    contents: tuple[bytes, ...]
    """The block hashes."""
    tenants: tuple[str, ...]
    next_id: int
    step: int
    """Number of the next plan."""
    decode_clock: int
    """Clock of the virtual times; see `lockstep.core.decode_shares`."""
    pending: StepPlan | None
    """Plan of the current step; None: there is none."""
    proposed: tuple[tuple[int, int], ...]
    """Drafts that were proposed for the next step, as pairs of sequence and their number."""
    aborting: tuple[tuple[int, FinishReason], ...]
    """Sequences that a command has ended since the current step began."""
    sequences: tuple[SavedSequence, ...]
    """Unfinished sequences by id."""
    kv: KVState
    served: tuple[tuple[int, int], ...]
    """Pairs of tenant and served tokens, longest absent first."""
    counters: Counters


class FingerprintState(NamedTuple):
    """A fingerprint between two steps."""

    chain: bytes
    """The digest over the closed records."""
    body: bytes | None
    """Bytes of the open record; None: there is none."""
    repeats: int
    before: StepPlan | None
    """The step before; None: there was none, or it failed."""
    ended_before: tuple[int, ...]
    """Ids of sequences that ended with it, ascending."""
    is_plain: bool
    """True if it may be repeated."""


def saved(seq: Sequence, contents: dict[bytes, int], tenants: dict[str, int]) -> SavedSequence:
    """Convert a sequence to a plain value.

    Args:
        contents, tenants: index of each block hash and tenant; new ones are added.
    """
    request = seq.request
    return SavedSequence(
        seq.seq_id,
        replace(request, block_hashes=(), tenant=""),
        tuple([contents.setdefault(block_hash, len(contents)) for block_hash in request.block_hashes]),
        tenants.setdefault(request.tenant, len(tenants)),
        seq.state,
        seq.max_known,
        seq.num_prefill,
        seq.num_computed,
        seq.num_known,
        tuple(seq.forced.items()),
        seq.table,
        seq.host_table,
        saved_blocks(seq.others),
        saved_blocks(seq.host_others),
        seq.stops,
        seq.num_published,
        seq.num_cached_tokens,
        seq.num_preemptions,
        seq.num_recomputed_tokens,
        seq.num_skips,
        seq.arrival_step,
        seq.admitted_step,
        seq.first_token_step,
        seq.last_sampled_step,
        seq.virtual_time,
    )


def restored(
    state: SavedSequence, contents: tuple[bytes, ...], tenants: tuple[str, ...], groups: Iterable[KVGroup]
) -> Sequence:
    """Restore the sequence.

    Args:
        contents, tenants: block hashes and tenants by index.
        groups: the KV groups.
    """
    hashes = tuple([contents[place] for place in state.contents])
    request = replace(state.request, block_hashes=hashes, tenant=tenants[state.tenant])
    seq = Sequence(state.seq_id, request, state.max_known - request.num_prompt_tokens, state.arrival_step)
    seq.state, seq.num_prefill = state.state, state.num_prefill
    seq.num_computed, seq.num_known, seq.forced = state.num_computed, state.num_known, dict(state.forced)
    seq.table, seq.host_table, seq.num_published = state.table, state.host_table, state.num_published
    seq.num_cached_tokens, seq.num_preemptions = state.num_cached_tokens, state.num_preemptions
    seq.num_recomputed_tokens, seq.num_skips = state.num_recomputed_tokens, state.num_skips
    seq.others = restored_blocks(groups, state.others)
    seq.host_others = restored_blocks(groups, state.host_others)
    seq.stops = state.stops
    seq.admitted_step, seq.first_token_step = state.admitted_step, state.first_token_step
    seq.last_sampled_step, seq.virtual_time = state.last_sampled_step, state.virtual_time
    return seq
