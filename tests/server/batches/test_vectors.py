"""Batches of embeddings, rankings and scores: the answers of the endpoints, from a server and from a file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.batches.inputs import created, ended, jsonl, results
from tests.server.encoders import serving_encoders
from tests.server.process import ServerProcess
from tests.waiting import HANG_S
from tools.random_vector_models import write_reranker

QUERY = "I want my money back"
DOCUMENTS = ["my login page shows an error", "I was charged twice for one order"]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"model": "embedder", "input": DOCUMENTS},
    "/v1/rerank": {"model": "reranker", "query": QUERY, "documents": DOCUMENTS},
    "/v1/score": {"model": "reranker", "text_1": QUERY, "text_2": DOCUMENTS},
}
WRONG: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"model": "reranker"},
    "/v1/rerank": {"top_n": 0},
    "/v1/score": {"text_1": " "},
}
ID = "id"
"""Member that differs from answer to answer."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving_encoders(tmp_path_factory.mktemp("encoders")) as running:
        yield running


def lines_of(endpoint: str) -> list[dict[str, Any]]:
    """A request, and one that is refused."""
    bodies = (BODIES[endpoint], {**BODIES[endpoint], **WRONG[endpoint]})
    return [
        {"custom_id": str(index), "method": "POST", "url": endpoint, "body": body} for index, body in enumerate(bodies)
    ]


@pytest.mark.parametrize("endpoint", BODIES)
def test_a_batch_has_the_answers_of_its_endpoint(server: ServerProcess, endpoint: str) -> None:
    lines = lines_of(endpoint)
    with server.client() as http:
        right, wrong = (http.post(endpoint, json=each["body"]).json() for each in lines)
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=HANG_S) as client:
        batch = ended(client, created(client, jsonl(lines), endpoint=endpoint))
        [answered] = results(client, batch.output_file_id)
        [failed] = results(client, batch.error_file_id)
    body = answered["response"]["body"]
    assert {**body, ID: ""} == {**right, ID: ""}
    assert failed["response"]["body"] == wrong


def test_a_file_is_ranked_without_a_server(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked = [each for endpoint in ("/v1/rerank", "/v1/score") for each in lines_of(endpoint)]
    for index, each in enumerate(asked):
        each["custom_id"] = str(index)
    source.write_bytes(jsonl(asked))
    model = str(write_reranker(tmp_path / "reranker"))
    command = [sys.executable, "-m", "lockstep", "run-batch", str(source), str(target), model]
    ran = subprocess.run(
        [*command, "--served-model-name", "reranker"], capture_output=True, timeout=HANG_S, check=False
    )
    assert ran.returncode == 1, ran.stderr
    answers = [json.loads(each)["response"] for each in target.read_bytes().splitlines()]
    assert [each["status_code"] for each in answers] == [200, 400, 200, 400]
    by_index = {each["index"]: each["relevance_score"] for each in answers[0]["body"]["results"]}
    assert [each["score"] for each in answers[2]["body"]["data"]] == [by_index[0], by_index[1]]
