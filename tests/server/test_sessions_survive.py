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
TEXT = "I was charged twice for my subscription last week, and nobody answers my letters. " * 8
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


def ask(client: httpx2.Client, session: str | None) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were there."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 12, "temperature": 0}
    response = client.post("/v1/chat/completions", json={**body, "model": "router", "session_id": session})
    assert response.status_code == 200, response.text
    told = response.json()
    return told["choices"][0]["message"]["content"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


def session_in(client: httpx2.Client) -> dict[str, Any]:
    [session] = client.get("/v1/sessions").json()["data"]
    found: dict[str, Any] = session
    return found


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def test_an_idle_session_leaves_the_device_and_comes_back(start: Start) -> None:
    with start("--kv-check", "1", idle="100ms").client() as client:
        first, cached = ask(client, "s")
        assert cached == 0
        until(lambda: session_in(client)["num_tokens"] == 0, "it left the device")
        session = session_in(client)
        assert session["state"] == "idle"
        assert session["num_stored_tokens"] > 100
        assert ask(client, "s") == (first, session["num_stored_tokens"])
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
        stored = f'lockstep:kv_store_blocks{{tier="host"}} {full / 32:g}'
        until(lambda: stored in client.get("/metrics").text, "its blocks are in host memory")
        [worker] = [p for p in psutil.Process(server.pid).children() if "worker" in " ".join(p.cmdline())]
        os.kill(worker.pid, signal.SIGKILL)
        until(lambda: client.get("/health").status_code == 200 and not worker.is_running(), "the next worker is ready")
        assert ask(client, "s") == (first, full)


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
        assert ask(client, "s") == (first, full)
        assert client.delete("/v1/sessions/s").status_code == 200
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
    assert "another process keeps its KV blocks there; give each its own folder" in second.stderr
