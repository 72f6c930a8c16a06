"""Whether the server lives, whether it will answer, and how busy it is. Never asks the engine's thread."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from lockstep.server.serving import Serving, serving_of
from lockstep.version import __version__

RETRY_AFTER_S = "2"
"""What is not ready is worth asking again after this."""
router = APIRouter(tags=["health"])


class HealthBody(BaseModel):
    """``reason`` says why not, in one sentence; empty when ready. ``warnings`` say what somebody should look after
    although requests are answered."""

    status: Literal["ready", "live", "unavailable"]
    reason: str = ""
    warnings: list[str] = []


class LoadBody(BaseModel):
    """Requests that are being answered."""

    server_load: int


class VersionBody(BaseModel):
    version: str


UNREADY: dict[int | str, dict[str, Any]] = {503: {"model": HealthBody, "description": "Loading, draining or broken."}}


@router.get("/health", response_model=HealthBody, responses=UNREADY, operation_id="health")
@router.get("/healthz", response_model=HealthBody, responses=UNREADY, operation_id="healthz")
@router.get("/health/ready", response_model=HealthBody, responses=UNREADY, operation_id="ready")
@router.get("/ping", response_model=HealthBody, responses=UNREADY, operation_id="ping")
@router.post("/ping", response_model=HealthBody, responses=UNREADY, operation_id="ping_post")
async def ready(request: Request) -> JSONResponse:
    """200 while requests will be answered, else 503."""
    serving = serving_of(request)
    reason, warnings = unready_reason(serving), list(serving.cluster.health().warnings)
    body = HealthBody(status="unavailable" if reason else "ready", reason=reason, warnings=warnings).model_dump()
    return JSONResponse(body, 503, {"Retry-After": RETRY_AFTER_S}) if reason else JSONResponse(body)


@router.get("/health/live", operation_id="live")
async def live() -> HealthBody:
    """200 as long as the process serves HTTP; what a supervisor restarts by."""
    return HealthBody(status="live")


@router.get("/load", operation_id="load")
async def load(request: Request) -> LoadBody:
    return LoadBody(server_load=serving_of(request).traffic.num_open)


@router.get("/version", operation_id="version")
async def version() -> VersionBody:
    return VersionBody(version=__version__)


def unready_reason(serving: Serving) -> str:
    """Why requests will not be answered; empty: they will."""
    if not serving.lifecycle.is_admitting:
        return "the server is shutting down"
    health = serving.cluster.health()
    return "" if health.ready else health.reason
