"""`create_app`: routes, middlewares and error shapes of one server, put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute

from lockstep.cluster.base import Cluster
from lockstep.server import (
    chat,
    completions,
    debug,
    embeddings,
    faults,
    health,
    home,
    manage,
    metrics,
    models,
    responses,
    tokenize,
    watch,
)
from lockstep.server.access import OriginMiddleware
from lockstep.server.body import BodyMiddleware
from lockstep.server.gate import GateMiddleware
from lockstep.server.lifecycle import Traffic
from lockstep.server.logs import RequestLog
from lockstep.server.options import ServerOptions
from lockstep.server.recording import RecordMiddleware, RecordObserver
from lockstep.server.serving import Serving
from lockstep.version import __version__

ROUTERS: tuple[APIRouter, ...] = (
    chat.router,
    completions.router,
    responses.router,
    embeddings.router,
    tokenize.router,
    manage.router,  # before the models', whose ids may hold slashes
    models.router,
    watch.router,
    health.router,
    metrics.router,
    home.router,
)
"""They are asked in this order, each for some 10 us: what is called most comes first."""


def create_app(
    cluster: Cluster,
    options: ServerOptions | None = None,
    observers: Sequence[RecordObserver] = (),
    response_store: responses.ResponseStore | None = None,
) -> FastAPI:
    """The ASGI application that answers with a cluster. Starting and closing the cluster is its owner's.

    From the outside in: record, CORS, gate, body, routes.

    Args:
        observers: told of every request that has ended, beside the log and the counters.
        response_store: where responses are kept, its caller's to close; None: in memory.
    """
    serving = Serving(cluster, options or ServerOptions())
    options = serving.options
    app = FastAPI(
        title="Lockstep",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=faults.ERROR_RESPONSES,
    )
    app.state.serving = serving
    app.state.http_counts = metrics.HttpCounts()
    app.state.watchers = Traffic()
    app.state.response_store = response_store or responses.memory_store(options)
    faults.install(app)
    routers = (*ROUTERS, debug.router) if options.enable_debug_endpoints else ROUTERS
    app.state.methods = methods_of(routers)
    for router in routers:
        app.include_router(router)
    app.add_middleware(BodyMiddleware, serving=serving)
    app.add_middleware(GateMiddleware, serving=serving)
    app.add_middleware(OriginMiddleware, origins=options.cors_origins, allows_loopback=options.allows_loopback_origins)
    counts = app.state.http_counts
    log = (RequestLog(options),) if options.log_requests else ()
    app.add_middleware(RecordMiddleware, observers=(counts, *log, *observers), paths=app.state.methods)
    return app


def methods_of(routers: Iterable[APIRouter]) -> dict[str, set[str]]:
    """What each path takes, over all of its routes."""
    methods: dict[str, set[str]] = {}
    for router in routers:
        for route in router.routes:
            assert isinstance(route, APIRoute)
            methods.setdefault(route.path, set()).update(route.methods or ())
    return methods
