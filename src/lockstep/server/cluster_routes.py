"""Cluster routes: serve the cluster's state, manifest, sessions and models, and load and unload models."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response
from msgspec.structs import replace
from pydantic import BaseModel

from lockstep.cluster.base import ModelCard
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.cluster_stats import DEFAULT_WINDOW_S, MAX_WINDOW_S, ClusterStats
from lockstep.cluster.snapshot import ClusterSnapshot, HostSnapshot, ModelSnapshot, Replaced, SessionSnapshot
from lockstep.errors import (
    InvalidJsonError,
    InvalidParameterError,
    LockstepError,
    ManifestError,
    NoManifestError,
    NotLoadableError,
    RequestError,
    SessionNotFoundError,
)
from lockstep.server.admission import permissions_of, sees_all
from lockstep.server.body import JSON_TYPE, YAML_TYPE, YAML_TYPES, kind_of
from lockstep.server.errors import ERROR_RESPONSES
from lockstep.server.request_context import context_of
from lockstep.server.serving import serving_of
from lockstep.server.status import batch_warnings

router = APIRouter(prefix="/v1", tags=["cluster"], responses=ERROR_RESPONSES)
models_router = APIRouter(prefix="/v1/models", tags=["models"], responses=ERROR_RESPONSES)
LOCATE_LIMIT_S = 1.0
"""Time limit, in seconds, for locating sessions, so that the cluster can be read while a worker is stuck."""
_FORMS: dict[str, Any] = {JSON_TYPE: {"schema": {"type": "object"}}} | {
    each: {"schema": {"type": "string"}} for each in YAML_TYPES
}
"""Media types of a manifest in requests and responses."""


_RANGES = {"*/*": (0, JSON_TYPE), "application/*": (1, JSON_TYPE), "text/*": (1, "text/yaml")} | {
    each: (2, each) for each in (JSON_TYPE, *YAML_TYPES)
}
"""Media ranges of an ``Accept`` header, each with its precision and the response type."""
_UNPRINTED = re.compile("[\x7f-\x9f\u2028\u2029\ufffe\uffff]")
"""Characters that JSON allows unescaped, but that end a line in YAML or must be escaped there."""
_NOT_YAML = re.compile(rf"\t|\\u[dD][89a-fA-F]|{_UNPRINTED.pattern}")
"""JSON text that YAML reads differently: unprintable characters, tabs between values, and escaped surrogate pairs."""


class SessionList(msgspec.Struct, frozen=True):
    """Named conversations, in order of their last use."""

    object: str
    data: tuple[SessionSnapshot, ...]


class EndedSession(msgspec.Struct, frozen=True):
    id: str
    object: str
    deleted: bool


class ModelBody(BaseModel):
    """One served name. Null members are unknown until the model is loaded."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "lockstep"
    root: str
    parent: str | None
    max_model_len: int | None
    tier: str
    task: str | None


class ModelListBody(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelBody]


def described(struct: type[msgspec.Struct]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI success response of a route that returns the given struct as JSON."""
    schema = schema_of(struct)
    return {200: {"description": "The result.", "content": {"application/json": {"schema": schema}}}}


def schema_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """JSON schema of a struct, without references. Recursive structs are not supported."""
    ([reference], definitions) = msgspec.json.schema_components([struct], ref_template="{name}")
    schema: dict[str, Any] = _inlined(reference, definitions)
    return schema


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"]], definitions)
    return {name: _inlined(value, definitions) for name, value in schema.items()}


@router.get("/cluster", responses=described(ClusterSnapshot), operation_id="retrieve_cluster")
async def retrieve_cluster(request: Request) -> Response:
    """Models and their locations, memory budgets, the caller's sessions, counters, and recent changes."""
    cluster = serving_of(request).cluster
    await cluster.locate_sessions(LOCATE_LIMIT_S)
    snapshot = cluster.snapshot()
    warnings = (*snapshot.warnings, *batch_warnings(request))
    return _json(replace(snapshot, sessions=tuple(_own(request, snapshot.sessions)), warnings=warnings))


@router.post("/cluster/hosts/{name:path}/drain", responses=described(HostSnapshot), operation_id="drain_host")
async def drain_host(name: str, request: Request) -> Response:
    """Drain a host: its replicas are moved to other hosts, so that it can be stopped. `name` is a name or a unique
    address of a host. Returns once the drain has started; it is complete when the host has no replicas."""
    return await _drained(name, True, request)


@router.delete("/cluster/hosts/{name:path}/drain", responses=described(HostSnapshot), operation_id="undrain_host")
async def undrain_host(name: str, request: Request) -> Response:
    """Allow replicas on a drained host again."""
    return await _drained(name, False, request)


@router.get("/stats", responses=described(ClusterStats), operation_id="retrieve_stats")
async def retrieve_stats(
    request: Request,
    window_s: Annotated[
        float, Query(gt=0, le=MAX_WINDOW_S, description="Length of the window for rates, in seconds.")
    ] = DEFAULT_WINDOW_S,
) -> Response:
    """Statistics of each engine for monitoring: tokens per second, times to first token, KV usage, prefix cache
    hits."""
    return _json(await serving_of(request).cluster.stats(window_s))


@router.get(
    "/manifest",
    responses={
        200: {
            "content": _FORMS,
            "description": "The effective manifest without default values: JSON, or YAML if `Accept` requests it.",
        }
    },
    response_class=Response,
    operation_id="retrieve_manifest",
)
async def retrieve_manifest(request: Request) -> Response:
    """The effective manifest, in a form that can be put back unchanged: JSON, or YAML if `Accept` requests it."""
    cluster = _manifest_cluster(request)
    kind = accepted_type(",".join(request.headers.getlist("accept")))
    body = msgspec.json.encode(cluster.manifest_plain()) if kind == JSON_TYPE else cluster.manifest_text()
    return Response(body, media_type=kind, headers={"Vary": "Accept"})


@router.put(
    "/manifest",
    responses=described(Replaced),
    openapi_extra={"requestBody": {"required": True, "content": _FORMS}},
    operation_id="replace_manifest",
)
async def replace_manifest(request: Request) -> Response:
    """Replace the manifest atomically: either all of it is applied, or nothing changes and the error lists all
    problems. Models in both manifests keep running. Removed models finish their open requests."""
    cluster = _manifest_cluster(request)
    text = manifest_text(await request.body(), request.headers.get("content-type", ""))
    permissions = permissions_of(context_of(request).tenant, serving_of(request).options)
    async with _loading("the manifest is not applied"):
        return _json(await cluster.replace(text, None, permissions))


@router.post("/models/{model_id:path}/load", responses=described(ModelSnapshot), operation_id="load_model")
async def load_model(model_id: str, request: Request) -> Response:
    """Load a model. Returns when the model can serve requests."""
    cluster = _manifest_cluster(request)
    name = cluster.card(model_id).name
    async with _loading(f"the model {name!r} is not loaded"):
        await cluster.load_model(name)
    return _json(_model(cluster, name))


@router.post("/models/{model_id:path}/unload", responses=described(ModelSnapshot), operation_id="unload_model")
async def unload_model(model_id: str, request: Request) -> Response:
    """Unload a model. Returns when its open requests have ended and its memory is free."""
    cluster = _manifest_cluster(request)
    name = cluster.card(model_id).name
    async with _loading(f"the model {name!r} is not unloaded"):
        await cluster.unload_model(name)
    return _json(_model(cluster, name))


@router.get("/sessions", responses=described(SessionList), operation_id="list_sessions")
async def list_sessions(request: Request) -> Response:
    """Conversations whose KV is or was stored. A key sees its own sessions; an admin key, or any caller of a server
    without keys, sees all."""
    cluster = serving_of(request).cluster
    await cluster.locate_sessions()
    return _json(SessionList("list", tuple(_own(request, cluster.sessions()))))


@router.delete("/sessions/{session_id:path}", responses=described(EndedSession), operation_id="end_session")
async def end_session(
    session_id: str,
    request: Request,
    caller: Annotated[str | None, Query(max_length=256, description="Name of the key that owns the session.")] = None,
) -> Response:
    """Delete a conversation and its KV. A key deletes its own session; an admin key deletes that of `caller`, or those
    of all callers with this id."""
    own = only_of(request)
    if own is not None and caller not in (None, own):
        raise SessionNotFoundError(f"No session with id '{session_id}'.", param="session_id")
    await serving_of(request).cluster.end_session(session_id, caller if own is None else own)
    return _json(EndedSession(session_id, "session", True))


@models_router.get("", operation_id="list_models")
async def list_models(request: Request) -> ModelListBody:
    """All names that requests can use, including aliases."""
    cards = serving_of(request).cluster.cards()
    return ModelListBody(data=[body for card in cards for body in _bodies(card)])


@models_router.get("/{model_id:path}", operation_id="retrieve_model")
async def retrieve_model(model_id: str, request: Request) -> ModelBody:
    """One model. Its id may contain slashes."""
    return _body(model_id, serving_of(request).cluster.card(model_id))


def manifest_text(body: bytes, content_type: str) -> str:
    """Convert a body to text for `lockstep.cluster.manifest_file.parse`. Line numbers are preserved where possible.

    Raises:
        InvalidParameterError: the body is empty.
        InvalidJsonError: the body is not valid JSON.
    """
    text = body.decode()
    if not text.strip():
        raise InvalidParameterError("the body is empty; send a manifest as YAML or JSON")
    if kind_of(content_type) in YAML_TYPES:
        return text
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise InvalidJsonError(f"the body is not valid JSON: {error}; send YAML with type {YAML_TYPE}") from None
    if not _NOT_YAML.search(text):
        return text
    return _UNPRINTED.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, indent=2, ensure_ascii=False))


def accepted_type(accept: str) -> str:
    """Choose the response type for an ``Accept`` header: highest weight, then most exact range, then first in the
    header. JSON if no range matches."""
    best, accepted = (0.0, len(_RANGES)), JSON_TYPE  # higher than any range with weight 0
    for part in accept.split(","):
        exactness, kind = _RANGES.get(kind_of(part), (0, ""))
        if kind and (rank := (_weight(part), exactness)) > best:
            best, accepted = rank, kind
    return accepted


def _weight(part: str) -> float:
    """The ``q`` weight of a range in an ``Accept`` header; 1 if it has none or an invalid one."""
    for parameter in part.split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            return float(value) if re.fullmatch(r"\s*[01](\.\d{0,3})?\s*", value) else 1.0
    return 1.0


def only_of(request: Request) -> str | None:
    """Name of the caller whose requests and sessions are visible to this request; None: those of all callers."""
    tenant = context_of(request).tenant
    return None if sees_all(tenant, serving_of(request).options) else tenant


def _own(request: Request, sessions: Iterable[SessionSnapshot]) -> Iterator[SessionSnapshot]:
    own = only_of(request)
    return (session for session in sessions if own in (None, session.caller))


def _manifest_cluster(request: Request) -> Cluster:
    """Return the cluster. Raises NoManifestError if it serves a single model from the command line."""
    cluster = serving_of(request).cluster
    if cluster.is_fixed:
        raise NoManifestError(
            "This server serves one model and has no manifest; start it with `lockstep serve --manifest FILE`."
        )
    return cluster


@asynccontextmanager
async def _loading(what: str) -> AsyncIterator[None]:
    """Convert a failure to load into an error for the request, with its reason."""
    try:
        yield
    except (RequestError, ManifestError):
        raise
    except LockstepError as error:
        raise NotLoadableError(f"{what}: {error}") from error


async def _drained(name: str, is_drained: bool, request: Request) -> Response:
    cluster = _manifest_cluster(request)
    found = await cluster.drain_host(name, is_drained)
    host = next(host for host in cluster.snapshot().hosts if host.name == found)
    return _json(replace(host, is_drained=is_drained))  # the controller has applied it; this snapshot may be older


def _model(cluster: Cluster, name: str) -> ModelSnapshot | None:
    return next((model for model in cluster.snapshot().models if model.id == name), None)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON_TYPE)


def _bodies(card: ModelCard) -> Iterator[ModelBody]:
    for name in (card.name, *card.aliases):
        yield _body(name, card)


def _body(name: str, card: ModelCard) -> ModelBody:
    return ModelBody(
        id=name,
        created=card.created_s,
        root=card.root,
        parent=card.parent,
        max_model_len=card.shown_max_model_len,
        tier=card.tier,
        task=card.task,
    )
