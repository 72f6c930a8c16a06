"""How requests are remembered when they have ended: success, failure and departure, told apart."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from lockstep.replay.trace import open_trace
from lockstep.server.request_context import RequestContext
from lockstep.worker.flight.entries import RequestDigest
from tests.server.frames import events_of
from tests.server.living import Living, living
from tests.server.process import IN_THREAD, ServerProcess, serve
from tests.waiting import HANG_S, until

ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a b c", "ignore_eos": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a b c"}], "ignore_eos": True},
    "/v1/responses": {"input": "a b c " * 40},
}
"""What the stub answers for longer than a test looks at it."""


@pytest.fixture(scope="module")
def logged() -> Iterator[ServerProcess]:
    """A server whose steps take some time, with a log for machines."""
    with serve("stub://alpha?step_ms=2", *IN_THREAD, "--served-model-name", "alpha", "--log-format", "json") as running:
        yield running


def line_of(server: ServerProcess, request_id: str) -> dict[str, Any]:
    """The log's line of a request; one that has ended has exactly one."""
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        lines = [json.loads(line) for line in server.stderr.splitlines() if line.startswith("{")]
        found[:] = [line for line in lines if line.get("id") == request_id]
        return bool(found)

    until(is_there, f"{request_id} is logged")
    [line] = found
    return line


def counted(server: ServerProcess, path: str, status: int) -> float:
    with server.client() as client:
        page = client.get("/metrics").text
    wanted = f'http_requests_total{{method="POST",path="{path}",status="{status}"}} '
    return next((float(line.removeprefix(wanted)) for line in page.splitlines() if line.startswith(wanted)), 0.0)


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("is_stream", [True, False])
def test_an_answer_that_was_read_to_its_end_is_a_success(logged: ServerProcess, path: str, is_stream: bool) -> None:
    before = counted(logged, path, 200), counted(logged, path, 499)
    body = {**ASKED[path], "model": "alpha", "stream": is_stream}
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    with logged.client() as client:  # one connection, kept for both
        ids = [
            client.post(path, json={**body, length: 3}, headers={"connection": connection}).headers["x-request-id"]
            for connection in ("keep-alive", "close")
        ]
    for id_ in ids:
        line = line_of(logged, id_)
        assert (line["status"], line["finish_reasons"], line["output_tokens"]) == (200, ["length"], 3)
        assert line["prompt_tokens"] > 0
        assert "error" not in line
    assert (counted(logged, path, 200), counted(logged, path, 499)) == (before[0] + 2, before[1])


def test_all_choices_of_all_prompts_are_remembered(logged: ServerProcess) -> None:
    body = {"model": "alpha", "prompt": ["a", "b"], "n": 2, "max_tokens": 2, "stream": True}
    with logged.client() as client:
        line = line_of(logged, client.post("/v1/completions", json=body).headers["x-request-id"])
    assert (line["status"], line["finish_reasons"], line["output_tokens"]) == (200, ["length"] * 4, 8)


def official(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=HANG_S)


def test_the_official_client_that_reads_to_the_end_succeeds_and_one_that_closes_early_has_left(
    logged: ServerProcess,
) -> None:
    with official(logged) as client:
        whole = client.completions.create(
            model="alpha", prompt="a b c", max_tokens=4, stream=True, extra_headers={"x-request-id": "reads-it-all"}
        )
        assert list(whole)[-1].choices[0].finish_reason == "length"
        cut = client.completions.create(
            model="alpha",
            prompt="a b c",
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers={"x-request-id": "leaves"},
        )
        next(iter(cut))
        cut.close()
    assert line_of(logged, "reads-it-all")["status"] == 200
    left = line_of(logged, "leaves")
    assert left["status"] == 499
    assert left["prompt_tokens"] == 5, "one of the stub's for each character"
    assert left["output_tokens"] >= 1, "what was computed until then"
    assert "finish_reasons" not in left
    assert "error" not in left


def raw(path: str, body: dict[str, Any], id_: str) -> bytes:
    data = json.dumps({"model": "alpha", **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nx-request-id: {id_}\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def address(server: ServerProcess) -> tuple[str, int]:
    url = httpx2.URL(server.base_url)
    assert url.port is not None
    return url.host, url.port


def test_streams_that_share_a_connection_one_after_the_other_are_successes(logged: ServerProcess) -> None:
    body = {"prompt": "a b c", "max_tokens": 2, "stream": True}
    with socket.create_connection(address(logged), timeout=HANG_S) as client:
        client.sendall(b"".join(raw("/v1/completions", body, f"pipelined-{number}") for number in range(4)))
        data = b""
        while data.count(b"[DONE]") < 4:
            data += client.recv(1 << 16)
        client.sendall(raw("/v1/completions", body, "after-them"))
        while data.count(b"[DONE]") < 5:
            data += client.recv(1 << 16)
    for id_ in (*(f"pipelined-{number}" for number in range(4)), "after-them"):
        assert line_of(logged, id_)["status"] == 200


@pytest.mark.parametrize("path", ASKED)
def test_a_closed_connection_is_logged_as_499_on_every_path(logged: ServerProcess, path: str) -> None:
    for kind, is_stream in (("stream", True), ("whole", False)):
        id_ = f"{path.replace('/', '-')}-{kind}"
        with socket.create_connection(address(logged), timeout=HANG_S) as client:
            client.sendall(raw(path, {**ASKED[path], "stream": is_stream}, id_))
            if is_stream:
                assert client.recv(16)
        assert line_of(logged, id_)["status"] == 499


def ended(server: Living) -> RequestContext:
    until(lambda: bool(server.records), "the request has ended")
    return server.records.pop()


@pytest.mark.parametrize("path", ASKED)
def test_failed_stream_is_recorded_with_its_error_and_tokens(path: str) -> None:
    with living("stub://alpha?fail_every=8") as server:
        answer = server.post(path, {**ASKED[path], "stream": True})
        assert answer.status_code == 200, "it had begun well"
        record = ended(server)
    assert record.error is not None
    assert (record.status, record.error.status, record.error.code) == (500, 500, "internal_error")
    assert record.finish_reasons == []
    assert record.totals.num_output_tokens > 0


def test_stream_beyond_its_deadline_is_recorded_as_timeout() -> None:
    with living("stub://alpha?step_ms=20") as server:
        body = {**ASKED["/v1/completions"], "deadline_ms": 300, "stream": True}
        events = events_of(server.post("/v1/completions", body).text)
        assert events[-1]["error"]["code"] == "deadline"
        record = ended(server)
    assert record.error is not None
    assert (record.status, record.error.code) == (504, "deadline")


def test_client_that_disconnects_before_computation_is_charged_nothing() -> None:
    with living("stub://alpha?step_ms=500") as server:
        with socket.create_connection(server.address, timeout=HANG_S) as client:
            client.sendall(raw("/v1/completions", {"model": "m", "prompt": "a b c"}, "x"))
            until(lambda: server.cluster.num_open == 1, "it is being answered")
        record = ended(server)
    assert (record.status, record.num_tokens) == (499, 0)


def test_a_client_that_ends_its_sending_has_left(logged: ServerProcess) -> None:
    """Whether it still reads cannot be known, and a model would go on for somebody who is gone."""
    with socket.create_connection(address(logged), timeout=HANG_S) as client:
        client.sendall(raw("/v1/completions", {"prompt": "a b c", "ignore_eos": True, "stream": True}, "half-closed"))
        assert client.recv(16)
        client.shutdown(socket.SHUT_WR)
        while client.recv(1 << 16):
            pass
    assert line_of(logged, "half-closed")["status"] == 499


def test_a_segment_is_a_short_text_of_ascii_or_none() -> None:
    given = ("eu west", "x" * 64, "x" * 65, "caf\u00e9", "")
    with living("stub://alpha") as server, server.client() as client:
        for segment in given:
            headers = {b"x-lockstep-segment": segment.encode("latin-1")}
            assert client.get("/version", headers=headers).status_code == 200
        assert client.get("/version").status_code == 200
        until(lambda: len(server.records) == 6, "all have ended")
        assert [record.segment for record in server.records] == ["eu west", "x" * 64, "", "", "", ""]


def test_every_generation_is_recorded_under_the_names_that_its_caller_gave(tmp_path: Path) -> None:
    """And one that names nothing under the id that we give it."""
    with serve("stub://alpha", *IN_THREAD, "--trace", str(tmp_path)) as server, server.client() as client:
        for path, body in ASKED.items():
            headers = {"x-request-id": f"r{path}", "x-lockstep-segment": "eu"}
            length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            assert client.post(path, json={**body, length: 16}, headers=headers).status_code == 200
        ours = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).headers["x-request-id"]
    found = [entry for entry in open_trace(tmp_path).entries() if isinstance(entry, RequestDigest)]
    named = [(f"r{path}", "eu") for path in ASKED]
    assert [(entry.external_id, entry.segment) for entry in found] == [*named, (ours, "")]
