"""Bisection tells which fields make a metric, against metrics whose making is known."""

from __future__ import annotations

from lockstep.core.policy import SchedulerConfig
from lockstep.replay.causes import bisect_fields
from tests.replay.workloads import config

A = config(max_num_seqs=8, max_num_batched_tokens=512, num_blocks=100, max_skips=64)
B = config(max_num_seqs=2, max_num_batched_tokens=256, num_blocks=50, max_skips=3)


def test_a_single_field_is_found_as_the_cause_with_its_effect_alone_and_left_out() -> None:
    found = bisect_fields(A, B, lambda each: 100.0 / each.max_num_seqs + each.max_skips / 1000)

    assert found.cause.alone == ("max_num_seqs",)
    effect = next(each for each in found.effects if each.name == "max_num_seqs")
    assert (effect.value_a, effect.value_b) == (8, 2)
    assert (effect.alone, effect.all_but) == (50.064, 12.503)
    assert [each.name for each in found.effects] == [
        "max_num_seqs",
        "max_skips",
        "num_blocks",
        "max_num_batched_tokens",
    ]


def test_fields_that_make_it_only_together_are_found_by_minimising() -> None:
    def metric(each: SchedulerConfig) -> float:
        return 1.0 if each.max_num_seqs == 2 and each.num_blocks == 50 else 0.0

    found = bisect_fields(A, B, metric)

    assert found.cause.alone == ()
    assert found.cause.together == ("max_num_seqs", "num_blocks")


def test_a_metric_that_is_the_same_needs_no_explanation() -> None:
    found = bisect_fields(A, B, lambda each: 7.0)

    assert (found.cause.alone, found.cause.together) == ((), ())
    assert found.share(7.0) is None


def test_a_field_that_makes_a_config_invalid_has_no_effect_alone() -> None:
    """A budget of 20 tokens is too small for the 64 sequences of the other side."""
    a, b = config(max_num_seqs=64), config(max_num_seqs=2, max_num_batched_tokens=20)

    found = bisect_fields(a, b, lambda each: float(each.max_num_batched_tokens))

    effect = next(each for each in found.effects if each.name == "max_num_batched_tokens")
    assert effect.alone is None
    assert found.cause.together == ("max_num_seqs", "max_num_batched_tokens")


def test_no_config_is_replayed_twice() -> None:
    asked: list[SchedulerConfig] = []

    def metric(each: SchedulerConfig) -> float:
        asked.append(each)
        return float(each.max_num_seqs == 2 and each.num_blocks == 50)

    found = bisect_fields(A, B, metric)

    assert len(asked) == len(set(asked)) == found.num_replays
