"""Rows of `GET /v1/requests`: plain values, which the server fills in and its clients decode."""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["waiting", "running", "ended"]
Kind = Literal[
    "model_loading",
    "no_place",
    "no_block",
    "no_budget",
    "lower_priority",
    "session",
    "blocks_returning",
    "preempted_first",
    "overtaken",
    "sibling",
    "lost_blocks",
]


class RequestHop(msgspec.Struct, frozen=True):
    """A model that was called before the one that answered."""

    model: str
    intent: str | None
    """The value that the rule read from its answer; null: none of the rule's values."""
    target: str | None
    """The model that answers next; null: the hop's own answer stood."""
    latency_ms: float


class RequestWait(msgspec.Struct, frozen=True):
    """A reason for which the request was passed over, as the planner reported it."""

    model: str
    kind: Kind
    reason: str
    """The latest of its kind, in words."""
    at_ms: float
    """From the arrival to its first report."""
    seen_ms: float
    """From the first report to the last; reasons are sampled."""


class RequestReplay(msgspec.Struct, frozen=True):
    """Place of one sequence of the request in its device's recording, and the command that explains its decisions."""

    model: str
    engine: str
    """Name of the engine in the recording."""
    sequence: int
    step: int
    """In which something of it was computed first."""
    command: str | None
    """Only for operators, since it names a folder of the server."""


class RequestRow(msgspec.Struct, frozen=True):
    """One request, over all of its prompts. What is null is not known, not yet, or does not apply."""

    number: int
    """By arrival, from 1; what `after` takes."""
    id: str
    """Its `x-request-id`."""
    endpoint: str
    model: str | None
    """Who answers."""
    hops: tuple[RequestHop, ...]
    """Models that were called before, in order."""
    session_id: str | None
    caller: str
    """Name of the API key that was used; never the key."""
    priority: int | None
    stream: bool
    state: State
    """`waiting` until something of it is computed."""
    status: int | None
    """Of the HTTP answer, or of the error in its stream; 499: the client left."""
    error: str | None
    """Code of the error that it ended with."""
    finish_reasons: tuple[str, ...]
    """Of its choices, each reason once."""
    at_s: float
    """Arrival, in Unix time."""
    waited_ms: float | None
    """From its arrival to the first step that computed something of it."""
    ttft_ms: float | None
    """From its arrival to its first token."""
    total_ms: float
    """From its arrival to its end, or so far."""
    tokens_per_second: float | None
    """Those after the first token, by the time since then; null until there is one."""
    prompt_tokens: int
    cached_tokens: int
    """Of prompts that were answered."""
    output_tokens: int
    preemptions: int
    waits: tuple[RequestWait, ...]
    """Why it waited, in the order in which the reasons were met."""
    replay: tuple[RequestReplay, ...]
    """Where the server records its steps."""


class RequestList(msgspec.Struct, frozen=True):
    """Requests, newest first."""

    object: str
    data: tuple[RequestRow, ...]
