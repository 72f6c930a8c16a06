"""Step builder: tracks what is left of a step's budgets, its rows so far, and which limits they have reached."""

from __future__ import annotations

from lockstep.core.kv import Moves
from lockstep.core.other_groups import OtherGroups
from lockstep.core.policy import SchedulerConfig, prompt_chunk
from lockstep.core.sequence import Sequence
from lockstep.core.step import Limit, StepPlan

Reached = tuple[Limit, int, int]
"""A limit, how much of it is used, and its maximum."""


BULK_PART = 4
"""Bulk prompts get one part in this many of a step's prompt tokens, and what other prompts leave."""


class StepBuilder:
    """Budgets and columns of one step. A sequence that samples or replays takes one of the ``num_width`` slots."""

    def __init__(self, config: SchedulerConfig, step: int, prefill_budget: int) -> None:
        self._config = config
        self._prefill_budget = prefill_budget
        self._chunking = config.chunking
        self._has_others = len(config.groups) > 1
        self._max_chunk = config.max_chunk_tokens if config.chunking else config.max_num_batched_tokens
        self.step = step
        self.num_tokens = config.max_num_batched_tokens
        self.num_prefill = prefill_budget
        self.num_width = config.decode_limit
        self.num_places = config.step_limit
        self.num_kept_places = 0
        """Number of slots that are reserved for a prompt."""
        self.endings: set[int] = set()
        """Ids of sequences with a slot to sample at the end of their prompt."""
        self.left_out: list[int] = []
        """Ids of running sequences that lack blocks or budget. While there are any, no new sequence is admitted."""
        self.is_budget_short = False
        """True if a sequence in the queue lacked budget."""
        self.seqs: list[Sequence] = []
        self.lengths: list[int] = []
        """Lengths of the rows. Each row starts at its sequence's number of computed positions."""
        self.drafts: list[int] = []
        """By row, the number of drafts in its length; empty: there are none."""
        self.num_prompt_tokens = 0
        self.admitted: list[int] = []
        self.resumed: list[int] = []
        self.preempted: list[int] = []
        self.victims: set[int] = set()
        """Ids of sequences that lost blocks in this step, preempted now or before. They cannot resume in the same
        step."""

    # -- sampling and replaying -------------------------------------------------------------------------------------

    def reserve_output(self, length: int) -> bool:
        """Reserve budgets for an output segment, if they suffice."""
        if self.num_width < 1 or self.num_tokens < length or self.num_places <= self.num_kept_places:
            return False
        self.num_width -= 1
        self.num_places -= 1
        self.num_tokens -= length
        return True

    def return_output(self, length: int) -> None:
        """Return what ``reserve_output`` reserved."""
        self.num_width += 1
        self.num_places += 1
        self.num_tokens += length

    def reserve_outputs(self, count: int, num_tokens: int) -> None:
        """Reserve budgets for many output segments. The caller has checked that they suffice."""
        self.num_width -= count
        self.num_places -= count
        self.num_tokens -= num_tokens

    # -- drafts -----------------------------------------------------------------------------------------------------

    def draft_room(self, seq: Sequence, length: int) -> int:
        """Number of drafts that a finished row of this length may get: none in a prompt, nor before the last known
        token."""
        if seq.prompt_left > 0 or seq.num_computed + length != seq.num_known:
            return 0
        longest = max(self._max_chunk, self._config.max_forced_tokens)
        return max(0, min(self.num_tokens, longest - length, seq.max_known - seq.num_known - 1))

    def add_drafts(self, index: int, count: int) -> None:
        """Add drafts to a row."""
        self.drafts = self.drafts or [0] * len(self.seqs)
        self.drafts[index] = count
        self.lengths[index] += count
        self.num_tokens -= count

    # -- prompts ----------------------------------------------------------------------------------------------------

    @property
    def chunk_room(self) -> int:
        """Number of tokens that a prompt can get now."""
        return min(self.num_tokens, self.num_prefill, self._max_chunk)

    def keep_back(self) -> int:
        """Reserve the part of bulk prompts. Returns its tokens, for `give_back`."""
        room = min(self.num_tokens, self.num_prefill)
        if room < 2:
            return 0  # too few for both parts
        kept = self.num_prefill - room + max(room // BULK_PART, 1)
        self.give_back(-kept)
        return kept

    def give_back(self, num_tokens: int) -> None:
        """Release the part of bulk prompts, and what other prompts left."""
        self.num_prefill += num_tokens
        self._prefill_budget += num_tokens

    def reserve_ending(self, seq: Sequence) -> bool:
        """Reserve a slot for a prompt that may end, and sample, in this step."""
        if self.num_width < 1 or self.num_places < 1:
            return False
        self.num_width -= 1
        self.num_places -= 1
        self.num_kept_places = 0
        self.endings.add(seq.seq_id)
        return True

    def return_ending(self, seq: Sequence) -> None:
        """Return what ``reserve_ending`` reserved, if anything."""
        if seq.seq_id in self.endings:
            self.endings.remove(seq.seq_id)
            self.num_width += 1
            self.num_places += 1

    def chunk_length(self, seq: Sequence, start: int) -> int:
        """Length of a prompt's next chunk, as far as budgets last; 0: there is none."""
        return self._chunk_length(seq, start, self.num_width > 0 or not seq.samples_next)

    def lacks_only_a_turn(self, seq: Sequence, start: int) -> bool:
        """True if a prompt lacks only a slot to sample, which it will get later."""
        return self.num_width < 1 and self._chunk_length(seq, start, True) > 0

    def _chunk_length(self, seq: Sequence, start: int, may_end: bool) -> int:
        left = seq.num_prefill - start
        room = self.chunk_room if self.num_places > 0 else 0
        if seq.stops:
            room = min(room, next((stop - start for stop in seq.stops if stop > start), room))
        if self._chunking:
            return prompt_chunk(left, room, may_end)
        return left if may_end and room >= left else 0

    def add_prompt(self, seq: Sequence, length: int) -> None:
        """Add a row for the next chunk of a prompt."""
        self.num_width -= seq.num_computed + length == seq.num_known
        self.num_places -= 1
        self.num_tokens -= length
        self.num_prefill -= length
        self.num_prompt_tokens += length
        self.seqs.append(seq)
        self.lengths.append(length)

    # -- explaining ---------------------------------------------------------------------------------------------------

    def limits_on_output(self, length: int) -> list[Reached]:
        """Limits that have no room for an output segment."""
        return self._reached(
            (Limit.WIDTH, self.num_width < 1),
            (Limit.PLACES, self.num_places <= self.num_kept_places),
            (Limit.TOKENS, self.num_tokens < length),
        )

    def limits_on_prompt(self, seq: Sequence, start: int) -> list[Reached]:
        """Limits that shorten a prompt's next chunk. Their use is reported as if the chunk were taken."""
        left, room = seq.num_prefill - start, self.chunk_room
        reached = self._reached(
            (Limit.PLACES, self.num_places < 1),
            (Limit.TOKENS, self.num_tokens == room < left),
            (
                Limit.PREFILL,
                self.num_prefill == room < left and self._prefill_budget < self._config.max_num_batched_tokens,
            ),
            (Limit.CHUNK, self._max_chunk == room < left and self._chunking),
            (Limit.WIDTH, self.num_width < 1 and room >= left and seq.samples_next),
        )
        length = self.chunk_length(seq, start)
        taken = {Limit.TOKENS, Limit.PREFILL}
        return [(limit, used + length * (limit in taken), most) for limit, used, most in reached]

    def spent(self) -> list[Reached]:
        """Limits that leave nothing for any prompt."""
        has_own = self._prefill_budget < self._config.max_num_batched_tokens
        return self._reached(
            (Limit.PLACES, self.num_places < 1),
            (Limit.TOKENS, self.num_tokens < 1),
            (Limit.PREFILL, self.num_prefill < 1 and has_own),
        )

    def _reached(self, *limits: tuple[Limit, bool]) -> list[Reached]:
        config = self._config
        left_of = {
            Limit.WIDTH: (self.num_width, config.decode_limit),
            Limit.PLACES: (self.num_places, config.step_limit),
            Limit.TOKENS: (self.num_tokens, config.max_num_batched_tokens),
            Limit.PREFILL: (self.num_prefill, self._prefill_budget),
            Limit.CHUNK: (self._max_chunk, self._max_chunk),
        }
        reached = [(limit, *left_of[limit]) for limit, is_reached in limits if is_reached]
        return [(limit, most - left, most) for limit, left, most in reached]

    # -- the whole --------------------------------------------------------------------------------------------------

    def is_settled(self, seq: Sequence) -> bool:
        """True if a sequence has a row of its prompt in the plan, or was admitted or resumed by it. Such a sequence
        loses no blocks in the same step."""
        is_new = seq.seq_id in self.admitted or seq.seq_id in self.resumed
        return is_new or (seq.prompt_left > 0 and seq in self.seqs)

    def remove_row(self, seq: Sequence) -> None:
        """Remove a victim from the plan, if it has a row, and return its budgets.

        Only output rows are written while victims are taken.
        """
        if seq in self.seqs:
            index = self.seqs.index(seq)
            self.return_output(self.lengths[index])
            del self.seqs[index], self.lengths[index]
        self.return_ending(seq)

    def plan(self, moves: Moves) -> StepPlan:
        """Create the plan."""
        seqs, lengths = self.seqs, self.lengths
        return StepPlan(
            self.step,
            moves.evicted,
            moves.swap_out,
            moves.swap_in,
            (),
            tuple([seq.seq_id for seq in seqs]),
            tuple([seq.num_computed for seq in seqs]),
            tuple(lengths),
            tuple([seq.table for seq in seqs]),
            tuple([seq.num_computed + length >= seq.num_known for seq, length in zip(seqs, lengths, strict=True)]),
            tuple(self.admitted),
            tuple(self.resumed),
            tuple(self.preempted),
            self.num_prompt_tokens,
            tuple([OtherGroups.tables(seq) for seq in seqs]) if self._has_others else (),
            tuple(self.drafts),
        )
