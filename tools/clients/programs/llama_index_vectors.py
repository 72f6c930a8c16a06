"""LlamaIndex's `OpenAILikeEmbedding`, `CohereRerank` and `JinaRerank`."""

from __future__ import annotations

import sys
from typing import Any

from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.jinaai_rerank import JinaRerank

from tools.clients.programs.scenarios import check, run
from tools.clients.programs.vector_checks import DOCUMENTS, QUERY, check_vectors
from tools.clients.server import RERANKER


def embeddings(base_url: str, model: str) -> None:
    made = OpenAILikeEmbedding(model_name=model, api_base=base_url, api_key="none")
    check_vectors(made.get_text_embedding_batch(list(DOCUMENTS)), 3)
    check_vectors([made.get_query_embedding(QUERY)], 1)


def _check_ranked(ranker: Any) -> None:
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in DOCUMENTS]
    found = ranker.postprocess_nodes(nodes, query_str=QUERY)
    check(len(found) == 2 and found[0].score >= found[1].score, "not the two best")


def cohere_rerank(base_url: str, model: str) -> None:
    url = base_url.removesuffix("/v1")
    _check_ranked(CohereRerank(base_url=url, api_key="none", model=RERANKER, top_n=2))


def jina_rerank(base_url: str, model: str) -> None:
    _check_ranked(JinaRerank(base_url=base_url, api_key="none", model=RERANKER, top_n=2))
    try:
        _check_ranked(JinaRerank(base_url=base_url, api_key="none", model="nobody", top_n=2))
    except RuntimeError as error:
        check("does not exist" in str(error), f"the message is {error}")


if __name__ == "__main__":
    scenarios = {"OpenAILikeEmbedding": embeddings, "CohereRerank": cohere_rerank, "JinaRerank": jina_rerank}
    sys.exit(run("llama-index-core", scenarios))
