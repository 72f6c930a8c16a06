"""Rows of `GET /v1/requests`: plain values, which the server creates and its clients decode."""

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
    "adapter",
    "preempted_first",
    "overtaken",
    "sibling",
    "lost_blocks",
]


class RequestHop(msgspec.Struct, frozen=True):
    """A model that was called before the one that answered."""

    model: str
    intent: str | None
    """Value that the rule read from the model's answer; null: none of the rule's values."""
    target: str | None
    """Model that answers next; null: the hop's own answer is returned."""
    latency_ms: float


class RequestWait(msgspec.Struct, frozen=True):
    """A reason for which the request was passed over, as reported by the planner."""

    model: str
    kind: Kind
    reason: str
    """Latest reason of its kind, as a sentence."""
    at_ms: float
    """Time in milliseconds from the request's arrival to the first report of the reason."""
    seen_ms: float
    """Time in milliseconds from the first to the last report of the reason. Reasons are sampled."""


class RequestReplay(msgspec.Struct, frozen=True):
    """Place of one sequence of the request in its device's recording, and the command that explains its decisions."""

    model: str
    engine: str
    """Name of the engine in the recording."""
    sequence: int
    step: int
    """Number of the step in which the computation of the sequence began."""
    command: str | None
    """Command that explains the decisions about the sequence; null for callers other than operators, since it contains
    the path of a folder of the server."""


class RequestRow(msgspec.Struct, frozen=True):
    """One request, over all of its prompts. Null fields are unknown, not known yet, or do not apply."""

    number: int
    """Sequence number by arrival, from 1; the value for `after`."""
    id: str
    """Id of the request, from `x-request-id` or generated."""
    endpoint: str
    model: str | None
    """Model that answers; null: not known yet."""
    hops: tuple[RequestHop, ...]
    """Models that were called before, in order."""
    session_id: str | None
    caller: str
    """Name of the API key that was used, never the key itself."""
    priority: int | None
    stream: bool
    state: State
    """State of the request; `waiting` until its computation begins."""
    status: int | None
    """Status of the HTTP response, or of the error in its stream; 499: the client disconnected."""
    error: str | None
    """Code of the error that ended the request; null: no error."""
    finish_reasons: tuple[str, ...]
    """Finish reasons of its choices, each once."""
    at_s: float
    """Arrival in Unix time."""
    waited_ms: float | None
    """Time in milliseconds from the arrival to the first step of its computation; null: it has not begun."""
    ttft_ms: float | None
    """Time in milliseconds from the arrival to the first output token; null: there is none."""
    total_ms: float
    """Time in milliseconds from the arrival to the end, or to now."""
    tokens_per_second: float | None
    """Rate of output tokens after the first one; null until there is one."""
    prompt_tokens: int
    cached_tokens: int
    """Number of prompt tokens that came from the prefix cache, of answered prompts."""
    output_tokens: int
    preemptions: int
    waits: tuple[RequestWait, ...]
    """Reasons why the request waited, in the order of their first reports."""
    replay: tuple[RequestReplay, ...]
    """Places of the request's sequences in the recording; empty if the server records no steps."""


class RequestList(msgspec.Struct, frozen=True):
    """Requests, newest first."""

    object: str
    data: tuple[RequestRow, ...]
