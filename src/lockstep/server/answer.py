"""Answers in the making: choices over all prompts, what their chunks share, and what they say of usage and time."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, Protocol, final

import msgspec

from lockstep.cluster.base import Accepted, Event, Hop, ModelCard
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.server.choices import Choice
from lockstep.server.errors import HttpError
from lockstep.server.fields import Shape
from lockstep.server.generation import GenerationBody
from lockstep.server.request_context import RequestContext
from lockstep.version import __version__

MS = 1_000.0
DISPATCH = "dispatch_to_specialist"
"""The function that a router is shown to have called."""
CALL_SUFFIX = "_router"
encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


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
    """What it said; of several choices the first."""
    intent: str | None
    """What a router's word was read as."""
    latency_ms: float
    usage: Usage


class Extension(Shape):
    """Where the time went, measured at the engine's steps."""

    request_id: str
    queue_ms: float
    ttft_ms: float | None
    tokens_per_second: float | None
    preemptions: int
    session_id: str | None
    warnings: NotRequired[Sequence[str] | None]
    """What was asked for and is not done, also in the header `x-lockstep-warning`."""
    entry_model: NotRequired[str | None]
    """Who routed the request; this and the following are there only if somebody did."""
    final_model: NotRequired[str | None]
    """Who answered it."""
    intent: NotRequired[str | None]
    """What the routing model's word was read as; null: nothing that the routing rule knows."""
    latency_ms: NotRequired[float | None]
    """From the arrival of the request to the end of its answer."""
    hops: NotRequired[list[RoutedHop] | None]
    """All models that were asked, in order; the last one is who answered."""


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


def documented(shape: Any) -> dict[int | str, dict[str, Any]]:
    """What a route says of its success: a whole answer, or a stream, for whose events OpenAPI 3.1 has no schema."""
    events = {"example": "data: {...}\n\ndata: [DONE]\n\n"}
    return {200: {"model": shape, "description": "The answer.", "content": {"text/event-stream": events}}}


@dataclass(frozen=True, slots=True)
class ResponseMetadata:
    """What all chunks of an answer have in common."""

    id: str
    created_s: int
    model: str
    fingerprint: str | None
    request_id: str
    started_s: float
    """When the request came, on the monotonic clock."""
    session_id: str | None = None
    include_usage: bool = False
    """Whether a stream ends with a chunk of usage."""
    continuous_usage: bool = False
    """Whether each of its chunks has the usage of its choice so far."""
    names_tier: bool = False
    """Whether the request named a service tier; there is one."""
    warnings: Sequence[str] = ()

    @property
    def tier(self) -> Tier:
        return {"service_tier": "default"} if self.names_tier else {}


class Chunks:
    """Frames of a stream. What is the same in all chunks of a choice is encoded once: a token costs the encoding of
    its text.

    Args:
        kind: the chunks' `object`.
        text: what stands in a choice before its new text and after it, where it has nothing else.
        num_choices: of the whole answer.
    """

    def __init__(self, metadata: ResponseMetadata, kind: str, text: tuple[bytes, bytes], num_choices: int) -> None:
        self.metadata = metadata
        shared = {
            "id": metadata.id,
            "object": kind,
            "created": metadata.created_s,
            "model": metadata.model,
            "system_fingerprint": metadata.fingerprint,
            **metadata.tier,
        }
        self._head = b"data: " + encode(shared)[:-1] + b',"choices":['
        before, self._after = text
        self._text_heads = [self._head + b'{"index":%d,' % index + before for index in range(num_choices)]
        self._text_tail = self._after + self._usage_member(None) + b"}\n\n"

    def text(self, choice: Choice) -> bytes:
        """A choice's new text, where it is all that is new."""
        tail = self._text_tail
        if self.metadata.continuous_usage:
            tail = self._after + self._usage_member(choice.usage) + b"}\n\n"
        return self._text_heads[choice.index] + encode(choice.text) + tail

    def choice(
        self, members: Mapping[str, Any], usage: Mapping[str, int] | None, extension: Extension | None = None
    ) -> bytes:
        """Anything of a choice; ``usage`` is its own so far."""
        more = b"" if extension is None else b',"lockstep":' + encode(extension)
        return self._head + encode(members) + b"]" + self._usage_member(usage) + more + b"}\n\n"

    def usage(self, usage: Usage, extension: Extension) -> bytes:
        """The last chunk, without choices."""
        return self._head + b"]," + encode({"usage": usage, "lockstep": extension})[1:] + b"\n\n"

    def _usage_member(self, so_far: Mapping[str, int] | None) -> bytes:
        """What a chunk says of usage, as a further member; empty: nothing."""
        if self.metadata.continuous_usage:
            return b',"usage":' + encode(so_far)
        return b',"usage":null' if self.metadata.include_usage else b""


class Encoder(Protocol):
    """One endpoint's shapes."""

    @property
    def chunks(self) -> Chunks: ...

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """Frames that are shown before there is any token."""
        ...

    def chunk(self, choice: Choice, extension: Extension | None) -> bytes:
        """Frames that show what a choice has; ``extension`` goes with its end."""
        ...

    def whole(self, answer: Answer) -> bytes:
        """The answer that is not streamed."""
        ...


class Answer:
    """Fed with the events of one or several calls; shows what is new, or everything at the end."""

    def __init__(self, accepted: Sequence[Accepted], choices: Sequence[Choice], encoder: Encoder) -> None:
        assert len(choices) % len(accepted) == 0, "every call has the same number of choices"
        self.accepted = accepted
        self.choices = choices
        self.num_pending_bytes = 0
        self._encoder = encoder
        self._choices_per_call = len(choices) // len(accepted)
        self._outputs: list[RequestOutput | None] = [None] * len(accepted)
        self._num_open = len(accepted)
        self._changed: list[Choice] = []
        self._opening = encoder.opening(choices)

    @property
    def is_complete(self) -> bool:
        return self._num_open == 0

    @property
    def outputs(self) -> list[RequestOutput]:
        """The calls that came to their end."""
        return [output for output in self._outputs if output is not None]

    @property
    def usage(self) -> Usage:
        num_reasoning = sum(choice.num_reasoning_tokens for choice in self.choices if choice.has_thoughts)
        return usage_of(self.outputs, num_reasoning)

    @property
    def extension(self) -> Extension:
        metadata = self._encoder.chunks.metadata
        return extension_of(metadata, self.accepted, self.outputs)

    def feed(self, call: int, events: Sequence[Event]) -> None:
        """Take events of one call, in order.

        Raises:
            RequestFailedError: a sequence ended without its answer.
        """
        first = call * self._choices_per_call
        for event in events:
            if not isinstance(event, TokenOutput):
                if isinstance(event, Accepted) and event.prompt_token_ids:  # the answer was begun when it was routed
                    for choice in self.choices[first : first + self._choices_per_call]:
                        choice.follow(event.prompt_token_ids)
                continue
            choice = self.choices[first + event.index]
            before = choice.num_pending_bytes
            choice.feed(event)
            self.num_pending_bytes += choice.num_pending_bytes - before
            if not choice.is_queued and choice.has_news:
                choice.is_queued = True
                self._changed.append(choice)
            if event.request is not None:
                self._outputs[call] = event.request
                self._num_open -= 1

    def take(self) -> bytes:
        """Frames of what has come since the last call: one piece per choice, however many outputs it was."""
        changed, opening = self._changed, self._opening
        if opening:
            self._opening = b""
            return opening + self.take()
        if not changed:
            return b""
        self._changed = []
        self.num_pending_bytes = 0
        if len(changed) == 1 and self._num_open:
            return self._show(changed[0], None)
        last = changed[-1] if self.is_complete and not self._encoder.chunks.metadata.include_usage else None
        return b"".join([self._show(choice, self.extension if choice is last else None) for choice in changed])

    def _show(self, choice: Choice, extension: Extension | None) -> bytes:
        data = self._encoder.chunk(choice, extension)
        choice.shown()
        choice.is_queued = False
        return data

    def end(self) -> bytes:
        """The last frames of a stream that came to its end."""
        if not self._encoder.chunks.metadata.include_usage:
            return DONE
        return self._encoder.chunks.usage(self.usage, self.extension) + DONE

    def failed(self, error: HttpError) -> bytes:
        """The last frames of a stream that did not."""
        return b"data: " + encode(error.body()) + b"\n\n" + DONE

    def whole(self) -> bytes:
        return self._encoder.whole(self)


def metadata_of(prefix: str, card: ModelCard, body: GenerationBody, context: RequestContext) -> ResponseMetadata:
    """The metadata of a new answer; ``prefix`` is the kind of its id."""
    options = body.stream_options
    is_continuous = options is not None and bool(options.continuous_usage_stats)
    has_last = None if options is None else options.include_usage
    return ResponseMetadata(
        id=f"{prefix}-{secrets.token_hex(12)}",
        created_s=int(time.time()),
        model=card.name,
        fingerprint=system_fingerprint(card),
        request_id=context.request_id,
        started_s=context.started_s,
        session_id=body.session_id,
        include_usage=is_continuous if has_last is None else has_last,
        continuous_usage=is_continuous,
        names_tier=body.service_tier is not None,
        warnings=context.warnings,
    )


def system_fingerprint(card: ModelCard) -> str:
    """Changes with our version, with where the model came from and with its context length."""
    what = f"{__version__}\0{card.root}\0{card.max_model_len}"
    return f"fp_{hashlib.sha256(what.encode()).hexdigest()[:12]}"


def usage_of(outputs: Sequence[RequestOutput], num_reasoning_tokens: int = 0) -> Usage:
    """Tokens over all prompts; a prompt counts once, whatever its `n`."""
    return usage_of_counts(
        sum(output.num_prompt_tokens for output in outputs),
        sum(output.num_cached_tokens for output in outputs),
        sum(output.num_output_tokens for output in outputs),
        num_reasoning_tokens,
    )


def usage_of_counts(
    num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int, num_reasoning_tokens: int = 0
) -> Usage:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
    }


def extension_of(
    metadata: ResponseMetadata, accepted: Sequence[Accepted], outputs: Sequence[RequestOutput]
) -> Extension:
    """Where the time went. Of several prompts: the longest wait, the earliest token, the rate of all together.

    Of a routed request also who was asked: the first prompt says who answered, and `hops` has those of all prompts.
    """
    ttfts_s = [output.timings.ttft_s for output in outputs if output.timings.ttft_s is not None]
    total_s = max((output.timings.total_s for output in outputs), default=0.0)
    num_tokens = sum(output.num_output_tokens for output in outputs)
    extension: Extension = {
        "request_id": metadata.request_id,
        "queue_ms": round(MS * max((output.timings.queue_s for output in outputs), default=0.0), 3),
        "ttft_ms": round(MS * min(ttfts_s), 3) if ttfts_s else None,
        "tokens_per_second": round(num_tokens / total_s, 3) if total_s > 0 else None,
        "preemptions": sum(output.num_preemptions for output in outputs),
        "session_id": metadata.session_id,
    }
    if metadata.warnings:
        extension["warnings"] = metadata.warnings
    first = accepted[0]
    if first.hops:
        extension["entry_model"] = first.hops[0].model
        extension["final_model"] = first.model
        extension["intent"] = first.hops[-1].intent
        extension["latency_ms"] = round(MS * (time.monotonic() - metadata.started_s), 3)
        extension["hops"] = _routed_hops(accepted, outputs)
    return extension


def _routed_hops(accepted: Sequence[Accepted], outputs: Sequence[RequestOutput]) -> list[RoutedHop]:
    hops: list[RoutedHop] = []
    for index, each in enumerate(accepted):
        hops += [_hop(hop) for hop in each.hops]
        if index < len(outputs) and each.hops and each.hops[-1].target is not None:
            hops.append(_last_hop(each.model, outputs[index]))
    return hops


def _hop(hop: Hop) -> RoutedHop:
    return {
        "model": hop.model,
        "completion": hop.completion,
        "intent": hop.intent,
        "latency_ms": round(MS * hop.latency_s, 3),
        "usage": usage_of_counts(hop.num_prompt_tokens, hop.num_cached_tokens, hop.num_output_tokens),
    }


def _last_hop(model: str, output: RequestOutput) -> RoutedHop:
    return {
        "model": model,
        "completion": output.text,
        "intent": None,
        "latency_ms": round(MS * output.timings.total_s, 3),
        "usage": usage_of([output]),
    }


def dispatch_calls(answer_id: str, hops: Sequence[Hop]) -> list[AnswerToolCall]:
    """The routing decisions as calls of a function; a hop whose own answer stands called nobody."""
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
    """Whether a call in a conversation is one of ours, sent back as it came: no model wrote it, so none is shown it."""
    return name == DISPATCH and call_id.startswith("call_") and CALL_SUFFIX in call_id
