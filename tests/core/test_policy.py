"""Invalid limits are refused, and the pure rules hold for every input."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.core.policy import SchedulerConfig, output_limit, prefill_budget, prompt_chunk
from lockstep.core.request import Request
from lockstep.errors import ConfigError, InvalidParameterError, PromptTooLongError
from lockstep.option_fields import option_types
from tests.core.drive import config


def test_defaults_are_the_documented_ones() -> None:
    ours = SchedulerConfig(block_size=32, num_blocks=100, max_model_len=2048)
    assert (ours.max_num_seqs, ours.max_num_batched_tokens, ours.max_chunk_tokens, ours.max_forced_tokens) == (
        64,
        512,
        256,
        16,
    )
    assert (ours.step_limit, ours.decode_limit, ours.prefill_limit) == (64, 64, 512)
    assert (ours.admission, ours.order, ours.decode_order, ours.prefill_share, ours.preemption) == (
        "optimistic",
        "fcfs",
        "weighted",
        "fixed",
        "swap",
    )
    assert (ours.chunking, ours.max_skips, ours.priority_aging_steps, ours.max_finished) == (True, 64, 0, 1024)


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_step_seqs": 0}, "max_num_step_seqs is 0"),
        ({"max_num_decode_seqs": 0}, "max_num_decode_seqs is 0"),
        ({"num_host_blocks": -1}, "num_host_blocks is -1"),
        ({"max_skips": -1}, "max_skips is -1"),
        ({"priority_aging_steps": -1}, "priority_aging_steps is -1"),
        ({"max_chunk_tokens": 0}, "max_chunk_tokens is 0"),
        ({"max_num_prefill_tokens": 0}, "max_num_prefill_tokens is 0"),
        ({"max_num_batched_tokens": 78}, "at least 79"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9, "max_forced_tokens": 1}, "at least 9"),
        ({"order": "lifo"}, "order is 'lifo'; it must be fcfs, priority or fair"),
        ({"decode_order": "x"}, "decode_order is 'x'; it must be weighted, priority or oldest"),
        ({"admission": "x"}, "it must be optimistic or reserve"),
        ({"prefill_share": "x"}, "it must be fixed or adaptive"),
        ({"preemption": "x"}, "it must be swap or recompute"),
        ({"prefill_share": "adaptive", "chunking": False}, "chunking"),
    ],
)
def test_invalid_limits_are_refused_at_construction(limits: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config(**limits)


def test_the_smallest_token_budgets_are_accepted() -> None:
    config(max_num_batched_tokens=79)
    config(max_num_batched_tokens=11, max_num_seqs=9, max_forced_tokens=1)


LEAST = {
    name: int(each.range.low) for name, each in option_types(SchedulerConfig).items() if each.range.low is not None
}


@pytest.mark.parametrize("name", LEAST)
def test_the_minimum_of_a_limit_is_accepted_and_one_less_is_not(name: str) -> None:
    least = LEAST[name]
    small = {"max_num_seqs": 1, "max_forced_tokens": 1, "max_num_batched_tokens": 3}
    config(**{**small, name: least})
    with pytest.raises(ConfigError, match=f"{name} is {least - 1}"):
        config(**{**small, name: least - 1})


def test_a_chunk_uses_the_available_room() -> None:
    for remaining in range(1, 40):
        for room in range(45):
            assert prompt_chunk(remaining, room, True) == min(remaining, room)
            assert prompt_chunk(remaining, room, False) == min(remaining - 1, room), "what samples waits its turn"


def test_a_cache_hit_leaves_a_token_to_compute() -> None:
    assert [config().usable_blocks(length) for length in range(1, 11)] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_adaptive_share_of_prompts() -> None:
    ours = config(prefill_share="adaptive", max_num_batched_tokens=100, max_num_prefill_tokens=60)
    assert [prefill_budget(ours, waiting, 9) for waiting in (0, 1, 9, 1000)] == [60, 10, 50, 60]
    assert prefill_budget(ours, 1, 1000) == 1
    fixed = config(max_num_batched_tokens=100, max_num_prefill_tokens=60)
    assert prefill_budget(fixed, 1, 1000) == 60


@pytest.mark.parametrize(
    ("tokens", "output", "error", "param", "says"),
    [
        (0, 1, InvalidParameterError, "prompt", "at least one is needed"),
        (5, 0, InvalidParameterError, "max_tokens", "at least 1 is needed"),
        (50, None, PromptTooLongError, "prompt", "context holds 50 .*at most 49"),
        (49, 2, InvalidParameterError, "max_tokens", "context holds 50.*at most 1 are possible"),
    ],
)
def test_a_request_that_exceeds_the_context_is_refused(
    tokens: int, output: int | None, error: type[InvalidParameterError], param: str, says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        output_limit(config(max_model_len=50), Request(tokens, output))
    assert caught.value.param == param


def test_an_unset_output_is_clipped_to_context_and_pool() -> None:
    assert output_limit(config(max_model_len=50), Request(49)) == 1
    assert output_limit(config(max_model_len=50), Request(10)) == 40
    small = config(num_blocks=3)
    assert output_limit(small, Request(10)) == 3, "12 positions, and the last token needs none"
    assert output_limit(config(num_blocks=3, admission="reserve"), Request(10)) == 2


def test_a_request_that_exceeds_the_pool_is_refused() -> None:
    small, reserve = config(num_blocks=3), config(num_blocks=3, admission="reserve")
    assert output_limit(small, Request(12, 1)) == 1
    with pytest.raises(InvalidParameterError, match="3 blocks of 4 holds 13"):
        output_limit(small, Request(12, 2))
    with pytest.raises(PromptTooLongError, match="3 blocks of 4 holds 13"):
        output_limit(small, Request(13, 1))
    with pytest.raises(PromptTooLongError, match="3 blocks of 4 holds 12"):
        output_limit(reserve, Request(12, 1))
    assert output_limit(reserve, Request(11, 1)) == 1


def test_without_chunking_a_prompt_above_the_budgets_is_refused() -> None:
    whole = config(chunking=False, max_num_prefill_tokens=100)
    assert output_limit(whole, Request(100, 1)) == 1, "max_chunk_tokens means nothing here"
    with pytest.raises(PromptTooLongError, match="at most 100"):
        output_limit(whole, Request(101, 1))
