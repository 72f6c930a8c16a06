"""Common parts of answers: framing as bytes and in the OpenAPI document, usage, timing, the hops of routed requests.

An encoder (`lockstep.server.answer_response.Encoder`) decides what is sent; the framing delimits it.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, final

import msgspec

from lockstep.cluster.base import Accepted, Hop, ModelCard
from lockstep.engine.outputs import RequestOutput
from lockstep.server.fields import Shape
from lockstep.server.generation import GenerationBody
from lockstep.server.request_context import RequestContext, RequestTotals
from lockstep.version import __version__

MS = 1_000.0
DISPATCH = "dispatch_to_specialist"
"""Name of the function under which the router's decision is shown as a call."""
CALL_SUFFIX = "_router"
DATA, END = b"data: ", b"\n\n"
"""Start of an event's data, and the end of an event. Encoders that build a frame of parts need them."""
encode = msgspec.json.Encoder().encode


class PromptTokensDetails(Shape):
    cached_tokens: int
    """Number of tokens that came from the prefix cache."""


class CompletionTokensDetails(Shape):
    reasoning_tokens: int
    """Number of tokens before the content, if the answer has reasoning."""


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
    """Answer of the model; its first choice if there are several."""
    intent: str | None
    """The intent that was parsed from the router's answer."""
    latency_ms: float
    usage: Usage


class Extension(Shape):
    """Timing of an answer, measured at engine steps, and its route."""

    request_id: str
    queue_ms: float
    ttft_ms: float | None
    tokens_per_second: float | None
    preemptions: int
    session_id: str | None
    warnings: NotRequired[Sequence[str] | None]
    """Warnings about requested features that are not supported. Also in the header `x-lockstep-warning`."""
    entry_model: NotRequired[str | None]
    """The model that routed the request. This and the following members are only present for routed requests."""
    final_model: NotRequired[str | None]
    """The model that answered."""
    intent: NotRequired[str | None]
    """Value that was parsed from the routing model's answer; null if it matches no value of the routing rule."""
    latency_ms: NotRequired[float | None]
    """Time from the arrival of the request to the end of its answer."""
    hops: NotRequired[list[RoutedHop] | None]
    """All models that were called, in order. The last one answered."""


class AnswerFunction(Shape):
    name: str
    arguments: str


class AnswerToolCall(Shape):
    id: str
    type: Literal["function"]
    function: AnswerFunction


@final
class Tier(Shape, total=False):
    """Service tier member, present in the answer if the request set a tier. Its only value is `default`."""

    service_tier: Literal["default"] | None


@dataclass(frozen=True, slots=True)
class Framing:
    """Framing of a stream, independent of its content."""

    content_type: bytes
    ping: bytes
    """Bytes that are sent while there is no output."""

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return (
            (b"content-type", self.content_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        )


SSE_TYPE, JSON_LINES_TYPE = b"text/event-stream", b"application/x-ndjson"


def data_frame(data: bytes) -> bytes:
    """Frame an event without a name, as OpenAI's clients read it."""
    return DATA + data + END


def event_frame(event: Mapping[str, object], *, name: str = "", event_id: int | None = None) -> bytes:
    """Frame an event as JSON under its name, which is its member ``type`` if none is given."""
    head = b"" if event_id is None else b"id: %d\n" % event_id
    return head + b"event: " + (name or str(event["type"])).encode() + b"\n" + data_frame(encode(event))


def event_frames(events: Iterable[Mapping[str, object]]) -> bytes:
    """Frame events that have their names in the member ``type``."""
    return b"".join([event_frame(event) for event in events])


def json_line(members: Mapping[str, object]) -> bytes:
    """Frame an object as one line of JSON."""
    return encode(members) + b"\n"


SSE = Framing(SSE_TYPE + b"; charset=utf-8", b": ping" + END)


def documented(
    shape: Any, example: str = "data: {...}\n\ndata: [DONE]\n\n", what: str = "The answer.", kind: bytes = SSE_TYPE
) -> dict[int | str, dict[str, Any]]:
    """OpenAPI success response of a route: a complete answer, or a stream, whose events OpenAPI 3.1 cannot describe.

    Args:
        shape: the complete answer.
        example: beginning of a stream.
        what: description of the answer.
        kind: content type of the stream.
    """
    return {200: {"model": shape, "description": what, "content": {kind.decode(): {"example": example}}}}


RECORDED_HEADER = b"x-lockstep-recorded"
"""Header with the recorded request whose answer was replayed, and how it was matched."""
Headers = Sequence[tuple[bytes, bytes]]


def recorded_headers(accepted: Sequence[Accepted]) -> Headers:
    """Headers for the calls that were answered from a recording, one each."""
    return [(RECORDED_HEADER, each.recorded.encode("latin-1", "replace")) for each in accepted if each.recorded]


@dataclass(frozen=True, slots=True)
class ResponseMetadata:
    """Members that all chunks of an answer share, and the request's options about usage."""

    id: str
    created_s: int
    model: str
    fingerprint: str | None
    include_usage: bool = False
    """Whether a stream ends with a chunk that has the usage."""
    continuous_usage: bool = False
    """Whether each chunk has the current usage of its choice."""
    names_tier: bool = False
    """Whether the request set a service tier."""

    @property
    def tier(self) -> Tier:
        return {"service_tier": "default"} if self.names_tier else {}


def metadata_of(prefix: str, card: ModelCard, body: GenerationBody) -> ResponseMetadata:
    """Create the metadata of a new answer. ``prefix`` is the prefix of its id."""
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
    """Fingerprint of the server version, the model's source and its context length."""
    what = f"{__version__}\0{card.root}\0{card.max_model_len}"
    return f"fp_{hashlib.sha256(what.encode()).hexdigest()[:12]}"


def usage_of(counts: RequestTotals | RequestOutput | Hop, num_reasoning_tokens: int = 0) -> Usage:
    """Usage of a request or one of its hops. A prompt counts once, independent of `n`."""
    return {
        "prompt_tokens": counts.num_prompt_tokens,
        "completion_tokens": counts.num_output_tokens,
        "total_tokens": counts.num_prompt_tokens + counts.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
    }


def extension_of(
    context: RequestContext, totals: RequestTotals, accepted: Sequence[Accepted], outputs: Sequence[RequestOutput]
) -> Extension:
    """Create the extension of a complete answer. The token rate covers all prompts together.

    For a routed request it includes the route: the model that answered the first prompt, and the hops of all prompts.
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
    """Routing decisions as function calls. A hop that answered the request itself has none."""
    return [
        {
            "id": f"call_{answer_id}{CALL_SUFFIX}" + (str(index) if index else ""),
            "type": "function",
            "function": {
                "name": DISPATCH,
                "arguments": encode({"intent": hop.intent, "target": hop.target}).decode(),
            },
        }
        for index, hop in enumerate(hops)
        if hop.target is not None
    ]


def is_dispatch(call_id: str, name: str) -> bool:
    """True if a call in a conversation is a routing decision that was sent back. Such calls are not shown to models."""
    return name == DISPATCH and call_id.startswith("call_") and CALL_SUFFIX in call_id
