"""The memory of a sequence is that of its blocks, group by group."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.executors.kv_costs import activation_bytes_per_token, kv_costs
from lockstep.executors.kv_layout import BLOCK_TOKENS
from tests.executors.native.support import config_of
from tools.random_models import SHAPES

LLAMA, QWEN, LFM2 = (config_of(SHAPES[name]) for name in ("llama-3.2-1b", "qwen3.5-0.8b", "lfm2.5-350m"))
WINDOWS = replace(LLAMA, windows=(512, 512, 512, 0) * 4)


def test_a_decoder_without_windows_and_states_keeps_all_of_each_token() -> None:
    costs = kv_costs(LLAMA)
    per_token = 16 * 8 * 64 * 2 * 2
    assert [(group.num_layers, group.window, group.bytes_per_token) for group in costs.groups] == [(16, 0, per_token)]
    assert (costs.state_bytes, costs.snapshot_interval) == (0, 0)
    assert costs.bytes_of(8192) == 8192 * per_token
    assert costs.bytes_of(1) == costs.bytes_of(32) == 32 * per_token


def test_a_state_costs_the_same_for_every_length() -> None:
    costs = kv_costs(QWEN)
    assert [(group.num_layers, group.bytes_per_token) for group in costs.groups] == [(6, 6 * 2 * 256 * 2 * 2)]
    net = QWEN.delta_net
    assert net is not None
    least = 18 * 4 * (16 * 128 * 128 + 3 * net.num_channels)
    assert least <= costs.state_bytes <= 1.06 * least, "pieces of a state leave a part of some blocks empty"
    assert costs.snapshot_interval == 1792
    assert costs.bytes_of(8192) - costs.bytes_of(4096) == 4096 * 12288
    assert costs.bytes_of(1) == costs.state_bytes + 32 * 12288
    assert kv_costs(LFM2).state_bytes == kv_costs(LFM2).layout.block_bytes


def test_a_window_bounds_what_its_layers_keep() -> None:
    costs = kv_costs(WINDOWS)
    assert [(group.num_layers, group.window) for group in costs.groups] == [(4, 0), (12, 512)]
    full, local = (group.bytes_per_token for group in costs.groups)
    assert local == 3 * full
    assert costs.bytes_of(8192) == 8192 * full + 512 * local
    assert costs.bytes_of(8193) == 8224 * full + 544 * local


def test_a_model_with_all_kinds_of_memory_keeps_the_sum() -> None:
    """LFM3 has layers with and without windows, and convolutions."""
    config = config_of(SHAPES["lfm3-1.7b"])
    costs, per_token = kv_costs(config), 4 * 128 * 2 * 2
    groups = [(group.num_layers, group.window, group.bytes_per_token) for group in costs.groups]
    assert groups == [(6, 0, 6 * per_token), (5, 256, 6 * per_token)], "blocks of the second group have an empty part"
    assert costs.state_bytes == 2 * costs.layout.block_bytes >= 13 * 6 * 2048 * 4
    assert costs.bytes_of(8192) == (8192 + 256) * 6 * per_token + costs.state_bytes


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_a_longer_sequence_never_costs_less_at_borders_of_blocks(one: int, other: int) -> None:
    costs, (less, more) = kv_costs(WINDOWS), sorted((one, other))
    assert costs.bytes_of(less * BLOCK_TOKENS) <= costs.bytes_of(more * BLOCK_TOKENS)


@pytest.mark.parametrize(("storage", "size"), [("f32", 4 * 64), ("f16", 2 * 64), ("int8", 64 + 4)])
def test_precision_changes_keys_and_values(storage: str, size: int) -> None:
    assert kv_costs(LLAMA, storage).groups[0].bytes_per_token == 16 * 8 * 2 * size


def test_an_encoder_keeps_two_layers_and_its_hidden_states() -> None:
    encoder = replace(LLAMA, bidirectional=True, num_layers=12, num_heads=4, num_kv_heads=4, head_dim=8, hidden_size=40)
    assert activation_bytes_per_token(encoder) == 2 * 2 * 2 * 32 + 4 * (40 + 32)
    assert activation_bytes_per_token(encoder, 4) == 2 * 2 * 4 * 32 + 4 * (40 + 32)
