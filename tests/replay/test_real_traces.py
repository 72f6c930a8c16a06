"""Published traces, where a directory that holds them is named: ``LOCKSTEP_TRACES=DIR pytest tests/replay``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.replay.cache_oracle import UnlimitedCache
from lockstep.replay.readers import ReadOptions, read_workload

DIRECTORY = os.environ.get("LOCKSTEP_TRACES")
pytestmark = pytest.mark.skipif(not DIRECTORY, reason="LOCKSTEP_TRACES names no directory")


def trace(name: str) -> Path:
    return Path(DIRECTORY or "") / name


def test_a_third_of_the_mooncake_conversations_blocks_were_there_before() -> None:
    cache = UnlimitedCache()
    assert len([*cache.passing(read_workload(trace("mooncake_conversation.jsonl")).requests)]) == 12_031
    assert (cache.num_blocks - cache.num_hits, cache.num_blocks) == (182_790, 288_500)
    assert round(100 * cache.num_hits / cache.num_blocks, 2) == 36.64


def test_mooncake_is_read_whole_and_spread() -> None:
    workload = read_workload(trace("mooncake_conversation.jsonl"), ReadOptions(dequantize_seed=0))
    arrivals = [request.arrival for request in workload.requests]
    assert len(arrivals) == 12_031
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) == 12_031


def test_azure_is_read_whole() -> None:
    requests = list(read_workload(trace("azure_llm_inference_conv.csv")).requests)
    assert len(requests) == 19_366
    assert requests[-1].arrival == 3_501_721_937_000_000
