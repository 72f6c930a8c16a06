"""`GET /v1/logs`: the latest lines of the server's log, for operators.

What a line has of prompts and answers under ``--log-prompts`` is on standard error alone, and so are tracebacks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response

from lockstep.server.admission import forbidden, is_operator
from lockstep.server.body import JSON_TYPE
from lockstep.server.cluster_routes import described
from lockstep.server.errors import ERROR_RESPONSES
from lockstep.server.request_context import context_of, refusal
from lockstep.server.request_log import MAX_NUMBER
from lockstep.server.serving import serving_of
from lockstep.worker.logs import FIELDS, PUBLIC_FIELDS, line_of

MAX_LINES = 500
"""That are kept."""
MAX_CHARS = 1_000
"""Of a line; what is longer is cut."""
DEFAULT_LIMIT = 100

router = APIRouter(prefix="/v1", tags=["cluster"], responses=ERROR_RESPONSES)


class LogLine(msgspec.Struct, frozen=True):
    """One line."""

    number: int
    """From 1; what `after` takes."""
    at_s: float
    """Unix time."""
    level: str
    logger: str
    text: str
    """Message and values, on one line."""


class LogList(msgspec.Struct, frozen=True):
    """Lines of the log, oldest first."""

    object: str
    data: tuple[LogLine, ...]


class LogLines(logging.Handler):
    """Keeps the latest lines of all loggers; any thread writes."""

    def __init__(self, max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self._kept: deque[LogLine] = deque(maxlen=max_lines)
        self._last = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record's line; callers hold the handler's lock."""
        fields = getattr(record, PUBLIC_FIELDS, None) or getattr(record, FIELDS, {})
        text = line_of(record, fields)
        if record.exc_info and record.exc_info[0] is not None:
            text += f" ({record.exc_info[0].__name__})"
        if len(text) > MAX_CHARS:
            text = f"{text[: MAX_CHARS - 1]}…"
        self._last += 1
        level = record.levelname.lower()
        self._kept.append(LogLine(self._last, round(record.created, 3), level, record.name, text))

    def lines(self, after: int = 0, limit: int = DEFAULT_LIMIT) -> tuple[LogLine, ...]:
        """The newest that are behind a number, oldest first."""
        self.acquire()
        try:
            found = [line for line in self._kept if line.number > after]
        finally:
            self.release()
        return tuple(found[-limit:])

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear every logger of this process until the block ends."""
        root = logging.getLogger()
        root.addHandler(self)
        try:
            yield
        finally:
            root.removeHandler(self)


@router.get("/logs", responses=described(LogList), response_class=Response, operation_id="list_log_lines")
async def list_log_lines(
    request: Request,
    after: Annotated[int, Query(ge=0, le=MAX_NUMBER, description="Came after the line of this number.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_LINES, description="As many of the newest at most.")] = DEFAULT_LIMIT,
) -> Response:
    """The latest lines of the server's log, without anything of a prompt. They tell of everybody's requests, so that an
    admin key is needed wherever there are keys; without keys, only this machine may ask."""
    if not is_operator(context_of(request).tenant, serving_of(request).options):
        return refusal(forbidden(), context_of(request))
    lines: LogLines = request.app.state.log_lines
    return Response(msgspec.json.encode(LogList("list", lines.lines(after, limit))), media_type=JSON_TYPE)
