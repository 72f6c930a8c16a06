"""The customer-support manifest on two Ray nodes: two real gateways, one cluster, and the bytes of one machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from lockstep.cli.main import invoke
from tests.hosts.support import write_secret
from tests.hosts.two_nodes import Nodes, joined
from tests.processes import ROOT
from tests.server.process import ServerProcess, serve
from tests.waiting import HANG_S, until

EXAMPLE = ROOT / "examples" / "customer-support.yaml"
HOSTS = """
hosts:
  ray: {address}
  secret: {secret}
  replicas:
    router: {{num: 2, resources: {{CPU: 0.5}}, spread: true}}
    billing: {{num: 3, resources: {{CPU: 0.5, memory: 100MB}}, spread: true}}
"""
QUESTIONS = tuple(f"I was charged twice for order {number}, please help" for number in range(6))


def answers_of(server: ServerProcess, model: str | None = None) -> list[tuple[str, str | None]]:
    """Who answered each question, and with which words."""
    client = OpenAI(base_url=f"{server.base_url}/v1", api_key="none", timeout=HANG_S)

    def ask(question: str) -> tuple[str, str | None]:
        answer = client.chat.completions.create(
            model=model or "customer-support-agent",
            messages=[{"role": "user", "content": question}],
            max_tokens=16,
            temperature=0.0,
        )
        return answer.model, answer.choices[0].message.content

    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        return list(pool.map(ask, QUESTIONS))


def places_of(server: ServerProcess) -> list[dict[str, Any]]:
    with server.client() as client:
        found: list[dict[str, Any]] = client.get("/v1/cluster").json()["places"]
        return found


def is_whole(server: ServerProcess) -> bool:
    return all(place["state"] == "ready" and not place["reason"] for place in places_of(server))


@pytest.fixture
async def empty(nodes: Nodes, tmp_path: Path) -> AsyncIterator[None]:
    """Nodes without this cluster, before and after."""
    async with joined(nodes, "customer-support-agent", write_secret(tmp_path)):
        yield


@pytest.mark.parametrize("backend", [pytest.param("stub", marks=pytest.mark.slow), "pocket"])
async def test_two_gateways_on_two_hosts_form_one_cluster_and_their_recordings_verify(
    nodes: Nodes, empty: None, tmp_path: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await asyncio.to_thread(_one_cluster, nodes, tmp_path, backend)
    assert invoke(["replay", "--verify", str(tmp_path / "trace")]) == 0
    told = capsys.readouterr().out
    for part in ("steps of", "plans, identical", "routes, identical"):
        assert part in told


def _one_cluster(nodes: Nodes, tmp_path: Path, backend: str) -> None:
    manifest, trace = tmp_path / "cluster.yaml", tmp_path / "trace"
    common = ("--manifest", str(manifest), "--backend", backend)
    manifest.write_text(EXAMPLE.read_text())
    with serve(*common) as alone:
        expected = {model: answers_of(alone, model) for model in (None, "billing", "legal")}
    hosts = HOSTS.format(address=nodes.address, secret=tmp_path / "secret")
    manifest.write_text(EXAMPLE.read_text() + hosts)
    with ExitStack() as stack:
        first, second = (ServerProcess(*common, "--trace", str(trace), environment=nodes.environment) for _ in range(2))
        for server in (first, second):
            stack.enter_context(server)
        for server in (first, second):
            server.wait_ready()
        until(lambda: is_whole(first) and is_whole(second))
        placed = places_of(first)
        assert {place["host"] for place in placed} == {"host_a", "host_b"}
        assert sum("billing" in place["models"] for place in placed) == 3
        for model, before in expected.items():
            assert answers_of(first, model) == before == answers_of(second, model)
        with first.client() as one, second.client() as other:
            listed = [client.get("/v1/models").json()["data"] for client in (one, other)]
            ids, others = ([model["id"] for model in models] for models in listed)
            assert ids == others
            body: dict[str, Any] = {
                "model": "billing",
                "session_id": "s",
                "messages": [{"role": "user", "content": QUESTIONS[0]}],
                "max_tokens": 4,
            }
            assert one.post("/v1/chat/completions", json=body).status_code == 200
            until(lambda: [each["id"] for each in other.get("/v1/sessions").json()["data"]] == ["s"])
            assert other.delete("/v1/sessions/s").status_code in (200, 204)
            until(lambda: not one.get("/v1/sessions").json()["data"])
