"""Cluster protocol: the one interface of the server to its models, whether there is one or many.

`Cluster.stream` answers a request with batches of events: first `Accepted`, alone, then a `TokenOutput` for what each
step brought to each of the ``n`` completions; the very last one carries the whole answer. Before `Accepted` comes
`Routed`, alone, where the request was routed to one who cannot begin at once. A non-streaming answer is the collected
stream, and leaving the stream is the abort.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from lockstep.cluster.events import EventLog
from lockstep.cluster.snapshot import ClusterSnapshot, Replaced, SessionSnapshot
from lockstep.cluster.trust import NONE, Powers
from lockstep.engine.metrics import MetricsSnapshot
from lockstep.engine.outputs import TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import LockstepError


class Hop(msgspec.Struct, frozen=True):
    """A model's finished part of a routed request."""

    model: str
    completion: str
    """What it said."""
    intent: str | None
    """What was read from it; None: nothing that the rule knows."""
    target: str | None
    """Who answers next, as ``set.id`` or an id; None: nobody, the hop's own answer stands."""
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


Event = Routed | Accepted | TokenOutput
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
    deterministic: bool | None
    """What the determinism probe found at load; None also where it was not run."""
    has_chat_template: bool | None
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests will be answered. Known without asking the engine's thread."""

    ready: bool
    reason: str
    """Why not, in one sentence; empty when ready."""
    warnings: tuple[str, ...] = ()
    """What somebody should look after although requests are answered, a sentence each."""


def recording_warnings(*faults: str) -> tuple[str, ...]:
    """The warning that something is to be recorded and is not; none where every fault is empty."""
    why = "; ".join(dict.fromkeys(filter(None, faults)))
    return (f"nothing is recorded now: {why}; requests are answered all the same",) if why else ()


class Cluster(Protocol):
    """Server of requests by one model or many. Used from one event loop."""

    def cards(self) -> tuple[ModelCard, ...]:
        """Every model that is served, in order of definition."""
        ...

    def card(self, name: str | None) -> ModelCard:
        """The model of a name or alias; ModelNotFoundError when there is none."""
        ...

    def tokenizer(self, name: str | None) -> Tokenizer:
        """A model's text side; ModelNotFoundError, or UnavailableError until it is loaded."""
        ...

    def stream(self, request: GenerationRequest) -> EventStream:
        """Answer a request. Leaving the stream early aborts it within one step.

        Raises (from the first ``anext``, as far as it is known by then):
            ModelNotFoundError, InvalidParameterError, PromptTooLongError, ChatTemplateError: it can never be served.
            QueueFullError, UnavailableError: not now.
            QueueDeadlineError, DeadlineError, RequestFailedError, WorkerLostError: accepted, then ended.
        """
        ...

    async def metrics(self) -> Mapping[str, MetricsSnapshot]:
        """Metrics by model; answered also while a step is running."""
        ...

    def health(self) -> Health: ...

    async def check(self) -> str:
        """Which invariant of the KV blocks does not hold, looked at between two steps; empty when all do."""
        ...

    async def reset_prefix_cache(self) -> int:
        """Forget what is cached and not in use; how many blocks that were."""
        ...

    @property
    def num_open(self) -> int:
        """Calls that are being answered."""
        ...

    async def prepare(self) -> None:
        """Open and weigh what is on this machine; nothing is fetched or loaded. LockstepError: `start` would be in
        vain."""
        ...

    async def start(self) -> None:
        """Load what is to be served; returns when it can answer. LockstepError: it cannot be loaded."""
        ...

    def abort_all(self, error: LockstepError) -> None:
        """End every open call with this error."""
        ...

    async def close(self) -> None:
        """End what is open, free the models and end the processes that were started."""
        ...

    # -- from above -----------------------------------------------------------------------------------------------

    @property
    def events(self) -> EventLog: ...

    def snapshot(self) -> ClusterSnapshot:
        """UnavailableError until its models have been opened."""
        ...

    @property
    def is_fixed(self) -> bool:
        """Whether no request may change what is served: it was made of a command line, and has no manifest to show.
        The five that follow are for others."""
        ...

    def manifest_text(self) -> str:
        """The effective manifest as YAML; `replace` takes it."""
        ...

    def manifest_plain(self) -> Mapping[str, Any]:
        """The same as maps, lists and scalars; `replace` takes it as JSON."""
        ...

    async def replace(self, text: str, environment: Mapping[str, str] | None = None, powers: Powers = NONE) -> Replaced:
        """Bring a new manifest in, as one unit.

        Args:
            environment: what the text may refer to; None: to nothing, as it came from the network.
            powers: of who sent it over the network; the operator's own text has all.

        Raises:
            ManifestError: it has faults. Nothing has changed, as with all that follow.
            UnavailableError: another one is being brought in.
            LockstepError: what it names does not fit the budgets, or cannot be loaded.
        """
        ...

    async def load_model(self, id_: str) -> None:
        """Promote a model; returns when it can answer at once.

        Raises:
            ModelNotFoundError: there is none of that id or alias.
            InvalidParameterError: it is remote.
            LockstepError: it cannot be loaded.
        """
        ...

    async def unload_model(self, id_: str) -> None:
        """Demote a model; returns when its calls have ended and its memory is free.

        Raises:
            ModelNotFoundError, InvalidParameterError: as in `load_model`.
        """
        ...

    def sessions(self) -> tuple[SessionSnapshot, ...]: ...

    async def end_session(self, id_: str) -> None:
        """Forget a session and give up its KV; SessionNotFoundError when nobody knows it."""
        ...
