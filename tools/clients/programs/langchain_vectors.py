"""LangChain's `OpenAIEmbeddings` and `CohereRerank`."""

from __future__ import annotations

import sys

from langchain_cohere import CohereRerank
from langchain_core.documents import Document
from langchain_openai import OpenAIEmbeddings

from tools.clients.programs.scenarios import check, run
from tools.clients.programs.vector_checks import DOCUMENTS, QUERY, check_ranking, check_vectors
from tools.clients.server import RERANKER


def embeddings(base_url: str, model: str) -> None:
    """Without its own tokens, which are those of OpenAI's models."""
    made = OpenAIEmbeddings(base_url=base_url, model=model, api_key="none", check_embedding_ctx_length=False)
    check_vectors(made.embed_documents(list(DOCUMENTS)), 3)
    check_vectors([made.embed_query(QUERY)], 1)


def rerank(base_url: str, model: str) -> None:
    ranker = CohereRerank(base_url=base_url.removesuffix("/v1"), cohere_api_key="none", model=RERANKER, top_n=2)
    ranking = [(each["index"], each["relevance_score"]) for each in ranker.rerank(list(DOCUMENTS), QUERY)]
    check_ranking(ranking, 2)
    kept = ranker.compress_documents([Document(text) for text in DOCUMENTS], QUERY)
    check([each.page_content for each in kept] == [DOCUMENTS[index] for index, _ in ranking], "other documents")


if __name__ == "__main__":
    sys.exit(run("langchain-openai", {"OpenAIEmbeddings": embeddings, "CohereRerank": rerank}))
