"""Bounds: rates per key, bodies, headers, time, and how many at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator

import pytest
import uvicorn
from fastapi import APIRouter, Request
from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine.outputs import RequestOutput, Timings
from lockstep.server.admission import RateLimits, TokenBucket
from lockstep.server.answer_response import conclude
from lockstep.server.app import create_app
from lockstep.server.options import ServerOptions
from lockstep.server.protocol import MAX_HEADERS, bounded_protocol
from lockstep.server.request_context import context_of
from tests.cluster.support import one_model
from tests.server.process import IN_THREAD, ServerProcess, serve
from tests.server.support import JSON, client_of, connect, error_of, exchange, received
from tests.waiting import HANG_S, until

START = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def narrow() -> Iterator[ServerProcess]:
    """One request at once, 4 KiB bodies, 2 KiB headers."""
    limits = ("--max-concurrent-requests", "1", "--max-body-bytes", "4096", "--max-header-bytes", "2048")
    with serve("stub://alpha", *IN_THREAD, *limits) as running:
        yield running


@given(st.integers(1, 600), st.lists(st.floats(0, 30), min_size=1, max_size=50))
def test_a_bucket_lets_no_more_through_than_it_promises(per_minute: int, pauses_s: list[float]) -> None:
    bucket = TokenBucket(per_minute, 0.0)
    now_s, taken = 0.0, 0
    for pause_s in pauses_s:
        now_s += pause_s
        while bucket.wait_s(now_s) == 0 and taken < 2_000:
            bucket.take(1, now_s)
            taken += 1
    assert taken <= per_minute + now_s * per_minute / 60 + 1e-6


def test_a_bucket_saves_no_more_than_a_minutes_worth() -> None:
    bucket = TokenBucket(10, 0.0)
    bucket.take(10, 3_600.0)
    assert bucket.wait_s(3_600.0) > 0, "an hour without requests is worth no more than a minute"


def test_a_request_is_admitted_after_the_retry_time() -> None:
    limits = RateLimits(requests_per_minute=2, tokens_per_minute=None)
    assert [limits.admit("a", 0.0) for _ in range(2)] == [None, None]
    refusal = limits.admit("a", 0.0)
    assert refusal is not None
    assert (refusal.status, refusal.headers["Retry-After"]) == (429, "30")
    assert limits.admit("b", 0.0) is None, "another key has its own bucket"
    assert limits.admit("a", 30.0) is None


def test_tokens_are_charged_when_they_are_known() -> None:
    """An answer may cost more than was left; then the debt is waited off."""
    limits = RateLimits(requests_per_minute=None, tokens_per_minute=60)
    assert limits.admit("a", 0.0) is None
    limits.spend("a", 90, 0.0)
    refusal = limits.admit("a", 0.0)
    assert refusal is not None
    assert refusal.headers["Retry-After"] == "31"
    assert limits.admit("a", 31.0) is None


async def test_a_key_over_its_request_rate_gets_429_with_a_retry_time() -> None:
    options = ServerOptions(api_keys=("k1", "k2"), requests_per_minute=2)
    async with client_of(options=options, headers={"X-Api-Key": "k1"}) as client:
        answers = [await client.post("/tokenize", json={"prompt": "a"}) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert error_of(answers[2])["type"] == "rate_limit_error"
        assert 1 <= int(answers[2].headers["retry-after"]) <= 30
        assert (await client.get("/v1/models")).status_code == 200, "only work is counted"
        other = await client.post("/tokenize", json={"prompt": "a"}, headers={"X-Api-Key": "k2"})
        assert other.status_code == 200


async def test_answers_are_charged_to_their_key() -> None:
    """Usage comes from the record, whoever filled it."""
    router = APIRouter()

    @router.post("/cost")
    async def cost(request: Request) -> None:
        conclude(context_of(request), [RequestOutput(1, (1,) * 50, (), 0, 0, Timings(0.0, None, 0.0))])

    async with client_of(options=ServerOptions(tokens_per_minute=40), routers=(router,)) as client:
        assert [(await client.post("/cost")).status_code for _ in range(2)] == [200, 429]


def test_a_body_over_the_limit_is_refused_by_its_length(narrow: ServerProcess) -> None:
    with narrow.client() as client:
        response = client.post("/tokenize", json={"prompt": "a" * 5000})
        assert response.status_code == 413
        assert "4096 bytes" in error_of(response)["message"]
        assert client.post("/tokenize", json={"prompt": "a" * 4000}).status_code == 200


def test_a_chunked_body_is_counted_as_it_comes(narrow: ServerProcess) -> None:
    def chunks(count: int) -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(count):
            yield b"a" * 500
        yield b'"}'

    with narrow.client() as client:
        assert client.post("/tokenize", content=chunks(7), headers=JSON).status_code == 200
    head = START + b"Transfer-Encoding: chunked\r\n\r\n"
    answer = exchange(narrow.base_url, head + (b"400\r\n" + b"a" * 1024 + b"\r\n") * 64)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower(), "what follows is not read"


def test_a_body_of_hopeless_length_is_not_waited_for(narrow: ServerProcess) -> None:
    head = START + b"Content-Length: 99999999999\r\n\r\n"
    assert exchange(narrow.base_url, head).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "headers",
    [
        b"X-Big: " + b"a" * 100_000 + b"\r\n",
        b"X-Big: " + b"a" * 10_000_000,
        b"X-Small: a\r\n" * 1_000,
        b"".join(b"H%d: a\r\n" % i for i in range(MAX_HEADERS)),
        b"a" * 3_000,
    ],
    ids=["one of 100 kB", "one without end", "a thousand", "one too many", "no colon"],
)
def test_a_flood_of_headers_is_refused(narrow: ServerProcess, headers: bytes) -> None:
    answer = exchange(narrow.base_url, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n")
    status = answer.split(b" ", 2)[1] if answer else b""
    assert status in (b"431", b"400"), answer[:200]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_a_long_path_is_refused(narrow: ServerProcess) -> None:
    answer = exchange(narrow.base_url, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ")


def test_headers_within_the_limit_pass_and_connections_are_kept(narrow: ServerProcess) -> None:
    """The count begins anew with each request of a connection."""
    with narrow.client() as client:
        for _ in range(5):
            assert client.get("/health", headers={"X-Some": "a" * 1_500}).status_code == 200
            assert client.post("/tokenize", json={"prompt": "a" * 3_000}).status_code == 200


def test_bytes_that_are_not_http_return_invalid_http(narrow: ServerProcess) -> None:
    answer = exchange(narrow.base_url, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_one_more_than_allowed_is_refused_and_the_next_is_not(narrow: ServerProcess) -> None:
    """A body that does not come holds the only place."""
    body = b'{"prompt": "a"}'
    head = START + b"Connection: close\r\n"
    with connect(narrow.base_url) as slow, narrow.client() as client:
        slow.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body))
        _wait_for_load(narrow, 1)
        refused = client.post("/tokenize", json={"prompt": "a"})
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert client.get("/health").status_code == 200, "probes are not work"
        slow.sendall(body)
        assert received(slow).startswith(b"HTTP/1.1 200 ")
        _wait_for_load(narrow, 0)
        assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200


def test_client_that_disconnects_before_its_body_frees_its_slot(narrow: ServerProcess) -> None:
    with connect(narrow.base_url) as slow:
        slow.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        _wait_for_load(narrow, 1)
    _wait_for_load(narrow, 0)
    until(lambda: "status=499" in narrow.stderr, "it is logged as left")


def _wait_for_load(server: ServerProcess, load: int) -> None:
    with server.client() as client:
        until(lambda: client.get("/load").json()["server_load"] == load, f"/load is {load}")


async def test_headers_that_do_not_come_are_not_waited_for() -> None:
    """With a limit of a fifth of a second instead of the real one; idle connections and slow ones alike."""
    cluster = one_model("stub://alpha", ("alpha",))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            create_app(cluster), http=bounded_protocol(2048, 0.2), lifespan="off", log_config=None, ws="none"
        )
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]  # pytest's are kept
        running = asyncio.create_task(server.serve([listener]))
        try:
            for start in (
                b"",
                b"GET /health HTTP/1.1\r\nX-Slow: ",
                b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\nGET /",
            ):
                connection = socket.create_connection(listener.getsockname())
                connection.sendall(start)  # before it is accepted: what comes after the limit would reset it
                connection.setblocking(False)
                reader, writer = await asyncio.open_connection(sock=connection)
                with contextlib.closing(writer):
                    answer = await asyncio.wait_for(reader.read(), HANG_S)
                await writer.wait_closed()
                assert answer.splitlines()[-1].count(b"header_timeout") == 1, answer
        finally:
            server.should_exit = True
            await running
            await cluster.close()


def test_gateways_hold_a_limit_together() -> None:
    limits = RateLimits(requests_per_minute=4, tokens_per_minute=None)
    limits.share(2, 0.0)
    assert [limits.admit("a", 0.0) is None for _ in range(3)] == [True, True, False]
    limits.share(1, 0.0)  # the other one has gone: what was taken stays taken, and more comes in
    assert limits.admit("a", 0.0) is not None
    assert [limits.admit("a", 60.0) is None for _ in range(5)] == [True, True, True, True, False]
