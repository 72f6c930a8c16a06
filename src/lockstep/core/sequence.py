"""Sequences: how far each is computed and in which segments, which blocks it holds; lists of those admitted."""

from __future__ import annotations

from bisect import bisect_left, insort
from enum import Enum
from operator import attrgetter
from typing import NamedTuple

from lockstep.core.request import MAX_WEIGHT, FinishReason, Request, weight_of


class SequenceState(Enum):
    """Stage of a sequence's life."""

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
    """A run of positions that is computed in one indivisible chunk, except the prompt, which chunking may split, and
    what is computed again as a prompt is."""

    start: int
    length: int


class Sequence:
    """One sequence. The scheduler owns it and is the only one to change it.

    ``num_computed`` positions have KV; ``num_known`` tokens are known. A step lets the one catch up with the other.
    """

    __slots__ = (
        "admitted_step",
        "arrival_step",
        "first_token_step",
        "forced",
        "host_table",
        "last_sampled_step",
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
        "rank",
        "request",
        "seq_id",
        "state",
        "stride",
        "table",
        "virtual_time",
    )

    def __init__(self, seq_id: int, request: Request, max_output_tokens: int, arrival_step: int) -> None:
        self.seq_id = seq_id
        self.request = request
        self.rank = (request.priority, seq_id)
        """Best class first, then oldest: a total order."""
        self.state = SequenceState.WAITING
        self.num_prompt = request.num_prompt_tokens
        self.num_prefill = request.num_prompt_tokens
        """Positions that are computed in chunks: those of the prompt and, of an answer that lost its KV, those that
        were known then."""
        self.num_computed = 0
        self.num_known = request.num_prompt_tokens
        self.max_known = request.num_prompt_tokens + max_output_tokens
        """Tokens at which it ends with LENGTH."""
        self.forced: dict[int, int] = {}
        """First position to length, of the output segments that are longer than one token, ascending."""
        self.table: tuple[int, ...] = ()
        """Device blocks, from position 0 on."""
        self.host_table: tuple[int, ...] = ()
        """Host blocks that continue ``table``; only while PREEMPTED."""
        self.num_published = 0
        """Leading blocks of ``table`` that need no publishing: hits, or published already."""
        self.num_cached_tokens = 0
        """Prompt tokens that the prefix cache gave at admission."""
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.num_skips = 0
        """Number of times that it was overtaken in the queue while it did not fit."""
        self.arrival_step = arrival_step
        self.admitted_step = -1
        self.first_token_step = -1
        self.last_sampled_step = -1
        """Step in which it last sampled; until it does, the step before it was admitted."""
        self.stride = MAX_WEIGHT // weight_of(request.priority)
        self.virtual_time = 0
        """Its position in the order of sampling; see `lockstep.core.decode_shares`."""

    @property
    def num_output(self) -> int:
        """Tokens that it generated."""
        return self.num_known - self.num_prompt

    @property
    def prompt_left(self) -> int:
        """Tokens to compute in chunks; not positive once it decodes."""
        return self.num_prefill - self.num_computed

    @property
    def samples_next(self) -> bool:
        """True if the chunk that ends its prompt samples; else what follows it is known already."""
        return self.num_known == self.num_prefill

    def move_to(self, state: SequenceState) -> None:
        """The only way to change the state."""
        assert state in _TRANSITIONS[self.state], f"sequence {self.seq_id}: {self.state.name} -> {state.name}"
        self.state = state

    def segment_length(self, position: int) -> int:
        """Length of the output segment that starts at ``position``."""
        return self.forced.get(position, 1)

    def append(self, num_tokens: int) -> None:
        """Make known what one sampling brought: a segment of ``num_tokens``."""
        if num_tokens > 1:
            self.forced[self.num_known] = num_tokens
        self.num_known += num_tokens

    def cut_to(self, num_computed: int) -> None:
        """Forget what was computed from ``num_computed`` on; it is computed again."""
        self.num_recomputed_tokens += self.num_computed - num_computed
        self.num_computed = num_computed

    def prefill_known(self) -> None:
        """Compute all that is known now in chunks, the answer like the prompt."""
        self.num_prefill = self.num_known

    def view(self) -> SequenceView:
        """A copy of what others may know."""
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
        )

    def finished(self, reason: FinishReason, step: int) -> FinishedSequence:
        """Counts that remain of it once it has ended; ``step``: the one that had last begun."""
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
    """Copy of what others may know of a sequence."""

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
    """The prompt, then one per sampling, over all known positions."""
    arrival_step: int
    admitted_step: int
    first_token_step: int


class FinishedSequence(NamedTuple):
    """Counts of a sequence that ended."""

    seq_id: int
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    arrival_step: int
    admitted_step: int
    """-1: it never ran."""
    first_token_step: int
    """-1: it got no token."""
    finished_step: int
    """Number of the step that had last begun."""


_by_rank = attrgetter("rank")


class RunningLists:
    """Admitted, unfinished sequences: three lists that stay in rank order, so that no step has to sort."""

    def __init__(self) -> None:
        self.prefilling: list[Sequence] = []
        """Running, with prompt tokens to compute."""
        self.decoding: list[Sequence] = []
        """Running, past their prompt."""
        self.preempted: list[Sequence] = []

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def insert(self, seq: Sequence) -> None:
        """List an admitted sequence in the list of its state."""
        insort(self._list_of(seq), seq, key=_by_rank)

    def run(self, seq: Sequence) -> None:
        """Let a waiting or preempted sequence run."""
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
        """The sequence has just computed the last of its prompt."""
        _take_out(self.prefilling, seq)
        insort(self.decoding, seq, key=_by_rank)

    def remove(self, seq: Sequence) -> None:
        """The sequence ends."""
        _take_out(self._list_of(seq), seq)

    def running_behind(self, rank: tuple[int, int]) -> list[Sequence]:
        """Running sequences of a worse rank, worst first."""
        running = sorted(self.decoding + self.prefilling, key=_by_rank, reverse=True)
        return [seq for seq in running if seq.rank > rank]

    def preempted_holders(self) -> list[Sequence]:
        """Preempted sequences that still hold device blocks, worst first."""
        return [seq for seq in reversed(self.preempted) if seq.table]

    def _list_of(self, seq: Sequence) -> list[Sequence]:
        if seq.state is SequenceState.PREEMPTED:
            return self.preempted
        return self.prefilling if seq.prompt_left > 0 else self.decoding


def _take_out(ordered: list[Sequence], seq: Sequence) -> None:
    index = bisect_left(ordered, seq.rank, key=_by_rank)
    assert ordered[index] is seq, f"sequence {seq.seq_id} is not in the list of its state"
    del ordered[index]
