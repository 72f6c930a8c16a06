"""Parts that answers share: usage, times, and the hops of routed requests."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, final

import msgspec

from lockstep.cluster.base import Accepted, Hop, ModelCard
from lockstep.engine.outputs import RequestOutput
from lockstep.server.fields import Shape
from lockstep.server.generation import GenerationBody
from lockstep.server.request_context import RequestContext, Totals
from lockstep.version import __version__

MS = 1_000.0
DISPATCH = "dispatch_to_specialist"
"""The function that a router is shown to have called."""
CALL_SUFFIX = "_router"
encode = msgspec.json.Encoder().encode


class PromptTokensDetails(Shape):
    cached_tokens: int
    """Came from the prefix cache."""


class CompletionTokensDetails(Shape):
    reasoning_tokens: int
    """Before the content, where there were thoughts."""


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class RoutedHop(Shape):
    """One model's part of a routed request."""

    model: str
    completion: str
    """Its answer; of several choices the first."""
    intent: str | None
    """What a router's word was read as."""
    latency_ms: float
    usage: Usage


class Extension(Shape):
    """Times of an answer, measured at the engine's steps, and the route that it took."""

    request_id: str
    queue_ms: float
    ttft_ms: float | None
    tokens_per_second: float | None
    preemptions: int
    session_id: str | None
    warnings: NotRequired[Sequence[str] | None]
    """What was requested and is not done, also in the header `x-lockstep-warning`."""
    entry_model: NotRequired[str | None]
    """The model that routed the request; this and the following are there only for a routed one."""
    final_model: NotRequired[str | None]
    """Who answered it."""
    intent: NotRequired[str | None]
    """The value that was read from the routing model's answer; null: none that the routing rule has."""
    latency_ms: NotRequired[float | None]
    """From the arrival of the request to the end of its answer."""
    hops: NotRequired[list[RoutedHop] | None]
    """All models that were called, in order; the last one answered."""


class AnswerFunction(Shape):
    name: str
    arguments: str


class AnswerToolCall(Shape):
    id: str
    type: Literal["function"]
    function: AnswerFunction


@final
class Tier(Shape, total=False):
    """The member that answers have whose requests named a service tier; there is one."""

    service_tier: Literal["default"] | None


@dataclass(frozen=True, slots=True)
class Framing:
    """Form of a stream, whatever its content."""

    content_type: bytes
    ping: bytes
    """What is sent in silence."""

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return (
            (b"content-type", self.content_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        )


SSE = Framing(b"text/event-stream; charset=utf-8", b": ping\n\n")
"""Server-sent events."""


RECORDED_HEADER = b"x-lockstep-recorded"
"""Which recorded request answered, and how it was matched."""
Headers = Sequence[tuple[bytes, bytes]]


def recorded_headers(accepted: Sequence[Accepted]) -> Headers:
    """Headers for the calls of an answer that a recording answers, one each."""
    return [(RECORDED_HEADER, each.recorded.encode("latin-1", "replace")) for each in accepted if each.recorded]


def documented(shape: Any) -> dict[int | str, dict[str, Any]]:
    """Document the success of a route: a whole answer, or a stream, for whose events OpenAPI 3.1 has no schema."""
    events = {"example": "data: {...}\n\ndata: [DONE]\n\n"}
    return {200: {"model": shape, "description": "The answer.", "content": {"text/event-stream": events}}}


@dataclass(frozen=True, slots=True)
class ResponseMetadata:
    """Members that all chunks of an answer have in common, and the wishes of its request about usage."""

    id: str
    created_s: int
    model: str
    fingerprint: str | None
    include_usage: bool = False
    """Whether a stream ends with a chunk of usage."""
    continuous_usage: bool = False
    """Whether each of its chunks has the usage of its choice so far."""
    names_tier: bool = False
    """Whether the request named a service tier; there is one."""

    @property
    def tier(self) -> Tier:
        return {"service_tier": "default"} if self.names_tier else {}


def metadata_of(prefix: str, card: ModelCard, body: GenerationBody) -> ResponseMetadata:
    """The metadata of a new answer; ``prefix`` is the kind of its id."""
    options = body.stream_options
    is_continuous = options is not None and bool(options.continuous_usage_stats)
    has_last = None if options is None else options.include_usage
    return ResponseMetadata(
        id=f"{prefix}-{secrets.token_hex(12)}",
        created_s=int(time.time()),
        model=card.name,
        fingerprint=system_fingerprint(card),
        include_usage=is_continuous if has_last is None else has_last,
        continuous_usage=is_continuous,
        names_tier=body.service_tier is not None,
    )


def system_fingerprint(card: ModelCard) -> str:
    """Changes with our version, with where the model came from and with its context length."""
    what = f"{__version__}\0{card.root}\0{card.max_model_len}"
    return f"fp_{hashlib.sha256(what.encode()).hexdigest()[:12]}"


def usage_of(counts: Totals | RequestOutput | Hop, num_reasoning_tokens: int = 0) -> Usage:
    """The tokens of a request or of one of its hops; a prompt counts once, whatever its `n`."""
    return {
        "prompt_tokens": counts.num_prompt_tokens,
        "completion_tokens": counts.num_output_tokens,
        "total_tokens": counts.num_prompt_tokens + counts.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
    }


def extension_of(
    context: RequestContext, totals: Totals, accepted: Sequence[Accepted], outputs: Sequence[RequestOutput]
) -> Extension:
    """The extension of an answer that is complete. The rate is that of all prompts together.

    For a routed request also the route: the model that answered the first prompt, and the `hops` of all prompts.
    """
    rate = totals.num_output_tokens / totals.total_s if totals.total_s > 0 else None
    extension: Extension = {
        "request_id": context.request_id,
        "queue_ms": round(MS * totals.queue_s, 3),
        "ttft_ms": None if totals.ttft_s is None else round(MS * totals.ttft_s, 3),
        "tokens_per_second": None if rate is None else round(rate, 3),
        "preemptions": totals.num_preemptions,
        "session_id": context.session_id,
    }
    if context.warnings:
        extension["warnings"] = context.warnings
    first = accepted[0]
    if first.hops:
        extension["entry_model"] = first.hops[0].model
        extension["final_model"] = first.model
        extension["intent"] = first.hops[-1].intent
        extension["latency_ms"] = round(MS * (time.monotonic() - context.started_s), 3)
        extension["hops"] = _routed_hops(accepted, outputs)
    return extension


def _routed_hops(accepted: Sequence[Accepted], outputs: Sequence[RequestOutput]) -> list[RoutedHop]:
    hops: list[RoutedHop] = []
    for each, output in zip(accepted, outputs, strict=True):
        hops += [_hop(hop.model, hop.completion, hop.intent, hop.latency_s, hop) for hop in each.hops]
        if each.hops and each.hops[-1].target is not None:
            hops.append(_hop(each.model, output.text, None, output.timings.total_s, output))
    return hops


def _hop(model: str, completion: str, intent: str | None, latency_s: float, counts: RequestOutput | Hop) -> RoutedHop:
    return {
        "model": model,
        "completion": completion,
        "intent": intent,
        "latency_ms": round(MS * latency_s, 3),
        "usage": usage_of(counts),
    }


def dispatch_calls(answer_id: str, hops: Sequence[Hop]) -> list[AnswerToolCall]:
    """The routing decisions as calls of a function; a hop whose own answer stands has none."""
    return [
        {
            "id": f"call_{answer_id}{CALL_SUFFIX}" + (str(index) if index else ""),
            "type": "function",
            "function": {
                "name": DISPATCH,
                "arguments": msgspec.json.encode({"intent": hop.intent, "target": hop.target}).decode(),
            },
        }
        for index, hop in enumerate(hops)
        if hop.target is not None
    ]


def is_dispatch(call_id: str, name: str) -> bool:
    """True if a call in a conversation is a routing decision, sent back: no model wrote it, so none is shown it."""
    return name == DISPATCH and call_id.startswith("call_") and CALL_SUFFIX in call_id
