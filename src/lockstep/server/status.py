"""Status endpoints: health, load, version, home page, API documentation and debugging.

Health checks never wait for the engine's thread. The debugging endpoints exist only with ``--enable-debug-endpoints``.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import HTMLResponse, Response

from lockstep.report.page import page_style, policy_of
from lockstep.server.errors import ERROR_RESPONSES
from lockstep.server.serving import Serving, serving_of
from lockstep.vendored import read_vendored
from lockstep.version import __version__

DASHBOARD = ("page.html", "dashboard.css", "dashboard.js", "hosts.js", "forms.js")
"""Source files of the dashboard."""
RETRY_AFTER_S = "2"
"""Seconds after which a client should check again whether the server is ready."""
router = APIRouter(tags=["health"], responses=ERROR_RESPONSES)
home_router = APIRouter(tags=["home"], responses=ERROR_RESPONSES)
debug_router = APIRouter(tags=["debug"], responses=ERROR_RESPONSES)


class HealthBody(BaseModel):
    """Health of the server. ``reason`` explains why the server is not ready; otherwise it is empty. ``warnings`` lists
    problems for the operator; a server that is ready but has warnings is ``degraded``."""

    status: Literal["ready", "degraded", "live", "unavailable"]
    reason: str = ""
    warnings: list[str] = []


class LoadBody(BaseModel):
    """Number of open requests."""

    server_load: int


class VersionBody(BaseModel):
    version: str


UNREADY: dict[int | str, dict[str, Any]] = {503: {"model": HealthBody, "description": "Loading, draining or failed."}}


@router.get("/health", response_model=HealthBody, responses=UNREADY, operation_id="health")
@router.get("/healthz", response_model=HealthBody, responses=UNREADY, operation_id="healthz")
@router.get("/health/ready", response_model=HealthBody, responses=UNREADY, operation_id="ready")
@router.get("/ping", response_model=HealthBody, responses=UNREADY, operation_id="ping")
@router.post("/ping", response_model=HealthBody, responses=UNREADY, operation_id="ping_post")
async def ready(request: Request) -> JSONResponse:
    """200 if the server accepts requests, otherwise 503."""
    serving = serving_of(request)
    reason, warnings = unready_reason(serving), [*serving.cluster.health().warnings, *batch_warnings(request)]
    status: Any = "unavailable" if reason else "degraded" if warnings else "ready"
    body = HealthBody(status=status, reason=reason, warnings=warnings).model_dump()
    return JSONResponse(body, 503, {"Retry-After": RETRY_AFTER_S}) if reason else JSONResponse(body)


@router.get("/health/live", operation_id="live")
async def live() -> HealthBody:
    """200 as long as the process serves HTTP. For liveness probes."""
    return HealthBody(status="live")


@router.get("/load", operation_id="load")
async def load(request: Request) -> LoadBody:
    return LoadBody(server_load=serving_of(request).traffic.num_open)


@router.get("/version", operation_id="version")
async def version() -> VersionBody:
    return VersionBody(version=__version__)


def batch_warnings(request: Request) -> tuple[str, ...]:
    """Warnings about batches for the operator."""
    runner = request.app.state.batches
    return () if runner is None or runner.store.fault is None else (str(runner.store.fault),)


def unready_reason(serving: Serving) -> str:
    """Reason why the server does not accept requests; empty if it does."""
    if not serving.lifecycle.is_admitting:
        return "the server is shutting down"
    health = serving.cluster.health()
    return "" if health.ready else health.reason


class HomeBody(BaseModel):
    name: str
    version: str
    api: str
    docs: str
    openapi: str
    health: str
    metrics: str


@home_router.get("/", operation_id="home", response_model=HomeBody)
@home_router.head("/", include_in_schema=False, response_model=None)
async def home(request: Request) -> Response | HomeBody:
    """Name and paths of the server, or the dashboard for a browser. The page requires no key and names no model."""
    if "text/html" in request.headers.get("accept", ""):
        return _page(*dashboard_page())
    return HomeBody(
        name="lockstep",
        version=__version__,
        api="/v1",
        docs="/docs",
        openapi="/openapi.json",
        health="/health",
        metrics="/metrics",
    )


@home_router.get("/docs", operation_id="docs", response_class=HTMLResponse)
async def docs() -> HTMLResponse:
    """API documentation for browsers. The page itself contains no data; its documents may require a key."""
    return _page(*docs_page())


def _page(page: str, policy: str) -> HTMLResponse:
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Vary": "Accept"}
    return HTMLResponse(page, headers=headers)


@cache
def docs_page() -> tuple[str, str]:
    """The API documentation page and its content security policy."""
    page = files("lockstep.server").joinpath("docs.html").read_text(encoding="utf-8")
    return page, _policy(page)


@cache
def dashboard_page() -> tuple[str, str]:
    """The dashboard as a single page with all its parts, and its content security policy."""
    folder = files("lockstep.server").joinpath("dashboard")
    page, style, *scripts = [folder.joinpath(name).read_text(encoding="utf-8") for name in DASHBOARD]
    parts = {
        "styles": read_vendored("uplot/uPlot.min.css") + page_style() + style,
        "plots": read_vendored("uplot/uPlot.iife.min.js"),
        "scripts": "\n".join(scripts),
    }
    for name, text in parts.items():
        page = page.replace(f"/* {name} */", text)
    return page, _policy(page)


def _policy(page: str) -> str:
    """Content security policy that allows only the page's own scripts, and connections only to this server."""
    scripts, styles = (re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL) for tag in ("script", "style"))
    return policy_of(scripts, styles, "connect-src 'self'", "frame-ancestors 'none'")


class ResetBody(BaseModel):
    num_blocks: int
    """Number of cached blocks that were removed."""


class CheckBody(BaseModel):
    ok: bool
    problem: str = ""
    """The violated invariant."""


@debug_router.post("/reset_prefix_cache", operation_id="reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> ResetBody:
    """Remove all cached prefixes that are not in use."""
    return ResetBody(num_blocks=await serving_of(request).cluster.reset_prefix_cache())


@debug_router.get("/debug/check", operation_id="debug_check")
async def check(request: Request) -> CheckBody:
    """Check that every KV block is accounted for exactly once."""
    problem = await serving_of(request).cluster.check()
    return CheckBody(ok=not problem, problem=problem)
