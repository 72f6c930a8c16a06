"""``/`` and ``/docs``: what somebody finds who opens the server in a browser."""

from __future__ import annotations

import base64
import re
from functools import cache
from hashlib import sha256
from importlib.resources import files

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import HTMLResponse

from lockstep.version import __version__

router = APIRouter(tags=["home"])


class HomeBody(BaseModel):
    name: str
    version: str
    api: str
    docs: str
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
        docs="/docs",
        openapi="/openapi.json",
        health="/health",
        metrics="/metrics",
    )


@router.get("/docs", operation_id="docs", response_class=HTMLResponse)
async def docs() -> HTMLResponse:
    """The OpenAPI document for people. The page itself tells nothing; what it reads may need a key."""
    page, policy = docs_page()
    return HTMLResponse(page, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})


@cache
def docs_page() -> tuple[str, str]:
    """The page, and the policy by which a browser runs what is written in it and asks nobody but this server."""
    page = files("lockstep.server").joinpath("docs.html").read_text(encoding="utf-8")

    def hashes(tag: str) -> str:
        blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(sha256(block.encode()).digest()).decode()}'" for block in blocks)

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy
