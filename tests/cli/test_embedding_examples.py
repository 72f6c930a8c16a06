"""The example manifests with embedding models, served: one with other files in place of the hub's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep import LLM
from lockstep.pocket import DEMO_MESSAGES
from tests.cli.encoders import write_embedder, write_reranker
from tests.server.process import IN_THREAD, serve

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DOCUMENTS = ["I was charged twice for one order", "The login page shows an error"]


def test_the_demos_messages_go_to_the_models_of_their_nearest_examples() -> None:
    manifest = str(EXAMPLES / "nearest-routing.yaml")
    with serve("--manifest", manifest, *IN_THREAD) as server, server.client() as client:
        for text, intent in DEMO_MESSAGES.items():
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
            answer = client.post("/v1/chat/completions", json=body).json()
            assert (text, answer["model"]) == (text, "general" if intent == "none" else intent)
            [hop] = answer["lockstep"]["hops"][:1]
            assert (hop["model"], hop["usage"]["completion_tokens"]) == ("embedder", 0)


def test_one_process_generates_embeds_and_reranks_under_one_budget(tmp_path: Path) -> None:
    embedder, reranker = write_embedder(tmp_path / "embedder"), write_reranker(tmp_path / "reranker")
    text = (EXAMPLES / "embeddings.yaml").read_text()
    text = text.replace("hf://BAAI/bge-small-en-v1.5", str(embedder))
    text = text.replace("hf://cross-encoder/ms-marco-MiniLM-L6-v2", str(reranker))
    text, num_replaced = re.subn(r"hf://Qwen/\S+", "pocket://", text)
    assert num_replaced == 3
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text(text)
    with serve("--manifest", str(manifest), *IN_THREAD) as server, server.client() as client:
        chat = {"messages": [{"role": "user", "content": "Where is my refund?"}], "max_tokens": 4}
        routed = client.post("/v1/chat/completions", json=chat).json()
        embedded = client.post("/v1/embeddings", json={"model": "embedder", "input": DOCUMENTS}).json()
        body = {"model": "reranker", "query": "my refund", "documents": DOCUMENTS}
        ranked = client.post("/v1/rerank", json=body).json()
        cluster = client.get("/v1/cluster").json()
        refused = client.post("/v1/chat/completions", json={**chat, "model": "embedder"})
    assert (routed["model"], routed["lockstep"]["hops"][0]["model"]) == ("writer", "router")
    with LLM(str(embedder)) as llm:
        assert embedded["data"][1]["embedding"] == pytest.approx(llm.embed(DOCUMENTS[1])[0].tolist())
    with LLM(str(reranker)) as llm:
        scores = llm.score("my refund", DOCUMENTS)
    assert [each["relevance_score"] for each in ranked["results"]] == sorted(scores, reverse=True)
    assert [model["task"] for model in cluster["models"]] == ["generate"] * 3 + ["embed", "rerank"]
    [budget] = [each for each in cluster["budgets"] if each["name"] == "gpu_budget"]
    assert budget["declared_bytes"] == 14_000_000_000
    assert 0 < budget["used_bytes"] == sum(each["bytes"] for each in cluster["replicas"]) < budget["effective_bytes"]
    assert refused.status_code == 400
