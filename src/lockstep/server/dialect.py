"""API dialects: detect the API that a request uses, and convert errors to the format of that API.

Handlers and middlewares raise or create an `HttpError`. The dialect of the request converts it to the status, body and
headers of that API. The dialect is determined by path, because a request can be rejected before it is routed. On paths
that both APIs share, Anthropic's clients are recognized by a header.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel
from starlette.responses import JSONResponse

from lockstep.server.errors import ErrorBody, HttpError

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
"""Error types by status. Other 4xx errors are invalid requests; other 5xx errors are API errors."""
_ANTHROPIC_CODES = {"thread": "thread_unsupported_request"}
"""Error codes by rejected parameter, on which Anthropic's client retries without the parameter."""
OVERLOADED_STATUS = 529


@dataclass(frozen=True, slots=True)
class Dialect:
    """Error format of one API."""

    name: str
    error_body: Callable[[HttpError, str], Mapping[str, Any]]
    """Creates the body from an error and the request id."""
    statuses: Mapping[int, int] = field(default_factory=dict)
    """Statuses that differ in this API, by original status."""
    id_header: bytes | None = None
    """Header for the request id, in addition to ``x-request-id``."""
    takes_forms: bool = False
    """Whether JSON is accepted with the content type of a form, which ``curl -d`` sends."""

    def with_own_status(self, error: HttpError) -> HttpError:
        """Convert the status of an error to this API's."""
        status = self.statuses.get(error.status)
        return error if status is None else replace(error, status=status)

    def response(self, error: HttpError, request_id: str) -> JSONResponse:
        """Create the error response."""
        return JSONResponse(self.error_body(error, request_id), error.status, dict(error.headers))


def _anthropic_body(error: HttpError, request_id: str) -> Mapping[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    detail: dict[str, Any] = {"type": kind, "message": error.message}
    if error.param in _ANTHROPIC_CODES:
        detail["details"] = {"error_code": _ANTHROPIC_CODES[error.param]}
    return {"type": "error", "error": detail, "request_id": request_id}


OPENAI = Dialect("openai", lambda error, _: error.body())
ANTHROPIC = Dialect("anthropic", _anthropic_body, {503: OVERLOADED_STATUS}, b"request-id")
RERANK = Dialect("rerank", lambda error, _: {**error.body(), "message": error.message, "detail": error.message})
"""OpenAI's form with the members that clients of Cohere (``message``) and of Jina (``detail``) read."""
OLLAMA = Dialect("ollama", lambda error, _: {"error": error.message}, takes_forms=True)
OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
    "/v1/score": "rerank",
    "/score": "rerank",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}
"""Paths of all APIs that use a model, with their ``gen_ai.operation.name``. `/v1/requests` lists their requests."""
_BY_PATH = (
    ("/v1/messages", ANTHROPIC),
    ("/api/", OLLAMA),
    *((path, RERANK) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
)


def dialect_of(path: str, headers: Iterable[tuple[bytes, bytes]]) -> Dialect:
    """Detect the dialect of a request, whether or not its path exists."""
    for prefix, dialect in _BY_PATH:
        if path.startswith(prefix):
            return dialect
    return ANTHROPIC if any(name == ANTHROPIC_VERSION_HEADER for name, _ in headers) else OPENAI


class AnthropicErrorDetail(BaseModel):
    """The error of an answer: type and message."""

    type: str
    message: str
    details: dict[str, str] | None = None


class AnthropicErrorBody(BaseModel):
    """Body of every error response of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


class RerankErrorBody(ErrorBody):
    """Body of every error response of the endpoint of rerankers."""

    message: str
    detail: str


class OllamaErrorBody(BaseModel):
    """Body of every error response of Ollama's API."""

    error: str
