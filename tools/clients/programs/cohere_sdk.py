"""Cohere's clients of both versions on a reranker and on an embedder."""

from __future__ import annotations

import sys
from typing import Any

import cohere

from tools.clients.programs.scenarios import check, run
from tools.clients.programs.vector_checks import DOCUMENTS, QUERY, check_ranking
from tools.clients.server import RERANKER


def _client(base_url: str, kind: Any = cohere.ClientV2) -> Any:
    return kind("none", base_url=base_url.removesuffix("/v1"))


def _ranking(answer: Any) -> list[tuple[int, float]]:
    return [(each.index, each.relevance_score) for each in answer.results]


def rerank(base_url: str, model: str) -> None:
    for name in (RERANKER, model):
        answer = _client(base_url).rerank(model=name, query=QUERY, documents=list(DOCUMENTS))
        check(answer.id, "no id")
        check_ranking(_ranking(answer))
    answer = _client(base_url).rerank(model=RERANKER, query=QUERY, documents=list(DOCUMENTS), top_n=2)
    check_ranking(_ranking(answer), 2)


def long_documents(base_url: str, model: str) -> None:
    documents = [*DOCUMENTS, "refund " * 400]
    for name in (RERANKER, model):
        answer = _client(base_url).rerank(model=name, query=QUERY, documents=documents, max_tokens_per_doc=64)
        check_ranking(_ranking(answer), 4)


def first_version(base_url: str, model: str) -> None:
    asked = _client(base_url, cohere.Client)
    answer = asked.rerank(model=RERANKER, query=QUERY, documents=list(DOCUMENTS), return_documents=True)
    check_ranking(_ranking(answer))
    check(all(each.document.text == DOCUMENTS[each.index] for each in answer.results), "other documents")
    answer = asked.rerank(model=RERANKER, query=QUERY, documents=[{"text": text} for text in DOCUMENTS], top_n=1)
    check_ranking(_ranking(answer), 1)


def refusals(base_url: str, model: str) -> None:
    try:
        _client(base_url).rerank(model=RERANKER, query=QUERY, documents=[])
    except cohere.BadRequestError as error:
        check("documents" in error.body["message"], f"the message is {error.body}")
    else:
        check(False, "no documents were ranked")


if __name__ == "__main__":
    scenarios = {
        "rerank": rerank, "documents that are cut": long_documents, "client of version 1": first_version,
        "errors": refusals,
    }  # fmt: skip
    sys.exit(run("cohere", scenarios))
