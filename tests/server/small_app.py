"""The least application that the routers need: records, and errors as bodies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.cluster.base import Cluster
from lockstep.errors import LockstepError
from lockstep.server import chat, completions
from lockstep.server.errors import HttpError, http_error
from lockstep.server.options import ServerOptions
from lockstep.server.record import RequestRecord
from lockstep.server.serving import Serving


def small_app(cluster: Cluster, options: ServerOptions) -> FastAPI:
    app = FastAPI()
    app.state.serving = Serving(cluster, options)
    app.state.records = []
    app.include_router(chat.router)
    app.include_router(completions.router)
    app.add_exception_handler(LockstepError, _lockstep)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_middleware(_Records, records=app.state.records)
    return app


class _Records:
    def __init__(self, app: ASGIApp, records: list[RequestRecord]) -> None:
        self._app = app
        self._records = records

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = RequestRecord(f"req-{len(self._records)}", scope["path"], time.monotonic())
        self._records.append(record)
        scope.setdefault("state", {})["record"] = record
        await self._app(scope, receive, send)


async def _lockstep(_: Request, error: Exception) -> JSONResponse:
    return _answer(http_error(error))


async def _validation(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return _answer(HttpError(400, "invalid_request_error", str(first["msg"]), _path(first["loc"])))


def _path(loc: Sequence[Any]) -> str:
    steps = [step for step in loc[1:] if not str(step).startswith("[")]
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


def _answer(error: HttpError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, dict(error.headers))
