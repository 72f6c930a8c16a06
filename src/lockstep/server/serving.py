"""What every handler works with: the cluster and the server's options, put on the application by `create_app`."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from lockstep.cluster.base import Cluster
from lockstep.server.options import ServerOptions


@dataclass(frozen=True, slots=True)
class Serving:
    """One server."""

    cluster: Cluster
    options: ServerOptions


def serving_of(request: Request) -> Serving:
    """The server that a request came to."""
    serving: Serving = request.app.state.serving
    return serving
