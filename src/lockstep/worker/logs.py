"""Logging of our processes: writes lines of text or JSON objects to standard error, with structured values at the end.

The server and its worker process use the same format, so that one reader can parse both.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]
FIELDS = "lockstep_fields"
"""Attribute of a log record that holds structured values: ``log.info("...", extra={FIELDS: {...}})``."""
PUBLIC_FIELDS = "lockstep_public_fields"
"""Attribute with the values that may be shown outside of the log. Without it, all of them may."""


def log_to_stderr(log_format: LogFormat, level: str, process: str) -> None:
    """Send every logger of this process to standard error: ours from a level on, others only warnings.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        process: name of this process in its lines.
    """
    handler = logging.StreamHandler(_Stderr())
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("lockstep").setLevel(level.upper())


class _Stderr:
    """The current standard error when a line is written, so that a progress display can insert lines above itself."""

    def write(self, text: str) -> None:
        sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, process, logger, message, then ``name=value``. A value that could break the line is JSON."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        text = line_of(record, _fields_of(record))
        line = f"{_time(record)} {record.levelname:<7} {self._process} {record.name}: {text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def line_of(record: logging.LogRecord, fields: Mapping[str, Any]) -> str:
    """Message and values on one line."""
    shown = "".join(f" {name}={_shown(value)}" for name, value in fields.items())
    return f"{' '.join(record.getMessage().splitlines())}{shown}"


def _fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, FIELDS, {})
    return fields


def _shown(value: Any) -> str:
    if isinstance(value, str) and value.isprintable() and not set(value) & set(' "='):
        return value
    text = json.dumps(value, ensure_ascii=False, default=str)
    # JSON does not escape line separators and C1 controls, which a terminal interprets.
    return text if text.isprintable() else json.dumps(value, default=str)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
