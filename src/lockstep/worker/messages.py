"""Commands and events of a device worker: plain values that are its whole interface.

Commands go in, and events come out. The other side may be a thread, a process or another host. Request ids and ask ids
are chosen by the sender. The events of a replica arrive in the order in which they happened.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from lockstep.artifacts.model import TokenizerParts
from lockstep.artifacts.task import Task
from lockstep.core.policy import SchedulerConfig
from lockstep.core.prefix import ContentNews
from lockstep.core.request import Priority
from lockstep.engine.kv_store import KeptSession
from lockstep.engine.kv_tiers import KVStoreOptions, TierStats
from lockstep.engine.metrics import MetricsSnapshot
from lockstep.engine.options import AdapterSource, LoadOptions
from lockstep.engine.outputs import Started, TokenOutput, WaitReason
from lockstep.engine.request import GenerationRequest
from lockstep.engine.scoring import Scoring, scoring_of
from lockstep.engine.sessions import SessionChange, SessionReport
from lockstep.errors import LockstepError
from lockstep.executors.base import Geometry

IDS_PER_CLIENT = 1 << 40
"""Size of the id range of one network link. The ids of the n-th link start at n times this value, so an id identifies
its link."""
DEFAULT_TRIAL_LIMIT_S = 1800.0
"""Default time limit of a trial in seconds. A trial reads, builds and compiles the model, which takes minutes for large
models or on slow disks."""


class TrialOptions(msgspec.Struct, frozen=True, array_like=True):
    """Options of trials: first loads of a model on this machine, done in a separate, temporary process."""

    enabled: bool = True
    limit_s: float = DEFAULT_TRIAL_LIMIT_S
    """Time limit in seconds. A trial that exceeds it is ended, and the load fails."""
    is_forced: bool = False
    """True to also try a model that has loaded before, because a worker has failed while loading it."""


class _Part(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A value within a command or an event."""


class AskMetrics(_Part, frozen=True):
    """Request metrics, also while a step runs. Answered by MetricsReport."""


class AskHealth(_Part, frozen=True):
    """Request a health report, also while a step runs. Answered by HealthReport."""


class Check(_Part, frozen=True):
    """Check the conservation of blocks and sequences between two steps. Answered by Checked."""


class ResetPrefixCache(_Part, frozen=True):
    """Discard all cached content. Answered by PrefixCacheReset."""


class AskSessions(_Part, frozen=True):
    """List the sessions, between two steps. Answered by SessionsReport."""


class AskKept(_Part, frozen=True):
    """List the sessions that are stored outside of the device, also while a step runs. Answered by KeptReport."""

    environments: tuple[bytes, ...]
    """Environment keys, from `lockstep.executors.base.kv_environment`."""


class Sweep(_Part, frozen=True):
    """Free the blocks of a replica's idle sessions, between two steps. Busy sessions are left unchanged. Answered by
    SweepReport."""

    replica: str
    session_id: str | None = None
    """Id of the selected sessions; None: all ids."""
    owner: str | None = None
    """Owner of the selected sessions; None: all owners."""


class EndSession(_Part, frozen=True):
    """Free the blocks of sessions that have ended. Busy sessions keep no blocks when their requests end. Answered by
    SweepReport."""

    replica: str
    session_id: str
    owner: str | None = None


class UseAdapters(_Part, frozen=True):
    """Set the adapters that requests of a replica can name. Open requests keep theirs. If one of them cannot be used,
    nothing changes. Answered by AdaptersUsed."""

    replica: str
    adapters: tuple[AdapterSource, ...]


Question = AskMetrics | AskHealth | Check | ResetPrefixCache | AskSessions | AskKept | Sweep | EndSession | UseAdapters


class _Command(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Load(_Command, frozen=True):
    """Load a model in a side thread. Answered by Loading events, then Loaded or LoadFailed."""

    replica: str
    """Key that identifies the replica in other commands."""
    source: str
    options: LoadOptions
    trial: TrialOptions
    priority: int = Priority.NORMAL
    """Priority of its steps on the device; see `lockstep.worker.device_scheduler`."""


class OpenStore(_Command, frozen=True):
    """Open the KV store outside of the device, or change its budgets; a budget of 0 disables a tier. Replicas that were
    loaded before the first of these commands do not use the store. Not answered."""

    options: KVStoreOptions


class Prioritise(_Command, frozen=True):
    """Change the priority of a replica that is loading or loaded. Not answered."""

    replica: str
    priority: int


class Unload(_Command, frozen=True):
    """Abort a replica's requests and free it. Answered by Unloaded."""

    replica: str


class Submit(_Command, frozen=True):
    """Send a request. Answered by Refused, or by an acceptance and outputs in Outputs events."""

    request_id: int
    replica: str
    request: GenerationRequest


class Abort(_Command, frozen=True):
    """Abort requests before the replica's next step. Unknown ids are ignored."""

    replica: str
    request_ids: tuple[int, ...]


class Ask(_Command, frozen=True):
    """Send a query. Answered by Answered, with the same id."""

    ask_id: int
    question: Question


class WatchSteps(_Command, frozen=True):
    """Report at most this many steps of each replica per second, in Outputs events. The default, 0, reports none."""

    max_per_s: float


class AnswerShown(_Command, frozen=True):
    """Record the chunks in which a streamed answer was sent to its client, if content is recorded. Not answered."""

    replica: str
    seq_id: int
    """Sequence id of the request's first sequence."""
    chunks: tuple[tuple[int, int, int], ...]
    """Same format as in `lockstep.worker.flight.entries.Shown`."""


class DispatchDecided(_Command, frozen=True):
    """Record a decision by nearest examples. Not answered."""

    replica: str
    """Replica that computed the vector of the message."""
    seq_id: int
    target: str
    """Id of the model that answers; empty: the fallback."""
    scores: tuple[tuple[str, float], ...]


class Stop(_Command, frozen=True):
    """Abort every request, free every replica and exit. Not answered."""


Observation = AnswerShown | DispatchDecided
"""What happened outside of the worker and belongs into its recording."""
Command = Load | OpenStore | Prioritise | Unload | Submit | Abort | Ask | WatchSteps | Observation | Stop


class StepReport(msgspec.Struct, frozen=True, array_like=True):
    """Statistics of one step: its batch and its duration."""

    replica: str
    step: int
    """Step number in its replica."""
    num_sequences: int
    num_tokens: int
    """Tokens computed by the step, of prompts and of answers."""
    num_samples: int
    """Number of sequences that got a token."""
    duration_s: float
    num_unreported: int
    """Number of the replica's steps since the previous report."""


class MetricsReport(_Part, frozen=True):
    replicas: dict[str, MetricsSnapshot]
    tiers: dict[str, TierStats] = {}
    """KV store statistics by tier: host, disk."""


class HealthReport(_Part, frozen=True):
    waiting_s: float
    """Seconds for which work has waited without a completed step; 0: no work waits."""
    num_running: int
    num_waiting: int
    recording_fault: str = ""
    """The reason why nothing is being recorded now; empty: recording works, or is disabled."""
    kv_fault: str = ""
    """The reason why less KV is stored outside of the device than its budgets allow; empty: there is no such limit."""


class Checked(_Part, frozen=True):
    fault: str
    """Description of the inconsistency; empty: there is none."""
    num_open: int
    """Requests that are being prepared, waiting or running."""


class PrefixCacheReset(_Part, frozen=True):
    num_blocks: int
    """Number of discarded blocks."""


class SessionsReport(_Part, frozen=True):
    replicas: dict[str, tuple[SessionReport, ...]]
    """Sessions by replica, least recently used first."""


class KeptReport(_Part, frozen=True):
    sessions: tuple[tuple[KeptSession, ...], ...] | None
    """Sessions of each environment, in the order of the query; None: the store has not been opened yet."""


class SweepReport(_Part, frozen=True, tag="SessionsSwept"):
    """Result of a Sweep or an EndSession: zeros if there is no such replica or session."""

    num_sessions: int
    num_blocks: int
    """Number of blocks that became free. Blocks that others share or use stay."""


class AdaptersUsed(_Part, frozen=True):
    """Result of UseAdapters."""

    error: LockstepError | None = None
    """Reason why nothing was changed."""


Answer = (
    AdaptersUsed | MetricsReport | HealthReport | Checked | PrefixCacheReset | SessionsReport | KeptReport | SweepReport
)


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Loading(_Event, frozen=True):
    """Progress of a load: a new stage, or progress within it."""

    replica: str
    stage: str
    fraction: float
    """Completed fraction of the stage, 0 to 1."""


class TokenizerPayload(msgspec.Struct, frozen=True, array_like=True):
    """All data of a `Tokenizer`, with the full vocabulary."""

    tokenizer_json: str
    """JSON in the format of ``tokenizers``. Large vocabularies take megabytes."""
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    end_token_ids: tuple[int, ...]
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    answer_ids: tuple[int, ...] | None = None
    has_raw_scores: bool = False

    @classmethod
    def of(cls, parts: TokenizerParts) -> TokenizerPayload:
        return cls(
            parts.tokenizer.to_str(),
            parts.chat_template,
            parts.bos_token,
            parts.eos_token,
            parts.end_token_ids,
            dict(parts.prompts),
            parts.default_prompt,
            parts.answer_ids,
            parts.has_raw_scores,
        )

    def parts(self) -> TokenizerParts:
        """Rebuild the tokenizer's parts. Reading a large vocabulary takes a second."""
        from tokenizers import Tokenizer

        return TokenizerParts(
            Tokenizer.from_str(self.tokenizer_json),
            self.chat_template,
            self.bos_token,
            self.eos_token,
            self.end_token_ids,
            self.prompts,
            self.default_prompt,
            self.answer_ids,
            self.has_raw_scores,
        )


class Loaded(_Event, frozen=True):
    """A loaded replica: the measurements of loading, and its tokenizer, so that the server needs no artifact."""

    replica: str
    name: str
    fingerprint: str
    """Fingerprint of the artifact's content."""
    config: SchedulerConfig
    geometry: Geometry
    sampling_defaults: dict[str, float | int]
    environment: dict[str, str]
    """Environment that affects the bits of the results."""
    machine: dict[str, str]
    """Instruction set and threads. They affect speed but not bits."""
    has_hidden_states: bool
    load_s: float
    text: TokenizerPayload
    weights_bytes: int | None = None
    """Memory that the replica takes in addition to its blocks; None: it could not be measured."""
    task: Task = "generate"
    max_model_len: int = 0
    """Maximum tokens of prompt and output together."""
    adapter_bytes: int = 0
    """Memory that is reserved for adapters."""
    adapters: dict[str, tuple[str, tuple[int, ...]]] = {}
    """Fingerprint and invocation tokens of each adapter with which the model was loaded, by name."""

    @property
    def scoring(self) -> Scoring | None:
        """Kind of the scores of pairs of texts; None: the model generates text."""
        return scoring_of(self.task, self.geometry.num_stages)


class LoadFailed(_Event, frozen=True):
    replica: str
    error: LockstepError


class Unloaded(_Event, frozen=True):
    replica: str


class Outputs(_Event, frozen=True):
    """Outputs of one step."""

    accepted: list[int]
    """Requests that entered the queue at the beginning of the step."""
    outputs: list[TokenOutput]
    step: StepReport | None = None
    """Statistics of the step, if steps are watched and this one is due."""
    started: list[Started] = []
    """Requests whose computation began with the step."""
    waits: list[WaitReason] = []
    """Reasons why other requests wait, reported at intervals."""


class Welcome(_Event, frozen=True):
    """First event of a network link. The loaded replicas follow, each as an ordinary Loaded event."""

    first_id: int
    """First id for requests and queries of this link. The link has `IDS_PER_CLIENT` ids."""


class ContentsChanged(_Event, frozen=True):
    """Sent to remote clients: contents that were added to or removed from a replica's prefix cache, in order."""

    replica: str
    news: list[ContentNews]


class Listening(_Event, frozen=True):
    """Sent to the parent process: the address at which the worker listens for gateways."""

    host: str
    port: int
    fault: str = ""
    """The reason why the worker does not listen; empty: it does."""


class Refused(_Event, frozen=True):
    """A request that was rejected before it reached the engine."""

    request_id: int
    error: LockstepError


class Answered(_Event, frozen=True):
    ask_id: int
    answer: Answer


class KVRejected(_Event, frozen=True):
    """A stored KV block did not match what was written. It was removed, and is computed again."""

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
    """Receiver of a link's events, called on the event loop that opened the link."""

    def received(self, event: Event) -> None: ...

    def lost(self, reason: str) -> None:
        """Called once when the worker is lost, except when the link was closed."""
        ...
