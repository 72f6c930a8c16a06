"""Blocks of sequences, and the moves of a step, one rule at a time."""

from __future__ import annotations

from typing import Any

from lockstep.core.kv import NO_HITS, KVCache
from lockstep.core.sequence import Sequence
from lockstep.core.victims import choose_tails
from tests.core.drive import config, prompt


def kv_of(**limits: Any) -> KVCache:
    return KVCache(config(**limits))


def holder(kv: KVCache, seq_id: int, tokens: int, computed: int | None = None) -> Sequence:
    """A sequence with blocks for its prompt, computed completely or in part."""
    seq = Sequence(seq_id, prompt([seq_id] * tokens), 8, 0)
    assert kv.hold(seq, NO_HITS, tokens)
    seq.num_computed = tokens if computed is None else computed
    return seq


def test_a_tail_moves_to_the_host_and_back_to_other_blocks() -> None:
    kv = kv_of(num_blocks=4, num_host_blocks=3)
    seq = holder(kv, 1, 16)
    kv.take_tail(seq, 2)
    assert (seq.table, seq.host_table, seq.num_computed) == ((1, 2), (0, 1), 16)
    assert kv.take_moves() == ((), ((3, 0), (4, 1)), ())
    kv.settle()
    assert kv.hold(seq, NO_HITS, 16)
    assert (seq.table, seq.host_table) == ((1, 2, 3, 4), ())
    assert kv.take_moves() == ((), (), ((0, 3), (1, 4)))
    assert kv.resumed == [seq]
    assert kv.host.num_free == 1, "the plan still reads them"
    kv.settle()
    assert kv.host.num_free == 3
    kv.check([seq])


def test_a_host_block_that_a_plan_reads_is_not_written_by_the_same_plan() -> None:
    """One sequence resumes, and in the same step another loses blocks while the host is full except for those of the
    first."""
    kv = kv_of(num_blocks=6, num_host_blocks=2)
    back, robbed = holder(kv, 1, 8), holder(kv, 2, 16)
    kv.take_tail(back, 2)
    kv.settle()
    kv.take_moves()
    assert kv.hold(back, NO_HITS, 8)
    kv.take_tail(robbed, 1)
    moves = kv.take_moves()
    assert [host for host, _ in moves.swap_in] == [0, 1]
    assert moves.swap_out == ()
    assert robbed.num_computed == 12, "there was no room: recomputed"


def test_blocks_dropped_in_the_same_step_are_not_copied() -> None:
    kv = kv_of(num_blocks=4, num_host_blocks=1)
    seq = holder(kv, 1, 16)
    kv.take_tail(seq, 1)
    kv.take_tail(seq, 1)
    assert (seq.table, seq.host_table, seq.num_computed) == ((1, 2), (0,), 12)
    assert kv.take_moves().swap_out == ((3, 0),)
    kv.take_tail(seq, 2)
    kv.release(seq)
    assert kv.take_moves().swap_out == ()
    kv.check([])


def test_empty_blocks_are_not_moved() -> None:
    kv = kv_of(num_blocks=4, num_host_blocks=4)
    seq = holder(kv, 1, 16, computed=6)
    kv.take_tail(seq, 1)
    assert (seq.table, seq.host_table, seq.num_computed) == ((1, 2), (), 6)
    assert kv.take_moves().swap_out == ()


def test_hits_start_only_at_block_borders() -> None:
    """A sequence that stopped inside a block computes from there, independent of cached blocks."""
    kv = kv_of(num_blocks=20)
    first, second = holder(kv, 1, 16), holder(kv, 1, 16, computed=6)
    kv.publish(first, 16)
    kv.fail([second])
    assert kv.hits(second) == NO_HITS
    second.num_computed = 8
    assert kv.hits(second).blocks == (3,)


def test_shared_blocks_stay_in_place_and_later_ones_are_dropped() -> None:
    kv = kv_of(num_blocks=9, num_host_blocks=9)
    first = holder(kv, 1, 12)
    kv.publish(first, 12)
    second = Sequence(2, prompt([1] * 15), 8, 0)
    assert kv.hold(second, kv.hits(second), 15)
    second.num_computed = 15
    kv.take_tail(second, 2)
    assert (second.table, second.host_table, second.num_computed) == ((1, 2), (), 8)
    assert kv.take_moves().swap_out == ()
    kv.check([first, second])


def test_preemption_by_recompute_does_not_use_the_host() -> None:
    kv = kv_of(num_blocks=4, num_host_blocks=9, preemption="recompute")
    seq = holder(kv, 1, 16)
    kv.take_tail(seq, 1)
    assert (seq.table, seq.host_table, seq.num_computed, seq.num_recomputed_tokens) == ((1, 2, 3), (), 12, 4)


# -- whose blocks are taken: as little as possible, exclusive ones first ---------------------------------------------


def tails(tables: list[tuple[int, ...]], missing: int) -> list[int] | None:
    refs: dict[int, int] = {}
    for table in tables:
        for block in table:
            refs[block] = refs.get(block, 0) + 1
    return choose_tails(tables, lambda block: refs[block], missing)


def test_blocks_are_taken_from_tails_and_accumulated() -> None:
    tables: list[tuple[int, ...]] = [(1, 2), (3, 4, 5), (6,)]
    assert [tails(tables, missing) for missing in range(1, 8)] == [
        [1, 0, 0],
        [2, 0, 0],
        [2, 1, 0],
        [2, 2, 0],
        [2, 3, 0],
        [2, 3, 1],
        None,
    ]


def test_a_victim_with_only_shared_blocks_is_skipped_if_others_suffice() -> None:
    assert tails([(1, 2), (1, 2, 3), (4, 5)], 2) == [0, 1, 1]


def test_shared_blocks_are_released_if_no_others_suffice() -> None:
    assert tails([(1, 2), (1, 2, 3)], 2) == [2, 2]
    assert tails([(1, 2), (1, 2, 3)], 3) == [2, 3]
    assert tails([(1, 2), (1, 2, 3)], 4) is None


def test_tails_shared_with_another_sequence_free_nothing() -> None:
    assert choose_tails([(1, 2)], lambda _: 2, 1) is None
