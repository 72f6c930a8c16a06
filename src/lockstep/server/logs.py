"""Structured logs: one line per request with its numbers, as text or JSON; every logger goes the same way.

Prompts and answers are in no line unless ``--log-prompts`` is given, and neither is a refusal's message, which may
repeat what the client sent; keys are in none at all.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from lockstep.server.options import ServerOptions
from lockstep.server.record import RequestRecord

LogFormat = Literal["text", "json"]
LEVELS = ("debug", "info", "warning", "error")
PROBES = frozenset(
    {"/", "/health", "/health/live", "/health/ready", "/healthz", "/load", "/metrics", "/ping", "/version"}
)
"""Asked for again and again by machines: logged at the debug level."""
_FIELDS = "lockstep_fields"
"""Attribute of a log record that holds structured values."""

log = logging.getLogger("lockstep.request")


class RequestLog:
    """Writes the line of a request that has ended."""

    def __init__(self, options: ServerOptions) -> None:
        self._shows_prompts = options.log_prompts

    def __call__(self, record: RequestRecord, duration_s: float) -> None:
        level = logging.DEBUG if record.endpoint in PROBES else logging.INFO
        if log.isEnabledFor(level):
            fields = request_fields(record, duration_s, shows_prompts=self._shows_prompts)
            log.log(level, "ended", extra={_FIELDS: fields})


def request_fields(record: RequestRecord, duration_s: float, *, shows_prompts: bool) -> dict[str, Any]:
    """What is said of a request; what does not apply to it is left out. Times in milliseconds."""
    fields: dict[str, Any] = {
        "id": record.request_id,
        "method": record.method,
        "endpoint": record.endpoint,
        "status": record.status,
        "model": record.model,
        "tenant": record.tenant,
        "stream": record.is_stream or None,
        "total_ms": _ms(duration_s),
    }
    if record.outputs:
        usage = record.usage()
        timings = [output.timings for output in record.outputs]
        ttfts = [timing.ttft_s for timing in timings if timing.ttft_s is not None]
        fields["prompt_tokens"] = usage.num_prompt_tokens
        fields["cached_tokens"] = usage.num_cached_tokens
        fields["output_tokens"] = usage.num_output_tokens
        fields["preemptions"] = sum(output.num_preemptions for output in record.outputs) or None
        fields["queue_ms"] = _ms(max(timing.queue_s for timing in timings))
        fields["ttft_ms"] = _ms(min(ttfts)) if ttfts else None
    fields["finish_reasons"] = record.finish_reasons
    fields["metadata"] = dict(record.metadata)
    error = record.error
    if error is not None:
        fields["error"] = error.code or error.type
        fields["param"] = error.param
        fields["message"] = error.message if error.status >= 500 or shows_prompts else None
    if shows_prompts:
        fields["body"] = record.body
        fields["answers"] = [completion.text for output in record.outputs for completion in output.completions]
    return {name: value for name, value in fields.items() if value not in (None, "", [], {})}


def set_up_logging(log_format: LogFormat, level: str) -> None:
    """Send every logger, uvicorn's too, to standard error in one format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("lockstep").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, logger, message, then ``name=value``. A value that could break the line is quoted as in JSON."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_shown(value)}" for name, value in _fields_of(record).items())
        message = " ".join(record.getMessage().splitlines())
        line = f"{_time(record)} {record.levelname:<7} {record.name}: {message}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, _FIELDS, {})
    return fields


def _shown(value: Any) -> str:
    if isinstance(value, str) and value.isprintable() and not set(value) & set(' "='):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
