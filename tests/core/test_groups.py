"""What a KV group keeps of a sequence, one rule at a time."""

from __future__ import annotations

import pytest

from lockstep.core.groups import (
    ONE_GROUP,
    KVGroup,
    StateBlocks,
    WindowBlocks,
    content_key,
    contents_of_chain,
    contents_to_continue,
    no_blocks,
    restored_blocks,
    saved_blocks,
    snapshot_positions,
)
from tests.core.drive import config

WINDOW = KVGroup(window=6)
STATE = KVGroup(3, is_state=True, snapshot_interval=8)


@pytest.mark.parametrize(("position", "column"), [(0, 0), (5, 0), (8, 0), (9, 1), (12, 1), (13, 2)])
def test_a_token_sees_the_columns_of_its_window(position: int, column: int) -> None:
    """Blocks of 4 and a window of 6: the token at 9 sees positions 4 to 9."""
    assert WINDOW.first_column(position, 4) == column
    assert KVGroup().first_column(position, 4) == 0


def test_held_blocks_are_listed_once() -> None:
    assert WindowBlocks(2, (7, 8)).held == (7, 8)
    assert StateBlocks((1, 2), (3, 4), (5, 6)).held == (1, 2, 3, 4, 5, 6)
    assert StateBlocks((1, 2), (3, 4), (1, 2)).held == (1, 2, 3, 4)


def test_blocks_are_saved_as_plain_values() -> None:
    groups = (KVGroup(), WINDOW, STATE)
    assert no_blocks(groups) == (WindowBlocks(), StateBlocks())
    own = (WindowBlocks(2, (7, 8), 3), StateBlocks((1, 2, 3), (), (4, 5, 6), 12))
    saved = saved_blocks(own)
    assert saved == ((2, (7, 8), 3), ((1, 2, 3), (), (4, 5, 6), 12))
    assert all(type(values) is tuple for values in saved)
    assert restored_blocks(groups, saved) == own
    assert restored_blocks(ONE_GROUP, ()) == ()


def test_the_key_of_the_first_group_is_the_hash() -> None:
    assert [content_key(b"h", group) for group in (0, 1)] == [b"h", (b"h", 1)]


def test_a_sequence_continues_with_a_state_and_the_columns_of_its_window() -> None:
    groups = (KVGroup(), WINDOW, STATE)
    assert list(contents_to_continue(groups, 3, 4)) == [(2, range(2, 3)), (1, range(1, 3))]
    assert list(contents_to_continue(ONE_GROUP, 3, 4)) == []


def test_the_contents_of_a_chain_are_listed_once() -> None:
    """The windows of the borders at 8 and 12 have a column in common."""
    groups, hashes = (KVGroup(), WINDOW, STATE), (b"0", b"1", b"2", b"3")
    expected = [(each, 0) for each in hashes]
    assert contents_of_chain(groups, hashes, (), 4) == expected
    expected += [(b"1", 2), (b"0", 1), (b"1", 1), (b"2", 2), (b"2", 1)]
    assert contents_of_chain(groups, hashes, (2, 3), 4) == expected


@pytest.mark.parametrize(
    ("chosen", "num_matched", "num_computed", "num_prompt", "positions"),
    [
        ((), 0, 0, 40, (16, 32)),
        ((), 0, 0, 32, (16,)),
        ((), 0, 16, 40, (32,)),
        ((), 20, 0, 40, (20, 32)),
        ((), 28, 0, 40, (16, 28, 32)),
        ((24,), 0, 0, 40, (24, 32)),
        ((24, 36), 8, 0, 40, (8, 24, 36)),
        ((24, 40, 44), 0, 24, 40, (32,)),
        ((24,), 24, 24, 25, ()),
    ],
)
def test_snapshots_are_chosen_matched_or_regular(
    chosen: tuple[int, ...], num_matched: int, num_computed: int, num_prompt: int, positions: tuple[int, ...]
) -> None:
    """With an interval of 16, none is made up to 8 positions before another kind, at the end or where it is known."""
    assert snapshot_positions(chosen, 16, num_matched, num_computed, num_prompt) == positions


def test_a_sequence_holds_at_most_its_window_its_chunk_and_two_states() -> None:
    limits = config(groups=(KVGroup(), KVGroup(2, window=6), STATE), max_chunk_tokens=8, max_forced_tokens=2)
    assert limits.other_blocks(1) == 2 + 6
    assert limits.other_blocks(12) == 6 + 6
    assert limits.other_blocks(1000) == (4 + 2) * 2 + 6
    whole = config(groups=limits.groups, chunking=False, max_num_batched_tokens=80)
    assert whole.other_blocks(1000) == (22 + 2) * 2 + 6


@pytest.mark.parametrize("num_blocks", [1, 8, 9, 11, 12, 30, 31])
def test_the_longest_sequence_fills_the_pool(num_blocks: int) -> None:
    limits = config(groups=(KVGroup(), KVGroup(2, window=6), STATE), max_chunk_tokens=8, num_blocks=num_blocks)
    most = limits.most_positions()
    assert most == 0 or limits.blocks_for(most) + limits.other_blocks(most) <= num_blocks
    assert limits.blocks_for(most + 1) + limits.other_blocks(most + 1) > num_blocks
    assert limits.positions_in(num_blocks + 4) - most >= limits.block_size * (num_blocks > 8)


def test_one_group_has_a_block_for_each_block_of_positions() -> None:
    limits = config(num_blocks=7)
    assert (limits.most_positions(), limits.positions_in(3), limits.positions_in(0)) == (28, 12, 0)
