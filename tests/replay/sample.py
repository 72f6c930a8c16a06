"""Small workloads and configs for tests."""

from __future__ import annotations

from typing import Any

from lockstep.core.policy import SchedulerConfig
from lockstep.replay.workload import ArrivalUnit, Workload, WorkloadRequest


def request(
    name: str, prompt: int, output: int, arrival: int = 0, most: int | None = None, **more: Any
) -> WorkloadRequest:
    """Request with ``output`` generated tokens and the limit ``most``."""
    return WorkloadRequest(name, prompt, output if most is None else most, output, arrival, **more)


def workload(*requests: WorkloadRequest, unit: ArrivalUnit = ArrivalUnit.TICKS, content_size: int = 0) -> Workload:
    return Workload("sample", requests, unit, content_size)


def config(**limits: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"block_size": 16, "num_blocks": 20, "max_model_len": 320, **limits})
