"""Snapshots of a cluster: plain values, as `GET /v1/cluster` shows them."""

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
    """``gpu_budget`` or ``ram_budget``."""
    declared_bytes: int | None
    """None: the manifest sets none."""
    effective_bytes: int | None
    """What holds: cut to what the machine has; None: nothing bounds it."""
    used_bytes: int


class EngineSnapshot(msgspec.Struct, frozen=True):
    """A loaded replica's engine: its limits, its KV pool and what it computes with."""

    max_model_len: int
    max_num_seqs: int
    """Sequences running at once."""
    kv_tokens: int
    """Tokens for whose KV, or an encoder's activations, the pool has room."""
    kv_bytes: int
    host_kv_tokens: int
    """For the KV of preempted sequences."""
    host_kv_bytes: int
    weights_bytes: int | None
    """As they are packed; None: they are a fiction, as a stub's."""
    isa: str
    """Instruction set of its kernels; empty where nothing is computed, as are the next three."""
    threads: int | None
    """Of a forward pass."""
    kv_precision: str
    quantize: str
    """What float weights were rounded to, or ``none``."""
    is_encoder: bool = False
    """True if the pool holds activations of whole texts, and no KV."""

    @property
    def text_limit(self) -> int:
        """Most tokens of an encoder's text: its length includes one of output, which there never is."""
        return self.max_model_len - 1


class ReplicaSnapshot(msgspec.Struct, frozen=True):
    """Weights, KV pool and engine, shared by the models that name one artifact."""

    key: str
    source: str
    phase: str
    """``absent``, ``loading``, ``resident`` or ``unloading``."""
    models: tuple[str, ...]
    """Ids, in order of definition."""
    bytes: int
    """Weights and KV pool: measured where it was loaded once, predicted before."""
    predicted_bytes: int
    """As declared, or from the sizes of its files."""
    measured_bytes: int | None
    """By its last load; None: it was never loaded."""
    load_s: float | None
    """How long its last load took; None: it was never loaded."""
    num_busy: int
    """Calls that are being answered."""
    num_waiting: int
    """Calls that wait for it to be loaded."""
    fingerprint: str | None
    """Of the artifact's content, once it was loaded."""
    failure: str | None
    """Why its last load failed; None: it did not."""
    engine: EngineSnapshot | None = None
    """None: it is not loaded."""


class ModelSnapshot(msgspec.Struct, frozen=True):
    """One model of the manifest."""

    id: str
    set: str | None
    source: str
    """As the backend serves it."""
    tier: str
    """As declared: ``resident``, ``standby`` or ``remote``."""
    state: str
    """As it is: ``resident``, ``standby``, ``loading``, ``unloading``, ``failed`` or ``remote``."""
    reason: str
    """Why it cannot answer; empty when it can, or would be loaded for it."""
    priority: int
    aliases: tuple[str, ...]
    replica: str | None
    """Key of its replica; None: it is remote."""
    size_bytes: int
    """Of its replica, which others may share; 0: it is remote."""
    max_model_len: int | None
    num_requests: int
    """Answered or being answered since the start."""
    num_running: int
    num_waiting: int
    num_sessions: int
    """Sessions that it holds: those of requests that it answers, ephemeral ones too, and those that are idle."""
    max_active_sessions: int | None
    """None: no bound, but what an engine keeps by itself."""
    co_activation: tuple[str, ...]
    idle_s: float | None
    """Since it last answered; None: it never did."""
    task: Task | None = None
    """What it is for: ``generate``, ``embed`` or ``rerank``; None: it is remote."""


class SessionSnapshot(msgspec.Struct, frozen=True):
    """One conversation that keeps its KV."""

    id: str
    model: str
    """Who answered last."""
    state: str
    """``active`` while a request of it is answered, then ``idle``, and ``dropped`` when its KV was given up on the
    device and is kept nowhere else."""
    age_s: float
    idle_s: float
    num_requests: int
    num_tokens: int = 0
    """Of its prompts, kept on the device by all its models together."""
    num_stored_tokens: int | None = 0
    """Of its prompts, kept in host memory or on disk, beside the device or instead; None: a worker that began anew has
    not reported it yet, as in what follows, where it may have reported only their number."""
    num_host_tokens: int | None = 0
    """Of these, those in host memory."""
    num_disk_tokens: int | None = 0
    """And those on disk, which may be in host memory as well."""
    place: KVLocation | None = "none"
    """The fastest place that has something of it: `device`, `host`, `disk`, `none`."""
    caller: str = ""
    """Name of the API key whose session it is; empty: it came without one."""


class ClusterCounters(msgspec.Struct):
    """Counted since the start."""

    requests_total: int = 0
    router_hits: int = 0
    """Requests that went through the entry model."""
    dispatch_hits: int = 0
    """Of these, those that the rule sent to a model."""
    dispatch_fallbacks: int = 0
    """And those that went to the fallback."""
    promotions: int = 0
    """Models that became resident, after the boot."""
    demotions: int = 0
    co_activation_warms: int = 0
    lru_evictions: int = 0
    """Idle sessions whose KV was evicted, least recently used first: for another session, or after a long idle time."""
    model_evictions: int = 0
    """Models that were unloaded to make room for others."""


class TransitionSnapshot(msgspec.Struct, frozen=True):
    """A change of a model's state."""

    at_s: float
    """Unix time."""
    model: str
    before: str = msgspec.field(name="from")
    after: str = msgspec.field(name="to")
    reason: str
    duration_ms: float


class RemoteSnapshot(msgspec.Struct, frozen=True):
    """A remote model's dealings with its server since the start."""

    model: str
    breaker: str
    """``closed``: it gets requests; ``open``: it gets none after its failures; ``half_open``: one request tries."""
    num_open: int
    """Calls that are being answered."""
    requests_total: int
    """Calls, those that were left alone included."""
    attempts_total: int
    """Requests that were sent; a call may be tried again before its first byte."""
    failures_total: int
    """Attempts that failed, before their first byte or later, by the other server's fault."""
    refusals_total: int
    """Calls that the open breaker kept back."""
    first_byte_s: HistogramSnapshot
    """From sending an attempt to the first event of its answer."""


class HostSnapshot(msgspec.Struct, frozen=True):
    """One host that replicas may be placed on."""

    name: str
    """As its Ray node was named, else its address."""
    address: str
    is_there: bool
    is_drained: bool
    """It gets no replicas, and those that it has leave."""
    resources: Mapping[str, float]
    """All of it: ``CPU``, ``memory`` in bytes, and those by name."""
    free: Mapping[str, float]
    """Of these, those that no one has."""
    num_replicas: int
    """On it now, those that leave included."""

    @classmethod
    def of(cls, host: values.Host, places: Sequence[values.ReplicaStatus]) -> HostSnapshot:
        """A host as the owner tells it.

        Args:
            places: of all replicas, on whatever host.
        """
        num_replicas = sum(place.node_id == host.node_id for place in places)
        of_it = (host.name, host.address, host.is_there, host.is_drained)
        return cls(*of_it, dict(host.resources), dict(host.free), num_replicas)


class PlaceSnapshot(msgspec.Struct, frozen=True):
    """One replica of a group, where it is and how this gateway uses it."""

    models: tuple[str, ...]
    """Ids, in order of definition, that it answers for."""
    key: str
    """Of the group: that of the cluster's replica."""
    number: int
    """In the group, from 0."""
    state: str
    """``waiting`` for room, ``starting``, ``loading``, ``ready``, ``failed``, ``leaving``, or ``unreachable``: placed,
    and without a link to this server."""
    reason: str
    """Why it is not ready, or not reached although it is, in one sentence; empty: it is, or that is unknown."""
    host: str
    """Name of its host; empty: it is on none."""
    address: str
    """``host:port`` where its worker listens; empty: it does not."""
    pid: int
    """Of its worker's process; 0: there is none, or no link to it."""
    num_starts: int
    """Workers that were started for it."""
    num_running: int = 0
    """Requests of this gateway that are under way there, as all that follows is this gateway's."""
    num_cached_blocks: int = 0
    """KV blocks that it has reported to this gateway as cached."""
    routed: Mapping[str, int] = {}
    """Requests that it was given since the start, by why: ``session``, ``prefix``, ``load`` or ``turn``."""
    num_retried: int = 0
    """Of these, those that another replica answered, as its worker was lost before their first token."""
    num_away: int = 0
    """Times that it was lost, or left its host, after it had been there."""
    away_s: float = 0.0
    """Seconds without it, since it was there first."""

    @property
    def group(self) -> str:
        """The first of its models, by which replicas are named; its key if it has none any more."""
        return self.models[0] if self.models else self.key

    @property
    def name(self) -> str:
        """Its group and number."""
        return f"{self.group}#{self.number}"

    @property
    def sentence(self) -> str:
        """Reason why it gets no requests of this gateway; empty: it does, or the reason is unknown."""
        state = "gets no requests" if self.state == "ready" else f"is {self.state}"
        return f"{self.name} {state}: {self.reason}" if self.reason else ""

    @property
    def num_routed(self) -> int:
        """Requests that it was given since the start."""
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
        """A replica as the owner tells its place, and as this gateway counts its use.

        Args:
            models: ids of those that it answers for.
            use: what is counted of it; None: nothing yet.
            now_s: by the clock of `use`.
            num_running: open requests, by the balancer.
            num_cached_blocks: contents that it holds, by the balancer.
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
    """The model that routes; None: none does."""
    fallback: str | None
    is_replacing: bool
    """Whether a new manifest is being brought in."""
    models: tuple[ModelSnapshot, ...]
    """In order of definition."""
    replicas: tuple[ReplicaSnapshot, ...]
    budgets: tuple[BudgetSnapshot, ...]
    sessions: tuple[SessionSnapshot, ...]
    """Only those that were named by their clients."""
    sessions_live: int
    """Named sessions, and the ephemeral ones of requests that are being answered."""
    counters: ClusterCounters
    transitions: tuple[TransitionSnapshot, ...]
    """The latest, oldest first."""
    remotes: tuple[RemoteSnapshot, ...] = ()
    """Of remote models, in order of definition."""
    warnings: tuple[str, ...] = ()
    """Warnings for the operator while calls are answered, a sentence each."""
    is_fixed: bool = False
    """It was made of a command line: models and manifest are not changed over HTTP."""
    hosts: tuple[HostSnapshot, ...] = ()
    """By name; none without ``hosts:`` in the manifest, as of places."""
    places: tuple[PlaceSnapshot, ...] = ()
    """Replicas on hosts, by group and number."""
    report_age_s: float | None = None
    """Since the controller's last report on hosts and replicas; None: the manifest has no ``hosts:``."""

    @property
    def reasons(self) -> list[str]:
        """Reasons why models and replicas cannot answer, a sentence each, without those among the warnings."""
        found = [f"{model.id}: {model.reason}" for model in self.models if model.reason]
        return found + [each.sentence for each in self.places if each.sentence not in ("", *self.warnings)]


class Replaced(msgspec.Struct, frozen=True):
    """Result of a manifest's replacement."""

    cluster: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]
    num_drained: int
    """Calls to what is gone that came to their own end."""
    num_cut: int
    """Calls that were ended because draining took too long."""
    duration_ms: float
    warnings: tuple[str, ...] = ()
    """What of its text was taken and should be written otherwise, a sentence each."""


def host_named(hosts: Sequence[HostSnapshot], text: str) -> str:
    """The name of the host that is called so, or else that alone has this address.

    Raises:
        HostNotFoundError: there is none, or several have it.
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
