"""From exceptions to what HTTP clients see: a status, OpenAI's error body, and whether to try again.

The body is ``{"error": {"message", "type", "param", "code"}}``, also in a stream's error frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.errors import (
    ChatTemplateError,
    DeadlineError,
    InvalidJsonError,
    InvalidParameterError,
    ManifestError,
    ModelNotFoundError,
    NoManifestError,
    NotLoadableError,
    Problem,
    PromptTooLongError,
    QueueDeadlineError,
    QueueFullError,
    RemoteFailedError,
    RequestError,
    ResponseNotFoundError,
    SessionNotFoundError,
    UnavailableError,
    WorkerLostError,
)

NEVER_RETRY = {"x-should-retry": "false"}
"""The official client would send the request again by itself, and triple an overload."""


@dataclass(frozen=True, slots=True)
class HttpError:
    """One refused or failed request, as its client sees it."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    """Of a manifest that is refused, all of them."""

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


_KINDS: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (PromptTooLongError, 400, "invalid_request_error", "context_length_exceeded"),
    (InvalidJsonError, 400, "invalid_request_error", "invalid_json"),
    (InvalidParameterError, 400, "invalid_request_error", "invalid_parameter"),
    (ChatTemplateError, 400, "invalid_request_error", "chat_template"),
    (ModelNotFoundError, 404, "not_found_error", "model_not_found"),
    (ResponseNotFoundError, 404, "not_found_error", "response_not_found"),
    (SessionNotFoundError, 404, "not_found_error", "session_not_found"),
    (NoManifestError, 404, "not_found_error", "no_manifest"),
    (NotLoadableError, 422, "invalid_request_error", "not_loadable"),
    (ManifestError, 400, "invalid_request_error", "invalid_manifest"),
    (QueueDeadlineError, 408, "timeout_error", "queue_deadline"),
    (DeadlineError, 504, "timeout_error", "deadline"),
    (QueueFullError, 429, "rate_limit_error", "queue_full"),
    (RemoteFailedError, 502, "server_error", "remote_failed"),
    (WorkerLostError, 503, "server_error", "worker_lost"),
    (UnavailableError, 503, "server_error", "unavailable"),
)
"""The first class that fits decides: status, type, code."""


def http_error(error: BaseException) -> HttpError:
    """What a client is told of an exception. What is not ours is told without its details."""
    param = error.param if isinstance(error, RequestError) else None
    for kind, status, type_, code in _KINDS:
        if isinstance(error, kind):
            problems = error.problems if isinstance(error, ManifestError) else ()
            return HttpError(status, type_, str(error), param, code, _headers(error), problems)
    message = str(error) if isinstance(error, RequestError) else f"internal error: {type(error).__name__}"
    return HttpError(500, "server_error", message, param, "internal_error")


def _headers(error: BaseException) -> Mapping[str, str]:
    if isinstance(error, DeadlineError):
        return NEVER_RETRY
    if isinstance(error, UnavailableError | RemoteFailedError) and error.retry_after_s is not None:
        return {"Retry-After": str(max(1, round(error.retry_after_s)))}
    return {"Retry-After": "1"} if isinstance(error, QueueFullError) else {}
