"""The life of a server process: listening, loading, draining on signals, ending, and every way of not starting."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator

import httpx2
import psutil
import pytest
from msgspec import structs

from lockstep.artifacts.task import Task
from lockstep.cluster.snapshot import EngineSnapshot, ReplicaSnapshot
from lockstep.errors import ConfigError, UsageError
from lockstep.server.options import ServerOptions
from lockstep.server.run import first_request, ready_lines, run_server
from lockstep.server.serving import Lifecycle, ServerPhase
from tests.server.managing import Managed
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


def test_draining_server_finishes_open_requests_and_accepts_no_new_ones() -> None:
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
def test_client_without_a_body_is_disconnected_at_the_shutdown_timeout() -> None:
    with serve("stub://alpha", *IN_THREAD, "--shutdown-timeout", "0.2") as server, in_flight(server) as slow:
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert b" 200 " not in received(slow)
        assert "ending 1 requests that are still open" in server.stderr


def test_further_signals_speed_up_the_shutdown() -> None:
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


class Doubtful(Managed):
    """Looks, while it makes sure, whether the port is open yet; and finds that nothing can be served."""

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__()
        self._address = address
        self.seen: list[int] = []

    async def prepare(self) -> None:
        with socket.socket() as probe:
            self.seen.append(probe.connect_ex(self._address))
        raise ConfigError("the models need more than there is")


def test_the_port_opens_when_all_is_known_to_be_right() -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    cluster, lines = Doubtful(("127.0.0.1", port)), list[str]()
    with pytest.raises(ConfigError, match="more than there is"):
        run_server(cluster, ServerOptions(port=port), lines.append)
    assert cluster.seen == [errno.ECONNREFUSED]
    assert lines == []


def test_port_is_bound_before_artifacts_are_opened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cluster = Doubtful(taken.getsockname())
        with pytest.raises(UsageError, match="is in use"):
            run_server(cluster, ServerOptions(port=taken.getsockname()[1]), print)
    assert cluster.seen == []


class Endless(Managed):
    """Makes sure for ever, as over a file that takes long to read; and is told to end meanwhile."""

    async def prepare(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()


def test_a_signal_before_the_port_is_open_ends_it() -> None:
    lines: list[str] = []
    run_server(Endless(), ServerOptions(port=0), lines.append)
    assert lines == []


ENGINE = EngineSnapshot(100, 2, 3200, 4_000_000, 0, 0, 9_000_000, "avx2", 2, "f16", "int8")


def test_the_lines_at_ready_are_limited_in_number() -> None:
    replica = ReplicaSnapshot("k", "s", "resident", ("a", "b"), 1, 1, 1, 1.0, 0, 0, None, None, ENGINE)
    seen = Managed().snapshot()
    lines = ready_lines(structs.replace(seen, replicas=(replica,) * 51), "http://h", ServerOptions())
    assert lines[0] == (
        "a, b: context of 100 tokens; KV of 3,200 tokens in 4 MB; 2 sequences at once; weights of 9 MB, "
        "KV in f16; avx2, 2 threads; weights rounded to int8"
    )
    assert lines[8] == "43 more engines: GET http://h/v1/cluster"
    assert lines[9:] == [
        "org/legal: standby, loaded on the first request",
        "far: remote, runs on a remote server",
        "metrics: http://h/metrics; documentation of the API: http://h/docs",
        "no API key is required: every caller on this machine is an admin",
    ]


@pytest.mark.parametrize(
    ("task", "words"), [("embed", "embeds texts at /v1/embeddings"), ("rerank", "scores documents at /v1/rerank")]
)
def test_an_encoder_has_texts_and_activations_at_ready(task: Task, words: str) -> None:
    engine = structs.replace(ENGINE, is_encoder=True)
    seen = Managed().snapshot()
    model = structs.replace(seen.models[0], task=task)
    replica = ReplicaSnapshot("k", "s", "resident", (model.id,), 1, 1, 1, 1.0, 0, 0, None, None, engine)
    lines = ready_lines(structs.replace(seen, models=(model,), replicas=(replica,)), "http://h", ServerOptions())
    limits = "texts of up to 99 tokens; activations of 3,200 tokens in 4 MB; 2 texts at once; weights of 9 MB"
    assert lines[0].startswith(f"{model.id}: {words}; {limits}")
    path = words.split()[-1]
    assert f"curl http://h{path} " in first_request("http://h", (model,), has_key=False)
    assert "curl http://h/v1/chat/completions " in first_request("http://h", seen.models, has_key=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ServerOptions(allow_unauthenticated=True), "every caller can use and change this server"),
        (ServerOptions(api_keys=("k",)), "an API key is required"),
        (ServerOptions(admin_keys=("a",)), "an admin key is required for shared state"),
        (ServerOptions(api_keys=("k",), admin_keys=("a",)), "an admin key is required for shared state; an API key"),
    ],
)
def test_the_required_keys_are_listed_at_ready(options: ServerOptions, words: str) -> None:
    assert words in ready_lines(Managed().snapshot(), "http://h", options)[-1]


async def test_a_phase_never_goes_back() -> None:
    lifecycle = Lifecycle()
    phases = [lifecycle.phase]
    for _ in range(4):
        lifecycle.on_signal()
        phases.append(lifecycle.phase)
    assert phases == [
        ServerPhase.ADMITTING,
        ServerPhase.DRAINING,
        ServerPhase.ENDING,
        ServerPhase.FORCED,
        ServerPhase.FORCED,
    ]
    lifecycle.end()
    assert lifecycle.phase is ServerPhase.FORCED
    assert await lifecycle.changed() is ServerPhase.FORCED


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


def test_a_hanging_worker_is_replaced_and_the_log_names_its_process_and_models() -> None:
    """In the middle of an answer, stopped as a debugger or a defect in native code would stop it."""
    answers: list[httpx2.Response] = []
    body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}
    with serve(f"stub://alpha?step_ms={ENDLESS_MS}", "--worker-timeout", "2") as server, server.client() as client:
        asking = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=body)))
        asking.start()
        until(lambda: b"num_requests_running" in metrics(server), "the request is being computed")
        [worker] = psutil.Process(server.pid).children()
        try:
            worker.suspend()
            asking.join(HANG_S)
            assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "worker_lost")
            assert "without a message while it answered; send the request again" in answers[0].text
            with server.client() as looking:
                until(lambda: looking.get("/health/ready").status_code == 200, "another worker serves")
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.resume()
        assert f"killing the device worker (process {worker.pid}), which hangs" in server.stderr
        assert "it has alpha loaded" in server.stderr


def metrics(server: ServerProcess) -> bytes:
    """The lines of what is not zero."""
    with server.client() as client:
        lines = client.get("/metrics").content.splitlines()
    return b"\n".join(line for line in lines if not line.startswith(b"#") and not line.endswith(b" 0.0"))
