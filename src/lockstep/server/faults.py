"""Exceptions of handlers and of FastAPI as OpenAI's error bodies; a fault of the request names the field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from lockstep.errors import LockstepError
from lockstep.server.errors import HttpError, http_error
from lockstep.server.long_bodies import RefusedBodyError
from lockstep.server.record import record_of
from lockstep.server.refusals import error_response

_TYPES = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}
_SHOWN_CHARS = 64
"""A value that is repeated to its sender is cut after so many characters."""
_OF_BODY = ("body", "query", "path", "header")


class ManifestProblem(BaseModel):
    """One fault of a manifest."""

    line: int
    where: str
    message: str


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None
    problems: list[ManifestProblem] | None = None
    """Of a manifest that is refused, all of them."""


class ErrorBody(BaseModel):
    """Every answer that is no success."""

    error: ErrorDetail


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is refused; the error says what would be right."},
    "5XX": {"model": ErrorBody, "description": "The server cannot answer, or not now."},
}
"""For the OpenAPI document: what any route may answer."""


def install(app: FastAPI) -> None:
    """Let the application answer exceptions in one shape."""
    app.exception_handler(RequestValidationError)(_on_validation)
    app.exception_handler(HTTPException)(_on_http)
    app.exception_handler(LockstepError)(_on_lockstep)


async def _on_lockstep(request: Request, error: Exception) -> JSONResponse:
    return _answer(request, http_error(error))


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error, RefusedBodyError):
        return _answer(request, error.error)
    route = request.scope.get("route")
    allowed = request.app.state.methods.get(getattr(route, "path", None), ())
    return _answer(request, of_http_exception(error, request.method, request.url.path, allowed))


async def _on_validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return _answer(request, of_validation(error.errors()))


def _answer(request: Request, error: HttpError) -> JSONResponse:
    record_of(request).error = error
    return error_response(error)


def of_http_exception(error: HTTPException, method: str, path: str, allowed: Iterable[str]) -> HttpError:
    """What starlette and FastAPI raise by themselves: unknown paths, wrong methods, bodies that cannot be read.

    Args:
        allowed: all methods of this path; starlette names those of its first route.
    """
    status, headers = error.status_code, error.headers or {}
    message, code = str(error.detail), None
    if status == 404 and message == HTTPStatus.NOT_FOUND.phrase:
        message, code = f"There is nothing at {path[:_SHOWN_CHARS]}.", "unknown_path"
    elif status == 405:
        headers = {"Allow": ", ".join(sorted(allowed)) or headers.get("Allow", "")}
        message = f"{method} is not what {path[:_SHOWN_CHARS]} takes; it takes {headers['Allow']}."
        code = "method_not_allowed"
    elif status == 400:
        message, code = "The body could not be read as JSON.", "invalid_json"
    type_ = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return HttpError(status, type_, message, code=code, headers=headers)


def of_validation(errors: Sequence[Mapping[str, Any]]) -> HttpError:
    """The first fault that validation found, with the name of its field."""
    error = errors[0]
    if error["type"] == "json_invalid":
        place = error["loc"][-1]
        message = f"The body is not valid JSON at character {place}: {error['ctx']['error']}."
        return HttpError(400, "invalid_request_error", message, code="invalid_json")
    param = field_path(error["loc"])
    return HttpError(400, "invalid_request_error", _fault(param, error), param, "invalid_parameter")


def field_path(loc: Sequence[int | str]) -> str | None:
    """``("body", "messages", 2, "content", "str")`` as ``messages[2].content``; None: the body itself.

    Names of alternatives, which pydantic puts between fields, are left out: they are of types, not of fields.
    """
    path = ""
    for step in loc[1:] if loc and loc[0] in _OF_BODY else loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not _is_type_name(step):
            path += f".{step[:_SHOWN_CHARS]}" if path else step[:_SHOWN_CHARS]
    return path or None


def _is_type_name(step: str) -> bool:
    return (
        "[" in step
        or "(" in step
        or step[:1].isupper()
        or step in ("str", "int", "float", "bool", "list", "dict", "none")
    )


def _fault(param: str | None, error: Mapping[str, Any]) -> str:
    where = param or "the body"
    if error["type"] == "missing":
        return f"{where} is missing."
    if error["type"] == "extra_forbidden":
        return f"{where} is not a parameter that is known here."
    reason = str(error["msg"]).removeprefix("Value error, ")
    return f"{where}: {reason}." if error["type"] == "value_error" else f"{where}: {reason}; it is {_described(error)}."


def _described(error: Mapping[str, Any]) -> str:
    """The value at fault, as much of it as helps: numbers and wrong choices, never somebody's prose."""
    value = error.get("input")
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int | float):
        return str(value)[:_SHOWN_CHARS]
    if isinstance(value, str):
        return repr(value[:_SHOWN_CHARS]) if error["type"] in ("literal_error", "enum") else "a string"
    return "a list" if isinstance(value, list | tuple) else "an object" if isinstance(value, dict) else "something else"
