"""HTTP errors: from exceptions and validation to a status, OpenAI's error body, and whether to try again.

The body is ``{"error": {"message", "type", "param", "code"}}``, also in a stream's error frame.
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
"""By status; other refusals are of invalid requests, other failures the server's."""
_OTHER_DEMAND = "have the form that /openapi.json gives for it"
_OF_BODY = ("body", "query", "path", "header")


NEVER_RETRY = {"x-should-retry": "false"}
"""The official client would send the request again by itself, and triple an overload, or upload a file three times."""


@dataclass(frozen=True, slots=True)
class HttpError:
    """One refused or failed request, as its client sees it."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    """Of a manifest that is refused, all of them."""

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
    """A body with a fault, where FastAPI expects JSON."""

    def __init__(self, error: HttpError) -> None:
        super().__init__(error.status)
        self.error = error


class ManifestProblem(BaseModel):
    """One fault of a manifest."""

    line: int
    where: str
    message: str


class ErrorDetail(BaseModel):
    """The error of an answer: its message, kind and place."""

    message: str
    type: str
    param: str | None
    code: str | None
    problems: list[ManifestProblem] | None = None
    """Of a manifest that is refused, all of them."""


class ErrorBody(BaseModel):
    """Every answer that is no success."""

    error: ErrorDetail


def documented_errors(body: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI document: what any route may answer whose errors are such bodies."""
    return {
        "4XX": {"model": body, "description": "The request is refused; the error states what would be right."},
        "5XX": {"model": body, "description": "The server cannot answer, or not now."},
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
"""The first class that fits decides: status and code."""


def http_error(error: BaseException) -> HttpError:
    """The error that a client sees of an exception; one that is not ours comes without its details."""
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


def of_http_exception(error: HTTPException, method: str, path: str, allowed: Iterable[str]) -> HttpError:
    """The error of what starlette and FastAPI raise: unknown paths, wrong methods, bodies that cannot be read.

    Args:
        allowed: all methods of this path; starlette names those of its first route.
    """
    status, headers = error.status_code, error.headers or {}
    message, code = str(error.detail), None
    if status == 404 and message == HTTPStatus.NOT_FOUND.phrase:
        message, code = f"There is nothing at {path[:MAX_SHOWN_CHARS]}.", "unknown_path"
    elif status == 405:
        headers = {"Allow": ", ".join(sorted(allowed)) or headers.get("Allow", "")}
        message = f"{method} is not what {path[:MAX_SHOWN_CHARS]} takes; it takes {headers['Allow']}."
        code = "method_not_allowed"
    elif status == 400:
        message, code = "The body could not be read as JSON.", "invalid_json"
    return HttpError(status, message, code=code, headers=headers)


def of_validation(errors: Sequence[Mapping[str, Any]]) -> HttpError:
    """The first fault that validation found, with the name of its field."""
    error = errors[0]
    if error["type"] == "json_invalid":
        place = error["loc"][-1]
        message = f"The body is not valid JSON at character {place}: {error['ctx']['error']}."
        return HttpError(400, message, code="invalid_json")
    param = field_path(error["loc"])
    return HttpError(400, _fault(param, error), param, "invalid_parameter")


def field_path(loc: Sequence[int | str]) -> str | None:
    """``("body", "messages", 2, "content", "str")`` as ``messages[2].content``; None: the body itself.

    Names of alternatives, which pydantic puts between fields, are left out: they are of types, not of fields.
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
    """One sentence on a fault, without pydantic's own wording unless a validator of ours wrote it."""
    where, kind = param or "the body", error["type"]
    if kind == "missing":
        return f"{where} is missing."
    if kind == "extra_forbidden":
        return f"{where} is not a parameter that is known here."
    reason = str(error["msg"]).removeprefix("Value error, ")
    if kind == "value_error":
        return f"{where}: {reason}."
    if kind.endswith("_kind"):
        return f"{where}: {reason}; it is {_kind_of(error)}."
    return f"{where} is {described(error)}; it must {demand(error, _OTHER_DEMAND)}."


def _kind_of(error: Mapping[str, Any]) -> str:
    """The type that an object gives for itself, where none of that type is known."""
    value = error.get("input")
    return repr(str(value.get("type"))[:MAX_SHOWN_CHARS]) if isinstance(value, dict) else described(error)
