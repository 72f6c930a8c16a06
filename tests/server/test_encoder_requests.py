"""Requests for vectors and scores of real encoders: what each API refuses, and what it says about the models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import LLM, EngineOptions, LoadOptions
from lockstep.errors import InvalidParameterError, PromptTooLongError, RequestError
from tests.server.encoders import serving_encoders
from tests.server.process import IN_THREAD, ServerProcess, serve
from tools.random_vector_models import CONTEXT, SIZE, write_answering_reranker, write_embedder, write_reranker

QUERY = "I want my money back"
DOCUMENTS = ["my login page shows an error", "I was charged twice for one order", "is this clause enforceable?"]
LONG = "x " * (CONTEXT + 1)
INVISIBLE = "\u200b"
"""A character that WordPiece leaves out."""
SAID = [{"role": "user", "content": "a"}]
EMBED, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
ROUTED = """
cluster: routed
models:
  embedder: {{source: '{folder}/embedder'}}
  specialists:
    - {{id: billing, source: 'pocket://'}}
    - {{id: legal, source: 'pocket://'}}
routing:
  entry: embedder
  dispatch:
    kind: nearest
    set: specialists
    examples: {{billing: [I was charged twice], legal: [is this clause enforceable]}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving_encoders(tmp_path_factory.mktemp("encoders")) as running:
        yield running


def post(server: ServerProcess, path: str, body: Mapping[str, object]) -> tuple[int, Any]:
    with server.client() as http:
        answer = http.post(path, json=body)
    return answer.status_code, answer.json()


def refused(server: ServerProcess, path: str, body: Mapping[str, object]) -> Any:
    status, answer = post(server, path, body)
    assert status == 400, answer
    return answer["error"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": "  \n"}, "input"),
        ({"input": ["a", " "]}, "input[1]"),
        ({"input": INVISIBLE}, "input"),
        ({"input": " ", "prompt_name": "query"}, "input"),
        ({"input": LONG}, "input"),
        ({"input": [320]}, "input"),
        ({"input": [[5], [-1]]}, "input[1][0]"),
        ({"input": LONG, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": LONG, "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": LONG, "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ({"input": LONG, "truncate_prompt_tokens": CONTEXT + 1}, "truncate_prompt_tokens"),
        ({"prompt_name": "nobody"}, "prompt_name"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": SIZE + 1}, "dimensions"),
        ({"model": "reranker"}, "model"),
        ({"model": "reranker", "input": [5, 6]}, "model"),
        ({"model": "reranker", "pooling": "cls"}, "model"),
    ],
)
def test_a_wrong_request_for_embeddings_names_its_parameter(
    server: ServerProcess, body: Mapping[str, object], param: str
) -> None:
    assert refused(server, EMBED, {"model": "embedder", "input": "hi", **body})["param"] == param


@pytest.mark.parametrize("model", ["reranker", "embedder"])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": " "}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": ["a", " "]}, "documents[1]"),
        ({"documents": ["a", INVISIBLE]}, "documents[1]"),
        ({"documents": ["a", {"text": "b"}, 3]}, "documents[2]"),
        ({"documents": ["a", LONG]}, "documents[1]"),
        ({"documents": [LONG], "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"documents": [LONG], "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"documents": [LONG], "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ({"documents": [LONG], "truncate_prompt_tokens": CONTEXT + 1}, "truncate_prompt_tokens"),
        ({"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ({"top_n": 0}, "top_n"),
        ({"instruction": "judge"}, "instruction"),
    ],
)
def test_a_wrong_request_for_scores_names_its_parameter(
    server: ServerProcess, model: str, body: Mapping[str, object], param: str
) -> None:
    status, answer = post(server, RERANK, {"model": model, "query": QUERY, "documents": DOCUMENTS, **body})
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_a_missing_parameter_is_named_with_an_unknown_one(server: ServerProcess) -> None:
    error = refused(server, RERANK, {"model": "reranker", "query": QUERY, "texts": DOCUMENTS})
    assert error["param"] == "documents"
    assert "texts" in error["message"]


def test_errors_of_rerank_have_the_members_that_clients_of_cohere_and_jina_read(server: ServerProcess) -> None:
    for path in (RERANK, "/rerank", "/v2/rerank"):
        status, answer = post(server, path, {"model": "nobody", "query": QUERY, "documents": DOCUMENTS})
        assert status == 404
        assert answer["message"] == answer["detail"] == answer["error"]["message"]


@pytest.mark.parametrize("model", ["embedder", "reranker"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": SAID}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": SAID, "max_tokens": 4}),
        ("/api/chat", {"messages": SAID}),
        ("/api/generate", {"prompt": "a"}),
        ("/api/generate", {"prompt": "a", "raw": True}),
    ],
)
def test_encoders_generate_no_text_in_any_api(
    server: ServerProcess, model: str, path: str, body: Mapping[str, object]
) -> None:
    error = refused(server, path, {"model": model, **body})
    told = error if isinstance(error, str) else error["message"]
    assert re.search(f"model '{model}' has the task '(embed|rerank)' and generates no text", told)
    if not path.startswith(("/api", "/v1/messages")):
        assert error["param"] == "model"


@pytest.mark.parametrize("path", [RERANK, SCORE])
def test_a_model_for_text_gives_embeddings_and_no_scores(server: ServerProcess, path: str) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS} if path == RERANK else {"text_1": QUERY, "text_2": DOCUMENTS}
    assert refused(server, path, {"model": "chat", **body})["param"] == "model"
    status, answer = post(server, EMBED, {"model": "chat", "input": " "})
    assert (status, len(answer["data"][0]["embedding"])) == (200, 256)


@pytest.mark.parametrize("model", ["reranker", "embedder"])
def test_documents_are_cut_to_their_first_tokens(server: ServerProcess, model: str) -> None:
    documents = [LONG, "x x x", DOCUMENTS[0]]
    body = {"model": model, "query": QUERY, "documents": documents, "max_tokens_per_doc": 3}
    status, answer = post(server, "/v2/rerank", body)
    assert status == 200, answer
    scores = {each["index"]: each["relevance_score"] for each in answer["results"]}
    assert scores[0] == scores[1] != scores[2]
    whole = {**body, "documents": documents[1:], "max_tokens_per_doc": 1_000}
    alone = {each["index"]: each["relevance_score"] for each in post(server, "/v2/rerank", whole)[1]["results"]}
    assert alone[0] == scores[0]
    assert alone[1] != scores[2]


def test_an_embedder_scores_with_its_prompt_for_queries(server: ServerProcess, tmp_path: Path) -> None:
    documents = [QUERY, *DOCUMENTS]
    with LLM(str(write_embedder(tmp_path / "embedder"))) as llm:
        expected = llm.score(QUERY, documents)
        [query], others = llm.embed(QUERY, prompt_name="query"), llm.embed(documents, prompt_name="")
    assert np.allclose(expected, others @ query, atol=1e-6)
    assert expected[0] < 0.9999, "the query has a prompt and the same text as a document has none"
    _, scored = post(server, SCORE, {"model": "embedder", "text_1": QUERY, "text_2": documents})
    assert [each["score"] for each in scored["data"]] == expected
    _, ranked = post(server, RERANK, {"model": "embedder", "query": QUERY, "documents": documents})
    assert {each["index"]: each["relevance_score"] for each in ranked["results"]} == dict(enumerate(expected))


def test_ollama_embeds_with_an_embedder_and_refuses_a_reranker(server: ServerProcess) -> None:
    _, expected = post(server, EMBED, {"model": "embedder", "input": ["hi", "ho"]})
    status, answer = post(server, "/api/embed", {"model": "embedder:latest", "input": ["hi", "ho"]})
    assert status == 200
    assert answer["embeddings"] == [each["embedding"] for each in expected["data"]]
    assert answer["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
    _, old = post(server, "/api/embeddings", {"model": "embedder", "prompt": "hi"})
    vector = np.array(old["embedding"])
    assert np.allclose(vector / np.linalg.norm(vector), answer["embeddings"][0], atol=1e-6)
    _, cut = post(server, "/api/embed", {"model": "embedder", "input": "hi", "dimensions": 8})
    assert np.allclose(np.linalg.norm(cut["embeddings"][0]), 1.0)
    assert post(server, "/api/embed", {"model": "embedder", "input": ""})[1]["embeddings"] == []
    assert post(server, "/api/embed", {"model": "embedder", "input": LONG})[1]["prompt_eval_count"] == CONTEXT
    for more, word in (
        ({"input": LONG, "truncate": False}, "input"),
        ({"input": ["a", "", "b"]}, "input\\[1\\]"),
        ({"input": "a", "dimensions": SIZE + 1}, "dimensions"),
        ({"input": "a", "model": "reranker"}, "reranker"),
    ):
        error = refused(server, "/api/embed", {"model": "embedder", **more})
        assert re.search(word, error)
        assert "truncate_prompt_tokens" not in error


def test_models_say_in_ollamas_words_what_they_are_for(server: ServerProcess) -> None:
    with server.client() as http:
        listed = {each["name"]: each["capabilities"] for each in http.get("/api/tags").json()["models"]}
        shown = {
            name: http.post("/api/show", json={"model": name}).json()["capabilities"]
            for name in ("embedder", "reranker", "chat")
        }
    assert shown == {"embedder": ["embedding"], "reranker": [], "chat": ["completion", "tools"]}
    assert {name: listed[f"{name}:latest"] for name in shown} == shown


def test_the_log_and_the_metrics_have_the_model_and_its_prompt_tokens(server: ServerProcess) -> None:
    def counted() -> float:
        with server.client() as http:
            page = http.get("/metrics").text
        [line] = re.findall(r'lockstep:prompt_tokens_total\{.*model_name="reranker"\} (\S+)', page)
        return float(line)

    before = counted()
    _, answer = post(server, SCORE, {"model": "reranker", "text_1": QUERY, "text_2": DOCUMENTS})
    num_tokens = answer["usage"]["prompt_tokens"]
    assert counted() - before == num_tokens
    logged = [line for line in server.stderr.splitlines() if f"endpoint={SCORE} status=200" in line]
    assert "model=reranker " in logged[-1]
    assert f"prompt_tokens={num_tokens} " in logged[-1]


def test_the_metrics_have_the_pool_of_an_encoder_in_the_tokens_of_the_cluster_tables(server: ServerProcess) -> None:
    with server.client() as http:
        page = http.get("/metrics").text
        replicas = http.get("/v1/cluster").json()["replicas"]
        listed = {each["id"]: each["max_model_len"] for each in http.get("/v1/models").json()["data"]}
        tokenised = http.post("/tokenize", json={"model": "embedder", "prompt": "a"}).json()
    assert (listed["embedder"], listed["chat"], tokenised["max_model_len"]) == (CONTEXT, 2048, CONTEXT)
    engines = {model: replica["engine"] for replica in replicas for model in replica["models"]}
    assert engines.keys() == {"embedder", "reranker", "chat"}
    for model, engine in engines.items():
        [line] = [
            line
            for line in page.splitlines()
            if line.startswith("lockstep:cache_config_info{") and f'model_name="{model}"' in line
        ]
        labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
        assert int(labels["num_gpu_blocks"]) * int(labels["block_size"]) == engine["kv_tokens"]
        assert int(labels["max_model_len"]) == listed[model]
        assert (labels["enable_prefix_caching"] == "False") == (model != "chat") == engine["is_encoder"]


def test_conversations_are_routed_by_an_embedder_without_a_chat_template(tmp_path: Path) -> None:
    write_embedder(tmp_path / "embedder")
    (tmp_path / "manifest.yaml").write_text(ROUTED.format(folder=tmp_path))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    asked = [{"role": "user", "content": "is this clause enforceable"}]
    with serve("--manifest", str(tmp_path / "manifest.yaml"), *IN_THREAD) as running:
        for path, body in (
            ("/v1/chat/completions", {"messages": asked, "max_tokens": 4}),
            ("/v1/chat/completions", {"messages": asked, "max_tokens": 4, "tools": [tool]}),
            ("/v1/messages", {"messages": asked, "max_tokens": 4, "model": "embedder"}),
            ("/api/chat", {"messages": asked, "stream": False, "model": "embedder"}),
        ):
            status, answer = post(running, path, body)
            assert (status, answer["model"]) == (200, "legal"), answer


def test_a_reranker_that_answers_gives_only_scores(tmp_path: Path) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS}
    with serve(str(write_answering_reranker(tmp_path / "model")), *IN_THREAD, "--served-model-name", "m") as running:
        status, answer = post(running, "/v2/rerank", body)
        assert status == 200
        _, judged = post(running, "/v2/rerank", {**body, "instruction": "Judge."})
        assert judged["results"] != answer["results"]
        _, scored = post(running, SCORE, {"text_1": QUERY, "text_2": DOCUMENTS})
        scores = {each["index"]: each["score"] for each in scored["data"]}
        assert {each["index"]: each["relevance_score"] for each in answer["results"]} == scores
        documents = ["x " * 9_000, "x " * 4]
        _, cut = post(running, "/v2/rerank", {**body, "documents": documents, "max_tokens_per_doc": 4})
        first, second = cut["results"]
        assert first["relevance_score"] == second["relevance_score"]
        assert refused(running, RERANK, {**body, "documents": documents})["param"] == "documents[0]"
        assert refused(running, RERANK, {**body, "truncate_prompt_tokens": 1})["param"] == "truncate_prompt_tokens"
        assert refused(running, EMBED, {"input": "a"})["param"] == "model"
        assert refused(running, "/v1/chat/completions", {"messages": SAID})["param"] == "model"


@pytest.mark.parametrize(
    ("path", "body", "param", "num_tokens"),
    [
        (EMBED, {"model": "embedder", "input": ["a", LONG]}, "input[1]", CONTEXT + 3),
        (EMBED, {"model": "embedder", "input": [5] * (CONTEXT + 1)}, "input", CONTEXT + 1),
        (EMBED, {"model": "embedder", "input": LONG * 1_000}, "input", (CONTEXT + 1) * 1_000 + 2),
        (EMBED, {"model": "chat", "input": [5] * 9_000}, "input", 9_000),
        (RERANK, {"model": "embedder", "query": LONG, "documents": ["a"]}, "query", CONTEXT + 9),
        (SCORE, {"model": "embedder", "text_1": "a", "text_2": ["b", LONG]}, "text_2[1]", CONTEXT + 3),
        (SCORE, {"model": "reranker", "text_1": "a", "text_2": ["b", LONG]}, "text_2[1]", CONTEXT + 5),
    ],
)
def test_a_text_that_is_too_long_is_named_with_its_tokens_and_with_what_cuts_it(
    server: ServerProcess, path: str, body: Mapping[str, object], param: str, num_tokens: int
) -> None:
    error = refused(server, path, body)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    most = 2_047 if body["model"] == "chat" else CONTEXT
    assert re.search(rf"\b{num_tokens} tokens.* {most};.*truncate_prompt_tokens", error["message"])
    assert "output" not in error["message"]
    assert post(server, path, {**body, "truncate_prompt_tokens": -1})[0] == 200


def test_a_small_pool_limits_the_texts_of_an_encoder_in_tokens(tmp_path: Path) -> None:
    with LLM(str(write_embedder(tmp_path / "embedder")), LoadOptions(EngineOptions(num_blocks=1))) as llm:
        geometry = llm.model.executor.geometry
        most = geometry.block_size // geometry.num_stages
        assert most < CONTEXT
        with pytest.raises(PromptTooLongError, match=f"has {most + 1} tokens, but the model takes {most};"):
            llm.embed([5] * (most + 1))
        assert llm.embed(LONG, truncate_prompt_tokens=-1).shape == llm.embed([5] * most).shape


def test_python_calls_name_the_text_that_is_refused(tmp_path: Path) -> None:
    calls: list[tuple[Callable[[LLM], object], str]] = [
        (lambda llm: llm.embed(LONG), "prompts"),
        (lambda llm: llm.embed([[5], [5] * (CONTEXT + 1)]), "prompts[1]"),
        (lambda llm: llm.embed([]), "prompts"),
        (lambda llm: llm.score("", DOCUMENTS), "query"),
        (lambda llm: llm.score("a", ["b", LONG]), "documents[1]"),
        (lambda llm: llm.score("a", "b"), "documents"),
        (lambda llm: llm.score("a", ["b"], instruction="judge"), "instruction"),
    ]
    with LLM(str(write_embedder(tmp_path / "embedder"))) as llm:
        for call, param in calls:
            with pytest.raises(RequestError) as caught:
                call(llm)
            assert caught.value.param == param
        assert llm.score("a", []) == []


def test_python_calls_are_refused_in_the_same_way(tmp_path: Path) -> None:
    with LLM(str(write_reranker(tmp_path / "reranker"))) as llm:
        assert len(llm.score(QUERY, DOCUMENTS)) == 3
        for query, documents, param in (
            ("a", ["b", LONG], "documents[1]"),
            ("", ["b"], "query"),
            ("a", [" "], "documents[0]"),
        ):
            with pytest.raises(RequestError) as caught:
                llm.score(query, documents)
            assert caught.value.param == param
        for prompt in ("hi", [5, 6]):
            with pytest.raises(InvalidParameterError, match="gives no embeddings"):
                llm.embed(prompt)
        with pytest.raises(InvalidParameterError, match="generates no text"):
            llm.generate("hi")
    with (
        LLM(str(write_reranker(tmp_path / "labels", num_labels=3))) as llm,
        pytest.raises(InvalidParameterError, match="classifier has 3 labels"),
    ):
        llm.score(QUERY, DOCUMENTS)
