"""Adapters on a real server: names, endpoints at runtime, errors, a storm of changes under traffic, a lost worker."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.adapter_files import write_pocket_adapter
from tests.server.process import ServerProcess, plain_async_client
from tests.waiting import until
from tools.random_adapters import write_peft
from tools.random_shapes import SHAPES

NUM_ADAPTERS = 12
PROMPTS = ("the invoice", "my login fails", "a clause of the contract")
KNOWN: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve adapters of the embedded model, and three that cannot be used with it."""
    folder = tmp_path_factory.mktemp("adapters")
    for number in range(NUM_ADAPTERS):
        write_pocket_adapter(folder / f"a{number}", number)
    write_pocket_adapter(folder / "large", 1, rank=17)
    write_peft(folder / "foreign", SHAPES["tiny-llama"], 4)
    shutil.copytree(folder / "a0", folder / "cut")
    weights = folder / "cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    arguments = ("pocket://", "--max-loras", "3", "--enable-debug-endpoints", "--num-blocks", "200")
    modules = ("--lora-modules", f"a0={folder / 'a0'}", json.dumps({"name": "a1", "path": str(folder / "a1")}))
    with ServerProcess(*arguments, *modules) as server:
        server.wait_ready()
        yield server


def text_of(response: httpx2.Response) -> str:
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def answer(client: httpx2.Client, model: str, prompt: str) -> str:
    return text_of(client.post("/v1/completions", json={"model": model, "prompt": prompt, **KNOWN}))


def error_of(response: httpx2.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def load(client: httpx2.Client, name: str, path: Path | str, **more: Any) -> httpx2.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more})


def unload(client: httpx2.Client, name: str) -> httpx2.Response:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def test_adapters_are_models_with_their_base_as_parent(server: ServerProcess, folder: Path) -> None:
    with server.client() as client:
        models = {each["id"]: each for each in client.get("/v1/models").json()["data"]}
        assert models["a0"]["parent"] == "pocket://"
        assert models["a0"]["root"] == str(folder / "a0")
        assert models["pocket"]["parent"] is None
        texts = {answer(client, name, PROMPTS[0]) for name in ("pocket", "a0", "a1")}
        assert len(texts) == 3
        shown = client.post("/api/show", json={"model": "a0"}).json()
        assert f"FROM pocket://\nADAPTER {folder / 'a0'}\n" in shown["modelfile"]
        [replica] = client.get("/v1/cluster").json()["replicas"]
        assert replica["models"] == ["pocket://", "a0", "a1"]


def test_an_adapter_is_loaded_replaced_and_unloaded_at_runtime(server: ServerProcess, folder: Path) -> None:
    with server.client() as client:
        loaded = load(client, "new", folder / "a2")
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'new' added successfully.")
        first = answer(client, "new", PROMPTS[1])
        assert error_of(load(client, "new", folder / "a3")) == (400, "invalid_parameter", "lora_name")
        assert load(client, "new", folder / "a3", load_inplace=True).status_code == 200
        assert answer(client, "new", PROMPTS[1]) != first
        unloaded = unload(client, "new")
        assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
        assert error_of(unload(client, "new")) == (404, "model_not_found", "lora_name")
        request = {"model": "new", "prompt": "x", **KNOWN}
        assert error_of(client.post("/v1/completions", json=request)) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"lora_name": "x"}, (400, "invalid_parameter", "lora_path")),
        ({"lora_path": "x"}, (400, "invalid_parameter", "lora_name")),
        ({"lora_name": "x", "lora_path": "{folder}/none"}, (404, "model_not_found", "lora_path")),
        ({"lora_name": "x", "lora_path": "{folder}/cut"}, (400, "invalid_parameter", "lora_path")),
        ({"lora_name": "x", "lora_path": "{folder}/foreign"}, (400, "invalid_parameter", "lora_path")),
        ({"lora_name": "x", "lora_path": "{folder}/large"}, (400, "invalid_parameter", "lora_path")),
        ({"lora_name": "pocket", "lora_path": "{folder}/a0"}, (400, "invalid_parameter", "lora_name")),
        (
            {"lora_name": "x", "lora_path": "{folder}/a0", "base_model_name": "y"},
            (404, "model_not_found", "base_model_name"),
        ),
    ],
)
def test_an_adapter_that_cannot_be_used_changes_nothing(
    server: ServerProcess, folder: Path, body: dict[str, str], expected: tuple[int, str, str]
) -> None:
    given = {name: value.format(folder=folder) for name, value in body.items()}
    with server.client() as client:
        before = client.get("/v1/models").json()
        assert error_of(client.post("/v1/load_lora_adapter", json=given)) == expected
        assert client.get("/v1/models").json() == before


def test_a_typo_in_the_name_gets_a_suggestion(server: ServerProcess, folder: Path) -> None:
    with server.client() as client:
        assert load(client, "billing", folder / "a4").status_code == 200
        for response in (
            client.post("/v1/completions", json={"model": "biling", "prompt": "x"}),
            unload(client, "biling"),
        ):
            assert response.status_code == 404
            assert "billing" in response.json()["error"]["message"]
            assert "did you mean" in response.json()["error"]["message"]
        assert unload(client, "billing").status_code == 200


def test_llama_servers_parameter_names_the_way(server: ServerProcess) -> None:
    with server.client() as client:
        request = {"model": "pocket", "prompt": "x", "lora": [{"id": 0, "scale": 1.0}]}
        response = client.post("/v1/completions", json=request)
        assert error_of(response)[::2] == (400, "lora")


def test_a_server_without_adapters_refuses_them(folder: Path) -> None:
    with ServerProcess("stub://s", "--worker", "thread") as server:
        server.wait_ready()
        with server.client() as client:
            response = load(client, "a", folder / "a0")
            assert response.status_code == 400
            assert "--enable-lora" in response.json()["error"]["message"]


# -- a storm ----------------------------------------------------------------------------------------------------------


class Storm:
    """Random loads, unloads and requests of adapters. An answer must be that of one of the contents that its name had
    while the request was open."""

    def __init__(self, server: ServerProcess, folder: Path, expected: dict[tuple[int, str], str], seed: int) -> None:
        self._server = server
        self._folder = folder
        self._expected = expected
        self._rng = random.Random(seed)
        self._contents: dict[str, list[int]] = {}
        """Contents that each name has had, in order; names whose adapter is unloaded keep theirs."""
        self._served: set[str] = set()
        self._changing = ""
        """Name whose adapter is being loaded or unloaded now."""
        self.num_answers = self.num_gone = self.num_changes = 0

    async def run(self, num_operations: int, num_clients: int = 5) -> None:
        self._left = num_operations
        async with plain_async_client(self._server.base_url) as client:
            await asyncio.gather(self._change(client), *(self._request(client) for _ in range(num_clients)))
            for name in sorted(self._served):
                assert (await self._post(client, "unload_lora_adapter", lora_name=name)).status_code == 200

    async def _post(self, client: httpx2.AsyncClient, path: str, **body: Any) -> httpx2.Response:
        """Send a request, and again while the worker is being restarted."""
        while True:
            response = await client.post(f"/v1/{path}", json=body)
            if response.status_code != 503:
                return response
            await asyncio.sleep(0.05)

    async def _change(self, client: httpx2.AsyncClient) -> None:
        """Load and unload, one at a time."""
        rng = self._rng
        while self._left > 0:
            self._left -= 1
            self.num_changes += 1
            name = self._changing = f"n{rng.randrange(NUM_ADAPTERS)}"
            if name in self._served and rng.random() < 0.4:
                self._served.discard(name)
                assert (await self._post(client, "unload_lora_adapter", lora_name=name)).status_code == 200
            else:
                number = rng.randrange(NUM_ADAPTERS)
                self._contents.setdefault(name, []).append(number)
                body = {"lora_name": name, "lora_path": str(self._folder / f"a{number}"), "load_inplace": True}
                response = await self._post(client, "load_lora_adapter", **body)
                assert response.status_code == 200, response.text
                self._served.add(name)
            self._changing = ""

    async def _request(self, client: httpx2.AsyncClient) -> None:
        rng = self._rng
        while self._left > 0:
            self._left -= 1
            served, all_names = sorted(self._served), sorted(self._contents)
            name = rng.choice([*served, "pocket"] if rng.random() < 0.8 else [*all_names, "pocket"])
            prompt = rng.choice(PROMPTS)
            before = self._contents.get(name, [-1])
            first, was_served = len(before) - 1, name in self._served or name == "pocket"
            if name == self._changing:
                first, was_served = max(0, first - 1), False
            response = await self._post(client, "completions", model=name, prompt=prompt, **KNOWN)
            is_served = name in self._served or name == "pocket"
            possible = self._contents.get(name, [-1])[first:]
            if response.status_code == 404:
                assert not (was_served and is_served and len(possible) == 1), "a served adapter was not found"
                self.num_gone += 1
                continue
            assert text_of(response) in {self._expected[number, prompt] for number in possible}
            self.num_answers += 1


def expected_answers(server: ServerProcess, folder: Path) -> dict[tuple[int, str], str]:
    """Answers of each adapter alone, by its number; -1: the base."""
    found: dict[tuple[int, str], str] = {}
    with server.client() as client:
        for number in range(-1, NUM_ADAPTERS):
            name = "pocket" if number < 0 else "alone"
            if number >= 0:
                assert load(client, name, folder / f"a{number}", load_inplace=True).status_code == 200
            found |= {(number, prompt): answer(client, name, prompt) for prompt in PROMPTS}
        assert unload(client, "alone").status_code == 200
    assert len({found[number, PROMPTS[0]] for number in range(-1, NUM_ADAPTERS)}) > NUM_ADAPTERS // 2
    return found


def check_kept(server: ServerProcess) -> None:
    """No block, sequence or slot is lost, and only the first adapters are left."""
    with server.client() as client:
        assert client.get("/debug/check").status_code == 200
        models = [each["id"] for each in client.get("/v1/models").json()["data"]]
        assert models == ["pocket://", "pocket", "a0", "a1"]


def run_storm(server: ServerProcess, folder: Path, num_operations: int, seed: int, *, kills: bool = False) -> Storm:
    print(f"seed {seed}")
    storm = Storm(server, folder, expected_answers(server, folder), seed)

    async def run() -> None:
        running = asyncio.create_task(storm.run(num_operations))
        if kills:
            await asyncio.sleep(0.5)
            _kill_worker(server)
        await running

    asyncio.run(run())
    check_kept(server)
    return storm


def _kill_worker(server: ServerProcess) -> None:
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    workers = [int(each) for each in children if b"worker" in Path(f"/proc/{each}/cmdline").read_bytes()]
    assert workers, "the worker is a child of the server"
    os.kill(workers[-1], signal.SIGKILL)


def test_a_storm_of_changes_under_traffic_gives_no_wrong_answer(server: ServerProcess, folder: Path) -> None:
    storm = run_storm(server, folder, 150, seed=1)
    assert storm.num_answers > 60
    assert storm.num_changes > 10


def test_adapters_survive_a_lost_worker(server: ServerProcess, folder: Path) -> None:
    with server.client() as client:
        assert load(client, "late", folder / "a5").status_code == 200
        before = answer(client, "late", PROMPTS[2])
        _kill_worker(server)
        until(lambda: client.get("/health/ready").status_code == 503 or _answers(client))
        until(lambda: client.get("/health/ready").status_code == 200)
        assert answer(client, "late", PROMPTS[2]) == before
        assert unload(client, "late").status_code == 200
    check_kept(server)


def _answers(client: httpx2.Client) -> bool:
    return client.post("/v1/completions", json={"model": "late", "prompt": "x", **KNOWN}).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_thousand_random_operations_with_a_restart_in_the_middle(
    server: ServerProcess, folder: Path, seed: int
) -> None:
    storm = run_storm(server, folder, 1_000, seed, kills=True)
    print(f"{storm.num_answers} answers, {storm.num_changes} changes, {storm.num_gone} of adapters that were gone")
    assert storm.num_answers > 500
