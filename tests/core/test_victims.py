"""Victims lose as little as possible, exclusive blocks first."""

from __future__ import annotations

from lockstep.core.victims import choose_tails


def counts(tables: list[tuple[int, ...]], missing: int) -> list[int] | None:
    refs: dict[int, int] = {}
    for table in tables:
        for block in table:
            refs[block] = refs.get(block, 0) + 1
    return choose_tails(tables, lambda block: refs[block], missing)


def test_blocks_are_taken_from_tails_and_accumulated() -> None:
    tables: list[tuple[int, ...]] = [(1, 2), (3, 4, 5), (6,)]
    assert [counts(tables, missing) for missing in range(1, 8)] == [
        [1, 0, 0],
        [2, 0, 0],
        [2, 1, 0],
        [2, 2, 0],
        [2, 3, 0],
        [2, 3, 1],
        None,
    ]


def test_one_whose_blocks_are_all_shared_is_skipped_if_others_suffice() -> None:
    assert counts([(1, 2), (1, 2, 3), (4, 5)], 2) == [0, 1, 1]


def test_shared_blocks_are_released_when_there_is_no_other_way() -> None:
    assert counts([(1, 2), (1, 2, 3)], 2) == [2, 2]
    assert counts([(1, 2), (1, 2, 3)], 3) == [2, 3]
    assert counts([(1, 2), (1, 2, 3)], 4) is None


def test_what_somebody_else_holds_too_frees_nothing() -> None:
    assert choose_tails([(1, 2)], lambda _: 2, 1) is None
