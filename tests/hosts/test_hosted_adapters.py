"""Adapters of a manifest with `hosts:`: a replica on the second of two Ray nodes gives the bytes of one machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.adapter_files import write_pocket_adapter
from tests.hosts.support import write_secret
from tests.hosts.two_nodes import Nodes, joined
from tests.server.process import ServerProcess, serve
from tests.waiting import until

CLUSTER = "adapters-on-hosts"
MANIFEST = """
cluster: {cluster}
models:
  plain: {{source: 'pocket://'}}
  billing: {{source: 'pocket://', adapter: '{folder}/billing'}}
  legal: {{source: 'pocket://', adapter: '{folder}/legal'}}
"""
HOSTS = """
hosts:
  ray: {address}
  secret: {secret}
  replicas:
    plain: {{num: 1, resources: {{CPU: 0.5, host_b: 0.1}}}}
"""
MODELS = ("plain", "billing", "legal")


def answer(server: ServerProcess, model: str) -> str:
    with server.client() as client:
        body = {"model": model, "prompt": "I was charged twice", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        response = client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["text"]
        return text


def hosts_of(server: ServerProcess) -> list[tuple[str, str]]:
    with server.client() as client:
        return [(each["host"], each["state"]) for each in client.get("/v1/cluster").json()["places"]]


@pytest.fixture
async def empty(nodes: Nodes, tmp_path: Path) -> AsyncIterator[None]:
    """Nodes without this cluster, before and after."""
    async with joined(nodes, CLUSTER, write_secret(tmp_path)):
        yield


async def test_adapters_on_another_host_answer_as_on_one_machine(nodes: Nodes, empty: None, tmp_path: Path) -> None:
    await asyncio.to_thread(_serve_adapters, nodes, tmp_path)


def _serve_adapters(nodes: Nodes, folder: Path) -> None:
    for seed, name in enumerate(("billing", "legal", "later")):
        write_pocket_adapter(folder / name, seed)
    path = folder / "cluster.yaml"
    text = MANIFEST.format(cluster=CLUSTER, folder=folder)
    later = {"lora_name": "later", "lora_path": str(folder / "later")}
    path.write_text(text)
    with serve("--manifest", str(path)) as alone:
        with alone.client() as client:
            assert client.post("/v1/load_lora_adapter", json=later).status_code == 200
        expected = {model: answer(alone, model) for model in (*MODELS, "later")}
    assert len(set(expected.values())) == len(expected)
    path.write_text(text + HOSTS.format(address=nodes.address, secret=folder / "secret"))
    with ServerProcess("--manifest", str(path), environment=nodes.environment) as server:
        server.wait_ready()
        assert hosts_of(server) == [("host_b", "ready")]
        assert {model: answer(server, model) for model in MODELS} == {model: expected[model] for model in MODELS}
        with server.client() as client:
            assert client.post("/v1/load_lora_adapter", json=later).status_code == 200
        assert answer(server, "later") == expected["later"]
        assert answer(server, "billing") == expected["billing"]
        until(lambda: hosts_of(server) == [("host_b", "ready")])
