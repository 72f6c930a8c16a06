"""Routes whose JSON is parsed and checked on another thread where it is long.

A parser in C lets no other thread run until it is done, and pydantic lets none. So what has many values is read by
the standard library's parser in Python, which does the same in ten times the time and lets others run meanwhile;
and long lists are checked piece by piece (`schema.in_pieces`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from json import scanner
from typing import Any

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from lockstep.server.body import count
from lockstep.server.errors import HttpError
from lockstep.server.record import record_of
from lockstep.server.serving import MAX_INLINE_BYTES, translated

MAX_QUICK_VALUES = 16_384
"""Text with more commas than that, which part values from each other, is not left to the parser in C."""


class RefusedBodyError(HTTPException):
    """A body with a fault, where FastAPI expects JSON."""

    def __init__(self, error: HttpError) -> None:
        super().__init__(error.status)
        self.error = error


class LongBodyRoute(APIRoute):
    """A route whose handler gets what it would get anyway, without the event loop being held up."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI's own; long bodies are read by us."""
        handle, field = super().get_route_handler(), self.body_field

        async def handler(request: Request) -> Response:
            if field is None or record_of(request).num_body_bytes <= MAX_INLINE_BYTES:
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
        from lockstep.server.faults import of_validation

        body = await self.body()

        def read() -> tuple[Any, list[dict[str, Any]]]:
            return self._check(parsed(body))

        value, errors = await translated(self, read)
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
