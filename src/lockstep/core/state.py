"""State of a scheduler and of a fingerprint, as plain values: what decides every step to come, and nothing else.

`Scheduler.state` and `Fingerprint.state` return it, and `from_state` goes on from it as the original would; a recording
that begins in the middle begins with one. It leaves out what follows from the rest (reference counts, running lists,
the queue), what only saves work (a run of repeating steps, what a planner remembers) and results that were not read
yet. So two schedulers that decide alike for ever have the same state, whatever queries they have answered.

Block hashes and tenants are listed once, in the order in which they are met; everything else has their places in these
lists, so that a writer of states may use other names for them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from lockstep.core.request import FinishReason, Request
from lockstep.core.sequence import Sequence, SequenceState
from lockstep.core.stats import Counters
from lockstep.core.step import StepPlan

STATE_VERSION: Final = 4
"""Grows with every change of what is below: states of different versions cannot be compared."""


class SavedSequence(NamedTuple):
    """An unfinished sequence; see `lockstep.core.sequence.Sequence`."""

    seq_id: int
    request: Request
    """Without block hashes and tenant."""
    contents: tuple[int, ...]
    """Its block hashes."""
    tenant: int
    state: SequenceState
    max_known: int
    num_prefill: int
    num_computed: int
    num_known: int
    forced: tuple[tuple[int, int], ...]
    """(first position, length), ascending."""
    table: tuple[int, ...]
    host_table: tuple[int, ...]
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
    """Block pools and prefix cache; who holds a block is reported by the sequences."""

    free: tuple[int, ...]
    """Device blocks in the order of release: the last one is handed out first. The same order below."""
    cached: tuple[int, ...]
    """Likewise, but the first one is handed out first."""
    pinned: tuple[int, ...]
    """Those that are cached and handed out last."""
    num_allocated: int
    free_on_host: tuple[int, ...]
    leaving_host: tuple[int, ...]
    """Read by the step under way, and free after it."""
    published: tuple[tuple[int, int], ...]
    """(block, content), first published first."""
    pins: tuple[tuple[int, int], ...]
    """(content, how often it is pinned)."""
    moved_out: tuple[int, ...]
    """Ids of sequences that the step under way moves to the host, wholly or in part."""
    moved_in: tuple[tuple[int, int], ...]
    """(id, blocks that it had on the device before) of those that it brings back."""


class SchedulerState(NamedTuple):
    """A scheduler between two steps, or in one."""

    contents: tuple[bytes, ...]
    """The block hashes."""
    tenants: tuple[str, ...]
    next_id: int
    step: int
    """Number of the next plan."""
    decode_clock: int
    """See `lockstep.core.decode_shares`."""
    pending: StepPlan | None
    """The step under way."""
    aborting: tuple[tuple[int, FinishReason], ...]
    """Sequences that a command has ended since it began."""
    sequences: tuple[SavedSequence, ...]
    """By id."""
    kv: KVState
    served: tuple[tuple[int, int], ...]
    """(tenant, tokens), longest absent first."""
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
    """A sequence as a plain value.

    Args:
        contents, tenants: the places of block hashes and tenants; new ones get theirs.
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


def restored(state: SavedSequence, contents: tuple[bytes, ...], tenants: tuple[str, ...]) -> Sequence:
    """The sequence again.

    Args:
        contents, tenants: block hashes and tenants by their places.
    """
    hashes = tuple([contents[place] for place in state.contents])
    request = replace(state.request, block_hashes=hashes, tenant=tenants[state.tenant])
    seq = Sequence(state.seq_id, request, state.max_known - request.num_prompt_tokens, state.arrival_step)
    seq.state, seq.num_prefill = state.state, state.num_prefill
    seq.num_computed, seq.num_known, seq.forced = state.num_computed, state.num_known, dict(state.forced)
    seq.table, seq.host_table, seq.num_published = state.table, state.host_table, state.num_published
    seq.num_cached_tokens, seq.num_preemptions = state.num_cached_tokens, state.num_preemptions
    seq.num_recomputed_tokens, seq.num_skips = state.num_recomputed_tokens, state.num_skips
    seq.admitted_step, seq.first_token_step = state.admitted_step, state.first_token_step
    seq.last_sampled_step, seq.virtual_time = state.last_sampled_step, state.virtual_time
    return seq
