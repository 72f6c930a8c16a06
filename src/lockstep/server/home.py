"""``/``: what somebody finds who opens the server in a browser."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from lockstep.version import __version__

router = APIRouter(tags=["home"])


class HomeBody(BaseModel):
    name: str
    version: str
    api: str
    openapi: str
    health: str
    metrics: str


@router.get("/", operation_id="home")
async def home() -> HomeBody:
    """What this is and where to go on. No model is named: the page is open, their names need a key."""
    return HomeBody(
        name="lockstep",
        version=__version__,
        api="/v1",
        openapi="/openapi.json",
        health="/health",
        metrics="/metrics",
    )
