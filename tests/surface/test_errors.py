"""Every refusal in the tables has the status and the body that clients know."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any

import httpx2

from lockstep.server.app import create_app
from lockstep.server.options import ServerOptions
from tests.server.managing import Hosted, Managed
from tests.server.support import JSON, client_of
from tests.surface.held import hold
from tests.surface.refusals import RAW, Override, posts, posts_to_adapters

MAX_SHOWN_CHARS = 160
REQUEST_ID = re.compile(r'(?<="request_id": ")req-[0-9a-f]+')
SECONDS = re.compile(r"\d+(?= s\.)|(?<=\"retry-after\": \")\d+")
"""How long to wait for a rate's next request; the clock's, so it is not held."""


async def test_refused_requests_get_the_bodies_that_clients_know() -> None:
    async with client_of() as client:
        told = [line async for line in _told_of(client, posts())]
    async with client_of(options=ServerOptions(allowed_hosts=("test",))) as client:
        for method, path, body, headers in RAW:
            answer = await client.request(method, path, content=body, headers={**(JSON if body else {}), **headers})
            shown = f"{method} {path} {_short(body or '')} {json.dumps(headers) if headers else ''}"
            told += _told(shown.rstrip(), answer)
    hold("errors.txt", told)


async def test_anthropic_and_ollama_apis_return_errors_in_their_own_shapes() -> None:
    async with client_of() as client:
        told = [line async for line in _told_of(client, posts_to_adapters())]
    hold("errors_adapters.txt", told)


async def test_access_errors_match_the_golden_copy() -> None:
    told: list[str] = []
    async with client_of(options=ServerOptions(api_keys=("key",), admin_keys=("admin",))) as client:
        for method, path, headers in (
            ("GET", "/v1/models", {}),
            ("GET", "/nowhere", {}),
            ("GET", "/v1/models", {"Authorization": "Bearer wrong"}),
            ("GET", "/v1/cluster", {"X-Api-Key": "key"}),
            ("PUT", "/v1/manifest", {"X-Api-Key": "key"}),
            ("GET", "/v1/events", {"X-Api-Key": "key"}),
            ("DELETE", "/v1/sessions/a", {"X-Api-Key": "key"}),
            ("POST", "/v1/messages", {"X-Api-Key": "wrong"}),
            ("POST", "/api/chat", {"Authorization": "Bearer wrong"}),
        ):
            answer = await client.request(method, path, headers=headers)
            told += _told(f"{method} {path} {json.dumps(headers)}", answer)
    async with client_of(options=ServerOptions(requests_per_minute=1)) as client:
        for _ in range(2):
            answer = await client.post("/tokenize", json={"prompt": "a"})
        told += [SECONDS.sub("N", line) for line in _told("POST /tokenize, the second in a minute of one", answer)]
    async with client_of(options=ServerOptions(max_body_bytes=100)) as client:
        answer = await client.post("/tokenize", json={"prompt": "a" * 1000})
        told += _told("POST /tokenize, 1000 bytes where 100 are allowed", answer)
    hold("errors_access.txt", told)


async def test_cluster_errors_match_the_golden_copy() -> None:
    told: list[str] = []
    transport = httpx2.ASGITransport(app=create_app(Managed()))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for method, path, body, kind in (
            ("PUT", "/v1/manifest", "bad: 1", "application/yaml"),
            ("PUT", "/v1/manifest", "big: 1", "application/yaml"),
            ("PUT", "/v1/manifest", "{}", "text/html"),
            ("PUT", "/v1/manifest", "", "application/yaml"),
            ("PUT", "/v1/manifest", "{", "application/json"),
            ("POST", "/v1/models/nobody/load", None, ""),
            ("POST", "/v1/models/far/load", None, ""),
            ("DELETE", "/v1/sessions/nobody", None, ""),
            ("POST", "/v1/cluster/hosts/a/drain", None, ""),
        ):
            headers = {"Content-Type": kind} if kind else {}
            answer = await client.request(method, path, content=body, headers=headers)
            told += _told(f"{method} {path} {_short(body or '')} {kind}".rstrip(), answer)
    transport = httpx2.ASGITransport(app=create_app(Hosted()))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for method, path in (("POST", "/v1/cluster/hosts/ab/drain"), ("DELETE", "/v1/cluster/hosts/nowhere/drain")):
            told += _told(f"{method} {path} of several hosts", await client.request(method, path))
    hold("errors_cluster.txt", told)


async def _told_of(
    client: httpx2.AsyncClient, bodies: Iterable[tuple[str, Override, dict[str, Any]]]
) -> AsyncIterator[str]:
    for path, override, body in bodies:
        answer = await client.post(path, json=body)
        for line in _told(f"POST {path} {_short(json.dumps(override))}", answer):
            yield line


def _told(request: str, answer: httpx2.Response) -> Iterator[str]:
    """A request, its status with the headers that say what to do, and the body."""
    assert answer.status_code >= 400, f"{request}: {answer.status_code}; the table is of refusals"
    yield request
    headers = {
        name: answer.headers[name] for name in ("retry-after", "allow", "x-should-retry") if name in answer.headers
    }
    yield f"  {answer.status_code} {json.dumps(headers) if headers else ''}".rstrip()
    body: Mapping[str, Any] = answer.json()
    yield f"  {REQUEST_ID.sub('ID', json.dumps(body, ensure_ascii=False))}"


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}... ({len(text)} characters)"
