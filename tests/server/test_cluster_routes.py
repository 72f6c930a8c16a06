"""A real cluster behind a real server: routed answers as they come, and what its routes show and change."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest_file import parse
from lockstep.cluster.state import ClusterOptions
from lockstep.server.metrics import REMOTE_HELP
from lockstep.system import SYSTEM, System
from lockstep.worker.link import WorkerOptions
from tests.server.living import Living, living_cluster
from tests.server.process import IN_THREAD, serve
from tests.server.support import error_of
from tests.systems import ClockedSystem
from tests.waiting import ENDLESS_MS, HANG_S, Gate, until

STEP_MS = 30
MANIFEST = f"""\
cluster: test
models:
  router:
    source: stub://router?field=intent&ids=billing,legal
  specialists:
    - id: billing
      source: stub://billing?step_ms={STEP_MS}
    - id: legal
      source: stub://legal
      tier: standby
      aliases: [law]
fallback:
  source: stub://fallback
routing:
  entry: router
  dispatch_rule: router.output.intent -> specialists.{{intent}}
"""
CHAT = "/v1/chat/completions"


def asking(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


BILLING = asking("I was charged twice")
ENDLESS = {"max_tokens": 4000, "ignore_eos": True, "stream": True}


def clustered(text: str = MANIFEST, system: System = SYSTEM) -> contextlib.AbstractContextManager[Living]:
    return living_cluster(Cluster(parse(text), ClusterOptions(worker=WorkerOptions(system=system))))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Living]:
    with clustered() as server:
        yield server


@pytest.fixture
def client(cluster: Living) -> Iterator[httpx2.Client]:
    with cluster.client() as made:
        yield made


def model_of(client: httpx2.Client, name: str) -> dict[str, Any]:
    models: list[dict[str, Any]] = client.get("/v1/cluster").json()["models"]
    return next(model for model in models if model["id"] == name)


def test_the_hop_comes_first_and_every_token_as_it_is_made(cluster: Living, client: httpx2.Client) -> None:
    """They are read while the answer, which takes minutes, is being made."""
    with client.stream("POST", CHAT, json={**BILLING, **ENDLESS}) as response:
        chunks = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))
        [call] = next(chunks)["choices"][0]["delta"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"intent": "billing", "target": "specialists.billing"}
        text = ""
        while len(text) < 8:
            text += next(chunks)["choices"][0]["delta"].get("content") or ""
        with cluster.client() as looking:
            assert model_of(looking, "billing")["num_running"] == 1


def test_the_hop_does_not_wait_for_the_model_that_it_names(gate: Gate) -> None:
    """While the client has the hop, the specialist is still being loaded; the answer is that of a warm one."""
    text = MANIFEST.replace("stub://legal", f"stub://legal?load_ms={ENDLESS_MS}")
    with clustered(text) as server, server.client() as client, server.client() as looking:
        whole = {**asking("Is this clause legal?"), "stream": True, "logprobs": True}
        with client.stream("POST", CHAT, json=whole) as response:
            chunks = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))
            [call] = next(chunks)["choices"][0]["delta"]["tool_calls"]
            assert model_of(looking, "legal")["state"] == "loading"
            gate.open()
            rest = list(chunks)
        assert json.loads(call["function"]["arguments"])["target"] == "specialists.legal"
        assert model_of(client, "legal")["state"] == "resident"
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in rest)
        assert text == "[stub:legal] ok len=21 max=8"
        assert [hop["model"] for hop in rest[-1]["lockstep"]["hops"]] == ["router", "legal"]
        warm = client.post(CHAT, json={**whole, "stream": False}).json()["choices"][0]
        told = [entry for chunk in rest for entry in (chunk["choices"][0]["logprobs"] or {"content": ()})["content"]]
        assert (text, told) == (warm["message"]["content"], warm["logprobs"]["content"])


def test_models_unloaded_by_hand_under_load_come_back_and_no_request_fails() -> None:
    statuses: list[tuple[str, int]] = []
    is_over = threading.Event()

    def ask_on(server: Living, name: str) -> None:
        with server.client() as client:
            while not is_over.is_set():
                statuses.append((name, client.post(CHAT, json=asking("Is this legal?", model=name)).status_code))

    with clustered() as server, server.client() as client:
        clients = [threading.Thread(target=ask_on, args=(server, name)) for name in ("law", "law", "billing", "test")]
        for each in clients:
            each.start()
        try:
            for _ in range(8):
                for name in ("legal", "billing", "router"):
                    assert client.post(f"/v1/models/{name}/unload").status_code == 200
                seen = len(statuses)
                until(lambda seen=seen: len(statuses) > seen + 8, "they are answered again")  # type: ignore[misc]  # bound now
        finally:
            is_over.set()
            for each in clients:
                each.join(HANG_S)
        assert {name for name, _ in statuses} == {"law", "billing", "test"}
        assert {status for _, status in statuses} == {200}
        assert client.get("/v1/cluster").json()["counters"]["demotions"] >= 8


def test_a_hop_to_a_model_that_cannot_be_loaded_is_shown_and_the_stream_ends_with_the_reason() -> None:
    """A request for a whole answer, and any request while the failure lasts, get an error status. The cluster's clock
    stands still, so that nothing is loaded again meanwhile."""
    text = MANIFEST.replace("      aliases: [law]", "      engine: {block_size: 7}")
    ask = {**asking("Is this clause legal?"), "stream": True}
    with clustered(text, system=ClockedSystem(lambda: 1.0)) as server, server.client() as client:
        frames = [line for line in client.post(CHAT, json=ask).text.splitlines() if line.startswith("data: ")]
        assert "dispatch_to_specialist" in frames[0]
        assert "block_size is 7" in json.loads(frames[1][6:])["error"]["message"]
        assert frames[2:] == ["data: [DONE]"]
        for is_stream in (True, False):
            refused = client.post(CHAT, json={**ask, "stream": is_stream})
            assert (refused.status_code, "block_size" in error_of(refused)["message"]) == (503, True)
            assert "retry-after" in refused.headers


@pytest.mark.parametrize(
    ("text", "intent", "model"),
    [
        ("I was charged twice", "billing", "billing"),
        ("Is this clause legal?", "legal", "legal"),
        ("Hi", "none", "fallback"),
    ],
)
def test_a_request_without_a_model_is_routed(client: httpx2.Client, text: str, intent: str, model: str) -> None:
    told = client.post(CHAT, json=asking(text)).json()
    extension = told["lockstep"]
    assert (extension["entry_model"], extension["intent"], extension["final_model"]) == ("router", intent, model)
    assert [hop["model"] for hop in extension["hops"]] == ["router", model]
    assert extension["hops"][1]["usage"] == told["usage"]


@pytest.mark.parametrize("name", ["router", "test"])
def test_the_entrys_id_and_the_clusters_name_are_routed_too(client: httpx2.Client, name: str) -> None:
    assert client.post(CHAT, json={**BILLING, "model": name}).json()["model"] == "billing"


def test_the_official_client_reads_a_routed_answer(cluster: Living) -> None:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as made:
        answer = made.chat.completions.create(
            model="test", messages=[{"role": "user", "content": "I was charged twice"}], max_tokens=8
        )
        text = ""
        names = []
        for chunk in made.chat.completions.create(
            model="test", messages=[{"role": "user", "content": "I was charged twice"}], max_tokens=8, stream=True
        ):
            text += chunk.choices[0].delta.content or ""
            for call in chunk.choices[0].delta.tool_calls or ():
                assert call.function is not None
                names.append(call.function.name)
    assert names == ["dispatch_to_specialist"]
    assert text == answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_a_model_named_by_the_request_answers_without_routing(client: httpx2.Client) -> None:
    told = client.post(CHAT, json={**BILLING, "model": "law"}).json()
    assert told["model"] == "legal"
    assert "hops" not in told["lockstep"]
    missing = client.post(CHAT, json={**BILLING, "model": "nobody"})
    assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")


def test_models_are_loaded_and_unloaded_by_hand(client: httpx2.Client) -> None:
    assert client.post("/v1/models/legal/load").json()["state"] == "resident"
    assert client.post("/v1/models/law/unload").json()["state"] == "standby"
    assert model_of(client, "legal")["state"] == "standby"
    assert client.post(CHAT, json={**BILLING, "model": "legal"}).status_code == 200, "a request brings it back"
    assert model_of(client, "legal")["state"] == "resident"


def test_a_session_is_seen_until_it_is_ended(client: httpx2.Client) -> None:
    answer = client.post(CHAT, json={**BILLING, "session_id": "customer/1"}).json()
    assert answer["lockstep"]["session_id"] == "customer/1"
    [session] = [each for each in client.get("/v1/sessions").json()["data"] if each["id"] == "customer/1"]
    assert (session["num_requests"], session["state"]) == (1, "idle")
    assert client.delete("/v1/sessions/customer/1").json()["deleted"] is True
    gone = client.delete("/v1/sessions/customer/1")
    assert (gone.status_code, error_of(gone)["code"]) == (404, "session_not_found")


def test_watcher_receives_the_events_of_a_routed_request(cluster: Living) -> None:
    lines: list[str] = []

    def watch() -> None:
        with cluster.client() as watching, watching.stream("GET", "/v1/events?type=hop") as response:
            for line in response.iter_lines():
                lines.append(line)
                if line.startswith("data: "):
                    return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    until(lambda: ": watching" in lines, "the watcher is let in")
    with cluster.client() as client:
        client.post(CHAT, json=BILLING)
    watcher.join(HANG_S)
    assert not watcher.is_alive()
    [event] = [line for line in lines if line.startswith("event: ")]
    [data] = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert event == "event: hop"
    assert (data["model"], data["intent"], data["target"]) == ("router", "billing", "specialists.billing")


def test_counters_increase(client: httpx2.Client) -> None:
    before = client.get("/v1/cluster").json()["counters"]
    client.post(CHAT, json=BILLING)
    client.post(CHAT, json=asking("Hi"))
    client.post(CHAT, json={**BILLING, "model": "billing"})
    after = client.get("/v1/cluster").json()["counters"]
    grown = {name: after[name] - before[name] for name in before}
    assert grown["requests_total"] == 3
    assert grown["router_hits"] == 2
    assert (grown["dispatch_hits"], grown["dispatch_fallbacks"]) == (1, 1)


def test_the_cluster_is_in_the_metrics(client: httpx2.Client) -> None:
    client.post(CHAT, json=BILLING)
    counters = client.get("/v1/cluster").json()["counters"]
    told = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if "lockstep:cluster_" in line)
    assert float(told["lockstep:cluster_requests_total"]) == counters["requests_total"]
    assert float(told["lockstep:cluster_dispatch_hits_total"]) == counters["dispatch_hits"]
    assert float(told['lockstep:cluster_model_state{model_name="billing",state="resident"}']) == 1
    assert float(told['lockstep:cluster_model_state{model_name="billing",state="standby"}']) == 0
    assert float(told['lockstep:cluster_budget_used_bytes{budget="gpu_budget"}']) >= 1_600_000_000
    for model in client.get("/v1/cluster").json()["models"]:
        labels = f'{{model_name="{model["id"]}"}}'
        assert float(told[f"lockstep:cluster_model_requests_total{labels}"]) == model["num_requests"]
        assert float(told[f"lockstep:cluster_model_running{labels}"]) == 0
        assert float(told[f"lockstep:cluster_model_sessions{labels}"]) == model["num_sessions"]


def test_evictions_of_sessions_and_of_models_are_counted_separately() -> None:
    """In the snapshot, in the metrics, and as events that say which session."""
    text = MANIFEST.replace("cluster: test", "cluster: test\nresources: {gpu_budget: 2400MB}")
    text = text.replace(f"stub://billing?step_ms={STEP_MS}", "stub://billing\n      max_active_sessions: 2")
    text = text.replace("stub://fallback", "stub://fallback\n  tier: standby")
    with clustered(text) as server, server.client() as client:
        for number in range(5):
            client.post(CHAT, json={**BILLING, "session_id": f"s{number}"})
        assert client.post(CHAT, json=asking("Hi")).json()["model"] == "fallback"
        assert client.post(CHAT, json=asking("Is this clause legal?")).json()["model"] == "legal"
        counters = client.get("/v1/cluster").json()["counters"]
        lines = client.get("/metrics").text.splitlines()
        told = dict(line.rsplit(" ", 1) for line in lines if "evictions" in line)
        with client.stream("GET", "/v1/events?after=0&type=session_evicted") as response:
            data = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))
            events = [next(data) for _ in range(3)]
    assert (counters["lru_evictions"], counters["model_evictions"]) == (3, 1)
    assert float(told["lockstep:cluster_lru_evictions_total"]) == 3
    assert float(told["lockstep:cluster_model_evictions_total"]) == 1
    assert [(event["session"], event["model"], event["reason"]) for event in events] == [
        (f"s{number}", "billing", "room") for number in range(3)
    ]


def test_the_remote_tier_is_in_the_metrics(cluster: Living) -> None:
    """Two remote models: the other server here, and a port where nobody listens, which is left alone after five."""
    far = f"base_url: '{cluster.url}/v1', model: billing"
    gone = "base_url: 'http://127.0.0.1:9/v1'"
    text = MANIFEST.replace("fallback:\n  source: stub://fallback\n", f"fallback: {{remote: {{{far}}}}}\n")
    text = text.replace("models:\n", f"models:\n  gone: {{remote: {{{gone}}}}}\n")
    with clustered(text) as server, server.client() as client:
        assert client.post(CHAT, json=asking("Hi")).json()["model"] == "fallback"
        statuses = [client.post(CHAT, json={**BILLING, "model": "gone"}).status_code for _ in range(3)]
        told = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if "_remote_" in line)
        shown = {remote["model"]: remote for remote in client.get("/v1/cluster").json()["remotes"]}
    assert statuses[:2] == [502, 502], "it cannot be reached"
    assert statuses[2] in (502, 503), "it is not asked any more, unless this takes so long that it is again"

    def value(name: str, model: str, more: str = "") -> float:
        return float(told[f'lockstep:cluster_remote_{name}{{model_name="{model}"{more}}}'])

    counts = {model: [value(f"{name}_total", model) for name in REMOTE_HELP] for model in ("fallback", "gone")}
    assert counts["fallback"] == [1, 1, 0, 0]
    requests, attempts, failures, refusals = counts["gone"]
    assert (requests, attempts, attempts + refusals) == (3, failures, 6), "where it takes long, the last tries once"
    assert failures >= 5
    assert value("breaker_state", "fallback", ',state="closed"') == value("breaker_state", "gone", ',state="open"') == 1
    assert value("breaker_state", "gone", ',state="closed"') == 0
    assert value("time_to_first_byte_seconds_count", "fallback") == 1
    assert value("time_to_first_byte_seconds_count", "gone") == 0
    assert (shown["gone"]["breaker"], shown["fallback"]["failures_total"]) == ("open", 0)


def test_metrics_are_labelled_by_model(client: httpx2.Client) -> None:
    client.post(CHAT, json=BILLING)
    told = client.get("/metrics").text
    for name in ("router", "billing"):
        assert f'lockstep:generation_tokens_total{{engine="0",model_name="{name}"}}' in told or (
            f'lockstep:generation_tokens_total{{model_name="{name}",engine="0"}}' in told
        )


def test_a_watcher_does_not_keep_a_server_from_ending(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(MANIFEST)
    with serve("--manifest", str(path), *IN_THREAD) as server, server.client() as client:
        with client.stream("GET", "/v1/events") as response:
            lines = response.iter_lines()
            assert next(lines) == ": watching"
            server.signal(signal.SIGTERM)
            assert not [line for line in lines if line], "the stream has its end"
        assert server.wait() == 0
    assert "Traceback" not in server.stderr
    assert "ERROR" not in server.stderr
