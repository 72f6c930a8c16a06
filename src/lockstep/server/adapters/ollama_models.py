"""Ollama's model endpoints: lists and describes models and embeds texts; rejects model management with a hint."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lockstep.cluster.base import ModelCard
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.snapshot import ModelSnapshot
from lockstep.engine.output_rules import tags_of_template
from lockstep.errors import InvalidParameterError, ModelNotFoundError, PromptTooLongError
from lockstep.server.adapters.ollama import ERRORS, NS, served_name
from lockstep.server.adapters.ollama_body import LATEST, KeepAlive, OllamaOptions
from lockstep.server.body import LongBodyRoute
from lockstep.server.embeddings import MAX_INPUTS, EmbeddingBody, embedded
from lockstep.server.fields import MAX_SEQUENCE_TOKENS, Body, JsonObject, Name, ParameterBody, Shape, TextOr
from lockstep.server.serving import serving_of
from lockstep.version import __version__

OLLAMA_VERSION = "0.12.11"
"""Version of Ollama whose API is implemented. Clients query it to select features."""
NEVER = "2318-12-31T00:00:00Z"
"""Expiry time of models that stay loaded until their memory is needed."""

router = APIRouter(prefix="/api", route_class=LongBodyRoute, tags=["ollama"], responses=ERRORS)


class OllamaDetails(Shape):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Shape):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    """Digest of the model's source and context length. It identifies the model, not its content."""
    details: OllamaDetails
    capabilities: list[str]
    """What the model is for; empty: it scores pairs of texts, which Ollama's API lacks, or it is loading."""


class OllamaModels(Shape):
    """All names that requests can use."""

    models: list[OllamaModel]


class OllamaRunningModel(OllamaModel):
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunning(Shape):
    """Models that are loaded."""

    models: list[OllamaRunningModel]


class OllamaVersion(Shape):
    version: str
    """Version of Ollama whose API is implemented."""
    lockstep: str


class OllamaShown(Shape):
    """One model."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaEmbeddings(Shape):
    """One vector for each input, in order."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Shape):
    embedding: list[float]


class OllamaStatus(Shape):
    status: Literal["success"]


class NamedModelBody(Body):
    """A model name."""

    model: Name | None = None
    name: Name | None = None
    """Older name of `model`."""
    verbose: bool | None = None
    stream: bool | None = None
    insecure: bool | None = None


class EmbedBody(ParameterBody):
    """Texts to embed."""

    model: Name
    input: TextOr[Annotated[list[str], Field(max_length=MAX_INPUTS)]]
    truncate: bool | None = None
    """False: an input that does not fit in the context is rejected. Default: only its first tokens are used."""
    dimensions: Annotated[int | None, Field(ge=1, le=MAX_SEQUENCE_TOKENS)] = None
    """Number of elements of each vector to return, from the start. The shortened vectors are normalized again."""
    options: OllamaOptions | None = None
    """Ignored: embeddings do not involve sampling."""
    keep_alive: KeepAlive | None = None
    """Ignored: the server determines how long models stay loaded."""


class OldEmbedBody(Body):
    """A text to embed. The vector is not normalized."""

    model: Name
    prompt: Annotated[str, Field(min_length=1)]
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


@router.get("/version", operation_id="ollama_version", response_model=OllamaVersion)
@router.head("/version", include_in_schema=False)
async def ollama_version() -> Response:
    """Versions of the implemented Ollama API and of this server."""
    return JSONResponse({"version": OLLAMA_VERSION, "lockstep": __version__})


@router.get("/tags", operation_id="ollama_tags", response_model=OllamaModels)
@router.head("/tags", include_in_schema=False)
async def ollama_tags(request: Request) -> Response:
    """All names that requests can use, including aliases (Ollama's format)."""
    cluster = serving_of(request).cluster
    sizes = _snapshots(cluster)
    models = [_listed(name, card, sizes) for card in cluster.cards() for name in (card.name, *card.aliases)]
    return JSONResponse({"models": models})


@router.get("/ps", operation_id="ollama_ps", response_model=OllamaRunning)
async def ollama_ps(request: Request) -> Response:
    """Loaded models (Ollama's format)."""
    cluster = serving_of(request).cluster
    snapshots = _snapshots(cluster)
    running = [card for card in cluster.cards() if card.tier == "resident"]
    return JSONResponse({"models": [_running(card, snapshots) for card in running]})


@router.post("/show", operation_id="ollama_show", response_model=OllamaShown)
async def ollama_show(body: NamedModelBody, request: Request) -> Response:
    """One model: its template, context length and capabilities."""
    cluster = serving_of(request).cluster
    name = served_name(cluster, _name(body))
    card = cluster.card(name)
    details = _details()
    template = card.tokenizer.chat_template or ""
    info: dict[str, Any] = {"general.architecture": details["family"], "general.basename": card.name}
    if card.shown_max_model_len is not None:
        info[f"{details['family']}.context_length"] = card.shown_max_model_len
    shown: OllamaShown = {
        "modelfile": _modelfile(card),
        "parameters": "",
        "template": template,
        "details": details,
        "model_info": info,
        "capabilities": _capabilities(card),
        "modified_at": _time(card),
    }
    return JSONResponse(shown)


def _modelfile(card: ModelCard) -> str:
    """The lines that a Modelfile of this model would have: its name, or its base and its adapter."""
    note = "# Served by Lockstep from its own source; there is no Modelfile."
    lines = (f"FROM {card.name}",) if card.adapter is None else (f"FROM {card.parent}", f"ADAPTER {card.adapter}")
    return "\n".join((note, *lines, ""))


@router.post("/embed", operation_id="ollama_embed", response_model=OllamaEmbeddings)
async def ollama_embed(body: EmbedBody, request: Request) -> Response:
    """Embed texts as normalized vectors."""
    inputs = ([body.input] if body.input else []) if isinstance(body.input, str) else body.input
    started_s = time.monotonic()
    name = served_name(serving_of(request).cluster, body.model)
    cut = None if body.truncate is False else -1
    vectors, num_tokens = await _vectors(
        request,
        inputs,
        name,
        dimensions=body.dimensions,
        truncate_prompt_tokens=cut,
    )
    answer: OllamaEmbeddings = {
        "model": name,
        "embeddings": vectors,
        "total_duration": round((time.monotonic() - started_s) * NS),
        "load_duration": 0,
        "prompt_eval_count": num_tokens,
    }
    return JSONResponse(answer)


@router.post("/embeddings", operation_id="ollama_embeddings", response_model=OllamaEmbedding)
async def ollama_embeddings(body: OldEmbedBody, request: Request) -> Response:
    """Embed one text. Older form of `/api/embed`."""
    name = served_name(serving_of(request).cluster, body.model)
    [vector], _ = await _vectors(request, [body.prompt], name, normalize=False, truncate_prompt_tokens=-1)
    return JSONResponse({"embedding": vector})


@router.post("/pull", operation_id="ollama_pull", response_model=OllamaStatus)
async def ollama_pull(body: NamedModelBody, request: Request) -> Response:
    """Succeed if the model is served, for clients that pull before use. Nothing is downloaded."""
    name = _name(body)
    try:
        served_name(serving_of(request).cluster, name)
    except ModelNotFoundError:
        raise InvalidParameterError(
            f"{name!r} is not served, and models cannot be downloaded by request: run `lockstep pull hf://ORG/NAME` "
            "on the server's machine, and serve the model with `lockstep serve` or a manifest",
            param="model",
        ) from None
    return JSONResponse({"status": "success"})


@router.post("/push", operation_id="ollama_push", responses={})
async def ollama_push(body: JsonObject) -> Response:
    """Not supported: models cannot be uploaded from the server."""
    raise _unsupported("Models cannot be uploaded from the server")


@router.post("/create", operation_id="ollama_create")
async def ollama_create(body: JsonObject) -> Response:
    """Not supported: models are served from their files."""
    raise _unsupported("Models cannot be created by request: `lockstep serve` serves GGUF files and model directories")


@router.post("/copy", operation_id="ollama_copy")
async def ollama_copy(body: JsonObject) -> Response:
    """Not supported: use an alias for a second name."""
    raise _unsupported("Models cannot be copied: add a --served-model-name, or `aliases` in a manifest")


@router.delete("/delete", operation_id="ollama_delete")
async def ollama_delete(body: JsonObject) -> Response:
    """Not supported: files are removed on the server's machine."""
    raise _unsupported("Models cannot be deleted by request: use `lockstep rm` for models of `lockstep pull`")


def _unsupported(why: str) -> InvalidParameterError:
    return InvalidParameterError(f"{why}.")


async def _vectors(request: Request, inputs: Sequence[str], name: str, **more: Any) -> tuple[list[list[float]], int]:
    """Embed texts; return the vectors and the number of tokens."""
    if not inputs:
        return [], 0
    body = EmbeddingBody.model_validate({"input": inputs, "model": name, **more})
    try:
        answer = await embedded(body, request)
    except PromptTooLongError as error:
        text, _, _ = str(error).partition(";")  # what follows names a parameter of another API
        raise PromptTooLongError(f"{text}; shorten it, or leave truncate out", param=error.param) from None
    return [each["embedding"] for each in answer["data"]], answer["usage"]["prompt_tokens"]  # type: ignore[misc]  # floats, as base64 is not requested


def _name(body: NamedModelBody) -> str:
    name = body.model or body.name
    if name is None:
        raise InvalidParameterError("model is missing", param="model")
    return name


def tagged(name: str) -> str:
    """Name of a model in Ollama's lists, with a tag."""
    return name if ":" in name else name + LATEST


def _snapshots(cluster: Cluster) -> Mapping[str, ModelSnapshot]:
    return {model.id: model for model in cluster.snapshot().models}


def _details() -> OllamaDetails:
    return {
        "parent_model": "",
        "format": "lockstep",
        "family": "lockstep",
        "families": ["lockstep"],
        "parameter_size": "",
        "quantization_level": "",
    }


def _listed(name: str, card: ModelCard, snapshots: Mapping[str, ModelSnapshot]) -> OllamaModel:
    of_model = snapshots.get(card.name)
    what = f"{card.root}\0{card.max_model_len}"
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": _time(card),
        "size": 0 if of_model is None else of_model.size_bytes,
        "digest": hashlib.sha256(what.encode()).hexdigest(),
        "details": _details(),
        "capabilities": _capabilities(card),
    }


def _capabilities(card: ModelCard) -> list[str]:
    """Return a model's capabilities by Ollama's names."""
    if card.task in ("embed", "rerank"):
        return ["embedding"] if card.task == "embed" else []
    if card.text is None:
        return []
    template = card.text.chat_template
    abilities = ["completion", "tools"] if template or card.text.vocab_size == 0 else ["completion"]
    return [*abilities, "thinking"] if template and tags_of_template(template) is not None else abilities


def _running(card: ModelCard, snapshots: Mapping[str, ModelSnapshot]) -> OllamaRunningModel:
    listed = _listed(card.name, card, snapshots)
    more = {"expires_at": NEVER, "size_vram": 0, "context_length": card.shown_max_model_len or 0}
    return {**listed, **more}  # type: ignore[typeddict-item]  # the additional members


def _time(card: ModelCard) -> str:
    return datetime.fromtimestamp(card.created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
