"""The number of blocks follows from bytes, limits from the model, the policy from the user; invalid ones are
refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.engine.options import EngineOptions, check_limits, check_sizes, plan_config
from lockstep.errors import ConfigError
from lockstep.executors.base import Geometry

GEOMETRY = Geometry(block_size=32, bytes_per_block=1000, num_layers=2, max_model_len=320, vocab_size=10)
PLENTY = 10**12
ENCODER = replace(GEOMETRY, block_size=32 * 25, max_model_len=8_192 * 25 + 1, num_stages=25, step_positions=1_326)
"""An encoder of 24 layers with texts of at most 8,192 tokens."""


def test_the_default_pool_has_all_contexts_or_its_share_of_memory() -> None:
    assert plan_config(EngineOptions(), GEOMETRY, PLENTY).num_blocks == 64 * 10
    scarce = plan_config(EngineOptions(), GEOMETRY, 100_000)
    assert (scarce.num_blocks, scarce.num_host_blocks) == (30, 15)


def test_explicit_options_override_computed_ones() -> None:
    options = EngineOptions(max_model_len=100, kv_cache_memory_bytes=5500, host_kv_memory_bytes=2000, max_num_seqs=3)
    config = plan_config(options, GEOMETRY, PLENTY)
    assert (config.max_model_len, config.num_blocks, config.num_host_blocks, config.max_num_seqs) == (100, 5, 2, 3)
    assert plan_config(EngineOptions(num_blocks=7), GEOMETRY, 10_000).num_blocks == 7
    by_blocks = EngineOptions(num_host_blocks=3, host_kv_memory_bytes=9000)
    assert plan_config(by_blocks, GEOMETRY, PLENTY).num_host_blocks == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (EngineOptions(max_model_len=321), "the model allows 2 to 320"),
        (EngineOptions(kv_cache_memory_bytes=999), "one takes 1000 bytes"),
        (EngineOptions(num_blocks=10**9), r"would take 1,500 GB .* but only 1,000 GB of memory are free"),
        (EngineOptions(num_blocks=1, host_kv_memory_bytes=10**13), "would take 10,000 GB"),
    ],
)
def test_invalid_limits_are_named(options: EngineOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_config(options, GEOMETRY, PLENTY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (EngineOptions(max_model_len=321), "the model allows 2 to 320"),
        (EngineOptions(max_num_seqs=8, max_num_batched_tokens=9), "max_num_batched_tokens is 9"),
    ],
)
def test_invalid_limits_are_refused_before_loading(options: EngineOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_limits(options, 320)


def test_pools_larger_than_memory_are_refused_with_the_available_memory() -> None:
    for options in (
        EngineOptions(kv_cache_memory_bytes=9 * 10**9),
        EngineOptions(host_kv_memory_bytes=9 * 10**9),
        EngineOptions(kv_cache_memory_bytes=5 * 10**9, host_kv_memory_bytes=4 * 10**9),
    ):
        with pytest.raises(ConfigError, match=r"this machine has 8 GB of memory .* lower it"):
            check_sizes(options, 8 * 10**9)
    check_sizes(EngineOptions(kv_cache_memory_bytes=4 * 10**9, host_kv_memory_bytes=4 * 10**9), 8 * 10**9)
    check_sizes(EngineOptions(), 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_model_len", 1),
        ("max_model_len", 10**15),
        ("num_blocks", 10**15),
        ("block_size", 0),
        ("num_host_blocks", -1),
        ("max_num_seqs", 10**9),
        ("max_num_queued_reqs", 10**20),
        ("kv_cache_memory_bytes", -1),
        ("order", "random"),
        ("chunking", 1),
    ],
)
def test_a_value_out_of_range_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field} is {value!r}; it must be "):
        EngineOptions(**{field: value})


def test_a_step_has_room_for_all_sequences_by_default() -> None:
    assert EngineOptions().batched_tokens == 512
    assert EngineOptions(max_num_seqs=1000).batched_tokens == 1015
    assert EngineOptions(max_num_seqs=1000, max_num_decode_seqs=8).batched_tokens == 512
    assert plan_config(EngineOptions(max_num_seqs=1000), GEOMETRY, PLENTY).max_num_batched_tokens == 1015


def test_a_step_of_an_encoder_has_the_positions_that_its_executor_suggests() -> None:
    assert plan_config(EngineOptions(), ENCODER, PLENTY).max_num_batched_tokens == 1_326
    assert plan_config(EngineOptions(), ENCODER, PLENTY).max_chunk_tokens == 663
    assert plan_config(EngineOptions(max_chunk_tokens=4), ENCODER, PLENTY).max_chunk_tokens == 4 * 25
    chosen = plan_config(EngineOptions(max_num_batched_tokens=100), ENCODER, PLENTY)
    assert (chosen.max_num_batched_tokens, chosen.max_chunk_tokens) == (100 * 25, 256 * 25)
    assert plan_config(EngineOptions(max_num_seqs=2_000), ENCODER, PLENTY).max_num_batched_tokens == 2_015
    for step_positions in (None, 34_265):
        geometry = replace(ENCODER, step_positions=step_positions)
        assert plan_config(EngineOptions(), geometry, PLENTY).max_num_batched_tokens == 512 * 25


def test_the_default_pool_of_an_encoder_has_two_longest_texts_and_64_of_256_tokens() -> None:
    config = plan_config(EngineOptions(), ENCODER, PLENTY)
    assert (config.num_blocks, config.num_host_blocks) == (2 * 257 + 64 * 8, 0)
    assert plan_config(EngineOptions(max_num_seqs=1), ENCODER, PLENTY).num_blocks == 257
    assert plan_config(EngineOptions(max_model_len=513), ENCODER, PLENTY).num_blocks == 2 * 17 + 64 * 8
    assert plan_config(EngineOptions(num_blocks=9_999), ENCODER, PLENTY).num_blocks == 9_999
