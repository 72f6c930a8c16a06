"""Decode shares: orders the running sequences that want to sample, if a step has fewer slots than such sequences.

The method is weighted fair queueing by strides, in integers. Each sample advances the virtual time of a sequence by its
stride, which is `MAX_STRIDE` divided by the weight of its priority. The sequence with the least virtual time samples
next; among equal ones, the one that sampled longest ago, then the older one. Only steps that leave a sequence out are
counted: if all fit, nothing is decided here and nothing changes.

The clock is the least virtual time that a step left out, and never goes back. A sequence that joins (a new one, one
that computes its prompt, one that was preempted) is set to one stride after the clock, as if it had just sampled. No
sequence is more than its stride after the clock, or more than `MAX_STRIDE` before it.

So every wait has a bound. R is ``max_num_seqs``. M is the least of ``max_num_decode_seqs``, ``max_num_step_seqs`` minus
the slot that is reserved for a prompt, and the number of samples that the token budget allows. A running sequence that
keeps its blocks samples again after at most ``(2 * MAX_STRIDE + 1) * R / M`` steps, rounded up: each sequence that has
already joined samples at most ``2 * weight + 1`` times before it. Those that join later are set after the clock, and
the clock advances as soon as the sequences that were left out have sampled, which takes ``R / M`` steps. Among
sequences of one priority the bound is that of a round, ``R / M``.

The ``priority`` order takes higher priorities first, aged by the steps since a sequence last sampled. Within a priority
it takes the sequence that sampled longest ago, and among equal ones the least virtual time, at equal strides. The
``oldest`` order counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import MAX_WEIGHT
from lockstep.core.sequence import Sequence

MAX_STRIDE = MAX_WEIGHT
"""Stride of the least weight, which is 1."""

_by_share = attrgetter("virtual_time", "last_sampled_step", "seq_id")
_by_age = attrgetter("seq_id")


class DecodeShares:
    """The order in which running sequences sample, and the virtual times that it depends on."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._order = config.decode_order
        self._is_weighted = config.decode_order == "weighted"
        self.clock = 0
        """Least virtual time that a step left out."""

    def join(self, seq: Sequence) -> None:
        """Set the virtual time of a sequence that is new, computes its prompt, or resumes, as if it had just
        sampled."""
        seq.virtual_time = max(seq.virtual_time, self.clock + (seq.stride if self._is_weighted else 1))

    def in_order(self, candidates: Iterable[Sequence], step: int) -> list[Sequence]:
        """Candidates for the slots of a step in the order in which they get one; a total order."""
        if self._order == "oldest":
            return sorted(candidates, key=_by_age)
        if self._is_weighted:
            return sorted(candidates, key=_by_share)
        clock = self.clock  # earlier times are of priorities that fitted completely and were not counted since
        return sorted(
            candidates,
            key=lambda seq: (
                self._priority(seq, step),
                seq.last_sampled_step,
                max(seq.virtual_time, clock),
                seq.seq_id,
            ),
        )

    def charge(self, chosen: Iterable[Sequence], left_out: Sequence, step: int) -> None:
        """Count a step that left sequences out.

        Args:
            chosen: sequences past their prompt that sample in the step.
            left_out: the first in order of the sequences that do not sample.
        """
        if self._order == "oldest":
            return
        self.clock = clock = max(self.clock, left_out.virtual_time)
        if not self._is_weighted:  # sequences of a priority that fitted completely did not compete
            contended = self._priority(left_out, step)
            chosen = [seq for seq in chosen if self._priority(seq, step) == contended]
        least = clock - (MAX_STRIDE if self._is_weighted else 1)
        for seq in chosen:
            before = seq.virtual_time
            if before > clock:
                before = clock
            elif before < least:
                before = least
            seq.virtual_time = before + (seq.stride if self._is_weighted else 1)

    def _priority(self, seq: Sequence, step: int) -> int:
        return self._config.aged_priority(seq.request.priority, step - seq.last_sampled_step)
