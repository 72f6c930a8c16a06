"""The whole of one answer while it comes: its choices over all prompts, and the encoder that puts them into bytes."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from lockstep.cluster.base import Accepted, Event, Hop, ModelCard
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.server.choices import Choice
from lockstep.server.errors import HttpError
from lockstep.server.generation import GenerationBody
from lockstep.server.request_context import RequestContext
from lockstep.version import __version__

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def frame(data: bytes) -> bytes:
    """One event of a stream."""
    return b"data: " + data + b"\n\n"


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
    service_tier: str | None = None
    """Told where the request named one."""
    warnings: Sequence[str] = ()

    def chunk_head(self, kind: str) -> bytes:
        """What every chunk begins with, encoded once; its own members follow after a comma."""
        told = {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            **self.told_tier,
        }
        return encode(told)[:-1]

    @property
    def told_tier(self) -> dict[str, str]:
        return {} if self.service_tier is None else {"service_tier": self.service_tier}

    def chunk_usage(self, so_far: Mapping[str, int] | None = None) -> bytes:
        """What a chunk says of usage, as a further member; empty: nothing."""
        if self.continuous_usage:
            return b',"usage":' + encode(so_far)
        return b',"usage":null' if self.include_usage else b""


class Encoder(Protocol):
    """One endpoint's shapes."""

    @property
    def metadata(self) -> ResponseMetadata: ...

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """Frames that are shown before there is any token."""
        ...

    def chunk(self, choice: Choice, extension: dict[str, Any] | None) -> bytes:
        """Frames that show what a choice has; ``extension`` goes with its end."""
        ...

    def usage_chunk(self, usage: dict[str, Any], extension: dict[str, Any]) -> bytes: ...

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
    def usage(self) -> dict[str, Any]:
        thoughts = sum(choice.num_reasoning_tokens for choice in self.choices if choice.has_thoughts)
        return usage_of(self.outputs, thoughts)

    @property
    def extension(self) -> dict[str, Any]:
        metadata, outputs = self._encoder.metadata, self.outputs
        route = Route(self.accepted, metadata.started_s)
        told = extension_of(metadata.request_id, metadata.session_id, outputs, metadata.warnings)
        return told | route.told(outputs)

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
        last = changed[-1] if self.is_complete and not self._encoder.metadata.include_usage else None
        return b"".join([self._show(choice, self.extension if choice is last else None) for choice in changed])

    def _show(self, choice: Choice, extension: dict[str, Any] | None) -> bytes:
        data = self._encoder.chunk(choice, extension)
        choice.shown()
        choice.is_queued = False
        return data

    def end(self) -> bytes:
        """The last frames of a stream that came to its end."""
        if not self._encoder.metadata.include_usage:
            return DONE
        return self._encoder.usage_chunk(self.usage, self.extension) + DONE

    def failed(self, error: HttpError) -> bytes:
        """The last frames of a stream that did not."""
        return frame(encode(error.body())) + DONE

    def whole(self) -> bytes:
        return self._encoder.whole(self)


def metadata_of(prefix: str, card: ModelCard, body: GenerationBody, context: RequestContext) -> ResponseMetadata:
    """A new metadata; ``prefix`` is the kind of its id."""
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
        service_tier=None if body.service_tier is None else "default",
        warnings=context.warnings,
    )


def system_fingerprint(card: ModelCard) -> str:
    """Changes with our version, with where the model came from and with its context length."""
    what = f"{__version__}\0{card.root}\0{card.max_model_len}"
    return f"fp_{hashlib.sha256(what.encode()).hexdigest()[:12]}"


MS = 1_000.0


def usage_of(outputs: Sequence[RequestOutput], num_reasoning_tokens: int = 0) -> dict[str, Any]:
    """Tokens over all prompts; a prompt counts once, whatever its `n`."""
    return usage_of_counts(
        sum(output.num_prompt_tokens for output in outputs),
        sum(output.num_cached_tokens for output in outputs),
        sum(output.num_output_tokens for output in outputs),
        num_reasoning_tokens,
    )


def usage_of_counts(
    num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int, num_reasoning_tokens: int = 0
) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
    }


def extension_of(
    request_id: str, session_id: str | None, outputs: Sequence[RequestOutput], warnings: Sequence[str] = ()
) -> dict[str, Any]:
    """Where the time went. Of several prompts: the longest wait, the earliest token, the rate of all together."""
    ttfts_s = [output.timings.ttft_s for output in outputs if output.timings.ttft_s is not None]
    total_s = max((output.timings.total_s for output in outputs), default=0.0)
    num_tokens = sum(output.num_output_tokens for output in outputs)
    return {
        "request_id": request_id,
        "queue_ms": round(MS * max((output.timings.queue_s for output in outputs), default=0.0), 3),
        "ttft_ms": round(MS * min(ttfts_s), 3) if ttfts_s else None,
        "tokens_per_second": round(num_tokens / total_s, 3) if total_s > 0 else None,
        "preemptions": sum(output.num_preemptions for output in outputs),
        "session_id": session_id,
        **({"warnings": warnings} if warnings else {}),
    }


DISPATCH = "dispatch_to_specialist"
"""The function that a router is shown to have called."""
CALL_SUFFIX = "_router"


@dataclass(frozen=True, slots=True)
class Route:
    """How a request came to those who answer it."""

    accepted: Sequence[Accepted]
    """Of its calls, one per prompt."""
    started_s: float
    """When the request came, on the monotonic clock."""

    def told(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Members of the `lockstep` extension; none where nobody was asked before. Of several prompts the first says
        who answered, and `hops` has those of all, prompt by prompt."""
        first = self.accepted[0]
        if not first.hops:
            return {}
        hops: list[dict[str, Any]] = []
        for index, accepted in enumerate(self.accepted):
            hops += [_hop(hop) for hop in accepted.hops]
            if index < len(outputs) and accepted.hops and accepted.hops[-1].target is not None:
                hops.append(_last_hop(accepted.model, outputs[index]))
        return {
            "entry_model": first.hops[0].model,
            "final_model": first.model,
            "intent": first.hops[-1].intent,
            "latency_ms": round(MS * (time.monotonic() - self.started_s), 3),
            "hops": hops,
        }


def dispatch_calls(answer_id: str, hops: Sequence[Hop]) -> list[dict[str, Any]]:
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


def _hop(hop: Hop) -> dict[str, Any]:
    return {
        "model": hop.model,
        "completion": hop.completion,
        "intent": hop.intent,
        "latency_ms": round(MS * hop.latency_s, 3),
        "usage": usage_of_counts(hop.num_prompt_tokens, hop.num_cached_tokens, hop.num_output_tokens),
    }


def _last_hop(model: str, output: RequestOutput) -> dict[str, Any]:
    return {
        "model": model,
        "completion": output.text,
        "intent": None,
        "latency_ms": round(MS * output.timings.total_s, 3),
        "usage": usage_of([output]),
    }
