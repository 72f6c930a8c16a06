"""The cluster from above: what it is doing, its manifest, its sessions, and models that are loaded by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from lockstep.cluster.base import Cluster
from lockstep.cluster.snapshot import ClusterSnapshot, ModelSnapshot, Replaced, SessionSnapshot
from lockstep.errors import LockstepError, ManifestError, NoManifestError, NotLoadableError, RequestError
from lockstep.server.access import powers_of
from lockstep.server.manifest_text import JSON_TYPE, YAML_TYPES, manifest_text, wanted_type
from lockstep.server.record import record_of
from lockstep.server.serving import serving_of
from lockstep.server.struct_schema import described

T = TypeVar("T")
router = APIRouter(prefix="/v1", tags=["cluster"])
_FORMS: dict[str, Any] = {JSON_TYPE: {"schema": {"type": "object"}}} | {
    each: {"schema": {"type": "string"}} for each in YAML_TYPES
}
"""In which a manifest is sent, either way."""


class SessionList(msgspec.Struct, frozen=True):
    """Conversations that were named by their clients, in order of their last use."""

    object: str
    data: tuple[SessionSnapshot, ...]


class EndedSession(msgspec.Struct, frozen=True):
    id: str
    object: str
    deleted: bool


@router.get("/cluster", responses=described(ClusterSnapshot), operation_id="retrieve_cluster")
async def retrieve_cluster(request: Request) -> Response:
    """Models and where they are, bytes against budgets, sessions, counters, the latest changes."""
    return _json(serving_of(request).cluster.snapshot())


@router.get(
    "/manifest",
    responses={
        200: {
            "content": _FORMS,
            "description": "What holds, without what is a default: JSON, or YAML where `Accept` asks for it.",
        }
    },
    response_class=Response,
    operation_id="retrieve_manifest",
)
async def retrieve_manifest(request: Request) -> Response:
    """The effective manifest, which may be put back as it came: as JSON, or as YAML where `Accept` asks for that."""
    cluster = _manifested(request)
    kind = wanted_type(",".join(request.headers.getlist("accept")))
    body = msgspec.json.encode(cluster.manifest_plain()) if kind == JSON_TYPE else cluster.manifest_text()
    return Response(body, media_type=kind, headers={"Vary": "Accept"})


@router.put(
    "/manifest",
    responses=described(Replaced),
    openapi_extra={"requestBody": {"required": True, "content": _FORMS}},
    operation_id="replace_manifest",
)
async def replace_manifest(request: Request) -> Response:
    """Replace the manifest as one unit: all of it is brought in, or nothing changes and the error says all that is
    wrong. Models that are in both go on as they are, those that are gone answer what they have begun."""
    cluster = _manifested(request)
    text = manifest_text(await request.body(), request.headers.get("content-type", ""))
    powers = powers_of(record_of(request).tenant, serving_of(request).options)
    async with _loading("the manifest is not brought in"):
        return _json(await cluster.replace(text, powers=powers))


@router.post("/models/{model_id:path}/load", responses=described(ModelSnapshot), operation_id="load_model")
async def load_model(model_id: str, request: Request) -> Response:
    """Promote a model; answers when it can."""
    cluster = _manifested(request)
    name = cluster.card(model_id).name
    async with _loading(f"the model {name!r} is not loaded"):
        await cluster.load_model(name)
    return _json(_model(cluster, name))


@router.post("/models/{model_id:path}/unload", responses=described(ModelSnapshot), operation_id="unload_model")
async def unload_model(model_id: str, request: Request) -> Response:
    """Demote a model; answers when its calls have ended and its memory is free."""
    cluster = _manifested(request)
    name = cluster.card(model_id).name
    async with _loading(f"the model {name!r} is not unloaded"):
        await cluster.unload_model(name)
    return _json(_model(cluster, name))


@router.get("/sessions", responses=described(SessionList), operation_id="list_sessions")
async def list_sessions(request: Request) -> Response:
    """Conversations that keep their KV, or kept it."""
    return _json(SessionList("list", tuple(serving_of(request).cluster.sessions())))


@router.delete("/sessions/{session_id:path}", responses=described(EndedSession), operation_id="end_session")
async def end_session(session_id: str, request: Request) -> Response:
    """Forget a conversation and give up its KV."""
    await serving_of(request).cluster.end_session(session_id)
    return _json(EndedSession(session_id, "session", True))


def _manifested(request: Request) -> Cluster:
    """The cluster, where a manifest says what it serves; NoManifestError where the command line does."""
    cluster = serving_of(request).cluster
    if cluster.is_fixed:
        raise NoManifestError(
            "This server serves one model and has no manifest; start it with `lockstep serve --manifest FILE`."
        )
    return cluster


@asynccontextmanager
async def _loading(what: str) -> AsyncIterator[None]:
    """What cannot be loaded is a refusal of the request, and told with its reason."""
    try:
        yield
    except (RequestError, ManifestError):
        raise
    except LockstepError as error:
        raise NotLoadableError(f"{what}: {error}") from error


def _model(cluster: Cluster, name: str) -> ModelSnapshot | None:
    return next((model for model in cluster.snapshot().models if model.id == name), None)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON_TYPE)
