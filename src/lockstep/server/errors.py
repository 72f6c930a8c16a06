"""HTTP errors: converts exceptions and validation errors to a status, OpenAI's error body, and retry headers.

The body is ``{"error": {"message", "type", "param", "code"}}``. Error events of streams have the same form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException

from lockstep.errors import (
    BatchNotFoundError,
    ChatTemplateError,
    DeadlineError,
    HostNotDrainableError,
    HostNotFoundError,
    InvalidJsonError,
    InvalidParameterError,
    ManifestError,
    ModelNotFoundError,
    NoManifestError,
    NotLoadableError,
    NotRecordedError,
    Problem,
    PromptTooLongError,
    QueueDeadlineError,
    QueueFullError,
    RemoteFailedError,
    ReplicaGoneError,
    RequestError,
    ResponseNotFoundError,
    SessionNotFoundError,
    SlowReaderError,
    StorageError,
    StorageFullError,
    StoredFileNotFoundError,
    UnavailableError,
)
from lockstep.spelling import MAX_SHOWN_CHARS, demand, described

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
"""Error types by status. Other 4xx errors are invalid requests; other 5xx errors are server errors."""
_OTHER_DEMAND = "have the form that /openapi.json gives for it"
_OF_BODY = ("body", "query", "path", "header")


NEVER_RETRY = {"x-should-retry": "false"}
"""Header that prevents automatic retries of the official client. Retries would triple an overload or an upload."""


@dataclass(frozen=True, slots=True)
class HttpError:
    """A rejected or failed request, as reported to the client."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    """All problems of a rejected manifest."""

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        if self.problems:
            error["problems"] = [asdict(problem) for problem in self.problems]
        return {"error": error}


class RefusedBodyError(HTTPException):
    """A body error that is raised where FastAPI expects parsed JSON."""

    def __init__(self, error: HttpError) -> None:
        super().__init__(error.status)
        self.error = error


class ManifestProblem(BaseModel):
    """One problem of a manifest."""

    line: int
    where: str
    message: str


class ErrorDetail(BaseModel):
    """The error of an answer: message, type and parameter."""

    message: str
    type: str
    param: str | None
    code: str | None
    problems: list[ManifestProblem] | None = None
    """All problems of a rejected manifest."""


class ErrorBody(BaseModel):
    """Body of every error response."""

    error: ErrorDetail


def documented_errors(body: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI error responses of routes whose errors have the given body."""
    return {
        "4XX": {"model": body, "description": "The request is rejected; the error describes a valid request."},
        "5XX": {"model": body, "description": "The server failed or is temporarily unavailable."},
    }


ERROR_RESPONSES = documented_errors(ErrorBody)


_KINDS: tuple[tuple[type[Exception], int, str], ...] = (
    (PromptTooLongError, 400, "context_length_exceeded"),
    (InvalidJsonError, 400, "invalid_json"),
    (InvalidParameterError, 400, "invalid_parameter"),
    (ChatTemplateError, 400, "chat_template"),
    (ModelNotFoundError, 404, "model_not_found"),
    (NotRecordedError, 404, "not_recorded"),
    (ResponseNotFoundError, 404, "response_not_found"),
    (StoredFileNotFoundError, 404, "file_not_found"),
    (BatchNotFoundError, 404, "batch_not_found"),
    (SessionNotFoundError, 404, "session_not_found"),
    (HostNotFoundError, 404, "host_not_found"),
    (HostNotDrainableError, 409, "host_not_drainable"),
    (NoManifestError, 404, "no_manifest"),
    (NotLoadableError, 422, "not_loadable"),
    (ManifestError, 400, "invalid_manifest"),
    (QueueDeadlineError, 408, "queue_deadline"),
    (SlowReaderError, 408, "slow_reader"),
    (DeadlineError, 504, "deadline"),
    (QueueFullError, 429, "queue_full"),
    (RemoteFailedError, 502, "remote_failed"),
    (ReplicaGoneError, 503, "worker_lost"),
    (UnavailableError, 503, "unavailable"),
    (StorageFullError, 507, "storage_full"),
    (StorageError, 503, "storage_unavailable"),
)
"""Exception classes with their status and code. The first matching class applies."""


def http_error(error: BaseException) -> HttpError:
    """Convert an exception to the error for the client. Unexpected exceptions are reported without details."""
    param = error.param if isinstance(error, RequestError) else None
    for kind, status, code in _KINDS:
        if isinstance(error, kind):
            problems = error.problems if isinstance(error, ManifestError) else ()
            return HttpError(status, str(error), param, code, _headers(error), problems)
    message = str(error) if isinstance(error, RequestError) else f"internal error: {type(error).__name__}"
    return HttpError(500, message, param, "internal_error")


def _headers(error: BaseException) -> Mapping[str, str]:
    if isinstance(error, DeadlineError | StorageError):
        return NEVER_RETRY
    if isinstance(error, UnavailableError | RemoteFailedError) and error.retry_after_s is not None:
        return {"Retry-After": str(max(1, round(error.retry_after_s)))}
    return {"Retry-After": "1"} if isinstance(error, QueueFullError) else {}


def exception_http_error(error: HTTPException, method: str, path: str, allowed: Iterable[str]) -> HttpError:
    """Convert an exception of starlette or FastAPI: unknown paths, wrong methods, unreadable bodies.

    Args:
        allowed: all methods of this path; starlette reports only those of its first route.
    """
    status, headers = error.status_code, error.headers or {}
    message, code = str(error.detail), None
    if status == 404 and message == HTTPStatus.NOT_FOUND.phrase:
        message, code = f"The path {path[:MAX_SHOWN_CHARS]} does not exist.", "unknown_path"
    elif status == 405:
        headers = {"Allow": ", ".join(sorted(allowed)) or headers.get("Allow", "")}
        message = f"{method} is not allowed for {path[:MAX_SHOWN_CHARS]}; the path supports {headers['Allow']}."
        code = "method_not_allowed"
    elif status == 400:
        message, code = "The body could not be read as JSON.", "invalid_json"
    return HttpError(status, message, code=code, headers=headers)


def validation_http_error(errors: Sequence[Mapping[str, Any]]) -> HttpError:
    """Convert the first validation error, with the path of its field. A missing parameter may have been sent under
    another name, so the first unknown one is named with it."""
    error = errors[0]
    if error["type"] == "json_invalid":
        place = error["loc"][-1]
        message = f"The body is not valid JSON at character {place}: {error['ctx']['error']}."
        return HttpError(400, message, code="invalid_json")
    param = field_path(error["loc"])
    message = _fault(param, error)
    unknown = next((each for each in errors if each["type"] == "extra_forbidden"), None)
    if error["type"] == "missing" and unknown is not None:
        message = f"{message.removesuffix('.')}; {_fault(field_path(unknown['loc']), unknown)}"
    return HttpError(400, message, param, "invalid_parameter")


def field_path(loc: Sequence[int | str]) -> str | None:
    """Convert ``("body", "messages", 2, "content", "str")`` to ``messages[2].content``; None: the body itself.

    Names of union members, which pydantic inserts between fields, are left out: they name types, not fields.
    """
    path = ""
    for step in loc[1:] if loc and loc[0] in _OF_BODY else loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not _is_type_name(step):
            path += f".{step[:MAX_SHOWN_CHARS]}" if path else step[:MAX_SHOWN_CHARS]
    return path or None


def _is_type_name(step: str) -> bool:
    return (
        "[" in step
        or "(" in step
        or step[:1].isupper()
        or step in ("str", "int", "float", "bool", "list", "dict", "none")
    )


def _fault(param: str | None, error: Mapping[str, Any]) -> str:
    """One sentence about an error. pydantic's own wording is used only if a validator of this package wrote it."""
    where, kind = param or "the body", error["type"]
    if kind == "missing":
        return f"{where} is missing."
    if kind == "extra_forbidden":
        return f"{where} is not a supported parameter."
    reason = str(error["msg"]).removeprefix("Value error, ")
    if kind == "value_error":
        return f"{where}: {reason}."
    if kind.endswith("_kind"):
        return f"{where}: {reason}; it is {_kind_of(error)}."
    return f"{where} is {described(error)}; it must {demand(error, _OTHER_DEMAND)}."


def _kind_of(error: Mapping[str, Any]) -> str:
    """The ``type`` member of an object that matches no member of a union."""
    value = error.get("input")
    return repr(str(value.get("type"))[:MAX_SHOWN_CHARS]) if isinstance(value, dict) else described(error)
