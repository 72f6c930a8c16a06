"""Cluster types: defines the events of an answer, and the description of models and health for clients.

An answer is a stream of batches of events: first `Accepted`, alone, then a `TokenOutput` for the result of each step
for each of the ``n`` completions. The last one carries the whole answer. If the request is routed to a model that
cannot start at once, `Routed` comes alone before `Accepted`. A non-streaming answer collects the stream; closing the
stream aborts the request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import msgspec

from lockstep.artifacts.task import Task
from lockstep.engine.outputs import TokenOutput
from lockstep.engine.scoring import Scoring
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import UnavailableError


class Hop(msgspec.Struct, frozen=True):
    """Completed part of a routed request by one model."""

    model: str
    completion: str
    """Answer of the model."""
    intent: str | None
    """Value that the rule read from the answer; None: the answer matches none of the rule's values."""
    target: str | None
    """Model that answers next, as ``set.id`` or an id; None: the hop's own answer is returned."""
    latency_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    scores: tuple[tuple[str, float], ...] = ()
    """Best cosine of each model's examples, if the nearest example decided; the completion is then empty."""


class Routed(msgspec.Struct, frozen=True):
    """Routed call whose target cannot start at once, because it has to be loaded or is remote. The call may still be
    rejected."""

    model: str
    """Served name of the target model."""
    hops: tuple[Hop, ...]
    """Hops as in `Accepted`."""


class Accepted(msgspec.Struct, frozen=True):
    """The call can be served and is in the queue."""

    model: str
    """Served name of the answering model."""
    prompt_token_ids: tuple[int, ...]
    hops: tuple[Hop, ...] = ()
    """Earlier hops of a routed request, in order."""
    recorded: str = ""
    """Recorded request that is replayed, and how it was matched; empty: a model answers."""


Event = Routed | Accepted | TokenOutput
ShownChunk = tuple[int, int, int]
"""Index of the completion, number of its new tokens, and microseconds since the previous chunk."""
EventStream = AsyncGenerator[Sequence[Event], None]
"""Batches of events: all that arrived since the last iteration, in order; a batch is never empty."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Description of a served model."""

    name: str
    """Name to use in requests."""
    aliases: tuple[str, ...]
    root: str
    """Source of the model."""
    created_s: int
    """Unix time at which the server was created."""
    tier: str
    """``resident`` if the model can answer at once, otherwise e.g. ``loading`` or ``failed``."""
    max_model_len: int | None
    """Context length; None, like the following fields, until the model is loaded."""
    has_chat_template: bool | None
    parent: str | None = None
    """Model of the same replica that this one adds an adapter or a persona to; None: there is none."""
    adapter: str | None = None
    """Path of its LoRA adapter; None: it has none."""
    task: Task | None = None
    """What the model is for; None: a remote model."""
    scoring: Scoring | None = None
    """How the model scores pairs of texts; None: it does not, or it was never loaded."""
    text: Tokenizer | None = field(default=None, repr=False, compare=False)
    """Tokenizer and chat template; None: the model is loading."""
    absence: str = "the model is loading"
    """Reason why there is no tokenizer yet, in one sentence."""

    @property
    def shown_max_model_len(self) -> int | None:
        """Context length for clients. Without text as the answer it is the length of the longest text, since no token
        of output follows."""
        has_output = self.task in (None, "generate")
        return self.max_model_len if self.max_model_len is None or has_output else self.max_model_len - 1

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer and chat template of the model.

        Raises:
            UnavailableError: the model is loading.
        """
        if self.text is None:
            raise UnavailableError(self.absence)
        return self.text


@dataclass(frozen=True, slots=True)
class Health:
    """Readiness to serve requests. It is available without a query to the engine's thread."""

    ready: bool
    reason: str
    """Reason why requests cannot be served, in one sentence; empty if ready."""
    warnings: tuple[str, ...] = ()
    """Warnings for the operator that do not affect readiness, one sentence each."""
