"""Snapshots of a cluster: plain values, as `GET /v1/cluster` shows them."""

from __future__ import annotations

from typing import Literal

import msgspec

from lockstep.engine.metrics import HistogramSnapshot

Place = Literal["device", "host", "disk", "none"]


class BudgetSnapshot(msgspec.Struct, frozen=True):
    """One budget of the manifest."""

    name: str
    """``gpu_budget`` or ``ram_budget``."""
    declared_bytes: int | None
    """None: the manifest says nothing."""
    effective_bytes: int | None
    """What holds: cut to what the machine has; None: nothing bounds it."""
    used_bytes: int


class EngineSnapshot(msgspec.Struct, frozen=True):
    """A loaded replica's engine: its limits, its KV pool and what it computes with."""

    max_model_len: int
    max_num_seqs: int
    """Sequences running at once."""
    kv_tokens: int
    kv_bytes: int
    host_kv_tokens: int
    """For the KV of preempted sequences."""
    host_kv_bytes: int
    device: str
    threads: int | None
    """Of a forward pass; None: it has none of its own, as a stub."""
    precision: str
    """Of activations; empty where nothing is computed, as are the next two."""
    kv_precision: str
    quantize: str
    """What float weights were rounded to, or ``none``."""


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
    deterministic: bool | None
    """What the determinism probe found; None: it was not run."""
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
    not said yet, as in what follows, where it may have said only how many."""
    num_host_tokens: int | None = 0
    """Of these, those in host memory."""
    num_disk_tokens: int | None = 0
    """And those on disk, which may be in host memory as well."""
    place: Place | None = "none"
    """The fastest place that has something of it: `device`, `host`, `disk`, `none`."""
    caller: str = ""
    """Name of the API key whose session it is; empty: it came without one."""


class Counters(msgspec.Struct):
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
    """Idle sessions whose KV was given up, least recently used first: for another session, or as nobody came back."""
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
    """``closed``: it is asked; ``open``: it is left alone after its failures; ``half_open``: one request tries."""
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


class ClusterSnapshot(msgspec.Struct, frozen=True):
    """The whole cluster at one moment."""

    cluster: str
    backend: str
    entry: str | None
    """Who routes; None: nobody does."""
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
    counters: Counters
    transitions: tuple[TransitionSnapshot, ...]
    """The latest, oldest first."""
    remotes: tuple[RemoteSnapshot, ...] = ()
    """Of remote models, in order of definition."""
    warnings: tuple[str, ...] = ()
    """What somebody should look after although calls are answered, a sentence each."""
    is_fixed: bool = False
    """It was made of a command line: models and manifest are not changed over HTTP."""


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
