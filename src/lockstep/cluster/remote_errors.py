"""What another server's refusals and failures are to those who asked us. Pure.

Clients are told the entry's id and the other server's own words, but never its address, and nothing of what it says
about our key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from lockstep.errors import (
    DeadlineError,
    InvalidParameterError,
    PromptTooLongError,
    RemoteFailedError,
    RequestError,
    UnavailableError,
)

MAX_REASON_CHARS = 300
"""Of another server's words."""
RETRY_AFTER_S = 1.0
"""Where the other server does not say when."""
MAX_RETRY_AFTER_S = 3_600.0
_OF_THE_REQUEST = ("invalid_request_error", "timeout_error")
"""Types of errors that say nothing against the server."""


class AttemptError(Exception):
    """An attempt came to nothing. Never leaves `RemoteModel`, which raises ``error``.

    Args:
        error: for those who asked.
        is_fault: whether it counts against the other server.
        may_retry: whether the same request may be sent again at once: nothing of an answer has come.
    """

    def __init__(self, error: RequestError, *, is_fault: bool = True, may_retry: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.is_fault = is_fault
        self.may_retry = may_retry


@dataclass(frozen=True, slots=True)
class Named:
    """Who failed, in messages."""

    id: str
    api_key_env: str | None = None

    def __str__(self) -> str:
        return f"{self.id!r}, which another server answers,"


def of_status(who: Named, status: int, retry_after: str | None, body: bytes) -> AttemptError:
    """A response that is no answer."""
    if 300 <= status < 400:
        return AttemptError(
            RemoteFailedError(f"{who} answered with a redirect ({status}), which is not followed; correct its base_url")
        )
    if status in (401, 403):
        given = "no api_key_env" if who.api_key_env is None else f"the key in {who.api_key_env}"
        return AttemptError(
            RemoteFailedError(f"{who} refused our key ({status}); its entry has {given}"), is_fault=False
        )
    message, param, code = _told(body)
    said = f"{who} answered {status}: {message}"
    if status in (400, 413, 422):
        kind = PromptTooLongError if code == "context_length_exceeded" else InvalidParameterError
        return AttemptError(kind(said, param=param), is_fault=False)
    if status in (408, 504):
        return AttemptError(DeadlineError(said), is_fault=status == 504)
    if status == 502:
        return AttemptError(RemoteFailedError(said), may_retry=True)
    if status in (429, 503, 529):
        error = UnavailableError(said, retry_after_s=_seconds(retry_after))
        is_overloaded = status in (429, 529)
        return AttemptError(error, is_fault=not is_overloaded, may_retry=not is_overloaded and retry_after is None)
    if status == 404:
        said += "; correct its remote.base_url (OpenAI's ends in /v1) or remote.model"
    return AttemptError(RemoteFailedError(said), is_fault=status < 400 or status >= 500, may_retry=status >= 500)


def of_frame(who: Named, error: Any) -> AttemptError:
    """An error in the middle of a stream."""
    type_ = error.get("type") if isinstance(error, dict) else None
    said = f"{who} ended its answer: {_words(error)}"
    kind = DeadlineError if type_ == "timeout_error" else RemoteFailedError
    return AttemptError(kind(said), is_fault=type_ not in _OF_THE_REQUEST)


def _told(body: bytes) -> tuple[str, str | None, str | None]:
    """Message, parameter and code of an error body of OpenAI's shape, or of any other."""
    try:
        value: Any = msgspec.json.decode(body)
    except ValueError:
        value = body.decode("utf-8", "replace")
    error = value.get("error", value) if isinstance(value, dict) else value
    param, code = (error.get("param"), error.get("code")) if isinstance(error, dict) else (None, None)
    return _words(error), param if isinstance(param, str) else None, code if isinstance(code, str) else None


def _words(error: Any) -> str:
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:MAX_REASON_CHARS] or "no reason given"


def _seconds(retry_after: str | None) -> float:
    """``Retry-After`` in seconds; a date is not read."""
    if retry_after is None or not retry_after.isascii() or not retry_after.strip().isdigit():
        return RETRY_AFTER_S
    return min(MAX_RETRY_AFTER_S, max(RETRY_AFTER_S, float(retry_after)))
