"""The example manifest with adapters, served: with the embedded model in place of the hub's, and random adapters."""

from __future__ import annotations

from pathlib import Path

from tests.adapter_files import write_pocket_adapter
from tests.server.process import IN_THREAD, serve

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BASE = "hf://Qwen/Qwen3-1.7B"
SPECIALISTS = ("billing", "technical", "legal")


def test_router_and_specialists_share_one_replica_under_one_budget(tmp_path: Path) -> None:
    text = (EXAMPLES / "lora-specialists.yaml").read_text()
    assert text.count(f"source: {BASE}\n") == 2 + len(SPECIALISTS)
    text = text.replace(BASE, "pocket://")
    for seed, name in enumerate(SPECIALISTS):
        text = text.replace(f"adapters/{name}", str(write_pocket_adapter(tmp_path / name, seed)))
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text(text)
    with serve("--manifest", str(manifest), *IN_THREAD) as server, server.client() as client:
        chat = {"messages": [{"role": "user", "content": "I was charged twice"}], "max_tokens": 4, "temperature": 0}
        routed = client.post("/v1/chat/completions", json=chat).json()
        answers = {
            model: client.post("/v1/chat/completions", json={**chat, "model": model}).json()
            for model in (*SPECIALISTS, "general")
        }
        cluster = client.get("/v1/cluster").json()
        models = {each["id"]: each["parent"] for each in client.get("/v1/models").json()["data"]}
        metrics = client.get("/metrics").text
    assert routed["lockstep"]["hops"][0]["model"] == "router"
    assert routed["model"] in answers
    assert {answer["model"]: len(answer["choices"]) for answer in answers.values()} == dict.fromkeys(answers, 1)
    assert [models[name] for name in SPECIALISTS] == ["router"] * 3
    [replica] = cluster["replicas"]
    [budget] = [each for each in cluster["budgets"] if each["name"] == "gpu_budget"]
    assert budget["declared_bytes"] == 6_000_000_000
    assert 0 < budget["used_bytes"] == replica["bytes"] < budget["effective_bytes"]
    assert 'lora_requests_info{engine="0",max_lora="8"' in metrics
