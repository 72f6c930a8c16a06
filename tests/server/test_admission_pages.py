"""Pages in a real browser: which origins may ask models, and the page about the API, which asks nobody else."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Browser, Page

from lockstep.server.admission import OPEN_PATHS
from lockstep.server.options import ServerOptions
from lockstep.server.status import docs_page
from tests.browser import chromium
from tests.server.living import Living, living

ASK = """async ([url, method, path, body]) => {
    try {
        const headers = body ? {"Content-Type": "application/json", "Authorization": "Bearer x"} : {};
        const answer = await fetch(url + path, {method, headers, body: body && JSON.stringify(body)});
        return [answer.status, await answer.text()];
    } catch (error) {
        return [0, String(error)];
    }
}"""
CHAT = {"messages": [{"role": "user", "content": "hello"}], "stream": True}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched


@contextlib.contextmanager
def own_page() -> Iterator[int]:
    """The port of somebody's own page."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>a page</title>")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=functools.partial(server.serve_forever, 0.05), daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def site() -> Iterator[int]:
    with own_page() as port:
        yield port


def asked(page: Page, url: str, method: str, path: str, body: object = None) -> tuple[int, str]:
    status, text = page.evaluate(ASK, [url, method, path, body])
    return status, text


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_page_of_a_loopback_origin_can_use_models_only(browser: Browser, site: int, stub: Living, host: str) -> None:
    page = browser.new_page()
    page.goto(f"http://{host}:{site}/")
    status, text = asked(page, stub.url, "POST", "/v1/chat/completions", CHAT)
    assert status == 200
    assert text.endswith("data: [DONE]\n\n")
    assert asked(page, stub.url, "GET", "/v1/models")[0] == 200
    assert asked(page, stub.url, "POST", "/tokenize", {"prompt": "a"})[0] == 200
    for method, path in (("GET", "/v1/sessions"), ("GET", "/v1/cluster"), ("POST", "/v1/models/alpha/unload")):
        assert asked(page, stub.url, method, path, {} if method == "POST" else None)[0] == 0, path
    page.close()


def test_page_of_another_origin_can_use_nothing(browser: Browser, site: int, stub: Living) -> None:
    page = browser.new_page()
    page.goto(f"http://app.example:{site}/")
    assert asked(page, stub.url, "POST", "/v1/chat/completions", CHAT)[0] == 0
    assert asked(page, stub.url, "GET", "/v1/models")[0] == 0
    page.close()


ORIGINS = {
    "http://localhost": True,
    "https://localhost:3000": True,
    "http://127.0.0.1:1": True,
    "http://[::1]:8080": True,
    "http://localhost.example.com": False,
    "http://127.0.0.1.example.com:80": False,
    "http://example.com/localhost": False,
    "http://localhost:3000@example.com": False,
    "http://127.0.0.2": False,
    "null": False,
    "file://": False,
}


def allowed(client: httpx2.Client, path: str, origin: str) -> str | None:
    """Whom a preflight names as the one who may."""
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    return client.options(path, headers=headers).headers.get("access-control-allow-origin")


def test_allowed_origins_must_match_exactly(stub: Living) -> None:
    with stub.client() as client:
        for origin, may_ask in ORIGINS.items():
            for path in (
                *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/resp_1"),
                *("/v1/embeddings", "/v1/models", "/v1/models/a/b", "/tokenize", "/detokenize"),
            ):
                assert allowed(client, path, origin) == (origin if may_ask else None), (path, origin)
            for path in ("/v1/models/a/b/load", "/v1/manifest", "/v1/events", "/v1/sessions/s", "/metrics", "/"):
                assert allowed(client, path, origin) is None, (path, origin)


def test_pages_of_loopback_origins_can_be_refused_and_others_allowed() -> None:
    options = ServerOptions(allows_loopback_origins=False, cors_origins=("https://a.example",))
    with living("stub://alpha", options) as server, server.client() as client:
        assert allowed(client, "/v1/chat/completions", "http://localhost:3000") is None
        for path in ("/v1/chat/completions", "/v1/sessions"):
            assert allowed(client, path, "https://a.example") == "https://a.example"


def test_the_docs_page_shows_the_whole_api_without_external_requests(browser: Browser, stub: Living) -> None:
    page = browser.new_page()
    requests: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"{stub.url}/docs")
    page.wait_for_selector("main details")
    document: dict[str, Any] = stub.get("/openapi.json").json()
    shown = page.eval_on_selector_all("main summary code", "all => all.map(one => one.textContent)")
    assert set(document["paths"]) <= set(shown)
    assert set(document["components"]["schemas"]) <= set(shown)
    page.click(
        "#create_chat_completion_v1_chat_completions_post > summary, details:has-text('/v1/chat/completions') > summary"
    )
    example = page.locator("details[open] pre").first.text_content() or ""
    assert example.startswith("curl -X POST ")
    sent = json.loads(example.split("-d '", 1)[1].rsplit("'", 1)[0].replace("'\\''", "'"))
    assert "messages" in sent
    assert set(requests) == {f"{stub.url}/docs", f"{stub.url}/openapi.json"}
    assert complaints == []
    page.close()


def test_docs_page_shows_a_form_for_the_key(browser: Browser) -> None:
    with living("stub://alpha", ServerOptions(api_keys=("secret",))) as server:
        page = browser.new_page()
        page.goto(f"{server.url}/docs")
        page.fill("input[type=password]", "secret")
        page.click("button")
        page.wait_for_selector("main details")
        assert page.locator("#key").is_hidden()
        page.close()


def test_the_pages_policy_lets_it_load_nothing_from_elsewhere() -> None:
    page, policy = docs_page()
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert "https://" not in page
    assert "/docs" in OPEN_PATHS
