"""The whole of one answer while it comes: its choices over all prompts, and the encoder that puts them into bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from lockstep.cluster.base import Accepted, Event
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.server.choices import Choice
from lockstep.server.errors import HttpError
from lockstep.server.hops import Route
from lockstep.server.usage import extension_of, usage_of

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def frame(data: bytes) -> bytes:
    """One event of a stream."""
    return b"data: " + data + b"\n\n"


@dataclass(frozen=True, slots=True)
class Heading:
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
    def heading(self) -> Heading: ...

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
        heading, outputs = self._encoder.heading, self.outputs
        route = Route(self.accepted, heading.started_s)
        told = extension_of(heading.request_id, heading.session_id, outputs, heading.warnings)
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
        last = changed[-1] if self.is_complete and not self._encoder.heading.include_usage else None
        return b"".join([self._show(choice, self.extension if choice is last else None) for choice in changed])

    def _show(self, choice: Choice, extension: dict[str, Any] | None) -> bytes:
        data = self._encoder.chunk(choice, extension)
        choice.shown()
        choice.is_queued = False
        return data

    def end(self) -> bytes:
        """The last frames of a stream that came to its end."""
        if not self._encoder.heading.include_usage:
            return DONE
        return self._encoder.usage_chunk(self.usage, self.extension) + DONE

    def failed(self, error: HttpError) -> bytes:
        """The last frames of a stream that did not."""
        return frame(encode(error.body())) + DONE

    def whole(self) -> bytes:
        return self._encoder.whole(self)
