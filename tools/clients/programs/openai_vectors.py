"""OpenAI's client on an embedder."""

from __future__ import annotations

import sys
from typing import Any

import openai

from tools.clients.programs.scenarios import check, run
from tools.clients.programs.vector_checks import DOCUMENTS, QUERY, check_vectors
from tools.clients.server import RERANKER


def _client(base_url: str) -> Any:
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)


def _vectors(base_url: str, model: str, given: Any, **more: Any) -> list[Any]:
    made = _client(base_url).embeddings.create(model=model, input=given, **more)
    check(made.usage.prompt_tokens > 0, "no tokens were counted")
    return [each.embedding for each in made.data]


def texts(base_url: str, model: str) -> None:
    check_vectors(_vectors(base_url, model, QUERY), 1)
    check_vectors(_vectors(base_url, model, list(DOCUMENTS)), 3)
    check_vectors(_vectors(base_url, model, [[2, 9, 10, 3], [2, 11, 3]]), 2)


def formats(base_url: str, model: str) -> None:
    floats = _vectors(base_url, model, QUERY, encoding_format="float")
    check_vectors(floats, 1)
    check(_vectors(base_url, model, QUERY) == floats, "base64, the client's default, gives other numbers")
    check(isinstance(_vectors(base_url, model, QUERY, encoding_format="base64")[0], str), "base64 is not text")


def dimensions(base_url: str, model: str) -> None:
    check_vectors(_vectors(base_url, model, QUERY, dimensions=16), 1, 16)


def refusals(base_url: str, model: str) -> None:
    for param, body in (("input", {"input": ""}), ("dimensions", {"dimensions": 65}), ("model", {"model": RERANKER})):
        try:
            _client(base_url).embeddings.create(**{"model": model, "input": QUERY, **body})
        except openai.BadRequestError as error:
            check(error.param == param, f"the error names {error.param} in place of {param}")
        else:
            check(False, f"{body} was answered")


if __name__ == "__main__":
    scenarios = {"texts and tokens": texts, "floats and base64": formats, "dimensions": dimensions, "errors": refusals}
    sys.exit(run("openai", scenarios))
