"""`create_app`: routes, middlewares and error shapes of one server, put together."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from lockstep.cluster.base import Cluster
from lockstep.server import faults, health, home, models
from lockstep.server.body import BodyMiddleware
from lockstep.server.gate import GateMiddleware
from lockstep.server.logs import RequestLog
from lockstep.server.options import ServerOptions
from lockstep.server.recording import RecordMiddleware, RecordObserver
from lockstep.server.serving import Serving
from lockstep.version import __version__

ROUTERS: tuple[APIRouter, ...] = (
    home.router,
    health.router,
    models.router,
)


def create_app(cluster: Cluster, options: ServerOptions | None = None) -> FastAPI:
    """The ASGI application that answers with a cluster. Starting and closing the cluster is its owner's.

    From the outside in: record, CORS, gate, body, routes.
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
    faults.install(app)
    for router in ROUTERS:
        app.include_router(router)
    app.add_middleware(BodyMiddleware, max_body_bytes=options.max_body_bytes)
    app.add_middleware(GateMiddleware, serving=serving)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    app.add_middleware(RecordMiddleware, observers=_observers(options), paths=paths)
    return app


def _observers(options: ServerOptions) -> tuple[RecordObserver, ...]:
    return (RequestLog(options),) if options.log_requests else ()
