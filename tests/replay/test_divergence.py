"""The first difference of two plans is the first in the order of deciding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.core.request import FinishReason
from lockstep.core.step import Finish, StepEvents, StepPlan
from lockstep.replay.divergence import Change, Difference, StepDecision, difference

PLAN = StepPlan(
    7,
    evicted=(),
    swap_out=(),
    swap_in=(),
    copies=(),
    seq_ids=(1, 2, 3),
    starts=(4, 5, 0),
    lengths=(1, 1, 6),
    tables=((1,), (2,), (3,)),
    samples=(True, True, True),
    admitted=(3,),
)
EVENTS = StepEvents(7, (Finish(1, FinishReason.LENGTH),), (1, 1, 1))


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({}, None),
        ({"preempted": (9,), "admitted": ()}, Difference(Change.VICTIM, (), (9,))),
        ({"swap_out": ((4, 0),)}, Difference(Change.MOVE, (), ())),
        ({"seq_ids": (1, 4, 3)}, Difference(Change.TURN, (2,), (4,))),
        ({"seq_ids": (2, 1, 3)}, Difference(Change.TURN, (1,), (2,))),
        ({"lengths": (1, 2, 6)}, Difference(Change.CHUNK, (2,), (2,))),
        ({"resumed": (8,)}, Difference(Change.RESUMPTION, (), (8,))),
        ({"seq_ids": (1, 2, 4), "admitted": (4,)}, Difference(Change.ADMISSION, (3,), (4,))),
        ({"starts": (4, 5, 2), "lengths": (1, 1, 4)}, Difference(Change.CACHE, (3,), (3,))),
        ({"lengths": (1, 1, 4)}, Difference(Change.CHUNK, (3,), (3,))),
        ({"tables": ((1,), (9,), (3,))}, Difference(Change.BLOCK, (2,), (2,))),
        ({"evicted": (5,)}, Difference(Change.BLOCK, (), ())),
    ],
)
def test_the_first_difference_is_the_first_in_the_order_of_deciding(
    other: dict[str, object], found: Difference | None
) -> None:
    plan = replace(PLAN, **other)  # type: ignore[arg-type]  # fields by name, of as many types

    assert difference(StepDecision(PLAN, EVENTS), StepDecision(plan, EVENTS)) == found


@pytest.mark.parametrize(
    ("finished", "found"),
    [
        ((), Difference(Change.END, (1,), ())),
        ((Finish(1, FinishReason.STOP),), Difference(Change.END, (1,), (1,))),
        ((*EVENTS.finished, Finish(2, FinishReason.LENGTH)), Difference(Change.END, (), (2,))),
    ],
)
def test_equal_plans_may_end_different_sequences(finished: tuple[Finish, ...], found: Difference) -> None:
    events = StepEvents(7, finished, EVENTS.num_tokens)

    assert difference(StepDecision(PLAN, EVENTS), StepDecision(PLAN, events)) == found


def test_refusals_and_idle_steps_precede_other_differences() -> None:
    idle = StepDecision(None, None)

    assert difference(idle, idle) is None
    assert difference(StepDecision(PLAN, EVENTS), idle) == Difference(Change.IDLE, (1, 2, 3), ())
    assert difference(StepDecision(PLAN, EVENTS, ("r",)), StepDecision(PLAN, EVENTS)) == Difference(
        Change.REFUSAL, (0,), ()
    )
