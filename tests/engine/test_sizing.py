"""Blocks from bytes, limits from the model, policy from the user; what cannot work is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.engine.sizing import EngineOptions, anonymous_memory_bytes, available_memory_bytes, plan_config
from lockstep.errors import ConfigError
from lockstep.executors.base import Geometry

GEOMETRY = Geometry(block_size=32, bytes_per_block=1000, num_layers=2, max_model_len=320, vocab_size=10)
PLENTY = 10**12


def test_by_default_the_pool_holds_all_contexts_or_its_share_of_memory() -> None:
    assert plan_config(EngineOptions(), GEOMETRY, PLENTY).num_blocks == 64 * 10
    scarce = plan_config(EngineOptions(), GEOMETRY, 100_000)
    assert (scarce.num_blocks, scarce.num_host_blocks) == (30, 15)


def test_what_the_user_says_wins() -> None:
    options = EngineOptions(
        max_model_len=100, kv_cache_memory_bytes=5500, host_kv_memory_bytes=2000, scheduler={"max_num_seqs": 3}
    )
    config = plan_config(options, GEOMETRY, PLENTY)
    assert (config.max_model_len, config.num_blocks, config.num_host_blocks, config.max_num_seqs) == (100, 5, 2, 3)
    assert plan_config(EngineOptions(num_blocks=7), GEOMETRY, 0).num_blocks == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (EngineOptions(max_model_len=321), "the model allows 2 to 320"),
        (EngineOptions(kv_cache_memory_bytes=999), "one takes 1000 bytes"),
        (EngineOptions(scheduler={"max_num_seq": 4}), "unknown scheduler option 'max_num_seq'; known: max_num_seqs"),
        (EngineOptions(scheduler={"num_blocks": 4}), "unknown scheduler option 'num_blocks'"),
        (EngineOptions(scheduler={"order": "random"}), "order is 'random'"),
    ],
)
def test_impossible_limits_are_named(options: EngineOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_config(options, GEOMETRY, PLENTY)


def test_available_memory_is_cut_by_the_cgroup(tmp_path: Path) -> None:
    whole = available_memory_bytes(tmp_path)
    assert whole > 0
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert available_memory_bytes(tmp_path) == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path) > 3000


def test_anonymous_memory_is_that_of_this_process_where_the_system_tells(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmRSS:\t   900 kB\nRssAnon:\t     500 kB\n")
    assert anonymous_memory_bytes(tmp_path / "status") == 500 * 1024
    assert anonymous_memory_bytes(tmp_path / "none") is None
