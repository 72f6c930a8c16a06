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

from lockstep.server.access import OPEN_PATHS
from lockstep.server.options import ServerOptions
from lockstep.server.request_context import PEOPLE, RequestContext
from lockstep.worker.logs import FIELDS

PROBES = OPEN_PATHS | {"/load"}
"""Asked for again and again by machines: logged at the debug level."""

HASH_BYTES = 6

log = logging.getLogger("lockstep.request")


class AccessLog:
    """Writes the line of a request that has ended."""

    def __init__(self, options: ServerOptions) -> None:
        self._shows_prompts = options.log_prompts
        self._called = str if options.log_user else hashed_by(secrets.token_bytes(16))

    def __call__(self, context: RequestContext, duration_s: float) -> None:
        level = logging.DEBUG if context.endpoint in PROBES else logging.INFO
        if log.isEnabledFor(level):
            fields = request_fields(context, duration_s, shows_prompts=self._shows_prompts, called=self._called)
            log.log(level, "ended", extra={FIELDS: fields})


def hashed_by(key: bytes) -> Callable[[str], str]:
    """A name for each text that is the same in all lines of one run and tells nobody who that is: without the key,
    which is nowhere kept, no list of users can be tried."""
    return lambda text: hashlib.blake2b(text.encode(), key=key, digest_size=HASH_BYTES).hexdigest()


def request_fields(
    context: RequestContext, duration_s: float, *, shows_prompts: bool, called: Callable[[str], str]
) -> dict[str, Any]:
    """What is said of a request; what does not apply to it is left out. Times in milliseconds.

    Args:
        called: what somebody is called here whom a request was sent for.
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
    usage = context.usage()
    if context.outputs or usage.num_output_tokens:
        fields["prompt_tokens"] = usage.num_prompt_tokens
        fields["cached_tokens"] = None if context.unfinished else usage.num_cached_tokens
        fields["output_tokens"] = usage.num_output_tokens
    if context.outputs:
        timings = [output.timings for output in context.outputs]
        ttfts = [timing.ttft_s for timing in timings if timing.ttft_s is not None]
        fields["preemptions"] = sum(output.num_preemptions for output in context.outputs) or None
        fields["queue_ms"] = _ms(max(timing.queue_s for timing in timings))
        fields["ttft_ms"] = _ms(min(ttfts)) if ttfts else None
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
        fields["answers"] = [completion.text for output in context.outputs for completion in output.completions]
    return {name: value for name, value in fields.items() if value not in (None, "", [], {})}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
