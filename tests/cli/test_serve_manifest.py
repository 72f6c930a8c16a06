"""`lockstep serve --manifest`: a cluster boots from its file, and the file is brought in again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lockstep.cli.main import invoke
from lockstep.pocket import pocket_path
from tests.server.process import IN_THREAD, ServerProcess, plain_async_client, serve
from tests.waiting import HANG_S, eventually, until

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = """\
cluster: small
models:
  router:
    source: stub://router
  specialists:
    - id: billing
      source: stub://billing
routing:
  entry: router
  dispatch_rule: router.output.intent -> specialists.{intent}
"""
GROWN = SMALL.replace("routing:", "    - id: legal\n      source: stub://legal\nrouting:")


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return path


def names_of(server: ServerProcess) -> list[str]:
    with server.client() as client:
        return [model["id"] for model in client.get("/v1/models").json()["data"]]


def test_the_example_boots_as_it_stands_and_routes() -> None:
    with serve("--manifest", str(EXAMPLES / "customer-support.yaml"), "--backend", "stub", *IN_THREAD) as server:
        assert names_of(server) == ["router", "billing", "technical", "legal", "fallback"]
        body = {"messages": [{"role": "user", "content": "My invoice shows a wrong payment"}], "max_tokens": 4}
        with server.client() as client:
            answer = client.post("/v1/chat/completions", json=body).json()
            direct = client.post("/v1/chat/completions", json={**body, "model": "legal"}).json()
    assert answer["lockstep"]["entry_model"] == "router"
    assert len(answer["lockstep"]["hops"]) == 2
    assert answer["lockstep"]["final_model"] == answer["model"]
    assert direct["model"] == "legal", "a standby model is loaded for who asks for it"
    assert "hops" not in direct["lockstep"]


def cluster_of(server: ServerProcess) -> dict[str, Any]:
    with server.client() as client:
        shown: dict[str, Any] = client.get("/v1/cluster").json()
    return shown


def test_one_model_from_a_file_answers_under_every_name() -> None:
    """The fallback's, too; it is loaded once."""
    path = str(pocket_path())
    with serve("--manifest", str(EXAMPLES / "customer-support.yaml"), "--backend", path, *IN_THREAD) as server:
        with server.client() as client:
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
            for name in names_of(server):
                assert client.post("/v1/chat/completions", json={**body, "model": name}).status_code == 200
        shown = cluster_of(server)
    assert shown["backend"] == path
    assert {model["source"] for model in shown["models"]} == {path}
    assert len(shown["replicas"]) == 1


def test_the_embedded_model_has_its_personas_by_either_of_its_names() -> None:
    with serve("--manifest", str(EXAMPLES / "customer-support.yaml"), "--backend", "pocket://", *IN_THREAD) as server:
        assert cluster_of(server)["backend"] == "pocket"


def test_one_stub_behind_every_name_still_routes_by_prompt() -> None:
    flags = ("--manifest", str(EXAMPLES / "customer-support.yaml"), "--backend", "stub://all?step_ms=1")
    with serve(*flags, *IN_THREAD) as server, server.client() as client:
        for words, model in (("a clause of my contract", "legal"), ("hello", "fallback")):
            body = {"messages": [{"role": "user", "content": words}], "max_tokens": 8}
            answer = client.post("/v1/chat/completions", json=body).json()
            [choice] = answer["choices"]
            assert (answer["model"], choice["finish_reason"]) == (model, "stop")
            assert choice["message"]["content"] == f"[stub:all] ok len={len(words)} max=8"


def test_a_budget_without_an_exact_unit_is_read_with_a_warning(tmp_path: Path) -> None:
    """The warning is in the log, in `/v1/cluster` and in the answer to a PUT."""
    text = SMALL.replace("models:", "resources: {gpu_budget: 18G}\nmodels:", 1)
    note = (
        "line 2: resources.gpu_budget is '18G', which is read as 18GB (18,000,000,000 bytes); NRT reads it as 18GiB; "
        "write 18GB or 18GiB"
    )
    with serve("--manifest", str(written(tmp_path, text)), *IN_THREAD) as server, server.client() as client:
        shown = client.get("/v1/cluster").json()
        kind = {"Content-Type": "application/yaml"}
        same = client.put("/v1/manifest", content=text.replace("18G", "18000000000"), headers=kind).json()
        right = client.put("/v1/manifest", content=text.replace("18G", "18GB"), headers=kind).json()
        log, after = server.stderr, client.get("/v1/cluster").json()
    assert shown["budgets"][0]["declared_bytes"] == 18_000_000_000
    assert shown["warnings"] == [note]
    assert note in log
    assert (same["unchanged"], len(same["warnings"])) == (["router", "billing"], 1)
    assert right["warnings"] == after["warnings"] == []


@pytest.mark.parametrize(
    ("example", "num_models", "num_resident", "num_standby", "resident_bytes"),
    [
        pytest.param("customer-support", 5, 3, 1, 2_400_000_000, marks=pytest.mark.slow),  # booted above
        pytest.param("density-50", 51, 26, 25, 20_800_000_000, marks=pytest.mark.slow),  # tests/bench/test_cluster.py
        ("warming-heavy", 9, 1, 8, 800_000_000),
    ],
)
def test_every_example_boots_with_its_models_in_their_tiers_and_its_bytes(
    example: str, num_models: int, num_resident: int, num_standby: int, resident_bytes: int
) -> None:
    path, body = EXAMPLES / f"{example}.yaml", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    with serve("--manifest", str(path), "--backend", "stub", *IN_THREAD) as server, server.client() as client:
        told = client.get("/v1/cluster").json()
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        warmed = client.get("/v1/cluster").json()["counters"]["co_activation_warms"]
    tiers = [model["tier"] for model in told["models"]]
    assert (len(tiers), tiers.count("resident"), tiers.count("standby")) == (num_models, num_resident, num_standby)
    assert [model["state"] for model in told["models"]] == [
        "resident" if tier == "resident" else "standby" for tier in tiers
    ], "what is remote elsewhere is a model in reach here"
    assert told["budgets"][0]["used_bytes"] == resident_bytes
    assert warmed == (8 if example == "warming-heavy" else 0)


def test_budgets_beyond_the_machine_are_cut_with_one_warning_each(tmp_path: Path) -> None:
    text = "cluster: c\nresources: {gpu_budget: 80TB, ram_budget: 20TB}\nmodels:\n  m: {source: 'pocket://'}\n"
    with serve("--manifest", str(written(tmp_path, text)), *IN_THREAD) as server:
        lines = [line for line in server.stderr.splitlines() if "is cut from" in line]
    assert len(lines) == 2
    assert all("WARNING" in line and line.endswith("as this machine has no more memory") for line in lines)


def test_every_fault_of_a_manifest_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, SMALL.replace("source: stub://router", "tier: hot") + "zebra: 1\n")
    assert invoke(["serve", "--manifest", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 3
    assert all(line.startswith(f"lockstep: error: {path}, line ") for line in lines)
    assert any("tier" in line for line in lines)
    assert any("zebra" in line for line in lines)


def test_startup_over_budget_prints_the_need_of_each_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, SMALL.replace("models:\n", "resources: {gpu_budget: 1GB}\nmodels:\n", 1))
    assert invoke(["serve", "--manifest", str(path), "--port", "0", *IN_THREAD]) == 2
    first, head, *rows, gpu, _ = capsys.readouterr().err.splitlines()
    assert first == (
        "lockstep: error: the models need more than gpu_budget (1.6 GB of 1 GB): "
        "raise it, or declare fewer models resident"
    )
    assert head.split()[:2] == ["model", "tier"]
    assert [row.split()[0] for row in rows] == ["router", "billing"]
    assert gpu == "gpu_budget: 1.6 GB needed of 1 GB, 600 MB too much"


async def test_models_of_one_replica_are_served_by_their_priority(tmp_path: Path) -> None:
    """One place in a step: what was asked of the critical model overtakes what waits for the low one.

    The others would take minutes: it is not their end that it comes after.
    """
    shared = "stub://shared?step_ms=20"
    text = f"cluster: c\nmodels:\n  low: {{source: '{shared}', priority: low}}\n"
    text += f"  top: {{source: '{shared}', priority: critical}}\n"
    with serve("--manifest", str(written(tmp_path, text)), "--max-num-seqs", "1", *IN_THREAD) as server:
        async with plain_async_client(server.base_url) as client:

            async def ask(model: str, max_tokens: int) -> int:
                body = {"model": model, "prompt": "a", "max_tokens": max_tokens, "ignore_eos": True}
                return (await client.post("/v1/completions", json=body)).status_code

            async def are_waiting(number: int) -> bool:
                return waiting_in((await client.get("/metrics")).text) == number

            asked: list[asyncio.Task[int]] = []
            for num_waiting, (model, max_tokens) in enumerate([("low", 8000)] * 3 + [("top", 2)]):
                asked.append(asyncio.create_task(ask(model, max_tokens)))
                await eventually(partial(are_waiting, num_waiting))
            first, *others, top = asked
            first.cancel()
            async with asyncio.timeout(HANG_S):
                ended, _ = await asyncio.wait([*others, top], return_when=asyncio.FIRST_COMPLETED)
            assert [(task is top, task.result()) for task in ended] == [(True, 200)]
            for other in others:
                other.cancel()
            await asyncio.gather(*asked, return_exceptions=True)


def waiting_in(page: str) -> float:
    """Requests of all models that wait for their first step."""
    families = text_string_to_metric_families(page)
    return sum(s.value for family in families for s in family.samples if s.name == "lockstep:num_requests_waiting")


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such signal")
def test_a_hangup_brings_the_file_in_and_a_faulty_one_changes_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, SMALL)
    with serve("--manifest", str(path), *IN_THREAD) as server:
        assert names_of(server) == ["router", "billing"]
        path.write_text(GROWN)
        server.signal(signal.SIGHUP)
        until(lambda: "legal" in names_of(server), "the new model is served")
        path.write_text(SMALL + "zebra: 1\n")
        server.signal(signal.SIGHUP)
        until(lambda: "is not applied: line 11" in server.stderr, "the fault is logged with its line")
        assert "legal" in names_of(server)
        assert server.stop() == 0


def test_a_watched_file_is_brought_in_by_itself(tmp_path: Path) -> None:
    path = written(tmp_path, SMALL)
    with serve("--manifest", str(path), "--watch", *IN_THREAD) as server:
        path.unlink()
        replaced = tmp_path / "new.yaml"
        replaced.write_text(GROWN)
        os.replace(replaced, path)
        until(lambda: "legal" in names_of(server), "the new model is served")


def test_a_watched_file_that_changes_while_its_models_are_loaded_is_brought_in(tmp_path: Path) -> None:
    path = written(tmp_path, SMALL.replace("stub://router", "stub://router?load_ms=1500"))
    with ServerProcess("--manifest", str(path), "--watch", *IN_THREAD) as server:
        server.wait_listening()
        path.write_text(GROWN)
        server.wait_ready()
        until(lambda: "legal" in names_of(server), "the new model is served")


def test_a_manifest_is_put_and_got_over_http(tmp_path: Path) -> None:
    with serve("--manifest", str(written(tmp_path, SMALL)), *IN_THREAD) as server, server.client() as client:
        yaml = {"Content-Type": "application/yaml"}
        put = client.put("/v1/manifest", content=GROWN, headers=yaml)
        assert put.status_code == 200
        assert put.json()["added"] == ["legal"]
        got = client.get("/v1/manifest", headers={"Accept": "application/yaml"}).text
        whole = ["router", "billing", "legal"]
        assert client.put("/v1/manifest", content=got, headers=yaml).json()["unchanged"] == whole
        as_json = client.get("/v1/manifest").json()
        assert as_json["cluster"] == "small"
        assert client.put("/v1/manifest", json=as_json).json()["unchanged"] == whole
        refused = client.put("/v1/manifest", content=SMALL + "zebra: 1\n", headers=yaml)
        assert refused.status_code == 400
        [problem] = refused.json()["error"]["problems"]
        assert problem["line"] == 11
        assert client.get("/v1/manifest", headers={"Accept": "application/yaml"}).text == got
