"""Sequences: track how far each is computed, in which segments and blocks, and list the admitted ones."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping
from enum import Enum
from operator import attrgetter
from typing import NamedTuple

from lockstep.core.groups import GroupBlocks
from lockstep.core.request import MAX_WEIGHT, FinishReason, Request, weight_of


class SequenceState(Enum):
    """Stage in the lifecycle of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_TRANSITIONS: dict[SequenceState, tuple[SequenceState, ...]] = {
    SequenceState.WAITING: (SequenceState.RUNNING, SequenceState.FINISHED),
    SequenceState.RUNNING: (SequenceState.PREEMPTED, SequenceState.FINISHED),
    SequenceState.PREEMPTED: (SequenceState.RUNNING, SequenceState.FINISHED),
    SequenceState.FINISHED: (),
}


class Segment(NamedTuple):
    """A run of positions that is computed in one indivisible chunk. Exceptions are the prompt, which chunking may
    split, and an answer that is computed again like a prompt."""

    start: int
    length: int


class Sequence:
    """One sequence. The scheduler owns it, and only the scheduler changes it.

    ``num_computed`` positions have KV, and ``num_known`` tokens are known. A step advances the first number towards the
    second.
    """

    __slots__ = (
        "admitted_step",
        "arrival_step",
        "first_token_step",
        "forced",
        "host_others",
        "host_table",
        "last_sampled_step",
        "listed_others",
        "max_known",
        "num_cached_tokens",
        "num_computed",
        "num_known",
        "num_preemptions",
        "num_prefill",
        "num_prompt",
        "num_published",
        "num_recomputed_tokens",
        "num_skips",
        "other_tables",
        "others",
        "rank",
        "request",
        "seq_id",
        "state",
        "stops",
        "stride",
        "table",
        "virtual_time",
    )

    def __init__(
        self,
        seq_id: int,
        request: Request,
        max_output_tokens: int,
        arrival_step: int,
        others: tuple[GroupBlocks, ...] = (),
    ) -> None:
        self.seq_id = seq_id
        self.request = request
        self.rank = (request.priority, seq_id)
        """Highest priority first, then oldest: a total order."""
        self.state = SequenceState.WAITING
        self.num_prompt = request.num_prompt_tokens
        self.num_prefill = request.num_prompt_tokens
        """Number of positions that are computed in chunks: those of the prompt and, for an answer that lost its KV,
        those that were known then."""
        self.num_computed = 0
        self.num_known = request.num_prompt_tokens
        self.max_known = request.num_prompt_tokens + max_output_tokens
        """Number of tokens at which it ends with LENGTH."""
        self.forced: dict[int, int] = {}
        """First position to length, for the output segments that are longer than one token, ascending."""
        self.table: tuple[int, ...] = ()
        """Device blocks, from position 0 on."""
        self.host_table: tuple[int, ...] = ()
        """Host blocks that continue ``table``; only while PREEMPTED."""
        self.others = others
        """Device blocks in each KV group after the first one."""
        self.host_others = others
        """Host blocks in these groups; only while PREEMPTED, when it has none on the device."""
        self.listed_others: tuple[GroupBlocks, ...] = ()
        """The value of `others` to which `other_tables` belongs."""
        self.other_tables: tuple[tuple[int, ...], ...] = ()
        """Tables of a row in these groups."""
        self.stops: tuple[int, ...] = ()
        """Positions of the prompt at which a chunk ends, so that the state there can be published, ascending."""
        self.num_published = 0
        """Number of leading blocks of ``table`` that need no publishing: they are hits or published already."""
        self.num_cached_tokens = 0
        """Number of prompt tokens that came from the prefix cache at admission."""
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.num_skips = 0
        """Number of times that it was overtaken in the queue while it did not fit."""
        self.arrival_step = arrival_step
        self.admitted_step = -1
        self.first_token_step = -1
        self.last_sampled_step = -1
        """Step in which it last sampled; before the first sample, the step before its admission."""
        self.stride = MAX_WEIGHT // weight_of(request.priority)
        self.virtual_time = 0
        """Its position in the sampling order; see `lockstep.core.decode_shares`."""

    @property
    def num_output(self) -> int:
        """Number of generated tokens."""
        return self.num_known - self.num_prompt

    @property
    def prompt_left(self) -> int:
        """Number of tokens to compute in chunks; not positive once it decodes."""
        return self.num_prefill - self.num_computed

    @property
    def samples_next(self) -> bool:
        """True if the chunk that ends its prompt samples; otherwise the next token is known already."""
        return self.num_known == self.num_prefill

    def move_to(self, state: SequenceState) -> None:
        """Change the state. This is the only way to change it."""
        assert state in _TRANSITIONS[self.state], f"sequence {self.seq_id}: {self.state.name} -> {state.name}"
        self.state = state

    def segment_length(self, position: int) -> int:
        """Length of the output segment that starts at ``position``."""
        return self.forced.get(position, 1)

    def append(self, num_tokens: int, num_accepted: int = 0) -> None:
        """Add the tokens of a step. Those after the accepted drafts, which are computed already, are a segment."""
        if num_tokens - num_accepted > 1:
            self.forced[self.num_known + num_accepted] = num_tokens - num_accepted
        self.num_known += num_tokens

    def cut_to(self, num_computed: int) -> None:
        """Drop what was computed from ``num_computed`` on; it is computed again."""
        self.num_recomputed_tokens += self.num_computed - num_computed
        self.num_computed = num_computed

    def prefill_known(self) -> None:
        """Compute all tokens that are known now in chunks, answer and prompt alike."""
        self.num_prefill = self.num_known

    def view(self) -> SequenceView:
        """A copy of its public state."""
        segments = [Segment(0, self.num_prompt)]
        position = self.num_prompt
        while position < self.num_known:
            segments.append(Segment(position, self.segment_length(position)))
            position += segments[-1].length
        return SequenceView(
            self.seq_id,
            self.state,
            self.num_prompt,
            self.num_computed,
            self.num_known,
            self.num_cached_tokens,
            self.num_preemptions,
            self.num_recomputed_tokens,
            self.table,
            self.host_table,
            tuple(segments),
            self.arrival_step,
            self.admitted_step,
            self.first_token_step,
            self.others,
            self.host_others,
        )

    def finished(self, reason: FinishReason, step: int) -> FinishedSequence:
        """Final counts of a sequence that has ended. ``step``: number of the last step that had begun."""
        return FinishedSequence(
            self.seq_id,
            reason,
            self.num_prompt,
            self.num_output,
            self.num_cached_tokens,
            self.num_preemptions,
            self.num_recomputed_tokens,
            self.arrival_step,
            self.admitted_step,
            self.first_token_step,
            step,
        )


class SequenceView(NamedTuple):
    """Copy of the public state of a sequence."""

    seq_id: int
    state: SequenceState
    num_prompt_tokens: int
    num_computed: int
    num_known: int
    num_cached_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    table: tuple[int, ...]
    host_table: tuple[int, ...]
    segments: tuple[Segment, ...]
    """The prompt, then one segment per sampling, over all known positions."""
    arrival_step: int
    admitted_step: int
    first_token_step: int
    others: tuple[GroupBlocks, ...] = ()
    host_others: tuple[GroupBlocks, ...] = ()


class FinishedSequence(NamedTuple):
    """Final counts of a sequence that has ended."""

    seq_id: int
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    arrival_step: int
    admitted_step: int
    """Step of its admission; -1: it never ran."""
    first_token_step: int
    """Step of its first token; -1: it got no token."""
    finished_step: int
    """Number of the last step that had begun."""


_by_rank = attrgetter("rank")


class RunningLists:
    """Admitted, unfinished sequences in three lists that stay in rank order, so that no step has to sort."""

    def __init__(self) -> None:
        self.prefilling: list[Sequence] = []
        """Running sequences with prompt tokens to compute."""
        self.decoding: list[Sequence] = []
        """Running sequences past their prompt."""
        self.preempted: list[Sequence] = []

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def insert(self, seq: Sequence) -> None:
        """Add an admitted sequence to the list of its state."""
        insort(self._list_of(seq), seq, key=_by_rank)

    def run(self, seq: Sequence) -> None:
        """Run a waiting or preempted sequence."""
        if seq.state is SequenceState.PREEMPTED:
            _take_out(self.preempted, seq)
        seq.move_to(SequenceState.RUNNING)
        self.insert(seq)

    def preempt(self, seq: Sequence) -> None:
        """Stop a running sequence until its blocks fit again."""
        _take_out(self._list_of(seq), seq)
        seq.move_to(SequenceState.PREEMPTED)
        self.insert(seq)

    def end_prompt(self, seq: Sequence) -> None:
        """Move a sequence that has just computed the end of its prompt to the decoding list."""
        _take_out(self.prefilling, seq)
        insort(self.decoding, seq, key=_by_rank)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that ends."""
        _take_out(self._list_of(seq), seq)

    def running_behind(self, rank: tuple[int, int]) -> list[Sequence]:
        """Running sequences of a lower rank, lowest first."""
        running = sorted(self.decoding + self.prefilling, key=_by_rank, reverse=True)
        return [seq for seq in running if seq.rank > rank]

    def preempted_holders(self) -> list[Sequence]:
        """Preempted sequences that still hold device blocks, lowest rank first."""
        return [seq for seq in reversed(self.preempted) if seq.table]

    def check(self, sequences: Mapping[int, Sequence], waiting: Collection[Sequence]) -> None:
        """Assert that every unfinished sequence is in exactly one list, the one of its state."""
        places = {
            SequenceState.RUNNING: [*self.prefilling, *self.decoding],
            SequenceState.PREEMPTED: self.preempted,
            SequenceState.WAITING: waiting,
        }
        assert sum(map(len, places.values())) == len(sequences), "a sequence is lost or listed twice"
        for state, seqs in places.items():
            assert all(sequences[seq.seq_id] is seq and seq.state is state for seq in seqs), state

    def _list_of(self, seq: Sequence) -> list[Sequence]:
        if seq.state is SequenceState.PREEMPTED:
            return self.preempted
        return self.prefilling if seq.prompt_left > 0 else self.decoding


def _take_out(ordered: list[Sequence], seq: Sequence) -> None:
    index = bisect_left(ordered, seq.rank, key=_by_rank)
    assert ordered[index] is seq, f"sequence {seq.seq_id} is not in the list of its state"
    del ordered[index]
