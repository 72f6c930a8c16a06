"""An error as an HTTP answer, for handlers and middlewares alike."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from lockstep.server.errors import HttpError
from lockstep.server.record import RequestRecord


def error_response(error: HttpError) -> JSONResponse:
    """The error's status, headers and body."""
    return JSONResponse(error.body(), error.status, dict(error.headers))


async def refuse(error: HttpError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with an error from inside a middleware; the request's record knows of it."""
    record: RequestRecord = scope["state"]["record"]
    record.error = error
    await error_response(error)(scope, receive, send)
