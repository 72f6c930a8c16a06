"""Whose step is next."""

from __future__ import annotations

from lockstep.worker.turns import Turns

ALL = ("a", "b", "c")


def test_everybody_with_work_steps_in_turn() -> None:
    turns = Turns()
    assert [turns.choose(ALL, ALL) for _ in range(7)] == ["a", "b", "c", "a", "b", "c", "a"]


def test_who_has_no_work_is_passed_over_and_loses_nothing() -> None:
    turns = Turns()
    assert turns.choose(ALL, ("b",)) == "b"
    assert turns.choose(ALL, ()) is None
    assert turns.choose(ALL, ALL) == "c"


def test_who_was_unloaded_is_forgotten() -> None:
    turns = Turns()
    assert turns.choose(ALL, ALL) == "a"
    assert turns.choose(("b", "c"), ("b", "c")) == "b"
