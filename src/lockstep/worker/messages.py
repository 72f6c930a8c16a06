"""Commands and events of a device worker: plain values, the whole of its interface.

Commands go in, events come out; the other side may be a thread, a process or another host.
Request ids and ask ids are the sender's. The order of a replica's events is the order in which they happened.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from lockstep.artifacts.model import TokenizerParts
from lockstep.core.policy import SchedulerConfig
from lockstep.core.prefix import ContentNews
from lockstep.core.request import Priority
from lockstep.engine.kv_store import KeptSession
from lockstep.engine.kv_tiers import KVStoreOptions, TierStats
from lockstep.engine.metrics import MetricsSnapshot
from lockstep.engine.options import LoadOptions
from lockstep.engine.outputs import Started, TokenOutput, WaitReason
from lockstep.engine.request import GenerationRequest
from lockstep.engine.sessions import SessionChange, SessionReport
from lockstep.errors import LockstepError
from lockstep.executors.base import Geometry

GUEST_IDS = 1 << 40
"""Ids of one link over a network: those of the n-th begin at n times this, so that an id names its link."""
DEFAULT_TRIAL_LIMIT_S = 1800.0
"""A trial reads, builds and compiles the model: minutes for large ones, on slow disks."""


class TrialOptions(msgspec.Struct, frozen=True, array_like=True):
    """Options of trials: loads of what this machine has never run, in a throw-away process first."""

    enabled: bool = True
    limit_s: float = DEFAULT_TRIAL_LIMIT_S
    """After so many seconds the trial is ended, and the load with it."""
    is_forced: bool = False
    """Also what has come through before: a worker has ended over it."""


class _Part(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A value within a command or an event."""


class AskMetrics(_Part, frozen=True):
    """Metrics, also while a step runs: a MetricsReport."""


class AskHealth(_Part, frozen=True):
    """A sign of life, also while a step runs: a HealthReport."""


class Check(_Part, frozen=True):
    """Assert the conservation of blocks and sequences between two steps: Checked."""


class ResetPrefixCache(_Part, frozen=True):
    """Forget all cached content: PrefixCacheReset."""


class AskSessions(_Part, frozen=True):
    """The sessions that there are, between two steps: a SessionsReport."""


class AskKept(_Part, frozen=True):
    """The sessions that are kept outside of the device, also while a step runs: a KeptReport."""

    environments: tuple[bytes, ...]
    """Keys as of `lockstep.executors.base.kv_environment`."""


class Sweep(_Part, frozen=True):
    """Free what idle sessions of a replica keep, between two steps; busy ones stay: SessionsSwept."""

    replica: str
    session_id: str | None = None
    """None: every session."""
    owner: str | None = None
    """None: every owner's."""


class EndSession(_Part, frozen=True):
    """Sweep sessions that will not come back: those that are busy keep nothing when they end. SessionsSwept."""

    replica: str
    session_id: str
    owner: str | None = None


Question = AskMetrics | AskHealth | Check | ResetPrefixCache | AskSessions | AskKept | Sweep | EndSession


class _Command(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Load(_Command, frozen=True):
    """Load a model in a side thread. Answered by Loading events, then Loaded or LoadFailed."""

    replica: str
    """The key by which other commands name it."""
    source: str
    options: LoadOptions
    trial: TrialOptions
    priority: int = Priority.NORMAL
    """Its class where replicas take turns on the device; see `lockstep.worker.device_scheduler`."""


class OpenStore(_Command, frozen=True):
    """Keep what sessions come back for outside of the device from now on, or with other budgets than before; 0: in no
    tier until there is one. Replicas that were there before the first of these do not. Nothing answers."""

    options: KVStoreOptions


class Prioritise(_Command, frozen=True):
    """Change the class of a replica that is loading or loaded. Nothing answers."""

    replica: str
    priority: int


class Unload(_Command, frozen=True):
    """End a replica's requests with ``abort`` and free it. Answered by Unloaded."""

    replica: str


class Submit(_Command, frozen=True):
    """Send a request. Answered by Refused, or by an acceptance and outputs in Outputs events."""

    request_id: int
    replica: str
    request: GenerationRequest


class Abort(_Command, frozen=True):
    """End requests before the replica's next step; unknown ids are left alone."""

    replica: str
    request_ids: tuple[int, ...]


class Ask(_Command, frozen=True):
    """Ask a question. Answered by Answered, with the same id."""

    ask_id: int
    question: Question


class WatchSteps(_Command, frozen=True):
    """Report so many steps of each replica in a second at most, in Outputs events; 0, as in the beginning: none."""

    max_per_s: float


class AnswerShown(_Command, frozen=True):
    """Record in which chunks a streamed answer was shown to its client; where content is recorded. Nothing answers."""

    replica: str
    seq_id: int
    """First sequence of its request."""
    chunks: tuple[tuple[int, int, int], ...]
    """As `lockstep.worker.flight.entries.Shown` has them."""


class Stop(_Command, frozen=True):
    """End every request, free every replica and end. Nothing answers."""


Command = Load | OpenStore | Prioritise | Unload | Submit | Abort | Ask | WatchSteps | AnswerShown | Stop


class StepReport(msgspec.Struct, frozen=True, array_like=True):
    """One step in figures: what it batched, and how long it took."""

    replica: str
    step: int
    """Its number in its replica."""
    num_sequences: int
    num_tokens: int
    """Computed by it, of prompts and of answers."""
    num_samples: int
    """Sequences that got a token."""
    duration_s: float
    num_unreported: int
    """Steps of the replica between the report before and this one."""


class MetricsReport(_Part, frozen=True):
    replicas: dict[str, MetricsSnapshot]
    tiers: dict[str, TierStats] = {}
    """Of the KV store: host, disk."""


class HealthReport(_Part, frozen=True):
    waiting_s: float
    """Seconds for which work has waited without a step being completed; 0: nothing waits."""
    num_running: int
    num_waiting: int
    recording_fault: str = ""
    """Why nothing is being recorded now; empty: it is, or nothing is to be."""
    kv_fault: str = ""
    """Why less KV is kept outside of the device than its budgets allow; empty: it is not."""


class Checked(_Part, frozen=True):
    fault: str
    """What is not conserved; empty when all is well."""
    num_open: int
    """Requests that are being prepared, waiting or running."""


class PrefixCacheReset(_Part, frozen=True):
    num_blocks: int
    """Blocks that were forgotten."""


class SessionsReport(_Part, frozen=True):
    replicas: dict[str, tuple[SessionReport, ...]]
    """Least recently used first."""


class KeptReport(_Part, frozen=True):
    sessions: tuple[tuple[KeptSession, ...], ...] | None
    """Of each environment, in the order of the question; None: what is kept is not known yet."""


class SessionsSwept(_Part, frozen=True):
    """Effect of a Sweep or an EndSession: nothing, where no such replica or session is there."""

    num_sessions: int
    num_blocks: int
    """That became free; what others share or use stays."""


Answer = MetricsReport | HealthReport | Checked | PrefixCacheReset | SessionsReport | KeptReport | SessionsSwept


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Loading(_Event, frozen=True):
    """A load has come to a stage, or further within it."""

    replica: str
    stage: str
    fraction: float
    """Of the stage, 0 to 1."""


class TokenizerPayload(msgspec.Struct, frozen=True, array_like=True):
    """Tokenizer payload: all that a `Tokenizer` is made of, with the vocabulary written out."""

    tokenizer_json: str
    """As ``tokenizers`` writes it; large vocabularies take megabytes."""
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    end_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, parts: TokenizerParts) -> TokenizerPayload:
        return cls(parts.tokenizer.to_str(), parts.chat_template, parts.bos_token, parts.eos_token, parts.end_token_ids)

    def parts(self) -> TokenizerParts:
        """The parts that it was made of; a large vocabulary takes a second to read."""
        from tokenizers import Tokenizer

        return TokenizerParts(
            Tokenizer.from_str(self.tokenizer_json),
            self.chat_template,
            self.bos_token,
            self.eos_token,
            self.end_token_ids,
        )


class Loaded(_Event, frozen=True):
    """A loaded replica: what loading measured, and its tokenizer, so that the server needs no artifact."""

    replica: str
    name: str
    fingerprint: str
    """Of the artifact's content."""
    config: SchedulerConfig
    geometry: Geometry
    sampling_defaults: dict[str, float | int]
    environment: dict[str, str]
    """What the bits depend on."""
    machine: dict[str, str]
    """Instruction set and threads: speed depends on them, bits do not."""
    has_hidden_states: bool
    load_s: float
    text: TokenizerPayload
    weights_bytes: int | None = None
    """Memory that it takes beside its blocks; None: it could not be measured."""


class LoadFailed(_Event, frozen=True):
    replica: str
    error: LockstepError


class Unloaded(_Event, frozen=True):
    replica: str


class Outputs(_Event, frozen=True):
    """Outputs of one step."""

    accepted: list[int]
    """Requests that got their place in the queue at the beginning of the step."""
    outputs: list[TokenOutput]
    step: StepReport | None = None
    """The step in figures, where it was requested and it is its turn to be reported."""
    started: list[Started] = []
    """Requests whose computation began with the step."""
    waits: list[WaitReason] = []
    """Reasons why others wait, now and then."""


class Welcome(_Event, frozen=True):
    """First event of a link over a network. What is loaded follows, each as if it had just come."""

    first_id: int
    """Of the ids for requests and questions on this link; there are `GUEST_IDS` of them."""


class ContentsChanged(_Event, frozen=True):
    """To remote clients: contents that a replica's prefix cache holds from now on, or no longer, in their order."""

    replica: str
    news: list[ContentNews]


class Listening(_Event, frozen=True):
    """To the owner: where the worker listens for gateways on a network."""

    host: str
    port: int
    fault: str = ""
    """Why it does not; empty: it does."""


class Refused(_Event, frozen=True):
    """A request that the engine never saw."""

    request_id: int
    error: LockstepError


class Answered(_Event, frozen=True):
    ask_id: int
    answer: Answer


class KVRejected(_Event, frozen=True):
    """A kept KV block was not what had been written; it was removed, and is computed again."""

    reason: str


class SessionsChanged(_Event, frozen=True):
    """Changes of a replica's sessions in one step, or by one command."""

    replica: str
    changes: list[SessionChange]


Event = (
    Loading
    | Loaded
    | LoadFailed
    | Unloaded
    | Outputs
    | ContentsChanged
    | Listening
    | Welcome
    | Refused
    | Answered
    | SessionsChanged
    | KVRejected
)


class Handler(Protocol):
    """Receiver of what a link brings, called on the event loop that opened it."""

    def received(self, event: Event) -> None: ...

    def lost(self, reason: str) -> None:
        """The worker is gone, and not because the link was closed; called once."""
        ...
