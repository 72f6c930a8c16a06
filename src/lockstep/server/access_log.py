"""Access log: writes one line per finished request, with its metrics.

Lines have no prompts or answers and no messages of client errors (which may quote the request), unless
``--log-prompts`` is given. They never contain keys. The end user of a request is logged as a hash, unless
``--log-user`` is given.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable
from typing import Any

from lockstep.server.admission import OPEN_PATHS
from lockstep.server.options import ServerOptions
from lockstep.server.request_context import PEOPLE, RequestContext
from lockstep.worker.logs import FIELDS, PUBLIC_FIELDS

PROBES = OPEN_PATHS | {"/load"}
"""Paths polled by probes. They are logged at debug level."""
WATCHED = frozenset({"/v1/cluster", "/v1/stats", "/v1/requests", "/v1/sessions", "/v1/logs", "/v1/events"})
"""Paths polled by dashboards every two seconds. They are logged at debug level unless the request is rejected."""

HASH_BYTES = 6

log = logging.getLogger("lockstep.request")


class AccessLog:
    """Writes the log line of a finished request."""

    def __init__(self, options: ServerOptions) -> None:
        self._shows_prompts = options.log_prompts
        self._name_of = str if options.log_user else hashed_by(secrets.token_bytes(16))

    def __call__(self, context: RequestContext, duration_s: float) -> None:
        is_watching = context.endpoint in WATCHED and (context.status or 0) < 400
        level = logging.DEBUG if context.endpoint in PROBES or is_watching else logging.INFO
        if log.isEnabledFor(level):
            fields = request_fields(context, duration_s, shows_prompts=False, name_of=self._name_of)
            extra = {FIELDS: fields}
            if self._shows_prompts:
                whole = request_fields(context, duration_s, shows_prompts=True, name_of=self._name_of)
                extra = {FIELDS: whole, PUBLIC_FIELDS: fields}
            log.log(level, "ended", extra=extra)


def hashed_by(key: bytes) -> Callable[[str], str]:
    """Return a function that hashes user names for one run of the server.

    The same text has the same hash in all lines. The key is not stored, so users cannot be identified by hashing a list
    of names.
    """
    return lambda text: hashlib.blake2b(text.encode(), key=key, digest_size=HASH_BYTES).hexdigest()


def request_fields(
    context: RequestContext, duration_s: float, *, shows_prompts: bool, name_of: Callable[[str], str]
) -> dict[str, Any]:
    """Members of a request's log line. Members that do not apply are left out. Times are in milliseconds.

    Args:
        name_of: returns the name of an end user for the log.
    """
    fields: dict[str, Any] = {
        "id": context.request_id,
        "method": context.method,
        "endpoint": context.endpoint,
        "status": context.status,
        "model": context.model,
        "tenant": context.tenant,
        "stream": context.is_stream or None,
        "total_ms": _ms(duration_s),
    }
    totals = context.totals
    if totals.num_answered or totals.num_output_tokens:
        fields["prompt_tokens"] = totals.num_prompt_tokens
        fields["cached_tokens"] = None if totals.num_unanswered else totals.num_cached_tokens
        fields["output_tokens"] = totals.num_output_tokens
    if totals.num_answered:
        fields["preemptions"] = totals.num_preemptions or None
        fields["queue_ms"] = _ms(totals.queue_s)
        fields["ttft_ms"] = None if totals.ttft_s is None else _ms(totals.ttft_s)
    fields["hops"] = [f"{hop.model}:{hop.intent or 'none'}" for hop in context.hops]
    fields["finish_reasons"] = context.finish_reasons
    fields["metadata"] = {name: name_of(text) if name in PEOPLE else text for name, text in context.labels.items()}
    error = context.error
    if error is not None:
        fields["error"] = error.code or error.type
        fields["param"] = error.param
        fields["message"] = error.message if error.status >= 500 or shows_prompts else None
    if shows_prompts:
        fields["body"] = context.body
        fields["answers"] = context.answers
    return {name: value for name, value in fields.items() if value not in (None, "", [], {})}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
