"""Streams as connections: silence, slow readers, clients that leave, and failures on the way."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from starlette.types import Message

from lockstep.cluster.base import Accepted, EventStream
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest import Manifest
from lockstep.engine.outputs import TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.server.app import create_app
from lockstep.server.options import ServerOptions
from lockstep.server.request_context import RequestContext
from lockstep.worker.progress import CallProgress
from tests.server.frames import events_of, texts_of
from tests.server.living import Living, living
from tests.server.process import plain_async_client
from tests.waiting import HANG_S, until

LONG = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}


def request_bytes(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def connect(server: Living, body: dict[str, Any], *, receive_buffer_bytes: int | None = None) -> socket.socket:
    """A connection that has asked, and read nothing."""
    client = socket.socket()
    if receive_buffer_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    client.settimeout(HANG_S)
    client.connect(server.address)
    client.sendall(request_bytes(body))
    return client


def read_all(client: socket.socket) -> bytes:
    data = b""
    while piece := client.recv(1 << 16):
        data += piece
    return data


def unchunked(response: bytes) -> bytes:
    """The body of a response that was sent with ``transfer-encoding: chunked``."""
    rest, body = response.split(b"\r\n\r\n", 1)[1], b""
    while rest:
        size, rest = rest.split(b"\r\n", 1)
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


def test_a_stream_has_the_headers_of_an_event_stream(stub: Living) -> None:
    body = {"prompt": "x", "max_tokens": 3, "stream": True}
    answer = stub.post("/v1/completions", body)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert events_of(answer.text)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "nobody"}, 404),
        ({"prompt": "x" * 9000}, 400),
        ({"prompt": [10**6]}, 400),
        ({"guided_regex": "("}, 400),
    ],
)
def test_rejected_request_has_an_error_status_even_as_a_stream(stub: Living, body: dict[str, Any], status: int) -> None:
    answer = stub.post("/v1/completions", {**LONG, **body})
    assert (answer.status_code, answer.json()["error"]["message"] != "") == (status, True)


def test_silence_is_filled_with_comments() -> None:
    with living("stub://alpha?step_ms=300", ServerOptions(ping_interval_s=0.05)) as server:
        answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "stream": True})
        assert answer.text.count(": ping\n\n") >= 2
        assert events_of(answer.text)


def test_a_failure_in_a_stream_is_an_error_frame_and_the_end() -> None:
    with living("stub://alpha?fail_every=20") as server:
        answer = server.post("/v1/completions", LONG)
        assert answer.status_code == 200
        *_, last = events_of(answer.text)
        assert last["error"]["type"] == "server_error"
        until(lambda: server.cluster.num_open == 0, "the call is closed")


def test_a_client_that_leaves_aborts_its_request() -> None:
    with living("stub://alpha?step_ms=2") as server:
        clients = [connect(server, {**LONG, "n": 2}) for _ in range(8)]
        clients += [connect(server, {**LONG, "stream": False}) for _ in range(8)]
        until(lambda: server.cluster.num_open == 16, "all are being answered")
        for client in clients:
            client.close()
        until(lambda: server.cluster.num_open == 0, "their calls are closed")
        records = server.records
        until(lambda: all(record.status == 499 for record in records), "and are remembered as left")
        answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert answer.status_code == 200, "others are served"


def test_clients_that_connect_and_drop_leave_nothing_open(stub: Living) -> None:
    for number in range(60):
        client = connect(stub, {**LONG, "n": 1 + number % 3, "stream": number % 2 == 0})
        if number % 6 == 2:
            client.recv(64)  # of a stream, its beginning
        client.close()
    until(lambda: stub.cluster.num_open == 0, "no call is open")


def test_connections_that_are_reset_are_no_failures_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    with living("stub://alpha") as server:
        for number in range(40):
            client = socket.create_connection(server.address)
            request = request_bytes({**LONG, "max_tokens": 3, "stream": number % 2 == 0})
            client.sendall(request.replace(b"connection: close\r\n", b"") * 20)  # pipelined
            client.recv(1)
            client.close()  # with unread data: a reset
        until(lambda: server.cluster.num_open == 0, "no call is open")
    assert {record.status for record in server.records} <= {200, 499}
    assert not [record for record in caplog.records if record.name.startswith("lockstep")]


def test_a_slow_reader_gets_fewer_chunks_and_the_same_text(stub: Living) -> None:
    body = {**LONG, "logprobs": 20, "max_tokens": 2000}
    client = connect(stub, body, receive_buffer_bytes=4096)
    until(lambda: stub.cluster.num_open == 0, "the engine does not wait for the reader")
    events = events_of(unchunked(read_all(client)))
    client.close()
    quick = stub.post("/v1/completions", {**LONG, "max_tokens": 2000, "stream": False})
    assert texts_of(events)[0] == quick.json()["choices"][0]["text"]
    assert len(events) < quick.json()["usage"]["completion_tokens"]


def test_a_slow_reader_gets_an_error_and_its_request_is_aborted() -> None:
    with living("stub://alpha", ServerOptions(max_pending_bytes=20_000)) as server:
        client = connect(server, {**LONG, "logprobs": 20, "max_tokens": 8000}, receive_buffer_bytes=4096)
        with client:
            beginning = client.recv(64)
            until(lambda: server.cluster.num_open == 0, "the call is closed while nobody reads")
            *events, last = events_of(unchunked(beginning + read_all(client)))
        assert "too slow" in last["error"]["message"]
        assert last["error"]["code"] == "slow_reader"
        counted = server.get("/metrics").text
        assert 'path="/v1/completions",status="408"} 1.0' in counted, "a slow client is no fault of the server"
        assert len(texts_of(events)[0]) < 8000


class Endless(Cluster):
    """One model whose answers never end."""

    is_closed = False

    async def stream(self, call: GenerationRequest, progress: CallProgress | None = None) -> EventStream:
        try:
            yield [Accepted("alpha", (1,))]
            while True:
                yield [TokenOutput(1, 0, (1,), "word")]
                await asyncio.sleep(0.01)
        finally:
            self.is_closed = True


async def test_a_client_that_takes_nothing_at_all_is_left() -> None:
    cluster = Endless(Manifest.of_model("stub://alpha", ("alpha",)))
    records: list[RequestContext] = []
    app = create_app(
        cluster, ServerOptions(ping_interval_s=0.05, max_stall_s=0.1), [lambda record, _: records.append(record)]
    )
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    messages = [{"type": "http.request", "body": body}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("localhost", 80)}
    await cluster.start()
    try:
        await asyncio.wait_for(app(scope, receive, send), HANG_S)
    finally:
        await cluster.close()
    assert [record.status for record in records] == [499]
    assert cluster.is_closed


@pytest.fixture
async def busy(pocket: Living) -> AsyncIterator[httpx2.AsyncClient]:
    async with plain_async_client(pocket.url) as client:
        yield client


async def test_concurrent_requests_get_the_same_answers_as_single_ones(busy: httpx2.AsyncClient) -> None:

    async def ask(number: int, *, is_stream: bool) -> str:
        body = {"prompt": f"Question {number}:", "max_tokens": 12, "seed": number, "stream": is_stream}
        answer = await busy.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        if is_stream:
            return texts_of(events_of(answer.text))[0]
        text: str = answer.json()["choices"][0]["text"]
        return text

    alone = [await ask(number, is_stream=False) for number in range(4)]
    together = await asyncio.gather(*(ask(number, is_stream=number % 2 == 0) for number in range(32)))
    assert together[:4] == alone
