"""Sessions of a real server survive the idle threshold, a demotion, the end of the worker and that of the server."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from lockstep.engine.kv_files import SHARED_MEMORY
from tests.server.process import ServerProcess
from tests.waiting import until

MANIFEST = """\
cluster: surviving
models:
  router: {source: 'pocket://', max_active_sessions: 4, engine: {num_blocks: 64}}
sessions: {idle_threshold: IDLE, sweep_interval: 50ms, min_lifetime: 50ms}
"""
TEXT = "I was charged twice for my subscription last week, and nobody answers my letters. " * 7
"""Prompt and answer end in the same block, so that the same prompt finds all that its session has, answers or not."""
Start = Callable[..., ServerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[ServerProcess] = []

    def start(*arguments: str, idle: str = "1h") -> ServerProcess:
        path = tmp_path / "surviving.yaml"
        path.write_text(MANIFEST.replace("IDLE", idle))
        server = ServerProcess("--manifest", str(path), *arguments)
        running.append(server)
        server.wait_ready()
        return server

    yield start
    for server in running:
        server.stop()


def ask(client: httpx2.Client, session: str | None, text: str = TEXT) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were there."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0}
    response = client.post("/v1/chat/completions", json={**body, "model": "router", "session_id": session})
    assert response.status_code == 200, response.text
    told = response.json()
    return told["choices"][0]["message"]["content"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


def session_in(client: httpx2.Client) -> dict[str, Any]:
    [session] = client.get("/v1/sessions").json()["data"]
    found: dict[str, Any] = session
    return found


def requests_of(client: httpx2.Client, session: str) -> list[dict[str, Any]]:
    """Those of a session that have ended, the newest first."""
    rows: list[dict[str, Any]] = client.get(f"/v1/requests?session_id={session}&state=ended").json()["data"]
    return rows


def num_tokens_by_id(client: httpx2.Client) -> dict[str, tuple[int, int]]:
    """On the device, and outside."""
    found = client.get("/v1/sessions").json()["data"]
    return {each["id"]: (each["num_tokens"], each["num_stored_tokens"]) for each in found}


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def test_idle_session_is_evicted_and_restored(start: Start) -> None:
    with start("--kv-check", "1", idle="100ms").client() as client:
        first, cached = ask(client, "s")
        assert cached == 0
        until(lambda: session_in(client)["num_tokens"] == 0, "it left the device")
        session = session_in(client)
        assert (session["state"], session["place"]) == ("idle", "host")
        assert session["num_stored_tokens"] == session["num_host_tokens"] > 100
        assert session["num_disk_tokens"] == 0
        assert ask(client, "s") == (first, session["num_stored_tokens"])
        until(lambda: len(requests_of(client, "s")) == 2, "both have ended")
        [(wait,), ()] = [row["waits"] for row in requests_of(client, "s")]
        assert wait["kind"] == "blocks_returning"
        assert wait["reason"] == "blocks of its prompt are being brought back from host memory or disk"
        metrics = client.get("/metrics").text
        assert f'lockstep:kv_store_loaded_total{{tier="host"}} {session["num_stored_tokens"] / 32:g}' in metrics
        checked = 'lockstep:kv_store_checked_total{tier="host"} 1.0'
        until(lambda: checked in client.get("/metrics").text, "what came back was computed again")
        assert 'lockstep:kv_store_rejected_total{tier="host"} 0.0' in client.get("/metrics").text


def test_it_survives_its_model_s_demotion(start: Start) -> None:
    with start().client() as client:
        first, _ = ask(client, "s")
        full = session_in(client)["num_tokens"]
        assert client.post("/v1/models/router/unload").status_code == 200
        assert session_in(client)["state"] == "idle"
        assert client.post("/v1/models/router/load").status_code == 200
        assert ask(client, "s") == (first, full)


def test_it_survives_the_end_of_the_worker(start: Start) -> None:
    server = start()
    with server.client() as client:
        first, _ = ask(client, "s")
        full = session_in(client)["num_tokens"]
        assert session_in(client)["place"] == "device"
        stored = f'lockstep:kv_store_blocks{{tier="host"}} {full / 32:g}'
        until(lambda: stored in client.get("/metrics").text, "its blocks are in host memory")
        [worker] = [p for p in psutil.Process(server.pid).children() if "worker" in " ".join(p.cmdline())]
        os.kill(worker.pid, signal.SIGKILL)
        seen: set[tuple[str | None, int | None]] = set()

        def is_back() -> bool:
            session = session_in(client)
            seen.add((session["place"], session["num_stored_tokens"]))
            return session["place"] == "host" and client.get("/health").status_code == 200

        until(is_back, "the next worker is ready")
        seen = {each for each in seen if each[0] != "device"}  # as long as it lived
        assert seen <= {(None, None), (None, full), ("host", full)}, "unknown until the next one has said it"
        assert ask(client, "s") == (first, full)


def test_kv_evicted_from_the_store_is_not_reported_as_stored(start: Start) -> None:
    with start("--host-kv-mb", "1", "--enable-debug-endpoints", idle="100ms").client() as client:
        for number in range(8):
            ask(client, str(number), f"{number} {TEXT}")

        def is_settled() -> bool:
            """All have left the device, and nothing was written between two looks."""
            told = num_tokens_by_id(client)
            evicted = "kv_store_evicted_total{"
            figures = [client.get("/metrics").text.partition(evicted)[2].splitlines()[0] for _ in range(2)]
            return not any(device for device, _ in told.values()) and figures[0] == figures[1]

        until(is_settled, "the store has what it can have")
        sessions = client.get("/v1/cluster").json()["sessions"]
        kept = {each["id"]: each["num_stored_tokens"] for each in sessions if each["num_stored_tokens"]}
        assert {(each["state"], each["place"]) for each in sessions if each["id"] in kept} == {("idle", "host")}
        assert {(each["state"], each["place"]) for each in sessions if each["id"] not in kept} == {("dropped", "none")}
        assert 0 < len(kept) < 8
        assert client.post("/reset_prefix_cache").status_code == 200
        id_ = max(kept, key=lambda each: (kept[each], each))
        assert ask(client, id_, f"{id_} {TEXT}")[1] == kept[id_], "what is told comes back"


def test_kv_evicted_from_the_device_is_not_reported_as_on_the_device(start: Start) -> None:
    """Pins are soft: a large request takes what idle sessions hold."""
    with start().client() as client:
        first, _ = ask(client, "s")
        full = session_in(client)["num_tokens"]
        until(lambda: session_in(client)["num_stored_tokens"] == full, "it was copied")
        body = {"model": "router", "prompt": [65] * 1990, "max_tokens": 4}
        assert client.post("/v1/completions", json=body).status_code == 200
        session = session_in(client)
        assert session["num_tokens"] < full
        assert session["num_stored_tokens"] == full
        assert ask(client, "s") == (first, full)


def test_a_session_whose_requests_were_all_refused_was_none(start: Start) -> None:
    with start().client() as client:
        body = {"model": "router", "prompt": "nobody answers " * 3000, "max_tokens": 4, "session_id": "refused"}
        assert client.post("/v1/completions", json=body).status_code == 400
        assert client.get("/v1/sessions").json()["data"] == []
        [model] = client.get("/v1/cluster").json()["models"]
        assert model["num_sessions"] == 0
        ask(client, "refused")
        assert client.post("/v1/completions", json=body).status_code == 400
        assert session_in(client)["state"] == "idle", "one request was taken"


def test_on_disk_it_survives_the_end_of_the_server(start: Start, tmp_path: Path) -> None:
    """And is gone from there when its client ends it."""
    folder = tmp_path / "kv"
    server = start("--kv-dir", str(folder))
    with server.client() as client:
        first, _ = ask(client, "s")
        full = session_in(client)["num_tokens"]
        until(lambda: len(files_in(folder)) == full // 32, "its blocks are on disk")
    server.signal(signal.SIGKILL)
    server.wait()
    server = start("--kv-dir", str(folder))
    with server.client() as client:
        until(lambda: session_in(client)["num_stored_tokens"] == full, "the next server knows it")
        assert (session_in(client)["place"], session_in(client)["num_host_tokens"]) == ("disk", 0)
        assert ask(client, "s") == (first, full)
        assert (session_in(client)["num_host_tokens"], session_in(client)["num_disk_tokens"]) == (full, full)
        assert client.delete("/v1/sessions/s?caller=").status_code == 200, "the one that came without a key"
        until(lambda: not files_in(folder), "nothing of it is on disk")
        assert ask(client, "s") == (first, 0)


def test_a_server_that_ends_gives_its_memory_back_and_the_next_that_of_one_that_was_killed(start: Start) -> None:
    def folder_of(server: ServerProcess) -> Path:
        """Others may run servers here as well."""
        files = [Path(file.path) for file in psutil.Process(server.pid).open_files()]
        [owner] = [path for path in files if path.parent.parent == SHARED_MEMORY and path.name == "owner"]
        return owner.parent

    killed = start()
    left = folder_of(killed)
    killed.signal(signal.SIGKILL)
    killed.wait()
    until(lambda: not psutil.pid_exists(killed.pid), "it is gone")
    server = start()
    assert not left.exists()
    own = folder_of(server)
    assert own.is_dir()
    server.stop()
    assert not own.exists()


def test_two_servers_do_not_share_a_folder(start: Start, tmp_path: Path) -> None:
    start("--kv-dir", str(tmp_path / "kv"))
    until(lambda: (tmp_path / "kv" / "sessions").exists(), "its worker has the folder")
    second = ServerProcess("pocket://", "--kv-dir", str(tmp_path / "kv"))
    assert second.wait() == 2
    assert "another process stores its KV blocks there; use a separate folder for each process" in second.stderr
