"""Snapshots of a cluster: the plain values of `GET /v1/cluster`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from lockstep.artifacts.task import Task
from lockstep.engine.metrics import HistogramSnapshot
from lockstep.errors import HostNotFoundError
from lockstep.spelling import did_you_mean, listed

if TYPE_CHECKING:
    from lockstep.hosts import values

KVLocation = Literal["device", "host", "disk", "none"]


class BudgetSnapshot(msgspec.Struct, frozen=True):
    """One budget of the manifest."""

    name: str
    """Name of the budget: ``gpu_budget`` or ``ram_budget``."""
    declared_bytes: int | None
    """Budget in the manifest in bytes; None: it sets none."""
    effective_bytes: int | None
    """Budget that is enforced, in bytes, at most what the machine has; None: there is no limit."""
    used_bytes: int


class EngineSnapshot(msgspec.Struct, frozen=True):
    """Engine of a loaded replica: its limits, its KV pool and its computation."""

    max_model_len: int
    max_num_seqs: int
    """Maximum number of running sequences."""
    kv_tokens: int
    """Tokens for whose KV, or an encoder's activations, the pool has room, if they belong to one sequence."""
    kv_bytes: int
    host_kv_tokens: int
    """Tokens that fit in the host memory for the KV of preempted sequences, if they belong to one."""
    host_kv_bytes: int
    weights_bytes: int | None
    """Memory of the packed weights in bytes; None: a stub, which has no weights."""
    isa: str
    """Instruction set of the kernels; empty, like the next three fields, for a stub, which computes nothing."""
    threads: int | None
    """Number of threads of a forward pass; None: a stub."""
    kv_precision: str
    quantize: str
    """Type to which float weights were rounded; ``none``: they were not rounded."""
    is_encoder: bool = False
    """True if the pool holds activations of whole texts, and no KV."""

    @property
    def text_limit(self) -> int:
        """Maximum tokens of an encoder's text: its length includes one of output, which there never is."""
        return self.max_model_len - 1


class ReplicaSnapshot(msgspec.Struct, frozen=True):
    """Weights, KV pool and engine, shared by the models with the same artifact."""

    key: str
    source: str
    phase: str
    """Phase of the replica: ``absent``, ``loading``, ``resident`` or ``unloading``."""
    models: tuple[str, ...]
    """Ids of the replica's models, in order of definition."""
    bytes: int
    """Size of weights and KV pool in bytes: measured if the replica was ever loaded, otherwise predicted."""
    predicted_bytes: int
    """Predicted size in bytes, from the manifest or from the sizes of the artifact's files."""
    measured_bytes: int | None
    """Size in bytes measured by the last load; None: the replica was never loaded."""
    load_s: float | None
    """Duration of the last load in seconds; None: the replica was never loaded."""
    num_busy: int
    """Number of calls in progress."""
    num_waiting: int
    """Number of calls that wait for the replica to be loaded."""
    fingerprint: str | None
    """Fingerprint of the artifact's content; None: the replica was never loaded."""
    failure: str | None
    """Reason why the last load failed; None: it did not fail."""
    engine: EngineSnapshot | None = None
    """State of the engine; None: the replica is not loaded."""


class ModelSnapshot(msgspec.Struct, frozen=True):
    """One model of the manifest."""

    id: str
    set: str | None
    source: str
    """Source of the model as the backend serves it."""
    tier: str
    """Tier in the manifest: ``resident``, ``standby`` or ``remote``."""
    state: str
    """Current state: ``resident``, ``standby``, ``loading``, ``unloading``, ``failed`` or ``remote``."""
    reason: str
    """Reason why the model cannot answer; empty: it can, or it is loaded for the next request."""
    priority: int
    aliases: tuple[str, ...]
    replica: str | None
    """Key of the model's replica; None: the model is remote."""
    size_bytes: int
    """Size of the replica in bytes, which several models may share; 0: the model is remote."""
    max_model_len: int | None
    num_requests: int
    """Number of answered requests since the start, including those in progress."""
    num_running: int
    num_waiting: int
    num_sessions: int
    """Number of sessions that the model holds: named and ephemeral ones of requests in progress, and idle ones."""
    max_active_sessions: int | None
    """Maximum number of sessions; None: only the engine's own limit applies."""
    co_activation: tuple[str, ...]
    idle_s: float | None
    """Time in seconds since the model's last answer; None: it has never answered."""
    task: Task | None = None
    """What the model is for: ``generate``, ``embed`` or ``rerank``; None: it is remote."""
    adapter: str | None = None
    """Path of the model's LoRA adapter; None: it has none."""


class SessionSnapshot(msgspec.Struct, frozen=True):
    """One conversation whose KV is retained."""

    id: str
    model: str
    """Model that answered last."""
    state: str
    """State of the session: ``active`` while a request is in progress, ``idle`` after it, and ``dropped`` when its KV
    was evicted from the device and is stored nowhere else."""
    age_s: float
    idle_s: float
    num_requests: int
    num_tokens: int = 0
    """Number of its prompt tokens that all its models together retain on the device."""
    num_stored_tokens: int | None = 0
    """Number of its prompt tokens that are stored in host memory or on disk, whether or not they are on the device too;
    None, like the next three fields: a restarted worker has not reported it yet. A worker may have reported only this
    total."""
    num_host_tokens: int | None = 0
    """Number of the stored tokens that are in host memory."""
    num_disk_tokens: int | None = 0
    """Number of the stored tokens that are on disk; some of them may also be in host memory."""
    place: KVLocation | None = "none"
    """Fastest location that holds part of the session: `device`, `host`, `disk` or `none`."""
    caller: str = ""
    """Name of the API key that the session belongs to; empty: it has none."""


class ClusterCounters(msgspec.Struct):
    """Counters since the start."""

    requests_total: int = 0
    router_hits: int = 0
    """Number of requests that went through the entry model."""
    dispatch_hits: int = 0
    """Number of these requests that the rule sent to a model."""
    dispatch_fallbacks: int = 0
    """Number of these requests that went to the fallback model."""
    promotions: int = 0
    """Number of times that a model became resident after startup."""
    demotions: int = 0
    co_activation_warms: int = 0
    lru_evictions: int = 0
    """Number of idle sessions whose KV was evicted, least recently used first, to make room for another session or
    after a long idle time."""
    model_evictions: int = 0
    """Number of models that were unloaded to make room for others."""


class TransitionSnapshot(msgspec.Struct, frozen=True):
    """A change of a model's state."""

    at_s: float
    """Unix time of the change."""
    model: str
    before: str = msgspec.field(name="from")
    after: str = msgspec.field(name="to")
    reason: str
    duration_ms: float


class RemoteSnapshot(msgspec.Struct, frozen=True):
    """Calls to a remote model and state of its server, since the start."""

    model: str
    breaker: str
    """State of the circuit breaker: ``closed``: all requests are sent; ``open``: no requests are sent, after failures;
    ``half_open``: one trial request is sent."""
    num_open: int
    """Number of calls in progress."""
    requests_total: int
    """Number of calls, including those that the breaker rejected."""
    attempts_total: int
    """Number of requests that were sent; a call may be retried before its first byte."""
    failures_total: int
    """Number of attempts that failed because of the other server, before or after their first byte."""
    refusals_total: int
    """Number of calls that the open breaker rejected."""
    first_byte_s: HistogramSnapshot
    """Histogram of the time from sending an attempt to the first event of its answer."""


class HostSnapshot(msgspec.Struct, frozen=True):
    """One host that replicas may be placed on."""

    name: str
    """Name of the Ray node; its address if it has no name."""
    address: str
    is_there: bool
    is_drained: bool
    """True if the host gets no replicas, and its present ones leave."""
    resources: Mapping[str, float]
    """Total resources: ``CPU``, ``memory`` in bytes, and named ones."""
    free: Mapping[str, float]
    """Resources that are not allocated, in the same form."""
    num_replicas: int
    """Number of replicas on the host, including those that leave."""

    @classmethod
    def of(cls, host: values.Host, places: Sequence[values.ReplicaStatus]) -> HostSnapshot:
        """Make the snapshot of a host from the controller's report.

        Args:
            places: status of all replicas on all hosts.
        """
        num_replicas = sum(place.node_id == host.node_id for place in places)
        state = (host.name, host.address, host.is_there, host.is_drained)
        return cls(*state, dict(host.resources), dict(host.free), num_replicas)


class PlaceSnapshot(msgspec.Struct, frozen=True):
    """One replica of a group: its placement, and its use by this gateway."""

    models: tuple[str, ...]
    """Ids of the models that it serves, in order of definition."""
    key: str
    """Key of its group, which is that of the cluster's replica."""
    number: int
    """Number of the replica within the group, from 0."""
    state: str
    """State of the replica: ``waiting`` for room, ``starting``, ``loading``, ``ready``, ``failed``, ``leaving``, or
    ``unreachable``: placed, but this server is not connected to it."""
    reason: str
    """Reason why it is not ready or, if ready, not reached, in one sentence; empty: there is none, or it is unknown."""
    host: str
    """Name of its host; empty: it is on no host."""
    address: str
    """Address ``host:port`` on which its worker listens; empty: none."""
    pid: int
    """Process id of its worker; 0: there is no worker, or this server is not connected to it."""
    num_starts: int
    """Number of workers that were started for it."""
    num_running: int = 0
    """Number of open requests of this gateway at the replica. The following fields count this gateway's requests
    too."""
    num_cached_blocks: int = 0
    """Number of KV blocks that it has reported to this gateway as cached."""
    routed: Mapping[str, int] = {}
    """Number of requests sent to it since the start, by the reason of the choice: ``session``, ``prefix``, ``load`` or
    ``turn``."""
    num_retried: int = 0
    """Number of these requests that another replica answered, because the worker was lost before their first token."""
    num_away: int = 0
    """Number of times that it was lost, or left its host, after it had been available."""
    away_s: float = 0.0
    """Total time in seconds for which it was unavailable after it had first been available."""

    @property
    def group(self) -> str:
        """Id of the first of its models, after which replicas are named; the group's key if it has no models any
        more."""
        return self.models[0] if self.models else self.key

    @property
    def name(self) -> str:
        """Name of the replica: group and number."""
        return f"{self.group}#{self.number}"

    @property
    def sentence(self) -> str:
        """Reason why it gets no requests of this gateway; empty: it gets requests, or the reason is unknown."""
        state = "gets no requests" if self.state == "ready" else f"is {self.state}"
        return f"{self.name} {state}: {self.reason}" if self.reason else ""

    @property
    def num_routed(self) -> int:
        """Number of requests sent to it since the start."""
        return sum(self.routed.values())

    @classmethod
    def of(
        cls,
        place: values.ReplicaStatus,
        models: Sequence[str] = (),
        use: values.ReplicaUse | None = None,
        *,
        now_s: float = 0.0,
        num_running: int = 0,
        num_cached_blocks: int = 0,
    ) -> PlaceSnapshot:
        """Make the snapshot of a replica from the controller's report and this gateway's counts.

        Args:
            models: ids of the models that it serves.
            use: counts of its use; None: there are none yet.
            now_s: time on the clock of `use`.
            num_running: number of its open requests, from the balancer.
            num_cached_blocks: number of blocks that it holds, from the balancer.
        """
        counted: dict[str, Any] = {}
        if use is not None:
            routed = {why.value: count for why, count in use.routed.items()}
            counted = {"routed": routed, "num_retried": use.num_retried, "num_away": use.num_away}
            counted["away_s"] = round(use.away_s(now_s), 3)
        return cls(
            models=tuple(models),
            key=place.key,
            number=place.number,
            state=place.state.value,
            reason=place.reason,
            host=place.host,
            address=_address(place.address, place.port) if place.port else "",
            pid=place.pid,
            num_starts=place.num_starts,
            num_running=num_running,
            num_cached_blocks=num_cached_blocks,
            **counted,
        )


class ClusterSnapshot(msgspec.Struct, frozen=True):
    """The whole cluster at one moment."""

    cluster: str
    backend: str
    entry: str | None
    """Id of the model that routes requests; None: there is none."""
    fallback: str | None
    is_replacing: bool
    """True while a new manifest is being applied."""
    models: tuple[ModelSnapshot, ...]
    """Models in order of definition."""
    replicas: tuple[ReplicaSnapshot, ...]
    budgets: tuple[BudgetSnapshot, ...]
    sessions: tuple[SessionSnapshot, ...]
    """Sessions that their clients named."""
    sessions_live: int
    """Number of sessions: the named ones, and the ephemeral ones of requests in progress."""
    counters: ClusterCounters
    transitions: tuple[TransitionSnapshot, ...]
    """Latest state changes, oldest first."""
    remotes: tuple[RemoteSnapshot, ...] = ()
    """Remote models in order of definition."""
    warnings: tuple[str, ...] = ()
    """Warnings for the operator that do not prevent answers, one sentence each."""
    is_fixed: bool = False
    """True if the manifest was built from command-line flags, so that HTTP requests cannot change it or its models."""
    hosts: tuple[HostSnapshot, ...] = ()
    """Hosts by name; empty, like `places`, if the manifest has no ``hosts:``."""
    places: tuple[PlaceSnapshot, ...] = ()
    """Replicas on hosts, by group and number."""
    report_age_s: float | None = None
    """Time in seconds since the controller's last report about hosts and replicas; None: the manifest has no
    ``hosts:``."""

    @property
    def reasons(self) -> list[str]:
        """Reasons why models and replicas cannot answer, one sentence each, without those among the warnings."""
        found = [f"{model.id}: {model.reason}" for model in self.models if model.reason]
        return found + [each.sentence for each in self.places if each.sentence not in ("", *self.warnings)]


class Replaced(msgspec.Struct, frozen=True):
    """Result of replacing a manifest."""

    cluster: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]
    num_drained: int
    """Number of calls to removed or changed models that ended normally."""
    num_cut: int
    """Number of calls that were aborted because they did not end within the drain time."""
    duration_ms: float
    warnings: tuple[str, ...] = ()
    """Warnings about settings that are accepted but should be written differently, one sentence each."""


def host_named(hosts: Sequence[HostSnapshot], text: str) -> str:
    """Name of the host with this name or, if there is none, with this address.

    Raises:
        HostNotFoundError: no host has the name or address, or several have the address.
    """
    names = [host.name for host in hosts]
    if text in names:
        return text
    found = list(dict.fromkeys(host.name for host in hosts if host.address == text))
    if len(found) == 1:
        return found[0]
    if found:
        raise HostNotFoundError(f"{text} is the address of {listed(found)}; name one of them", param="name")
    hint = did_you_mean(text, names) or (f"there are {listed(names)}" if names else "no host has been seen yet")
    raise HostNotFoundError(f"no host is called {text!r}; {hint}", param="name")


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
