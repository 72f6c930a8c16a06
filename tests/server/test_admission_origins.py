"""Pages of foreign origins change nothing: every route that may change something, one table."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator

import httpx2
import pytest
from fastapi.routing import APIRoute
from playwright.sync_api import Browser

from lockstep.server.app import create_app
from lockstep.server.batches import BatchStore
from lockstep.server.options import ServerOptions
from tests.browser import chromium
from tests.cluster.support import one_model
from tests.server.process import IN_THREAD, serve
from tests.server.test_admission_pages import own_page

EVIL, LOOPBACK = "https://evil.example", "http://localhost:3000"
READING = {"GET", "HEAD", "OPTIONS"}
OPTIONS = ServerOptions(enable_debug_endpoints=True, cors_origins=("https://ui.example",))
FOR_LOOPBACK_PAGES = {
    *("/api/chat", "/api/copy", "/api/create", "/api/delete", "/api/embed", "/api/embeddings", "/api/generate"),
    *("/api/pull", "/api/push", "/api/show", "/detokenize", "/tokenize", "/v1/chat/completions", "/v1/completions"),
    *("/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/responses/{response_id}"),
    *("/v1/responses/{response_id}/cancel", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
}
"""Paths that ask models."""


def changing_routes() -> list[tuple[str, str]]:
    """Method and path of every route of the application that may change something."""
    app = create_app(one_model("stub://alpha"), OPTIONS)
    return sorted(
        (method, route.path)
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in (route.methods or set()) - READING
    )


ROUTES = changing_routes()


@pytest.fixture
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    cluster, store = one_model("stub://alpha"), BatchStore(None)
    await cluster.start()
    transport = httpx2.ASGITransport(app=create_app(cluster, OPTIONS, batch_store=store))
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as each:
        yield each
    await cluster.close()
    store.close()


@pytest.mark.parametrize(
    ("headers", "is_refused"),
    [
        ({"Origin": EVIL, "Sec-Fetch-Site": "cross-site"}, True),
        ({"Origin": EVIL}, True),
        ({"Origin": "null"}, True),
        ({"Origin": "http://test.evil.example"}, True),
        ({"Origin": "http://test", "Sec-Fetch-Site": "cross-site"}, True),
        ({"Sec-Fetch-Site": "cross-site"}, True),
        ({"Sec-Fetch-Site": "same-site"}, True),
        ({"Origin": "http://test"}, False),
        ({"Origin": "https://ui.example", "Sec-Fetch-Site": "cross-site"}, False),
        ({"Origin": "https://public.example", "Sec-Fetch-Site": "same-origin"}, False),
        ({"Sec-Fetch-Site": "none"}, False),
        ({}, False),
    ],
)
async def test_every_route_that_may_change_something_refuses_pages_of_foreign_origins(
    client: httpx2.AsyncClient, headers: dict[str, str], is_refused: bool
) -> None:
    """An own page behind a proxy has another name in `Host`, but is `same-origin` to its browser."""
    for method, path in ROUTES:
        answer = await client.request(method, re.sub(r"\{.*?\}", "x", path), headers=headers)
        assert (answer.status_code == 403) is is_refused, (method, path, answer.text)
        if is_refused:
            assert "--cors-origin" in answer.text


async def test_pages_of_loopback_origins_may_send_requests_to_models_only(client: httpx2.AsyncClient) -> None:
    for method, path in ROUTES:
        headers = {"Origin": LOOPBACK, "Sec-Fetch-Site": "same-site"}
        answer = await client.request(method, re.sub(r"\{.*?\}", "x", path), headers=headers)
        assert (answer.status_code != 403) is (path in FOR_LOOPBACK_PAGES), (method, path, answer.text)


def test_the_table_has_the_routes_that_pages_could_reach_without_asking() -> None:
    assert {("POST", "/v1/files"), ("POST", "/v1/batches/{batch_id}/cancel"), ("POST", "/ping")} <= {*ROUTES}
    assert len(ROUTES) > 20


async def test_a_key_admits_a_page_and_an_admin_key_alone_does_not_open_the_rest() -> None:
    """With admin keys only, uploads need no key, so the origin is what they are checked by."""
    cluster, page = one_model("stub://alpha"), {"Origin": EVIL, "Sec-Fetch-Site": "cross-site"}
    app = create_app(cluster, ServerOptions(admin_keys=("secret",)))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://test") as client:
        assert (await client.post("/v1/files", headers=page)).status_code == 403
        assert (await client.post("/v1/manifest", headers=page)).status_code == 401
        answer = await client.post("/v1/files", headers={**page, "X-Api-Key": "secret"})
        assert answer.status_code == 503, "no batches are run here, and the page was let in"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched


UPLOAD = """async url => {
    const form = new FormData();
    form.append("purpose", "batch");
    form.append("file", new Blob(["{}"]), "page.jsonl");
    await fetch(url + "/v1/files", {method: "POST", mode: "no-cors", body: form}).catch(() => 0);
    await fetch(url + "/v1/batches/batch_1/cancel", {method: "POST", mode: "no-cors"}).catch(() => 0);
}"""


def test_a_page_in_a_browser_can_upload_no_file(browser: Browser) -> None:
    """A form is sent without a preflight, from an origin elsewhere and from one of loopback; our own page may."""
    with own_page() as port, serve("stub://alpha", *IN_THREAD) as server, server.client() as client:
        for origin, num_files in (
            (f"http://app.example:{port}/", 0),
            (f"http://localhost:{port}/", 0),
            (f"{server.base_url}/docs", 1),
        ):
            page = browser.new_page(bypass_csp=True)
            page.goto(origin)
            page.evaluate(UPLOAD, server.base_url)
            page.close()
            assert len(client.get("/v1/files").json()["data"]) == num_files, origin
        assert server.stderr.count(" status=403 ") == 4, "two uploads, two cancellations"
