"""Scores of texts: serves `POST /v1/rerank` in the form of Jina and Cohere, and `POST /v1/score` in that of vLLM.

A reranker scores each pair with one engine call. With an embedding model, each text is embedded once in each
role, and a score is the cosine of two vectors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, NotRequired

import msgspec
from fastapi import APIRouter
from msgspec.structs import replace
from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from lockstep.cluster.cluster import Cluster
from lockstep.engine.outputs import RequestOutput
from lockstep.engine.request import TextRole
from lockstep.engine.scoring import check_not_blank, cosine, no_instruction, no_scores, pair_score
from lockstep.errors import InvalidParameterError
from lockstep.server.body import LongBodyRoute
from lockstep.server.dialect import RerankErrorBody
from lockstep.server.errors import ERROR_RESPONSES, documented_errors
from lockstep.server.fields import MAX_SEQUENCE_TOKENS, Body, Name, ParameterBody, Shape, text_or_list, text_or_object
from lockstep.server.generation import Caller
from lockstep.server.request_context import context_of
from lockstep.server.serving import serving_of
from lockstep.server.vectors import Calls, num_prompt_tokens, vector_call, vector_of, vector_outputs

MAX_DOCUMENTS = 1_000
"""Maximum number of documents per request, as in Cohere's API."""

router = APIRouter(route_class=LongBodyRoute, responses=ERROR_RESPONSES)


class DocumentObject(Body):
    """A document as an object."""

    text: str


Document = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[DocumentObject, Tag("[object]")],
    Discriminator(text_or_object),
]
Texts = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[list[str], Field(min_length=1, max_length=MAX_DOCUMENTS), Tag("[list]")],
    Discriminator(text_or_list),
]


class ScoringBody(ParameterBody):
    """Parameters that both endpoints have."""

    model: Name | None = None
    """Name of a served reranker or embedding model. Absent: the only served model."""
    instruction: str | None = None
    """What relevance means, for a reranker that reads an instruction, such as Qwen3-Reranker."""
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, le=MAX_SEQUENCE_TOKENS)] = None
    """Keeps only this many tokens of each pair, cutting the longer text; -1: as many as fit in the context."""
    user: Name | None = None
    """Logged. Without API keys, the scheduler's fair share is per user."""


class RerankBody(ScoringBody):
    """Documents to sort by their relevance to a query."""

    query: str
    documents: Annotated[list[Document], Field(min_length=1, max_length=MAX_DOCUMENTS)]
    top_n: Annotated[int | None, Field(ge=1)] = None
    """Number of most relevant documents to return. Default: all."""
    max_tokens_per_doc: Annotated[int | None, Field(ge=1, le=MAX_SEQUENCE_TOKENS)] = None
    """Reads only the first tokens of each document, at most this many, as Cohere's API does. Default: all."""
    return_documents: bool | None = None
    """Whether results contain the documents. Default: true, as in Jina's API; false at `/v2/rerank`, as in Cohere's."""


class ScoreBody(ScoringBody):
    """Pairs of texts to score: one text with each of several, or as many first texts as second ones."""

    text_1: Texts
    text_2: Texts


class DocumentShape(Shape):
    text: str


class RerankResult(Shape):
    index: int
    """Position of the document in the request."""
    relevance_score: float
    document: NotRequired[DocumentShape]


class ScoreUsage(Shape):
    prompt_tokens: int
    total_tokens: int


class Reranked(Shape):
    """The documents by falling score; of equal scores, the earlier document first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: ScoreUsage


class Score(Shape):
    index: int
    object: Literal["score"]
    score: float


class Scores(Shape):
    """One score for each pair, in order."""

    id: str
    object: Literal["list"]
    model: str
    data: list[Score]
    usage: ScoreUsage


class Pair(NamedTuple):
    """A pair of texts, and the names of both in the request."""

    query: str
    document: str
    query_name: str
    document_name: str


@router.post("/v1/rerank", response_model=Reranked, responses=documented_errors(RerankErrorBody))
@router.post("/rerank", response_model=Reranked, include_in_schema=False)
async def rerank(body: RerankBody, request: Request) -> Response:
    """Sort documents by their relevance to a query."""
    return await _reranked(body, request, returns_documents=body.return_documents is not False)


@router.post("/v2/rerank", response_model=Reranked, include_in_schema=False)
async def rerank_as_cohere(body: RerankBody, request: Request) -> Response:
    """Sort documents by their relevance to a query; the answer has their positions only."""
    return await _reranked(body, request, returns_documents=body.return_documents is True)


@router.post("/v1/score", response_model=Scores)
@router.post("/score", response_model=Scores, include_in_schema=False)
async def score(body: ScoreBody, request: Request) -> Response:
    """Score pairs of texts."""
    pairs = pairs_of(body.text_1, body.text_2)
    found, outputs = await _scored(request, body, pairs)
    content: Scores = {
        "id": f"score-{context_of(request).request_id}",
        "object": "list",
        "model": serving_of(request).cluster.card(body.model).name,
        "data": [{"index": index, "object": "score", "score": each} for index, each in enumerate(found)],
        "usage": _usage(outputs),
    }
    return Response(msgspec.json.encode(content), media_type="application/json")


async def _reranked(body: RerankBody, request: Request, returns_documents: bool) -> Response:
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    pairs = [Pair(body.query, text, "query", f"documents[{index}]") for index, text in enumerate(texts)]
    found, outputs = await _scored(request, body, pairs, body.max_tokens_per_doc)
    order = sorted(range(len(found)), key=lambda index: (-found[index], index))[: body.top_n]
    results: list[RerankResult] = []
    for index in order:
        result: RerankResult = {"index": index, "relevance_score": found[index]}
        if returns_documents:
            result["document"] = {"text": texts[index]}
        results.append(result)
    content: Reranked = {
        "id": f"rerank-{context_of(request).request_id}",
        "model": serving_of(request).cluster.card(body.model).name,
        "results": results,
        "usage": _usage(outputs),
    }
    return Response(msgspec.json.encode(content), media_type="application/json")


def pairs_of(first: str | list[str], second: str | list[str]) -> list[Pair]:
    """Pairs of one text with each of several, or of as many first texts as second ones.

    Raises:
        InvalidParameterError: the numbers do not fit.
    """
    ones = [first] if isinstance(first, str) else first
    others = [second] if isinstance(second, str) else second
    if len(ones) not in (1, len(others)):
        raise InvalidParameterError(
            f"text_1 has {len(ones)} texts and text_2 has {len(others)}; give one text, or as many as text_2",
            param="text_1",
        )

    def name(given: str | list[str], param: str, index: int) -> str:
        return param if isinstance(given, str) else f"{param}[{index}]"

    pairs = []
    for index, other in enumerate(others):
        at = index if len(ones) > 1 else 0
        pairs.append(Pair(ones[at], other, name(first, "text_1", at), name(second, "text_2", index)))
    return pairs


async def _scored(
    request: Request, body: ScoringBody, pairs: Sequence[Pair], max_document_tokens: int | None = None
) -> tuple[list[float], Sequence[RequestOutput]]:
    """Score pairs with the requested model. Returns the scores, and the outputs of the engine calls.

    Args:
        max_document_tokens: number of first tokens of each document that are read; None: all.
    """
    cluster: Cluster = serving_of(request).cluster
    card = cluster.card(body.model)
    if card.task in (None, "generate"):
        raise no_scores(card.name)
    for pair in pairs:
        check_not_blank(pair.query, pair.query_name)
        check_not_blank(pair.document, pair.document_name)
    if card.task == "embed":
        return await _cosines(request, body, pairs, max_document_tokens)
    _, outputs = await vector_outputs(
        request, body.model, body.user, lambda caller: _pair_calls(body, pairs, max_document_tokens, caller)
    )
    scoring = cluster.card(body.model).scoring  # known, since the model has answered
    assert scoring is not None, "a reranker gives scores"
    return [pair_score(scoring, vector_of(output)) for output in outputs], outputs


def _pair_calls(body: ScoringBody, pairs: Sequence[Pair], max_document_tokens: int | None, caller: Caller) -> Calls:
    return [
        (
            pair.document_name,
            replace(
                vector_call(caller, pair.query, body.model, body.truncate_prompt_tokens),
                document=pair.document,
                max_document_tokens=max_document_tokens,
                instruction=body.instruction,
            ),
        )
        for pair in pairs
    ]


async def _cosines(
    request: Request, body: ScoringBody, pairs: Sequence[Pair], max_document_tokens: int | None
) -> tuple[list[float], Sequence[RequestOutput]]:
    if body.instruction is not None:
        raise no_instruction(serving_of(request).cluster.card(body.model).name)
    names: dict[tuple[TextRole, str], str] = {}
    """Name of each text in the request, by its role and the text."""
    for pair in pairs:
        names.setdefault(("query", pair.query), pair.query_name)
        names.setdefault(("document", pair.document), pair.document_name)

    def calls(caller: Caller) -> Calls:
        made = []
        for (role, text), name in names.items():
            call = vector_call(caller, text, body.model, body.truncate_prompt_tokens)
            most = max_document_tokens if role == "document" else None
            made.append((name, replace(call, pooling="model", text_role=role, max_document_tokens=most)))
        return made

    _, outputs = await vector_outputs(request, body.model, body.user, calls)
    vectors = {key: vector_of(output) for key, output in zip(names, outputs, strict=True)}
    pairs_of_vectors = [(vectors["query", pair.query], vectors["document", pair.document]) for pair in pairs]
    found = await asyncio.to_thread(lambda: [cosine(*each) for each in pairs_of_vectors])
    return found, outputs


def _usage(outputs: Sequence[RequestOutput]) -> ScoreUsage:
    num_tokens = num_prompt_tokens(outputs)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
