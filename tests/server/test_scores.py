"""Scores of a real server: an embedding model's cosines, their order and forms, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from lockstep import LLM, EngineOptions, LoadOptions
from tests.server.process import IN_THREAD, ServerProcess, serve

QUERY = "I want my money back"
DOCUMENTS = ["My login page shows an error", "I was charged twice for one order", "Is this clause enforceable?"]
MANIFEST = """
cluster: two
models:
  embedder: {source: 'pocket://', task: embed}
  chat: {source: 'pocket://'}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("scores") / "manifest.yaml"
    path.write_text(MANIFEST)
    with serve("--manifest", str(path), *IN_THREAD) as running:
        yield running


@pytest.fixture(scope="module")
def cosines() -> list[float]:
    """Scores of the documents, by the Python API."""
    with LLM("pocket://", LoadOptions(EngineOptions(num_blocks=64), task="embed")) as llm:
        first, *others = llm.embed([QUERY, *DOCUMENTS])
        scores = llm.score(QUERY, DOCUMENTS)
    np.testing.assert_allclose(scores, [float(first @ other) for other in others], rtol=1e-5)
    return scores


def post(server: ServerProcess, path: str, **body: object) -> tuple[int, Mapping[str, object]]:
    with server.client() as http:
        answer = http.post(path, json={"model": "embedder", **body})
    return answer.status_code, answer.json()


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_come_by_falling_score(server: ServerProcess, cosines: list[float], path: str) -> None:
    status, answer = post(server, path, query=QUERY, documents=[DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]])
    assert status == 200
    order = sorted(range(3), key=lambda index: -cosines[index])
    expected: list[dict[str, object]] = [{"index": index, "relevance_score": cosines[index]} for index in order]
    if path != "/v2/rerank":
        expected = [{**each, "document": {"text": DOCUMENTS[each["index"]]}} for each in expected]  # type: ignore[call-overload]  # indices
    assert answer["results"] == expected
    assert answer["model"] == "embedder"
    assert answer["usage"]["total_tokens"] > 10  # type: ignore[index]  # an object


def test_the_first_few_are_enough(server: ServerProcess, cosines: list[float]) -> None:
    _, answer = post(server, "/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=False)
    assert answer["results"] == [{"index": int(np.argmax(cosines)), "relevance_score": max(cosines)}]


def test_equal_scores_keep_the_order_of_the_request(server: ServerProcess) -> None:
    _, answer = post(server, "/v1/rerank", query=QUERY, documents=[DOCUMENTS[1]] * 3)
    assert [each["index"] for each in answer["results"]] == [0, 1, 2]  # type: ignore[attr-defined]  # a list


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_one_text_is_scored_with_each_or_each_with_its_own(
    server: ServerProcess, cosines: list[float], path: str
) -> None:
    _, one = post(server, path, text_1=QUERY, text_2=DOCUMENTS)
    _, each = post(server, path, text_1=[QUERY] * 3, text_2=DOCUMENTS)
    expected = [{"index": index, "object": "score", "score": cosine} for index, cosine in enumerate(cosines)]
    assert one["data"] == each["data"] == expected
    _, single = post(server, path, text_1=QUERY, text_2=DOCUMENTS[0])
    assert single["data"] == expected[:1]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": QUERY, "documents": []}, "documents"),
        ("/v1/rerank", {"query": "", "documents": DOCUMENTS}, "query"),
        ("/v1/rerank", {"query": QUERY, "documents": ["a", ""]}, "documents[1]"),
        ("/v1/rerank", {"query": QUERY, "documents": ["a", "x " * 9_000]}, "documents[1]"),
        ("/v1/rerank", {"query": QUERY, "documents": ["a", 7]}, "documents[1]"),
        ("/v1/rerank", {"query": QUERY, "documents": ["a"] * 1_001}, "documents"),
        ("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "instruction": "x"}, "instruction"),
        ("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "model": "chat"}, "model"),
        ("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "colour": "red"}, "colour"),
        ("/v1/rerank", {"documents": DOCUMENTS}, "query"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "model": "chat"}, "model"),
    ],
)
def test_a_wrong_request_names_its_parameter(
    server: ServerProcess, path: str, body: Mapping[str, object], param: str
) -> None:
    status, answer = post(server, path, **body)
    assert (status, answer["error"]["param"]) == (400, param)  # type: ignore[index]  # an object


def test_a_long_document_can_be_cut(server: ServerProcess) -> None:
    status, answer = post(server, "/v1/rerank", query=QUERY, documents=["x " * 9_000], truncate_prompt_tokens=64)
    assert status == 200
    assert answer["usage"]["total_tokens"] <= 128  # type: ignore[index]  # an object


def test_models_say_what_they_are_for(server: ServerProcess) -> None:
    with server.client() as http:
        listed = {each["id"]: each["task"] for each in http.get("/v1/models").json()["data"]}
        answer = http.post(
            "/v1/chat/completions", json={"model": "embedder", "messages": [{"role": "user", "content": "a"}]}
        )
    assert listed == {"embedder": "embed", "chat": "generate"}
    assert answer.status_code == 400
