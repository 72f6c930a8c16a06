"""Answers of a cluster as events, and its models and its health as clients are shown them.

A request is answered with batches of events: first `Accepted`, alone, then a `TokenOutput` for what each step brought
to each of the ``n`` completions; the very last one carries the whole answer. Before `Accepted` comes `Routed`, alone,
where the request was routed to one who cannot begin at once. A non-streaming answer is the collected stream, and
leaving the stream is the abort.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import msgspec

from lockstep.engine.outputs import TokenOutput


class Hop(msgspec.Struct, frozen=True):
    """A model's finished part of a routed request."""

    model: str
    completion: str
    """Its answer."""
    intent: str | None
    """The value that the rule read from it; None: its answer is none of the rule's values."""
    target: str | None
    """The model that answers next, as ``set.id`` or an id; None: the hop's own answer stands."""
    latency_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class Routed(msgspec.Struct, frozen=True):
    """Target of a routed call that cannot begin at once: a model to be loaded, or another server. The call may still be
    refused."""

    model: str
    """The served name of who answers."""
    hops: tuple[Hop, ...]
    """As in `Accepted`."""


class Accepted(msgspec.Struct, frozen=True):
    """The call can be served and has its place in the queue."""

    model: str
    """The served name of who answers."""
    prompt_token_ids: tuple[int, ...]
    hops: tuple[Hop, ...] = ()
    """What others did before, in order, where the request was routed."""
    recorded: str = ""
    """Which recorded request answers and how it was matched, where nothing is computed; empty: a model answers."""


Event = Routed | Accepted | TokenOutput
ShownChunk = tuple[int, int, int]
"""Completion of ``n``, its tokens that are new, and microseconds since the chunk before."""
EventStream = AsyncGenerator[Sequence[Event], None]
"""All that has come since the last turn, in order, and never nothing."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Facts on a served model."""

    name: str
    """The name in requests."""
    aliases: tuple[str, ...]
    root: str
    """Where it came from."""
    created_s: int
    """Unix time of its loading."""
    tier: str
    """``resident`` when it can answer at once; ``loading``, ``failed`` otherwise."""
    max_model_len: int | None
    """None until it is loaded; so are the following."""
    has_chat_template: bool | None
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """Readiness to answer requests. Known without asking the engine's thread."""

    ready: bool
    reason: str
    """Why not, in one sentence; empty when ready."""
    warnings: tuple[str, ...] = ()
    """Warnings for the operator while requests are answered, a sentence each."""
