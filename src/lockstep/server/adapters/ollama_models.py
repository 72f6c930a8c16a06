"""Ollama's endpoints on models: listed, shown, embedded with; those that manage them say what to do here instead."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lockstep.cluster.base import ModelCard
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.snapshot import ModelSnapshot
from lockstep.engine.output_rules import tags_of_template
from lockstep.errors import InvalidParameterError, ModelNotFoundError
from lockstep.server.adapters.ollama import ERRORS, NS, served_name
from lockstep.server.adapters.ollama_body import LATEST, KeepAlive, OllamaOptions
from lockstep.server.body import LongBodyRoute
from lockstep.server.embeddings import MAX_INPUTS, EmbeddingBody, embedded
from lockstep.server.fields import MAX_SEQUENCE_TOKENS, Body, JsonObject, Name, ParameterBody, Shape, text_or_list
from lockstep.server.serving import serving_of
from lockstep.version import __version__

SPOKEN_VERSION = "0.12.11"
"""The version of Ollama whose shapes are spoken; clients ask for it to know what they may send."""
NEVER = "2318-12-31T00:00:00Z"
"""When models are unloaded that stay until their room is needed."""

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
    """Of where the model came from and its context; a name for it, not of its content."""
    details: OllamaDetails


class OllamaModels(Shape):
    """Every name that requests may use."""

    models: list[OllamaModel]


class OllamaRunningModel(OllamaModel):
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunning(Shape):
    """Models that can answer at once."""

    models: list[OllamaRunningModel]


class OllamaVersion(Shape):
    version: str
    """Of Ollama, whose shapes are spoken."""
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
    """A vector for each input, in order."""

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
    """A model by its name."""

    model: Name | None = None
    name: Name | None = None
    """The older name of `model`."""
    verbose: bool | None = None
    stream: bool | None = None
    insecure: bool | None = None


class EmbedBody(ParameterBody):
    """Texts that are to become vectors."""

    model: Name
    input: Annotated[
        Annotated[str, Tag("[text]")] | Annotated[list[str], Field(max_length=MAX_INPUTS), Tag("[list]")],
        Discriminator(text_or_list),
    ]
    truncate: bool | None = None
    """False: an input that does not fit the context is refused; default: its last tokens are kept."""
    dimensions: Annotated[int | None, Field(ge=1, le=MAX_SEQUENCE_TOKENS)] = None
    """The first so many numbers of each vector, whose length is then 1 again."""
    options: OllamaOptions | None = None
    """Unused: nothing is drawn."""
    keep_alive: KeepAlive | None = None
    """Unused: the server determines how long models stay loaded."""


class OldEmbedBody(Body):
    """A text that is to become a vector, which is not divided by its length."""

    model: Name
    prompt: Annotated[str, Field(min_length=1)]
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


@router.get("/version", operation_id="ollama_version", response_model=OllamaVersion)
@router.head("/version", include_in_schema=False)
async def ollama_version() -> Response:
    """The version of Ollama whose shapes are spoken, and ours."""
    return JSONResponse({"version": SPOKEN_VERSION, "lockstep": __version__})


@router.get("/tags", operation_id="ollama_tags", response_model=OllamaModels)
@router.head("/tags", include_in_schema=False)
async def ollama_tags(request: Request) -> Response:
    """Every name that requests may use, aliases too, in Ollama's shape."""
    cluster = serving_of(request).cluster
    sizes = _snapshots(cluster)
    models = [_listed(name, card, sizes) for card in cluster.cards() for name in (card.name, *card.aliases)]
    return JSONResponse({"models": models})


@router.get("/ps", operation_id="ollama_ps", response_model=OllamaRunning)
async def ollama_ps(request: Request) -> Response:
    """Models that can answer at once, in Ollama's shape."""
    cluster = serving_of(request).cluster
    snapshots = _snapshots(cluster)
    running = [card for card in cluster.cards() if card.tier == "resident"]
    return JSONResponse({"models": [_running(card, snapshots) for card in running]})


@router.post("/show", operation_id="ollama_show", response_model=OllamaShown)
async def ollama_show(body: NamedModelBody, request: Request) -> Response:
    """One model: its template, its context, and what it can do."""
    cluster = serving_of(request).cluster
    name = served_name(cluster, _name(body))
    card, tokenizer = cluster.card(name), cluster.tokenizer(name)
    details = _details()
    template = tokenizer.chat_template or ""
    info: dict[str, Any] = {"general.architecture": details["family"], "general.basename": card.name}
    if card.max_model_len is not None:
        info[f"{details['family']}.context_length"] = card.max_model_len
    abilities = ["completion", "tools"] if template or tokenizer.vocab_size == 0 else ["completion"]
    if template and tags_of_template(template) is not None:
        abilities.append("thinking")
    shown: OllamaShown = {
        "modelfile": f"# Served by Lockstep from its own source; there is no Modelfile.\nFROM {card.name}\n",
        "parameters": "",
        "template": template,
        "details": details,
        "model_info": info,
        "capabilities": abilities,
        "modified_at": _time(card),
    }
    return JSONResponse(shown)


@router.post("/embed", operation_id="ollama_embed", response_model=OllamaEmbeddings)
async def ollama_embed(body: EmbedBody, request: Request) -> Response:
    """Turn texts into vectors of length 1."""
    inputs = [text for text in ([body.input] if isinstance(body.input, str) else body.input) if text]
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
    told: OllamaEmbeddings = {
        "model": name,
        "embeddings": vectors,
        "total_duration": round((time.monotonic() - started_s) * NS),
        "load_duration": 0,
        "prompt_eval_count": num_tokens,
    }
    return JSONResponse(told)


@router.post("/embeddings", operation_id="ollama_embeddings", response_model=OllamaEmbedding)
async def ollama_embeddings(body: OldEmbedBody, request: Request) -> Response:
    """Turn one text into a vector; the older form of `/api/embed`."""
    name = served_name(serving_of(request).cluster, body.model)
    [vector], _ = await _vectors(request, [body.prompt], name, normalize=False, truncate_prompt_tokens=-1)
    return JSONResponse({"embedding": vector})


@router.post("/pull", operation_id="ollama_pull", response_model=OllamaStatus)
async def ollama_pull(body: NamedModelBody, request: Request) -> Response:
    """Succeeds for a model that is served, for clients that make sure of it first; nothing is fetched."""
    name = _name(body)
    try:
        served_name(serving_of(request).cluster, name)
    except ModelNotFoundError:
        raise InvalidParameterError(
            f"{name!r} is not served, and models are not fetched by request here: run `lockstep pull hf://ORG/NAME` "
            "where the server is, and serve it with `lockstep serve` or a manifest",
            param="model",
        ) from None
    return JSONResponse({"status": "success"})


@router.post("/push", operation_id="ollama_push", responses={})
async def ollama_push(body: JsonObject) -> Response:
    """Refused: models are not sent anywhere from here."""
    raise _unmanaged("Models are not sent anywhere from here")


@router.post("/create", operation_id="ollama_create")
async def ollama_create(body: JsonObject) -> Response:
    """Refused: models are served from their files."""
    raise _unmanaged("Models are not made by request: `lockstep serve` takes a GGUF file or a directory as it is")


@router.post("/copy", operation_id="ollama_copy")
async def ollama_copy(body: JsonObject) -> Response:
    """Refused: a second name is an alias."""
    raise _unmanaged("Models are not copied: a second --served-model-name, or `aliases` of a manifest, names one twice")


@router.delete("/delete", operation_id="ollama_delete")
async def ollama_delete(body: JsonObject) -> Response:
    """Refused: files are removed where they are."""
    raise _unmanaged("Models are not deleted by request: `lockstep rm` removes what `lockstep pull` brought")


def _unmanaged(why: str) -> InvalidParameterError:
    return InvalidParameterError(f"{why}.")


async def _vectors(request: Request, inputs: Sequence[str], name: str, **more: Any) -> tuple[list[list[float]], int]:
    """The vectors of some texts, and the tokens of these."""
    if not inputs:
        return [], 0
    body = EmbeddingBody.model_validate({"input": inputs, "model": name, **more})
    told = await embedded(body, request)
    return [each["embedding"] for each in told["data"]], told["usage"]["prompt_tokens"]  # type: ignore[misc]  # floats, as nothing else was asked for


def _name(body: NamedModelBody) -> str:
    name = body.model or body.name
    if name is None:
        raise InvalidParameterError("model is missing", param="model")
    return name


def tagged(name: str) -> str:
    """A served name as Ollama lists it: with a tag."""
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
    }


def _running(card: ModelCard, snapshots: Mapping[str, ModelSnapshot]) -> OllamaRunningModel:
    listed = _listed(card.name, card, snapshots)
    more = {"expires_at": NEVER, "size_vram": 0, "context_length": card.max_model_len or 0}
    return {**listed, **more}  # type: ignore[typeddict-item]  # the members that it has more


def _time(card: ModelCard) -> str:
    return datetime.fromtimestamp(card.created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
