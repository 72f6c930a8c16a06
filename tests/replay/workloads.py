"""Helpers for replays."""

from __future__ import annotations

from typing import Any

from lockstep.core.policy import SchedulerConfig
from lockstep.replay.workload import ArrivalUnit, Workload, WorkloadRequest


def config(**limits: Any) -> SchedulerConfig:
    """Config with small blocks, a large pool and an ample budget."""
    return SchedulerConfig(
        **{"block_size": 4, "num_blocks": 1000, "max_model_len": 2000, "max_num_seqs": 8, "max_chunk_tokens": 512}
        | limits
    )


def request(name: str, prompt: int, output: int = 4, arrival: int = 0, **more: Any) -> WorkloadRequest:
    return WorkloadRequest(name, prompt, output, more.pop("gets", output), arrival, **more)


def workload(*requests: WorkloadRequest, unit: ArrivalUnit = ArrivalUnit.TICKS, content_size: int = 4) -> Workload:
    return Workload("test", requests, unit, content_size)
