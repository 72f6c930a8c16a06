"""Dialects of HTTP: which API a request speaks, and how its refusals read there.

Handlers and middlewares alike raise or make an `HttpError`; the dialect of the request turns it into the status, the
body and the headers that clients of that API know. A dialect is found by path, since a request can be refused before it
is routed; Anthropic's clients are also known by a header, on the paths that both APIs have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel
from starlette.responses import JSONResponse

from lockstep.server.errors import HttpError

ANTHROPIC_VERSION_HEADER = b"anthropic-version"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""By status; other refusals are of invalid requests, other failures the API's."""
_ANTHROPIC_CODES = {"thread": "thread_unsupported_request"}
"""By the parameter that is refused: codes at which Anthropic's own client asks again without it."""
OVERLOADED_STATUS = 529


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API's way to refuse."""

    name: str
    error_body: Callable[[HttpError, str], Mapping[str, Any]]
    """From an error and the request's id."""
    statuses: Mapping[int, int] = field(default_factory=dict)
    """Where this API has another status than ours."""
    id_header: bytes | None = None
    """Carries the request's id beside ``x-request-id``."""
    takes_forms: bool = False
    """Whether JSON is accepted under the content type of a form, as curl sends it with ``-d``."""

    def put(self, error: HttpError) -> HttpError:
        """The error under the status that this API's clients know."""
        status = self.statuses.get(error.status)
        return error if status is None else replace(error, status=status)

    def response(self, error: HttpError, request_id: str) -> JSONResponse:
        """The status, headers and body of a refusal."""
        return JSONResponse(self.error_body(error, request_id), error.status, dict(error.headers))


def _anthropic_body(error: HttpError, request_id: str) -> Mapping[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    told: dict[str, Any] = {"type": kind, "message": error.message}
    if error.param in _ANTHROPIC_CODES:
        told["details"] = {"error_code": _ANTHROPIC_CODES[error.param]}
    return {"type": "error", "error": told, "request_id": request_id}


OPENAI = Dialect("openai", lambda error, _: error.body())
ANTHROPIC = Dialect("anthropic", _anthropic_body, {503: OVERLOADED_STATUS}, b"request-id")
OLLAMA = Dialect("ollama", lambda error, _: {"error": error.message}, takes_forms=True)
_BY_PATH = (("/v1/messages", ANTHROPIC), ("/api/", OLLAMA))


def dialect_of(path: str, headers: Iterable[tuple[bytes, bytes]]) -> Dialect:
    """The dialect of a request, whether or not anything is at its path."""
    for prefix, dialect in _BY_PATH:
        if path.startswith(prefix):
            return dialect
    return ANTHROPIC if any(name == ANTHROPIC_VERSION_HEADER for name, _ in headers) else OPENAI


class AnthropicErrorDetail(BaseModel):
    """The error of an answer: its kind and message."""

    type: str
    message: str
    details: dict[str, str] | None = None


class AnthropicErrorBody(BaseModel):
    """Every answer of Anthropic's API that is no success."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


class OllamaErrorBody(BaseModel):
    """Every answer of Ollama's API that is no success."""

    error: str
