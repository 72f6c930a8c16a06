"""Helpers that drive a scheduler without a model."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.cli.collect_env import is_compiled
from lockstep.core.policy import SchedulerConfig
from lockstep.core.prefix import block_hashes
from lockstep.core.request import FinishReason, Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import StepEvents, StepPlan, StepResult

needs_interpreted = pytest.mark.skipif(
    is_compiled(), reason="it looks into objects or changes them, which compiled ones refuse"
)


def config(**limits: Any) -> SchedulerConfig:
    """Config with small blocks and a large pool."""
    return SchedulerConfig(**{"block_size": 4, "num_blocks": 1000, "max_model_len": 2000, **limits})


def scheduler(**limits: Any) -> Scheduler:
    return Scheduler(config(**limits))


def answer(plan: StepPlan, tokens: dict[int, int] | None = None, stops: tuple[int, ...] = ()) -> StepResult:
    """Result with one token for each sampling row, or the number in ``tokens``; sequences in ``stops`` end."""
    ids = [seq_id for seq_id, samples in zip(plan.seq_ids, plan.samples, strict=True) if samples]
    counts = tuple((tokens or {}).get(seq_id, 1) for seq_id in ids)
    return StepResult(counts, tuple(FinishReason.STOP if seq_id in stops else None for seq_id in ids))


def commit(core: Scheduler, plan: StepPlan, *stops: int, tokens: dict[int, int] | None = None) -> StepEvents:
    return core.commit(plan, answer(plan, tokens, stops))


def step(core: Scheduler, *stops: int, tokens: dict[int, int] | None = None) -> StepPlan:
    """Schedule and commit a step, and check conservation."""
    plan = core.schedule()
    if plan.has_work:
        commit(core, plan, *stops, tokens=tokens)
    core.check()
    return plan


def rows(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(id, start, length) of each row."""
    return list(zip(plan.seq_ids, plan.starts, plan.lengths, strict=True))


def lengths(plan: StepPlan) -> dict[int, int]:
    return dict(zip(plan.seq_ids, plan.lengths, strict=True))


def prompt(
    tokens: int | list[int],
    output: int | None = 8,
    block_size: int = 4,
    salt: bytes = b"",
    **more: Any,
) -> Request:
    """Request with hashes of its tokens; a number stands for that many equal tokens."""
    ids = [7] * tokens if isinstance(tokens, int) else tokens
    return Request(len(ids), output, block_hashes(b"test" + salt, ids, block_size), **more)


def run(core: Scheduler, max_steps: int = 1000) -> list[StepPlan]:
    """Run until all requests have ended."""
    plans = []
    while core.has_unfinished:
        plans.append(step(core))
        assert len(plans) <= max_steps
    return plans
