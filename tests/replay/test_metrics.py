"""Goals on the command line."""

from __future__ import annotations

import pytest

from lockstep.errors import UsageError
from lockstep.replay.metrics import parse_goals

NAMES = ("ttft", "tpot")


def test_goals_are_read_with_commas_and_with_spaces() -> None:
    expected = {"ttft": 500.0, "tpot": 50.0}
    assert parse_goals("ttft:500,tpot:50", "--slo", NAMES) == expected
    assert parse_goals("ttft:500 tpot:50", "--slo", NAMES) == expected
    assert parse_goals("", "--slo", NAMES) == {}


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "itl:5", "ttft:-1", "ttft:nan", "ttft:inf", "ttft:1:2"])
def test_a_wrong_goal_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"--slo has .* write ttft:500,tpot:50 \(milliseconds of ttft, tpot\)"):
        parse_goals(text, "--slo", NAMES)
