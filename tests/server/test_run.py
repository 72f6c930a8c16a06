"""The life of a server process: listening, loading, draining on signals, ending, and every way of not starting."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import Iterator

import httpx2
import pytest

from lockstep.server.lifecycle import Lifecycle, Phase
from tests.server.process import IN_THREAD, ServerProcess, plain_async_client, serve
from tests.server.support import connect, received
from tests.waiting import ENDLESS_MS, HANG_S, until

NUM_STREAMS = 32
BODY = b'{"prompt": "a"}'
HEAD = (
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    % len(BODY)
)


@contextlib.contextmanager
def in_flight(server: ServerProcess) -> Iterator[socket.socket]:
    """A request that is being answered for as long as its body is missing."""
    with connect(server.base_url) as slow, server.client() as client:
        slow.sendall(HEAD)
        until(lambda: client.get("/load").json()["server_load"] > 0, "it is being answered")
        yield slow


def wait_until_draining(server: ServerProcess) -> None:
    with server.client() as client:
        until(lambda: client.get("/health/ready").status_code != 200, "nothing new is admitted")


def test_a_signal_ends_an_idle_server_at_once() -> None:
    with serve("stub://alpha", *IN_THREAD, "--served-model-name", "my-model") as server:
        server.signal(signal.SIGINT)
        assert server.wait() == 0
        assert "Traceback" not in server.stderr
        assert server.stdout.splitlines() == [
            f"lockstep: listening on {server.base_url}, loading my-model",
            f"lockstep: ready on {server.base_url}, serving my-model",
        ]
        assert not server.base_url.endswith(":0"), "the port that was really taken"


def test_what_is_in_flight_is_finished_and_nothing_else_is_begun() -> None:
    with serve("stub://alpha", *IN_THREAD) as server, in_flight(server) as slow:
        server.signal(signal.SIGTERM)
        wait_until_draining(server)
        with server.client() as client:
            refused = client.post("/tokenize", json={"prompt": "a"})
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert client.get("/health").json()["reason"] == "the server is shutting down"
            assert client.get("/health/live").status_code == 200
        slow.sendall(BODY)
        assert b"HTTP/1.1 200 " in received(slow)
        assert server.wait() == 0


@pytest.mark.parametrize(
    ("timeout_s", "max_tokens", "ending"), [(HANG_S, 50, "finish_reason"), (0.3, 4000, "error")], ids=["may", "may not"]
)
async def test_every_stream_has_an_end_whether_it_may_finish_or_not(
    timeout_s: float, max_tokens: int, ending: str
) -> None:
    """32 streams of a second or of minutes, and SIGTERM after their first tokens; the model in its own process."""
    limits = ("--max-num-seqs", "32", "--shutdown-timeout", str(timeout_s))
    with serve("stub://alpha?step_ms=20", "--served-model-name", "alpha", *limits) as server:
        begun = asyncio.Semaphore(0)
        async with plain_async_client(server.base_url) as client, asyncio.TaskGroup() as group:
            streams = [group.create_task(frames_of(client, max_tokens, begun)) for _ in range(NUM_STREAMS)]
            for _ in streams:
                await asyncio.wait_for(begun.acquire(), HANG_S)
            server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "Traceback" not in server.stderr
    for stream in streams:
        frames = stream.result()
        assert frames[-1] == "[DONE]"
        chunks = [json.loads(frame) for frame in frames[:-1]]
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk.get("choices", ())]
        errors = [chunk["error"] for chunk in chunks if "error" in chunk]
        if ending == "finish_reason":
            assert (reasons[-1], errors) == ("length", [])
        else:
            assert (set(reasons), len(errors)) == ({None}, 1)
            assert "shutting down" in errors[0]["message"]


async def frames_of(client: httpx2.AsyncClient, max_tokens: int, begun: asyncio.Semaphore) -> list[str]:
    """The data of every frame of one streamed answer; the semaphore is told of the third."""
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "alpha", "messages": messages, "stream": True, "max_tokens": max_tokens, "ignore_eos": True}
    frames = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                frames.append(line.removeprefix("data: "))
                if len(frames) == 3:
                    begun.release()
    return frames


@pytest.mark.slow
def test_who_does_not_even_send_a_body_is_cut_off() -> None:
    with serve("stub://alpha", *IN_THREAD, "--shutdown-timeout", "0.2") as server, in_flight(server) as slow:
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert b" 200 " not in received(slow)
        assert "ending 1 requests that are still open" in server.stderr


def test_further_signals_hurry() -> None:
    """The second ends what is in flight, which else may take days; the third waits for nothing."""
    with serve("stub://alpha", *IN_THREAD, "--shutdown-timeout", "1e6") as server, in_flight(server):
        server.signal(signal.SIGTERM)
        wait_until_draining(server)
        server.signal(signal.SIGTERM)
        until(lambda: "requests that are still open" in server.stderr, "the second signal is obeyed")
        server.signal(signal.SIGINT)
        assert server.wait() == 0


def test_a_signal_while_loading_ends_it() -> None:
    with ServerProcess(f"stub://alpha?load_ms={ENDLESS_MS}") as server:
        server.wait_listening()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "ready on" not in server.stdout


@pytest.mark.slow  # test_promises.py has one with a worker
def test_a_server_that_is_killed_leaves_its_port_free() -> None:
    with serve("stub://alpha", *IN_THREAD) as first:
        port = first.base_url.rpartition(":")[2]
        first.signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        with serve("stub://alpha", *IN_THREAD, "--port", port) as second:
            assert second.base_url == first.base_url


async def test_a_phase_never_goes_back() -> None:
    lifecycle = Lifecycle()
    phases = [lifecycle.phase]
    for _ in range(4):
        lifecycle.on_signal()
        phases.append(lifecycle.phase)
    assert phases == [Phase.ADMITTING, Phase.DRAINING, Phase.ENDING, Phase.FORCED, Phase.FORCED]
    lifecycle.end()
    assert lifecycle.phase is Phase.FORCED
    assert await lifecycle.changed() is Phase.FORCED


def test_both_processes_log_in_one_format() -> None:
    """A step that fails is logged where it ran; a reader of JSON lines must not stumble over it."""
    with serve("stub://alpha?fail_every=1", "--log-format", "json") as server:
        with server.client() as client:
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 500
        assert server.stop() == 0
    lines = [json.loads(line) for line in server.stderr.splitlines()]
    failed = next(line for line in lines if line["process"] == "worker")
    assert failed["level"] == "error"
    assert "fail_every" in failed["traceback"]
    assert any(line["process"] == "server" and line.get("status") == 500 for line in lines)
