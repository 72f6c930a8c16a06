"""Manifest values: defines the models, budgets, routing and hosts of a cluster.

Pure: no files, no YAML, no clock. `manifest_file.py` converts between text and these values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from lockstep.artifacts.task import MERGE, Task
from lockstep.cluster.dispatch import DispatchRule, NearestRule
from lockstep.core.balancer import RoutingPolicy

PRIORITIES: Mapping[str, int] = {"critical": -2, "high": -1, "normal": 0, "low": 1}
"""Named priorities; a lower number is served first and evicted last."""

ONE_MODEL = "one-model"
"""Cluster name of a manifest that was built for a single model."""


class Tier(StrEnum):
    """Declared tier of a model."""

    RESIDENT = "resident"
    """Loaded at startup, with its KV pool allocated, and kept ready."""
    STANDBY = "standby"
    """Checked at startup, and loaded when it is needed."""
    REMOTE = "remote"
    """Served by another server."""


class Persona(StrEnum):
    """Position of a model's system prompt."""

    PREFIX = "prefix"
    SUFFIX = "suffix"
    """After the conversation, so that the hops of a request share the conversation's KV."""


@dataclass(frozen=True, slots=True)
class Remote:
    """OpenAI-compatible endpoint."""

    base_url: str
    model: str | None = None
    """Name of the model at the endpoint; None: the entry's id."""
    api_key_env: str | None = None
    """Environment variable that contains the API key."""
    timeout_s: float = 60.0
    only_public: bool = False
    """True if only public addresses may be used, because the manifest's author may not name others. Not a key of the
    text."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One named model: an artifact, a persona and limits."""

    id: str
    source: str
    tier: Tier = Tier.RESIDENT
    set: str | None = None
    """Name of the list that contains the model, e.g. ``specialists``; None: the model has its own key."""
    priority: int = 0
    max_active_sessions: int | None = None
    """Maximum number of sessions whose KV is held on the device; None: the manifest's limit."""
    co_activation: tuple[str, ...] = ()
    """Ids of models whose requests also load this one."""
    promotes_on_intent: bool = False
    """``promotion_hint: on_router_classification``: loading starts as soon as the routing decision is known."""
    aliases: tuple[str, ...] = ()
    system_prompt: str | None = None
    persona: Persona = Persona.PREFIX
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    """Sampling defaults for requests that do not set them."""
    size_bytes: int | None = None
    """Memory that the model needs, if known before it is loaded."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Fields of EngineOptions that override the server's."""
    chat_template: str | None = None
    """Jinja source that replaces the artifact's template; None: the artifact's own template."""
    task: Task | None = None
    """Task of the model; None: the one of its artifact."""
    keep_alive_s: float | None = None
    """Idle time in seconds after which a loaded standby model is unloaded; None: it is only unloaded to make room."""
    adapter: str | None = None
    """Source of a LoRA adapter of the source's model; None: none. Models of one source share a replica, with or without
    adapters."""
    remote: Remote | None = None

    @property
    def variant(self) -> str:
        """Key of its replica among models with the same source: equal options give an equal text."""
        options = sorted((name, repr(value)) for name, value in self.engine.items())
        others = [value for value in (self.chat_template, self.task) if value is not None]
        return repr((options, *others) if others else options)


@dataclass(frozen=True, slots=True)
class Resources:
    """Budgets in bytes; None: the machine's memory is the limit."""

    gpu_budget_bytes: int | None = None
    """Budget of resident weights and KV pools; on the CPU if there is no accelerator."""
    ram_budget_bytes: int | None = None
    """Budget of standby weights and host KV."""
    kv_budget_bytes: int | None = None
    host_kv_budget_bytes: int | None = None
    """Budget of KV in host memory: half of it for sessions whose KV left the device, half as swap space of preempted
    requests."""
    disk_kv_budget_bytes: int | None = None

    @property
    def swap_bytes(self) -> int | None:
        """Swap space of all replicas together; None: each replica has its default."""
        return None if self.host_kv_budget_bytes is None else self.host_kv_budget_bytes // 2


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of the number and duration of sessions whose KV is retained."""

    idle_threshold_s: float | None = 30.0
    """Idle time after which a session's KV may be evicted; None: it is only evicted to make room."""
    min_lifetime_s: float = 0.25
    sweep_interval_s: float = 0.5
    max_active_sessions: int | None = 16
    """Maximum number of sessions of one model; a request without a session counts as one. None: requests do not wait
    for each other, and sessions are retained as far as the engine retains them."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Routing of requests that name no model."""

    entry: str
    rule: DispatchRule | NearestRule


@dataclass(frozen=True, slots=True)
class HostedReplicas:
    """Demand for the replicas of one model across hosts."""

    num: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    """Resources of each replica: ``CPU``, ``memory`` in bytes, and named resources of hosts."""
    spread: bool = False
    """Whether replicas are spread over as many hosts as possible; otherwise over as few."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Hosts on which replicas are placed: the Ray cluster, the replicas of each model, and the security of
    connections."""

    ray: str = "auto"
    """``HOST:PORT`` of a Ray cluster, or ``auto``: the one that this machine belongs to, otherwise a local one."""
    replicas: Mapping[str, HostedReplicas] = field(default_factory=dict)
    """Demands by id of a model; `demand` returns the default for all others."""
    routing: RoutingPolicy = RoutingPolicy.PREFIX
    max_imbalance: int = 4
    """Maximum number of open requests by which a preferred replica may exceed the least loaded one."""
    secret: str = "~/.config/lockstep/secret"
    """Path of the shared secret on every host."""
    tls_ca: str = ""
    """Path of a PEM file on every host, as for the two fields below; empty: no TLS."""
    tls_cert: str = ""
    tls_key: str = ""
    """Path of the private key; empty: the key is in the certificate's file."""
    allows_plain: bool = False
    """Whether prompts may be sent unencrypted between machines."""

    def demand(self, ids: Iterable[str]) -> HostedReplicas:
        """Demand of models that share their replicas: the largest one; of equal ones the first."""
        return max((self.replicas[id_] for id_ in ids if id_ in self.replicas), key=_num, default=HostedReplicas())


def _num(demand: HostedReplicas) -> int:
    return demand.num


@dataclass(frozen=True, slots=True)
class Manifest:
    """Manifest of a cluster; `lockstep.cluster.manifest_file.parse` checks that its names are consistent."""

    cluster: str
    entries: tuple[ModelEntry, ...]
    """Models in order of definition, which breaks ties; the fallback model is the one named by `fallback`."""
    resources: Resources = field(default_factory=Resources)
    routing: Routing | None = None
    fallback: str | None = None
    """Id of the model that answers if the rule selects none."""
    sessions: SessionLimits = field(default_factory=SessionLimits)
    hosts: Hosts | None = None
    """Hosts of the cluster; None: everything runs on this machine."""
    rollouts: object | None = None
    """Block of another package as it was written, in dicts, lists and scalars; its validator is injected."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Warnings about settings that are accepted but should be written differently, one sentence each with its line."""

    @classmethod
    def of_model(
        cls,
        source: str,
        names: Sequence[str],
        chat_template: str | None = None,
        adapters: Mapping[str, str] = {},
    ) -> Manifest:
        """Build a manifest of one resident model. It has no budgets, so the model may use the whole device.

        Args:
            names: served name, then aliases; any text is allowed, even if a manifest file could not contain it.
            adapters: paths of adapters by their served names, each of which becomes a model of the same replica.
        """
        id_, *aliases = dict.fromkeys(names)
        entry = ModelEntry(id_, source, aliases=tuple(aliases), chat_template=chat_template)
        others = [replace(entry, id=name, aliases=(), adapter=path) for name, path in adapters.items()]
        limits = SessionLimits(idle_threshold_s=None, max_active_sessions=None)
        return cls(ONE_MODEL, (entry, *others), sessions=limits)

    def entry(self, id_: str) -> ModelEntry:
        """Model with an id; KeyError: there is none."""
        for entry in self.entries:
            if entry.id == id_:
                return entry
        raise KeyError(id_)

    @property
    def targets(self) -> tuple[str, ...]:
        """Ids that the routing rule may select, in order of definition."""
        return () if self.routing is None else tuple(e.id for e in self.entries if e.set == self.routing.rule.set)


def names_of_source(source: str) -> tuple[str, ...]:
    """Names of a model that is served without a given name: its source, and a short name as an alias.

    The short name of ``hf://org/name@revision#file`` is ``name``, that of ``./dir/model.gguf`` is ``model``, and that
    of ``pocket://`` is ``pocket``. A hub repository is also an alias: ``org/name``. A model with a merged adapter
    has the short name of the adapter.
    """
    if MERGE in source:
        return (source, names_of_source(source.split(MERGE)[-1])[-1])
    scheme, sign, rest = source.rpartition("://")
    path = re.split(r"[?#@]" if sign else r"$", rest or scheme)[0].rstrip("/")
    short = path.rpartition("/")[2].removesuffix(".gguf")
    shorter = (path if scheme == "hf" else "", short)
    return tuple(dict.fromkeys((source, *(name for name in shorter if name not in ("", ".", "..")))))
