"""Published traces from a directory: ``LOCKSTEP_TRACES=DIR pytest tests/replay``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.replay.configs import config_for
from lockstep.replay.readers import ReadOptions, read_workload
from lockstep.replay.simulator import Simulation

DIRECTORY = os.environ.get("LOCKSTEP_TRACES")
pytestmark = pytest.mark.skipif(not DIRECTORY, reason="LOCKSTEP_TRACES names no directory")


def trace(name: str) -> Path:
    return Path(DIRECTORY or "") / name


def test_a_third_of_the_blocks_of_mooncake_conversations_repeat() -> None:
    """The figure from the literature, in the trace's blocks including partial last ones."""
    contents = [each.contents for each in read_workload(trace("mooncake_conversation.jsonl")).requests]
    num_blocks, distinct = sum(map(len, contents)), {content for each in contents for content in each}
    assert (len(contents), len(distinct), num_blocks) == (12_031, 182_790, 288_500)
    assert round(100 * (num_blocks - len(distinct)) / num_blocks, 2) == 36.64


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [2_048, 200_000])
def test_no_pool_exceeds_the_bound_on_mooncake(num_blocks: int) -> None:
    workload = read_workload(trace("mooncake_conversation.jsonl"))
    replay = Simulation(workload, config_for(workload, {"num_blocks": str(num_blocks)})).run()
    assert replay.num_unbounded_hit_tokens is not None
    assert replay.stats.prefix_hits_tokens <= replay.num_unbounded_hit_tokens


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
