"""Endpoints for tests and for whoever hunts a fault; only there with ``--enable-debug-endpoints``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

from lockstep.server.serving import serving_of

router = APIRouter(tags=["debug"])


class ResetBody(BaseModel):
    num_blocks: int
    """Cached blocks that were forgotten."""


class CheckBody(BaseModel):
    ok: bool
    problem: str = ""
    """Which invariant does not hold."""


@router.post("/reset_prefix_cache", operation_id="reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> ResetBody:
    """Forget every cached prefix that nobody uses now."""
    return ResetBody(num_blocks=await serving_of(request).cluster.reset_prefix_cache())


@router.get("/debug/check", operation_id="debug_check")
async def check(request: Request) -> CheckBody:
    """Whether every KV block is accounted for, exactly once."""
    problem = await serving_of(request).cluster.check()
    return CheckBody(ok=not problem, problem=problem)
