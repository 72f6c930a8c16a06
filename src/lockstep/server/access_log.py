"""Access log: a line for each request that has ended, with its numbers.

Prompts and answers are in no line unless ``--log-prompts`` is given, and neither is a refusal's message, which may
repeat what the client sent; keys are in none at all. Whom a request was sent for is a hash, unless ``--log-user`` is
given.
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
"""Polled by machines: logged at the debug level."""
WATCHED = frozenset({"/v1/cluster", "/v1/stats", "/v1/requests", "/v1/sessions", "/v1/logs", "/v1/events"})
"""And what dashboards ask for every two seconds; only refusals are worth a line."""

HASH_BYTES = 6

log = logging.getLogger("lockstep.request")


class AccessLog:
    """Writes the line of a request that has ended."""

    def __init__(self, options: ServerOptions) -> None:
        self._shows_prompts = options.log_prompts
        self._called = str if options.log_user else hashed_by(secrets.token_bytes(16))

    def __call__(self, context: RequestContext, duration_s: float) -> None:
        is_watching = context.endpoint in WATCHED and (context.status or 0) < 400
        level = logging.DEBUG if context.endpoint in PROBES or is_watching else logging.INFO
        if log.isEnabledFor(level):
            fields = request_fields(context, duration_s, shows_prompts=False, called=self._called)
            extra = {FIELDS: fields}
            if self._shows_prompts:
                whole = request_fields(context, duration_s, shows_prompts=True, called=self._called)
                extra = {FIELDS: whole, PUBLIC_FIELDS: fields}
            log.log(level, "ended", extra=extra)


def hashed_by(key: bytes) -> Callable[[str], str]:
    """A name for each text that is the same in all lines of one run and does not identify its user: without the key,
    which is not stored, no list of users can be tried."""
    return lambda text: hashlib.blake2b(text.encode(), key=key, digest_size=HASH_BYTES).hexdigest()


def request_fields(
    context: RequestContext, duration_s: float, *, shows_prompts: bool, called: Callable[[str], str]
) -> dict[str, Any]:
    """Members of a request's line; those that do not apply to it are left out. Times in milliseconds.

    Args:
        called: returns the name in the log of the user of a request.
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
    fields["metadata"] = {name: called(text) if name in PEOPLE else text for name, text in context.labels.items()}
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
