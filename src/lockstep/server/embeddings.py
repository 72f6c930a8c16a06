"""Embeddings endpoint: serves `POST /v1/embeddings`; every input is a separate engine call, answered in order."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from lockstep.cluster.cluster import Cluster
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.engine.request import GenerationRequest, Prompt
from lockstep.errors import InvalidParameterError, RequestError, RequestFailedError
from lockstep.executors.row_math import row_math
from lockstep.server.answer_response import all_of, conclude
from lockstep.server.body import LongBodyRoute
from lockstep.server.errors import ERROR_RESPONSES
from lockstep.server.fields import MAX_SEQUENCE_TOKENS, Name, ParameterBody, Shape, TextOrTokens, Tokens, tokens_or_list
from lockstep.server.generation import Caller, caller_of
from lockstep.server.request_context import CLIENT_LEFT_STATUS, ClientLeft, context_of, disconnected, while_connected
from lockstep.server.serving import card_of, serving_of, translated
from lockstep.worker.progress import CallProgress

MAX_INPUTS = 2_048
"""Maximum number of inputs per request, as in OpenAI's API."""
MAX_OPEN_INPUTS = 64
"""Maximum number of inputs of one request that are queued at once, so that one request cannot fill the queue."""

router = APIRouter(route_class=LongBodyRoute, responses=ERROR_RESPONSES)

Inputs = Annotated[
    Annotated[str, Tag("[text]")]
    | Annotated[Tokens, Tag("[tokens]")]
    | Annotated[list[TextOrTokens], Field(min_length=1, max_length=MAX_INPUTS), Tag("[list]")],
    Discriminator(tokens_or_list),
]


class EmbeddingBody(ParameterBody):
    """Texts to embed, with the parameters of the vectors."""

    input: Inputs
    """Text, token ids, or a list of either."""
    model: Name | None = None
    """Name of a served model. Absent: the only served model, or the entry model of a cluster."""
    encoding_format: Literal["float", "base64"] | None = None
    """`base64`: the vector's float32 values, little-endian. Default: `float`."""
    dimensions: Annotated[int | None, Field(ge=1, le=MAX_SEQUENCE_TOKENS)] = None
    """Number of elements of each vector to return, from the start. The shortened vectors are normalized again. A
    warning is returned if the number is smaller than the model's."""
    pooling: Literal["mean", "last"] | None = None
    """Pooling of the hidden states of the prompt. Default: `mean`."""
    normalize: bool | None = None
    """Whether vectors are scaled to length 1. Default: true."""
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, le=MAX_SEQUENCE_TOKENS)] = None
    """Keeps only this many tokens from the end of each input; -1: as many as fit in the context."""
    user: Name | None = None
    """Logged. Without API keys, the scheduler's fair share is per user."""


class Embedding(Shape):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Shape):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Shape):
    """One vector for each input, in order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


@router.post("/v1/embeddings", response_model=Embeddings)
async def create_embeddings(body: EmbeddingBody, request: Request) -> Response:
    """Embed texts."""
    embeddings = await embedded(body, request)
    content = await asyncio.to_thread(lambda: msgspec.json.encode(embeddings))
    return Response(content, media_type="application/json")


async def embedded(body: EmbeddingBody, request: Request) -> Embeddings:
    """Compute the vectors of a request's texts.

    Raises:
        ClientLeft: the client disconnected; the request's context has recorded it.
    """
    serving, context, model = serving_of(request), context_of(request), card_of(request, body.model).name
    context.labels = {} if body.user is None else {"user": body.user}
    caller = caller_of(request)
    calls = await translated(request, lambda: calls_of(body, caller))
    try:
        outputs = await while_connected(
            disconnected(request.receive), _answer_all(serving.cluster, body, calls, context.progress), context
        )
    except ClientLeft:
        context.status = CLIENT_LEFT_STATUS
        raise
    conclude(context, outputs)
    num_dimensions = len(_vector(outputs[0]))
    if body.dimensions not in (None, num_dimensions):
        shortened = (
            f"dimensions: the model's vectors have {num_dimensions}; shorter ones require a model trained for them"
        )
        context.warnings = [shortened]
    return await asyncio.to_thread(lambda: embeddings_object(body, model, outputs))


def calls_of(body: EmbeddingBody, caller: Caller) -> list[GenerationRequest]:
    """Create one engine call per input, in order."""
    given = body.input
    is_one = isinstance(given, str) or isinstance(given[0], int)
    prompts: Sequence[Any] = [given] if is_one else given
    return [
        GenerationRequest(
            prompt if isinstance(prompt, str) else tuple(prompt),
            model=body.model,
            priority=caller.priority(),
            tenant=caller.tenant or body.user or "",
            queue_deadline_s=caller.options.queue_timeout_s,
            deadline_s=caller.options.request_timeout_s,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            pooling=body.pooling or "mean",
            external_id=caller.request_id,
            segment=caller.segment,
        )
        for prompt in prompts
    ]


async def _answer_all(
    cluster: Cluster, body: EmbeddingBody, calls: Sequence[GenerationRequest], progress: CallProgress
) -> list[RequestOutput]:
    """Execute the calls and return their outputs in order. The first error, in order, cancels the rest."""
    is_list = isinstance(body.input, list) and not isinstance(body.input[0], int)

    async def answer(index: int) -> RequestOutput:
        call = calls[index]
        try:
            output = await _answer(cluster, call, progress)
        except RequestError as error:
            raise with_input_name(error, f"input[{index}]" if is_list else "input", call.prompt) from None
        check_dimensions(body, _vector(output))
        return output

    return await all_of(answer, range(len(calls)), MAX_OPEN_INPUTS)


async def _answer(cluster: Cluster, call: GenerationRequest, progress: CallProgress) -> RequestOutput:
    async with aclosing(cluster.stream(call, progress)) as stream:
        async for events in stream:
            last = events[-1]
            if isinstance(last, TokenOutput) and last.request is not None:
                return last.request
    raise RequestFailedError("a call ended without its final output; this is a bug in Lockstep")


def with_input_name(error: RequestError, where: str, prompt: Prompt) -> RequestError:
    """Add the input's path to an error about its prompt. Other errors concern the whole request and are unchanged."""
    if error.param == "prompt":
        text = "the text is empty" if prompt == "" else str(error)
        error.args, error.param = (f"{where}: {text}",), where
    return error


def check_dimensions(body: EmbeddingBody, vector: npt.NDArray[np.float32]) -> None:
    """Reject more dimensions than the model has."""
    if body.dimensions is not None and body.dimensions > len(vector):
        raise InvalidParameterError(
            f"dimensions is {body.dimensions}; this model's vectors have {len(vector)}", param="dimensions"
        )


def embeddings_object(body: EmbeddingBody, model: str, outputs: Sequence[RequestOutput]) -> Embeddings:
    """Create the answer in OpenAI's format."""
    vectors = np.stack([_vector(output) for output in outputs])[:, : body.dimensions]
    if body.normalize is not False:
        vectors = row_math().unit(vectors)
    rows = [_base64(row) for row in vectors] if body.encoding_format == "base64" else vectors.tolist()
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _vector(output: RequestOutput) -> npt.NDArray[np.float32]:
    if output.embedding is None:
        raise RequestFailedError("the request ended without a vector")
    return output.embedding


def _base64(vector: npt.NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
