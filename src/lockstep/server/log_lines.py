"""Log endpoint: serves the latest lines of the server's log at `GET /v1/logs`, for operators.

Prompts and answers, which ``--log-prompts`` adds to lines, appear only on standard error. So do tracebacks.
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
"""Maximum number of lines that are kept."""
MAX_CHARS = 1_000
"""Maximum length of a line. Longer lines are cut."""
DEFAULT_LIMIT = 100

router = APIRouter(prefix="/v1", tags=["cluster"], responses=ERROR_RESPONSES)


class LogLine(msgspec.Struct, frozen=True):
    """One line of the log."""

    number: int
    """Line number from 1, for use with `after`."""
    at_s: float
    """Unix time."""
    level: str
    logger: str
    text: str
    """Message and fields, on one line."""


class LogList(msgspec.Struct, frozen=True):
    """Lines of the log, oldest first."""

    object: str
    data: tuple[LogLine, ...]


class LogLines(logging.Handler):
    """Log handler that keeps the latest lines of all loggers. Any thread can write."""

    def __init__(self, max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self._kept: deque[LogLine] = deque(maxlen=max_lines)
        self._last = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line of a record. The caller holds the handler's lock."""
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
        """Return the newest lines after a line number, oldest first."""
        self.acquire()
        try:
            found = [line for line in self._kept if line.number > after]
        finally:
            self.release()
        return tuple(found[-limit:])

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Receive the records of all loggers of this process until the block ends."""
        root = logging.getLogger()
        root.addHandler(self)
        try:
            yield
        finally:
            root.removeHandler(self)


@router.get("/logs", responses=described(LogList), response_class=Response, operation_id="list_log_lines")
async def list_log_lines(
    request: Request,
    after: Annotated[int, Query(ge=0, le=MAX_NUMBER, description="Return only lines after this line number.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_LINES, description="Maximum number of lines.")] = DEFAULT_LIMIT,
) -> Response:
    """The latest lines of the server's log, without prompts and answers. The lines are about requests of all callers,
    so an admin key is required. On a server without keys, only the local machine has access."""
    if not is_operator(context_of(request).tenant, serving_of(request).options):
        return refusal(forbidden(), context_of(request))
    lines: LogLines = request.app.state.log_lines
    return Response(msgspec.json.encode(LogList("list", lines.lines(after, limit))), media_type=JSON_TYPE)
