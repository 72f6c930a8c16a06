"""Request body reader: reads a body within limits of size and time, checks its JSON structure, and parses it.

A body that passes the middleware is safe for JSON parsers and tokenizers: it has no deep nesting, lone surrogates or
millions of empty lists. Long bodies are checked, parsed and validated on another thread, and their total number of
bytes in memory is limited. A parser in C blocks all other threads until it is done, and so does pydantic. Bodies with
many values are therefore parsed by the pure-Python parser of the standard library, which takes ten times as long but
lets other threads run. Long lists are validated in pieces (`fields.in_pieces`).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from json import scanner
from typing import Any

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.errors import QueueFullError
from lockstep.server.errors import HttpError, RefusedBodyError, http_error, validation_http_error
from lockstep.server.fields import MAX_VALUES
from lockstep.server.request_context import context_of, refuse
from lockstep.server.serving import MAX_INLINE_BYTES, Serving, translated

JSON_TYPE = "application/json"
JSON_HEADER = (b"content-type", JSON_TYPE.encode())
FORM_TYPE = "application/x-www-form-urlencoded"
UPLOAD_TYPE = "multipart/form-data"
YAML_TYPE = "application/yaml"
YAML_TYPES = (YAML_TYPE, "application/x-yaml", "text/yaml", "text/x-yaml")
BODY_TIMEOUT_S = 60.0
"""Time limit, in seconds, for a client to send a body."""
MAX_DEPTH = 128
"""Maximum nesting depth of objects and lists. Parsers and schema compilers are recursive."""
MAX_CONTAINERS = 1 << 17
"""Maximum number of objects and lists in a body. No conversation needs more, and each takes a microsecond per stage."""
MAX_MEMBERS = 1 << 14
"""Maximum number of members of one object. The error response lists each unknown one."""
MAX_QUICK_VALUES = 16_384
"""Maximum number of commas in text that is parsed in C. The number of commas approximates the number of values."""
MAX_DISCARDED_BODIES = 8
"""A rejected body of up to this many times the limit is read and discarded, so that its sender receives the error."""
TAKES_YAML = ("PUT", "/v1/manifest")
"""Method and path of the only request whose body can be YAML."""
UPLOADS = "/v1/files"
"""The only path whose bodies are not read here. They can be larger and are written to disk in pieces."""
_WINDOW = 1 << 16
"""Number of bytes that are searched at a time."""
_WITH_BODY = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_NON_STRUCTURE = bytes(sorted(frozenset(range(256)) - frozenset(b"[]{}:,")))
_COLON, _BACKSLASH = b":\\"
_SURROGATES = re.compile(
    rb"\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F])", re.DOTALL
)


class BodyMiddleware:
    """Passes a body on in one piece, or rejects the request."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app = app
        self._bench = serving.bench
        self._keeps_bodies = serving.options.log_prompts
        """Whether the body is also stored in the request context."""
        self._max_bytes = serving.options.max_body_bytes
        self._num_free_bytes = serving.max_held_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in _WITH_BODY or scope["path"] == UPLOADS:
            await self._app(scope, receive, send)
            return
        held = _Held()
        try:
            replayed = await self._checked(scope, receive, held)
            if replayed is not None:  # None: the client disconnected
                await self._app(scope, replayed, send)
        except _RefusedError as refused:
            await refuse(refused.error, scope, receive, send)
        finally:
            self._num_free_bytes += held.num_bytes

    async def _checked(self, scope: Scope, receive: Receive, held: _Held) -> Receive | None:
        """Return a channel that delivers the checked body; None if the client disconnected first."""
        headers, context = Headers(scope=scope), scope["state"]["context"]
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                chunks = await self._read(headers, receive, held)
        except TimeoutError:
            raise _RefusedError(_too_slow()) from None
        if chunks is None:
            return None
        if context.dialect.takes_forms and has_default_type(headers):
            scope["headers"] = [pair for pair in scope["headers"] if pair[0] != b"content-type"] + [JSON_HEADER]
            headers = Headers(scope=scope)
        if (encoding := headers.get("content-encoding", "identity").strip().lower()) != "identity" and any(chunks):
            raise _RefusedError(_encoded(encoding))
        content_type, takes_yaml = headers.get("content-type", ""), (scope["method"], scope["path"]) == TAKES_YAML

        def joined() -> tuple[bytes, HttpError | None]:
            body = b"".join(chunks)
            return body, body_fault(body, content_type, takes_yaml=takes_yaml)

        num_bytes = sum(map(len, chunks))
        try:
            body, fault = joined() if num_bytes <= MAX_INLINE_BYTES else await self._bench.do(joined, num_bytes)
        except QueueFullError as error:
            raise _RefusedError(http_error(error)) from None
        chunks.clear()
        if fault is not None:
            raise _RefusedError(fault)
        context.num_body_bytes = len(body)
        if self._keeps_bodies:
            context.body = body.decode()
        return _replay(body, receive)

    def _hold(self, num_bytes: int, held: _Held) -> None:
        """Reserve memory for a body of the given size until its request ends. Short bodies are not counted."""
        if num_bytes <= max(MAX_INLINE_BYTES, held.num_bytes):
            return
        if num_bytes - held.num_bytes > self._num_free_bytes:
            raise _RefusedError(_too_much())
        self._num_free_bytes -= num_bytes - held.num_bytes
        held.num_bytes = num_bytes

    async def _read(self, headers: Headers, receive: Receive, held: _Held) -> list[bytes] | None:
        length = headers.get("content-length", "")
        if length.isdigit():
            if int(length) > self._max_bytes:
                raise _RefusedError(self._too_large(closes=int(length) > MAX_DISCARDED_BODIES * self._max_bytes))
            self._hold(int(length), held)
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
            self._hold(num_bytes, held)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks

    def _too_large(self, *, closes: bool) -> HttpError:
        return HttpError(
            413,
            f"The body is larger than the limit of {self._max_bytes} bytes.",
            code="body_too_large",
            headers={"Connection": "close"} if closes else {},
        )


@dataclass(slots=True)
class _Held:
    """Number of bytes that one request has reserved for a long body."""

    num_bytes: int = 0


class _RefusedError(Exception):
    def __init__(self, error: HttpError) -> None:
        super().__init__(error.message)
        self.error = error


def body_fault(body: bytes, content_type: str, *, takes_yaml: bool = False) -> HttpError | None:
    """Return the first error of a body before it is parsed, or None. An empty body is not an error here."""
    if not body:
        return None
    kind = kind_of(content_type)
    is_yaml = takes_yaml and kind in YAML_TYPES
    if not is_yaml and kind != JSON_TYPE and not (kind.startswith("application/") and kind.endswith("+json")):
        right = f"JSON with `Content-Type: {JSON_TYPE}`" + (f" or YAML with `{YAML_TYPE}`" if takes_yaml else "")
        return HttpError(
            415,
            f"The content type is {kind or 'missing'}; send {right}.",
            code="unsupported_media_type",
        )
    at = body[:4].find(b"\0")  # parsers would detect UTF-16 or UTF-32 and read other text than was checked
    try:
        body.decode()
    except UnicodeDecodeError as error:
        at = error.start
    if at >= 0:
        where = f"byte {at} is 0x{body[at]:02x}"
        return _invalid(f"The body is not UTF-8: {where}; send it in UTF-8.", is_yaml=is_yaml)
    if is_yaml:  # the YAML parser limits nesting and reports lines itself
        return None
    structure = structure_fault(body)
    if structure is not None:
        return _invalid(structure)
    if has_lone_surrogate(body):
        return _invalid(r"The body has half of a surrogate pair (like \ud83d alone); send complete characters.")
    return None


def has_default_type(headers: Headers) -> bool:
    """True if the content type was not chosen by the sender: curl defaults to a form, other clients send none.

    A browser page must state that the body is JSON. For another origin the browser then sends a preflight request
    first.
    """
    return kind_of(headers.get("content-type", "")) in ("", FORM_TYPE) and "origin" not in headers


def kind_of(content_type: str) -> str:
    """Return a content type without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def structure_fault(body: bytes, max_depth: int = MAX_DEPTH) -> str | None:
    """Return an error if JSON text exceeds a limit: nesting depth, or number of values, containers or members of an
    object.

    Return None otherwise. The time is linear in the length of the text.
    """
    num_opened, num_colons, num_commas = count(body, b"[") + count(body, b"{"), count(body, b":"), count(body, b",")
    if num_opened <= max_depth and num_colons <= MAX_MEMBERS and num_commas < MAX_VALUES:
        return None
    skeleton = skeleton_of(body)
    if skeleton.count(b",") >= MAX_VALUES:
        return f"The body has more than {MAX_VALUES} values; split the request."
    if skeleton.count(b"[") + skeleton.count(b"{") > MAX_CONTAINERS:
        return f"The body has more than {MAX_CONTAINERS} objects and lists; split the request."
    num_members = [0]
    for character in skeleton.replace(b",", b""):
        if character == _COLON:
            num_members[-1] += 1
            if num_members[-1] > MAX_MEMBERS:
                return f"The body has an object of more than {MAX_MEMBERS} members; split the request."
        elif character in b"[{":
            num_members.append(0)
            if len(num_members) - 1 > max_depth:
                return f"The body nests objects and lists more than {max_depth} levels deep; reduce the nesting."
        elif len(num_members) > 1:
            num_members.pop()
    return None


def skeleton_of(body: bytes) -> bytes:
    """Return the brackets, braces, colons and commas of JSON text, without the content of strings.

    Other threads can run between two windows. Each step within a window is one operation in C.
    """
    pieces: list[bytes] = []
    begin, is_in_string = 0, False
    while begin < len(body):
        end = begin + _WINDOW
        while end < len(body) and body[end - 1] == _BACKSLASH:  # do not split an escape sequence
            end += 1
        parts = body[begin:end].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        pieces.append(b"".join(parts[is_in_string::2]).translate(None, _NON_STRUCTURE))
        begin, is_in_string = end, is_in_string ^ (len(parts) % 2 == 0)
    return b"".join(pieces)


def count(body: bytes, what: bytes) -> int:
    """Count the occurrences of a short byte string, in windows between which other threads can run."""
    overlap = len(what) - 1
    return sum(body.count(what, begin, begin + _WINDOW + overlap) for begin in range(0, len(body), _WINDOW))


def has_lone_surrogate(body: bytes) -> bool:
    """True if JSON text has an escape that is half of a UTF-16 surrogate pair, which UTF-8 cannot encode."""
    if not count(body, b"\\") or not (count(body, b"\\ud") or count(body, b"\\uD")):
        return False
    return any(match[1] for match in _SURROGATES.finditer(body))


def _invalid(message: str, *, is_yaml: bool = False) -> HttpError:
    return HttpError(400, message, code="invalid_yaml" if is_yaml else "invalid_json")


def _encoded(encoding: str) -> HttpError:
    return HttpError(
        415,
        f"The body's Content-Encoding {encoding[:64]} is not supported; send the body uncompressed, without "
        "Content-Encoding.",
        code="unsupported_content_encoding",
        headers={"Accept-Encoding": "identity"},
    )


def _too_slow() -> HttpError:
    return HttpError(
        408,
        f"The body did not arrive within {BODY_TIMEOUT_S:g} s.",
        code="body_timeout",
        headers={"Connection": "close"},
    )


def _too_much() -> HttpError:
    return HttpError(
        429,
        "The memory limit for long request bodies is reached; try again later.",
        code="too_many_bytes",
        headers={"Retry-After": "1"},
    )


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a channel that delivers the body once as one message, then the messages of the connection."""
    left = [body]

    async def replayed() -> Message:
        return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await receive()

    return replayed


class LongBodyRoute(APIRoute):
    """Route that parses long bodies on another thread, without blocking the event loop. Its handler is unchanged."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Like FastAPI's handler, except that long bodies are parsed by `_LongRequest`."""
        handle, field = super().get_route_handler(), self.body_field

        async def handler(request: Request) -> Response:
            if field is None or context_of(request).num_body_bytes <= MAX_INLINE_BYTES:
                return await handle(request)
            return await handle(_LongRequest(request, lambda value: field.validate(value, loc=("body",))))

        return handler


class _LongRequest(Request):
    """Request whose `json` returns the validated handler argument, which FastAPI then passes on unchanged."""

    def __init__(self, request: Request, check: Callable[[Any], tuple[Any, list[dict[str, Any]]]]) -> None:
        super().__init__(request.scope, request.receive)
        self._check = check

    async def body(self) -> bytes:
        """Return the body as received. Joining it with the stream's empty last chunk would copy it."""
        if not hasattr(self, "_body"):
            self._body = b"".join([chunk async for chunk in self.stream() if chunk])
        return self._body

    async def json(self) -> Any:
        body = await self.body()

        def read() -> tuple[Any, list[dict[str, Any]]]:
            return self._check(parsed(body))

        try:
            value, errors = await translated(self, read)
        except QueueFullError as error:  # FastAPI would report this as invalid JSON
            raise RefusedBodyError(http_error(error)) from None
        if errors:
            raise RefusedBodyError(validation_http_error(errors))
        return value


def parsed(body: bytes, max_quick_values: int = MAX_QUICK_VALUES) -> Any:
    """Parse JSON text, with the same result as `json.loads`.

    Raises:
        JSONDecodeError: the text is not valid JSON.
    """
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    if count(body, b",") <= max_quick_values:
        return json.loads(text)
    decoder = json.JSONDecoder()
    decoder.scan_once = scanner.py_make_scanner(decoder)  # type: ignore[attr-defined]  # missing in typeshed
    return decoder.decode(text)
