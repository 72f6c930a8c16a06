"""Who runs and who was preempted: three lists that stay in rank order, so that no step has to sort."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from lockstep.core.sequence import Sequence, SequenceState

by_rank = attrgetter("rank")


class Roster:
    """Admitted, unfinished sequences, best class first, then oldest."""

    def __init__(self) -> None:
        self.prefilling: list[Sequence] = []
        """Running, with prompt tokens to compute."""
        self.decoding: list[Sequence] = []
        """Running, past their prompt."""
        self.preempted: list[Sequence] = []

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def run(self, seq: Sequence) -> None:
        """Let a waiting or preempted sequence run."""
        if seq.state is SequenceState.PREEMPTED:
            _take_out(self.preempted, seq)
        seq.move_to(SequenceState.RUNNING)
        insort(self._running_list(seq), seq, key=by_rank)

    def preempt(self, seq: Sequence) -> None:
        """Stop a running sequence until its blocks fit again."""
        _take_out(self._running_list(seq), seq)
        seq.move_to(SequenceState.PREEMPTED)
        insort(self.preempted, seq, key=by_rank)

    def end_prompt(self, seq: Sequence) -> None:
        """The sequence has just computed the last of its prompt."""
        _take_out(self.prefilling, seq)
        insort(self.decoding, seq, key=by_rank)

    def remove(self, seq: Sequence) -> None:
        """The sequence ends."""
        _take_out(self.preempted if seq.state is SequenceState.PREEMPTED else self._running_list(seq), seq)

    def running_behind(self, rank: tuple[int, int]) -> list[Sequence]:
        """Running sequences of a worse rank, worst first."""
        running = sorted(self.decoding + self.prefilling, key=by_rank, reverse=True)
        return [seq for seq in running if seq.rank > rank]

    def preempted_holders(self) -> list[Sequence]:
        """Preempted sequences that still hold device blocks, worst first."""
        return [seq for seq in reversed(self.preempted) if seq.table]

    def _running_list(self, seq: Sequence) -> list[Sequence]:
        return self.prefilling if seq.prompt_left > 0 else self.decoding


def _take_out(ordered: list[Sequence], seq: Sequence) -> None:
    index = bisect_left(ordered, seq.rank, key=by_rank)
    assert ordered[index] is seq, f"sequence {seq.seq_id} is not where its state says"
    del ordered[index]
