"""Request bodies: read within bounds of bytes and time, checked to be JSON of a structure within reason, and parsed.

What the middleware lets through, a JSON parser and a tokenizer can take: handlers need not fear deep recursion, half
characters or a million empty lists. Long bodies are checked, parsed and validated on another thread, and what is held
of them at once is bounded. A parser in C lets no other thread run until it is done, and pydantic lets none. So what has
many values is read by the standard library's parser in Python, which does the same in ten times the time and lets
others run meanwhile; and long lists are checked piece by piece (`fields.in_pieces`).
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
from lockstep.server.errors import HttpError, RefusedBodyError, http_error, of_validation
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
"""Seconds that a client may take to send a body."""
MAX_DEPTH = 128
"""Objects and lists within each other; parsers and schema compilers recurse."""
MAX_CONTAINERS = 1 << 17
"""Objects and lists in all: more than any conversation has, and each takes a microsecond of many steps."""
MAX_MEMBERS = 1 << 14
"""Of one object: each unknown one is a fault that the response lists."""
MAX_QUICK_VALUES = 16_384
"""Text with more commas than that, which part values from each other, is not left to the parser in C."""
MAX_DISCARDED_BODIES = 8
"""A refused body of up to this many times the limit is read and dropped, so that its sender sees the refusal."""
TAKES_YAML = ("PUT", "/v1/manifest")
"""The one request whose body may be YAML."""
UPLOADS = "/v1/files"
"""The one path whose bodies are not read here: they may be larger, and go to the disk piece by piece."""
_WINDOW = 1 << 16
"""Bytes that are searched in one go."""
_WITH_BODY = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_FLESH = bytes(sorted(frozenset(range(256)) - frozenset(b"[]{}:,")))
_COLON, _BACKSLASH = b":\\"
_SURROGATES = re.compile(
    rb"\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F])", re.DOTALL
)


class BodyMiddleware:
    """Hands a body on in one piece, or refuses the request."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app = app
        self._bench = serving.bench
        self._keeps_bodies = serving.options.log_prompts
        """Whether the context gets the body as well."""
        self._max_bytes = serving.options.max_body_bytes
        self._num_free_bytes = serving.max_held_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in _WITH_BODY or scope["path"] == UPLOADS:
            await self._app(scope, receive, send)
            return
        held = _Held()
        try:
            replayed = await self._checked(scope, receive, held)
            if replayed is not None:  # else the client left
                await self._app(scope, replayed, send)
        except _RefusedError as refused:
            await refuse(refused.error, scope, receive, send)
        finally:
            self._num_free_bytes += held.num_bytes

    async def _checked(self, scope: Scope, receive: Receive, held: _Held) -> Receive | None:
        """A channel that gives the body of a request, which a parser may see; None: its client left before."""
        headers, context = Headers(scope=scope), scope["state"]["context"]
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                chunks = await self._read(headers, receive, held)
        except TimeoutError:
            raise _RefusedError(_too_slow()) from None
        if chunks is None:
            return None
        if context.dialect.takes_forms and is_unmarked(headers):
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
        """Count a body of so many bytes from now on to the end of its request; short ones are not counted."""
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
            f"The body is larger than {self._max_bytes} bytes, which is this server's limit.",
            code="body_too_large",
            headers={"Connection": "close"} if closes else {},
        )


@dataclass(slots=True)
class _Held:
    """One request's share of the bytes that long bodies may have."""

    num_bytes: int = 0


class _RefusedError(Exception):
    def __init__(self, error: HttpError) -> None:
        super().__init__(error.message)
        self.error = error


def body_fault(body: bytes, content_type: str, *, takes_yaml: bool = False) -> HttpError | None:
    """The fault of a body before anyone parses it; None: there is none. An empty body is no fault here."""
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
    at = body[:4].find(b"\0")  # by which parsers know UTF-16 and UTF-32: they would read another text than is checked
    try:
        body.decode()
    except UnicodeDecodeError as error:
        at = error.start
    if at >= 0:
        where = f"byte {at} is 0x{body[at]:02x}"
        return _invalid(f"The body is not UTF-8: {where}; send it in UTF-8.", is_yaml=is_yaml)
    if is_yaml:  # its own reader bounds what it nests, and knows its lines
        return None
    structure = structure_fault(body)
    if structure is not None:
        return _invalid(structure)
    if has_lone_surrogate(body):
        return _invalid(r"The body holds half of a surrogate pair (like \ud83d alone); send whole characters.")
    return None


def is_unmarked(headers: Headers) -> bool:
    """True if a body's kind was not said by who wrote it: curl calls it a form, and others say nothing. What comes from
    a page has to say that it is JSON, which a browser does not send to another origin without asking first."""
    return kind_of(headers.get("content-type", "")) in ("", FORM_TYPE) and "origin" not in headers


def kind_of(content_type: str) -> str:
    """A content type without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def structure_fault(body: bytes, max_depth: int = MAX_DEPTH) -> str | None:
    """The excess of JSON text: too many values, objects and lists in each other or in all, or members of one object.

    None: there is none. Linear in the text's length.
    """
    num_opened, num_colons, num_commas = count(body, b"[") + count(body, b"{"), count(body, b":"), count(body, b",")
    if num_opened <= max_depth and num_colons <= MAX_MEMBERS and num_commas < MAX_VALUES:
        return None
    skeleton = skeleton_of(body)
    if skeleton.count(b",") >= MAX_VALUES:
        return f"The body has more than {MAX_VALUES} values; send less at once."
    if skeleton.count(b"[") + skeleton.count(b"{") > MAX_CONTAINERS:
        return f"The body has more than {MAX_CONTAINERS} objects and lists; send less at once."
    num_members = [0]
    for character in skeleton.replace(b",", b""):
        if character == _COLON:
            num_members[-1] += 1
            if num_members[-1] > MAX_MEMBERS:
                return f"The body has an object of more than {MAX_MEMBERS} members; send less at once."
        elif character in b"[{":
            num_members.append(0)
            if len(num_members) - 1 > max_depth:
                return f"The body nests objects and lists deeper than {max_depth}; send it flatter."
        elif len(num_members) > 1:
            num_members.pop()
    return None


def skeleton_of(body: bytes) -> bytes:
    """The brackets, braces, colons and commas of JSON text, without what is in strings.

    In windows, between which other threads may run; every step within one is the interpreter's own, in C.
    """
    pieces: list[bytes] = []
    begin, is_in_string = 0, False
    while begin < len(body):
        end = begin + _WINDOW
        while end < len(body) and body[end - 1] == _BACKSLASH:  # not between a backslash and what it escapes
            end += 1
        parts = body[begin:end].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        pieces.append(b"".join(parts[is_in_string::2]).translate(None, _FLESH))
        begin, is_in_string = end, is_in_string ^ (len(parts) % 2 == 0)
    return b"".join(pieces)


def count(body: bytes, what: bytes) -> int:
    """Count the occurrences of something short; in windows, between which other threads may run."""
    overlap = len(what) - 1
    return sum(body.count(what, begin, begin + _WINDOW + overlap) for begin in range(0, len(body), _WINDOW))


def has_lone_surrogate(body: bytes) -> bool:
    """True if an escape in JSON text is half of a UTF-16 pair, which no UTF-8 can hold."""
    if not count(body, b"\\") or not (count(body, b"\\ud") or count(body, b"\\uD")):
        return False
    return any(match[1] for match in _SURROGATES.finditer(body))


def _invalid(message: str, *, is_yaml: bool = False) -> HttpError:
    return HttpError(400, message, code="invalid_yaml" if is_yaml else "invalid_json")


def _encoded(encoding: str) -> HttpError:
    return HttpError(
        415,
        f"The body's Content-Encoding is {encoding[:64]}, which is not decoded here; send the body as it is, without "
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
        "As many bytes of long requests are being read or answered as this server holds at once; try again later.",
        code="too_many_bytes",
        headers={"Retry-After": "1"},
    )


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body as one message, once and not kept; then whatever the connection has to say."""
    left = [body]

    async def replayed() -> Message:
        return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await receive()

    return replayed


class LongBodyRoute(APIRoute):
    """A route whose handler gets what it would get anyway, without the event loop being held up."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI's own; long bodies are read by us."""
        handle, field = super().get_route_handler(), self.body_field

        async def handler(request: Request) -> Response:
            if field is None or context_of(request).num_body_bytes <= MAX_INLINE_BYTES:
                return await handle(request)
            return await handle(_LongRequest(request, lambda value: field.validate(value, loc=("body",))))

        return handler


class _LongRequest(Request):
    """A request whose JSON is given as what the route's handler takes, which FastAPI then leaves as it is."""

    def __init__(self, request: Request, check: Callable[[Any], tuple[Any, list[dict[str, Any]]]]) -> None:
        super().__init__(request.scope, request.receive)
        self._check = check

    async def body(self) -> bytes:
        """As it came, in one piece: what joins it with the empty end of a stream would copy it."""
        if not hasattr(self, "_body"):
            self._body = b"".join([chunk async for chunk in self.stream() if chunk])
        return self._body

    async def json(self) -> Any:
        body = await self.body()

        def read() -> tuple[Any, list[dict[str, Any]]]:
            return self._check(parsed(body))

        try:
            value, errors = await translated(self, read)
        except QueueFullError as error:  # of which FastAPI would make a body that is no JSON
            raise RefusedBodyError(http_error(error)) from None
        if errors:
            raise RefusedBodyError(of_validation(errors))
        return value


def parsed(body: bytes, max_quick_values: int = MAX_QUICK_VALUES) -> Any:
    """The value of JSON text, as `json.loads` has it.

    Raises:
        JSONDecodeError: it is none.
    """
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    if count(body, b",") <= max_quick_values:
        return json.loads(text)
    decoder = json.JSONDecoder()
    decoder.scan_once = scanner.py_make_scanner(decoder)  # type: ignore[attr-defined]  # typeshed does not know it
    return decoder.decode(text)
