"""What every handler works with: the cluster and the server's options, put on the application by `create_app`."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.requests import Request

from lockstep.cluster.base import Cluster
from lockstep.server.lifecycle import Lifecycle, Traffic
from lockstep.server.options import ServerOptions


@dataclass(frozen=True, slots=True)
class Serving:
    """One server."""

    cluster: Cluster
    options: ServerOptions
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    traffic: Traffic = field(default_factory=Traffic)


def serving_of(request: Request) -> Serving:
    """The server that a request came to."""
    serving: Serving = request.app.state.serving
    return serving
