"""The line of a request that has ended, with its numbers.

Prompts and answers are in no line unless ``--log-prompts`` is given, and neither is a refusal's message, which may
repeat what the client sent; keys are in none at all.
"""

from __future__ import annotations

import logging
from typing import Any

from lockstep.server.access import OPEN_PATHS
from lockstep.server.options import ServerOptions
from lockstep.server.record import RequestRecord
from lockstep.worker.logs import FIELDS

PROBES = OPEN_PATHS | {"/load"}
"""Asked for again and again by machines: logged at the debug level."""

log = logging.getLogger("lockstep.request")


class RequestLog:
    """Writes the line of a request that has ended."""

    def __init__(self, options: ServerOptions) -> None:
        self._shows_prompts = options.log_prompts

    def __call__(self, record: RequestRecord, duration_s: float) -> None:
        level = logging.DEBUG if record.endpoint in PROBES else logging.INFO
        if log.isEnabledFor(level):
            fields = request_fields(record, duration_s, shows_prompts=self._shows_prompts)
            log.log(level, "ended", extra={FIELDS: fields})


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
    fields["hops"] = [f"{hop.model}:{hop.intent or 'none'}" for hop in record.hops]
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


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
