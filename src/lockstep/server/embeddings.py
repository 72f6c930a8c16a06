"""Embeddings endpoint: serves `POST /v1/embeddings`; every input is a separate engine call, answered in order."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from msgspec.structs import replace
from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from lockstep.artifacts.task import Pooling
from lockstep.engine.outputs import RequestOutput
from lockstep.errors import InvalidParameterError
from lockstep.executors.row_math import row_math
from lockstep.server.body import LongBodyRoute
from lockstep.server.errors import ERROR_RESPONSES
from lockstep.server.fields import (
    MAX_NAME_CHARS,
    MAX_SEQUENCE_TOKENS,
    Name,
    ParameterBody,
    Shape,
    TextOrTokens,
    Tokens,
    tokens_or_list,
)
from lockstep.server.generation import Caller
from lockstep.server.request_context import context_of
from lockstep.server.vectors import Calls, num_prompt_tokens, vector_call, vector_of, vector_outputs

MAX_INPUTS = 2_048
"""Maximum number of inputs per request, as in OpenAI's API."""

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
    pooling: Pooling | None = None
    """Pooling of the hidden states of the text. Default: the model's own, or `mean` if its files name none."""
    prompt_name: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    """Name of one of the model's prompts, which is put before each text, e.g. `query`; empty: none. Default: the
    model's default prompt."""
    normalize: bool | None = None
    """Whether vectors are scaled to length 1. Default: true."""
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, le=MAX_SEQUENCE_TOKENS)] = None
    """Keeps only the first tokens of each input, this many with the special tokens around them; -1: as many as fit in
    the context."""
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
    model, outputs = await vector_outputs(
        request,
        body.model,
        body.user,
        lambda caller: calls_of(body, caller),
        lambda vector: check_dimensions(body, vector),
    )
    context = context_of(request)
    num_dimensions = len(vector_of(outputs[0]))
    if body.dimensions not in (None, num_dimensions):
        shortened = (
            f"dimensions: the model's vectors have {num_dimensions}; shorter ones require a model trained for them"
        )
        context.warnings = [shortened]
    return await asyncio.to_thread(lambda: embeddings_object(body, model, outputs))


def calls_of(body: EmbeddingBody, caller: Caller) -> Calls:
    """Create one engine call per input, in order."""
    given = body.input
    is_one = isinstance(given, str) or isinstance(given[0], int)
    prompts: Sequence[Any] = [given] if is_one else given
    calls = []
    for index, prompt in enumerate(prompts):
        made = vector_call(
            caller, prompt if isinstance(prompt, str) else tuple(prompt), body.model, body.truncate_prompt_tokens
        )
        made = replace(made, pooling=body.pooling or "model", prompt_name=body.prompt_name)
        calls.append(("input" if is_one else f"input[{index}]", made))
    return calls


def check_dimensions(body: EmbeddingBody, vector: npt.NDArray[np.float32]) -> None:
    """Reject more dimensions than the model has."""
    if body.dimensions is not None and body.dimensions > len(vector):
        raise InvalidParameterError(
            f"dimensions is {body.dimensions}; this model's vectors have {len(vector)}", param="dimensions"
        )


def embeddings_object(body: EmbeddingBody, model: str, outputs: Sequence[RequestOutput]) -> Embeddings:
    """Create the answer in OpenAI's format."""
    vectors = np.stack([vector_of(output) for output in outputs])[:, : body.dimensions]
    if body.normalize is not False:
        vectors = row_math().unit(vectors)
    rows = [_base64(row) for row in vectors] if body.encoding_format == "base64" else vectors.tolist()
    num_tokens = num_prompt_tokens(outputs)
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _base64(vector: npt.NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
