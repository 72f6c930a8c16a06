"""Application factory: assembles the routes, middlewares and error handlers of one server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lockstep.cluster.cluster import Cluster
from lockstep.errors import LockstepError
from lockstep.server import (
    batches,
    chat,
    cluster_routes,
    completions,
    embeddings,
    log_lines,
    lora_routes,
    metrics,
    request_log,
    responses,
    scores,
    status,
    tokenize,
    watch,
)
from lockstep.server.access_log import AccessLog
from lockstep.server.adapters import anthropic, ollama, ollama_models
from lockstep.server.admission import AdmissionMiddleware, OriginMiddleware
from lockstep.server.body import BodyMiddleware
from lockstep.server.errors import (
    HttpError,
    RefusedBodyError,
    exception_http_error,
    http_error,
    validation_http_error,
)
from lockstep.server.options import ServerOptions
from lockstep.server.request_context import (
    CLIENT_LEFT_STATUS,
    ClientLeft,
    ContextMiddleware,
    RequestObserver,
    context_of,
    refusal,
)
from lockstep.server.serving import Serving, Traffic
from lockstep.version import __version__

ROUTERS: tuple[APIRouter, ...] = (
    chat.router,
    completions.router,
    responses.router,
    anthropic.router,
    ollama.router,
    embeddings.router,
    scores.router,
    batches.router,
    tokenize.router,
    ollama_models.router,
    anthropic.models_router,  # before the OpenAI route, which matches all other clients
    cluster_routes.router,  # before the model routes, whose ids may contain slashes
    cluster_routes.models_router,
    lora_routes.router,
    request_log.router,
    log_lines.router,
    watch.router,
    status.router,
    metrics.router,
    status.home_router,
)
"""Routers in the order in which they are tried. Each takes about 10 us, so the most frequently used ones are first."""


def create_app(
    cluster: Cluster,
    options: ServerOptions | None = None,
    observers: Sequence[RequestObserver] = (),
    response_store: responses.ResponseStore | None = None,
    batch_store: batches.BatchStore | None = None,
    routers: Sequence[APIRouter] = ROUTERS,
) -> FastAPI:
    """Create the ASGI application that serves a cluster. The caller starts and closes the cluster.

    Middlewares, from outermost to innermost: context, CORS, admission, body.

    Args:
        observers: called with every finished request, in addition to the log and the counters.
        response_store: store of responses; the caller closes it. None: in memory.
        batch_store: store of files and batches; the caller closes it, and runs ``state.batches``. None: no batches.
        routers: endpoints of the application.
    """
    serving = Serving(cluster, options or ServerOptions())
    options = serving.options
    app = FastAPI(
        title="Lockstep",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.serving = serving
    app.state.http_counts = metrics.HttpCounts()
    app.state.request_log = request_log.RequestLog()
    app.state.log_lines = log_lines.LogLines()
    app.state.watchers = Traffic()
    app.state.response_store = response_store or responses.ResponseStore(None, options.max_stored_responses)
    app.state.batches = None if batch_store is None else batches.BatchRunner(serving, batch_store, app)
    _install_handlers(app)
    if options.enable_debug_endpoints:
        routers = (*routers, status.debug_router)
    app.state.methods = methods_of(routers)
    for router in routers:  # `include_router` would recreate all routes at the first request, which takes 0.4 s
        app.router.routes.extend(router.routes)
    app.add_middleware(BodyMiddleware, serving=serving)
    app.add_middleware(AdmissionMiddleware, serving=serving)
    app.add_middleware(OriginMiddleware, origins=options.cors_origins, allows_loopback=options.allows_loopback_origins)
    counts = app.state.http_counts
    log = (AccessLog(options),) if options.log_requests else ()
    requests = app.state.request_log
    observers = (counts, requests.end, *log, *observers)
    app.add_middleware(ContextMiddleware, observers=observers, paths=app.state.methods, on_begin=requests.begin)
    return app


def methods_of(routers: Iterable[APIRouter]) -> dict[str, set[str]]:
    """Methods of each path over all of its routes."""
    methods: dict[str, set[str]] = {}
    for router in routers:
        for route in router.routes:
            assert isinstance(route, APIRoute)
            methods.setdefault(route.path, set()).update(route.methods or ())
    return methods


def _install_handlers(app: FastAPI) -> None:
    """Register handlers that convert exceptions to error responses."""
    app.exception_handler(RequestValidationError)(_on_validation)
    app.exception_handler(HTTPException)(_on_http)
    app.exception_handler(LockstepError)(_on_lockstep)
    app.exception_handler(ClientLeft)(_on_departure)


async def _on_lockstep(request: Request, error: Exception) -> JSONResponse:
    return _answer(request, http_error(error))


async def _on_departure(request: Request, error: Exception) -> Response:
    """Placeholder response; the client has disconnected."""
    return Response(status_code=CLIENT_LEFT_STATUS)


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error, RefusedBodyError):
        return _answer(request, error.error)
    route = request.scope.get("route")
    allowed = request.app.state.methods.get(getattr(route, "path", None), ())
    return _answer(request, exception_http_error(error, request.method, request.url.path, allowed))


async def _on_validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return _answer(request, validation_http_error(error.errors()))


def _answer(request: Request, error: HttpError) -> JSONResponse:
    return refusal(error, context_of(request))
