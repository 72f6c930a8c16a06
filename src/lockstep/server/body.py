"""The middleware that reads a request's body: bounded in bytes and time, JSON in UTF-8, nested within reason.

What it lets through, a JSON parser and a tokenizer can take: handlers need not fear deep recursion or half characters.
"""

from __future__ import annotations

import asyncio
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.server.errors import HttpError
from lockstep.server.manifest_text import JSON_TYPE, YAML_TYPE, YAML_TYPES, kind_of
from lockstep.server.refusals import refuse

BODY_TIMEOUT_S = 60.0
"""Seconds that a client may take to send a body."""
MAX_DEPTH = 128
"""Objects and lists within each other; parsers and schema compilers recurse."""
MAX_DISCARDED_BODIES = 8
"""A refused body of up to this many times the limit is read and dropped, so that its sender sees the refusal."""
TAKES_YAML = ("PUT", "/v1/manifest")
"""The one request whose body may be YAML."""
_WITH_BODY = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)|([\[{])|([\]}])', re.DOTALL)
_SURROGATES = re.compile(
    rb"\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F])", re.DOTALL
)


class BodyMiddleware:
    """Hands a body on in one piece, or refuses the request."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, keeps_bodies: bool = False) -> None:
        self._app = app
        self._keeps_bodies = keeps_bodies
        """Whether the record gets the body as well."""
        self._max_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in _WITH_BODY:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await self._read(headers, receive)
        except _RefusedError as refused:
            await refuse(refused.error, scope, receive, send)
            return
        except TimeoutError:
            await refuse(_too_slow(), scope, receive, send)
            return
        if body is None:  # the client left
            return
        takes_yaml = (scope["method"], scope["path"]) == TAKES_YAML
        fault = body_fault(body, headers.get("content-type", ""), takes_yaml=takes_yaml)
        if fault is not None:
            await refuse(fault, scope, receive, send)
            return
        if self._keeps_bodies:
            scope["state"]["record"].body = body.decode()
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._max_bytes:
            raise _RefusedError(self._too_large(closes=int(length) > MAX_DISCARDED_BODIES * self._max_bytes))
        chunks: list[bytes] = []
        num_bytes = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunk = message.get("body", b"")
            num_bytes += len(chunk)
            if num_bytes > self._max_bytes:
                raise _RefusedError(self._too_large(closes=True))
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    def _too_large(self, *, closes: bool) -> HttpError:
        return HttpError(
            413,
            "invalid_request_error",
            f"The body is larger than {self._max_bytes} bytes, which is this server's limit.",
            code="body_too_large",
            headers={"Connection": "close"} if closes else {},
        )


class _RefusedError(Exception):
    def __init__(self, error: HttpError) -> None:
        super().__init__(error.message)
        self.error = error


def body_fault(body: bytes, content_type: str, *, takes_yaml: bool = False) -> HttpError | None:
    """What is wrong with a body before anyone parses it; None: nothing. An empty body is nobody's fault here."""
    if not body:
        return None
    kind = kind_of(content_type)
    is_yaml = takes_yaml and kind in YAML_TYPES
    if not is_yaml and kind != JSON_TYPE and not (kind.startswith("application/") and kind.endswith("+json")):
        right = f"JSON with `Content-Type: {JSON_TYPE}`" + (f" or YAML with `{YAML_TYPE}`" if takes_yaml else "")
        return HttpError(
            415,
            "invalid_request_error",
            f"The content type is {kind or 'missing'}; send {right}.",
            code="unsupported_media_type",
        )
    try:
        body.decode()
    except UnicodeDecodeError as error:
        where = f"byte {error.start} is 0x{body[error.start]:02x}"
        return _invalid(f"The body is not UTF-8: {where}; send it in UTF-8.", is_yaml=is_yaml)
    if is_yaml:  # its own reader bounds what it nests, and knows its lines
        return None
    if nests_deeper_than(body, MAX_DEPTH):
        return _invalid(f"The body nests objects and lists deeper than {MAX_DEPTH}; send it flatter.")
    if has_lone_surrogate(body):
        return _invalid(r"The body holds half of a surrogate pair (like \ud83d alone); send whole characters.")
    return None


def nests_deeper_than(body: bytes, depth: int) -> bool:
    """Whether JSON text opens more than so many objects and lists at once. Linear in its length."""
    if body.count(b"[") + body.count(b"{") <= depth:
        return False
    level = 0
    for token in _STRUCTURE.finditer(body):
        if token[1]:
            level += 1
            if level > depth:
                return True
        elif token[2]:
            level -= 1
    return False


def has_lone_surrogate(body: bytes) -> bool:
    """Whether an escape in JSON text is half of a UTF-16 pair, which no UTF-8 can hold."""
    if b"\\ud" not in body and b"\\uD" not in body:
        return False
    return any(match[1] for match in _SURROGATES.finditer(body))


def _invalid(message: str, *, is_yaml: bool = False) -> HttpError:
    return HttpError(400, "invalid_request_error", message, code="invalid_yaml" if is_yaml else "invalid_json")


def _too_slow() -> HttpError:
    return HttpError(
        408,
        "timeout_error",
        f"The body did not arrive within {BODY_TIMEOUT_S:g} s.",
        code="body_timeout",
        headers={"Connection": "close"},
    )


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then whatever the connection has to say."""
    is_given = False

    async def replayed() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
