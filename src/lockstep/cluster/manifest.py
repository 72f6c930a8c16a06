"""The manifest as values: which models there are, under which budgets, and how requests find them.

Closed: no files, no YAML, no clock. `manifest_file.py` makes one of text and text of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lockstep.cluster.dispatch import DispatchRule
from lockstep.core.balancer import RoutingPolicy

PRIORITIES: Mapping[str, int] = {"critical": -2, "high": -1, "normal": 0, "low": 1}
"""Names of priority classes; lower is served first, and evicted last."""

ONE_MODEL = "one-model"
"""What a cluster is called that was made of one model."""


class Tier(StrEnum):
    """Intended place of a model."""

    RESIDENT = "resident"
    """Compiled, its KV pool allocated, ready."""
    STANDBY = "standby"
    """Checked and in reach: promoted to resident when it is needed."""
    REMOTE = "remote"
    """Answered by another server."""


class Persona(StrEnum):
    """Place of a model's system prompt."""

    PREFIX = "prefix"
    SUFFIX = "suffix"
    """After the conversation, so that the hops of a request share the conversation's KV."""


@dataclass(frozen=True, slots=True)
class Remote:
    """An OpenAI-compatible endpoint."""

    base_url: str
    model: str | None = None
    """Its name there; None: the entry's id."""
    api_key_env: str | None = None
    """The environment variable that holds its key."""
    timeout_s: float = 60.0
    only_public: bool = False
    """Whether only public addresses are connected to, since its author may not name others. Not a key of the text."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One named model: an artifact, a persona and limits."""

    id: str
    source: str
    tier: Tier = Tier.RESIDENT
    set: str | None = None
    """The list that it stands in, e.g. ``specialists``; None: it stands by its own key."""
    priority: int = 0
    max_active_sessions: int | None = None
    """Sessions whose KV is held on the device; None: the manifest's."""
    co_activation: tuple[str, ...] = ()
    """Models whose requests warm this one."""
    promotes_on_intent: bool = False
    """``promotion_hint: on_router_classification``: promoted as soon as the intent is known."""
    aliases: tuple[str, ...] = ()
    system_prompt: str | None = None
    persona: Persona = Persona.PREFIX
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    """Defaults of SamplingParams for requests that say nothing."""
    size_bytes: int | None = None
    """What it needs in memory, where that is known before it is loaded."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Fields of EngineOptions that are other than the server's."""
    chat_template: str | None = None
    """Jinja source in the place of the artifact's; None: the artifact's own."""
    keep_alive_s: float | None = None
    """Idle seconds after which a promoted standby model is demoted; None: only to make room."""
    remote: Remote | None = None

    @property
    def variant(self) -> str:
        """Key of its replica among models of its source: the same text for the same options."""
        options = sorted((name, repr(value)) for name, value in self.engine.items())
        return repr(options if self.chat_template is None else (options, self.chat_template))


@dataclass(frozen=True, slots=True)
class Resources:
    """Budgets in bytes; None: what the machine has."""

    gpu_budget_bytes: int | None = None
    """Of resident weights and KV pools; on the CPU where there is no accelerator."""
    ram_budget_bytes: int | None = None
    """Of standby weights and host KV."""
    kv_budget_bytes: int | None = None
    host_kv_budget_bytes: int | None = None
    """Half of it for sessions that left the device, half as swap space of preempted requests."""
    disk_kv_budget_bytes: int | None = None

    @property
    def swap_bytes(self) -> int | None:
        """Swap space of all replicas; None: each has its default."""
        return None if self.host_kv_budget_bytes is None else self.host_kv_budget_bytes // 2


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of the conversations that keep their KV: how many, and how long."""

    idle_threshold_s: float | None = 30.0
    """Unused for so long, a session's KV may go; None: only for others' room."""
    min_lifetime_s: float = 0.25
    sweep_interval_s: float = 0.5
    max_active_sessions: int | None = 16
    """Of one model, requests without a session counted as one each; None: no request waits for another, and named
    sessions are kept as far as an engine keeps them by itself."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Routing of requests that name no model."""

    entry: str
    rule: DispatchRule


@dataclass(frozen=True, slots=True)
class HostedReplicas:
    """Replicas of one model, as they are wanted across hosts."""

    num: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    """Of each: ``CPU``, ``memory`` in bytes, and resources that hosts were given by name."""
    spread: bool = False
    """Whether on as many hosts as there are; else as few."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Hosts that replicas are placed on: who places them, how many there are, and whom links to them believe."""

    ray: str = "auto"
    """``HOST:PORT`` of a Ray cluster, or ``auto``: the one that this machine belongs to, else a local one."""
    replicas: Mapping[str, HostedReplicas] = field(default_factory=dict)
    """By id of a model; `demand` returns the default for all others."""
    routing: RoutingPolicy = RoutingPolicy.PREFIX
    max_imbalance: int = 4
    """Open requests that a preferred replica may have more than the least loaded one."""
    secret: str = "~/.config/lockstep/secret"
    """Path of the shared secret on every host."""
    tls_ca: str = ""
    """Path of a PEM file on every host, as the two below; empty: no TLS."""
    tls_cert: str = ""
    tls_key: str = ""
    """Empty: the key is in the certificate's file."""
    allows_plain: bool = False
    """Whether prompts may travel in clear beyond a machine."""

    def demand(self, ids: Iterable[str]) -> HostedReplicas:
        """Replicas of models that share them: the demand of the one that wants the most, the first of equal ones."""
        return max((self.replicas[id_] for id_ in ids if id_ in self.replicas), key=_num, default=HostedReplicas())


def _num(demand: HostedReplicas) -> int:
    return demand.num


@dataclass(frozen=True, slots=True)
class Manifest:
    """A cluster as its author wants it; `lockstep.cluster.manifest_file.parse` checks that its names fit each other."""

    cluster: str
    entries: tuple[Entry, ...]
    """In order of definition, which breaks ties; the fallback is the one of `fallback`."""
    resources: Resources = field(default_factory=Resources)
    routing: Routing | None = None
    fallback: str | None = None
    """Id of the model that answers when the rule names none."""
    sessions: SessionLimits = field(default_factory=SessionLimits)
    hosts: Hosts | None = None
    """None: everything runs on this machine."""
    rollouts: object | None = None
    """Another room's block, as it was written, in dicts, lists and scalars; its validator is injected."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Warnings about what was accepted and should be written differently: a sentence each, with its line."""

    @classmethod
    def of_model(cls, source: str, names: Sequence[str], chat_template: str | None = None) -> Manifest:
        """A manifest of one resident model that has the device alone: without budgets, nothing is kept for others.

        Args:
            names: its served name, then aliases; any text, also where a manifest's file could not write it.
        """
        id_, *aliases = dict.fromkeys(names)
        entry = Entry(id_, source, aliases=tuple(aliases), chat_template=chat_template)
        return cls(ONE_MODEL, (entry,), sessions=SessionLimits(idle_threshold_s=None, max_active_sessions=None))

    def entry(self, id_: str) -> Entry:
        """The model of an id; KeyError when there is none."""
        for entry in self.entries:
            if entry.id == id_:
                return entry
        raise KeyError(id_)

    @property
    def targets(self) -> tuple[str, ...]:
        """Ids that the routing's rule may name, in order of definition."""
        return () if self.routing is None else tuple(e.id for e in self.entries if e.set == self.routing.rule.set)


def names_of_source(source: str) -> tuple[str, ...]:
    """Names of a model that is served without a name of its own: its source, and the short name as an alias.

    The short name of ``hf://org/name@revision#file`` is ``name``, that of ``./dir/model.gguf`` is ``model``, and that
    of ``pocket://`` is ``pocket``. A hub's repository is an alias too: ``org/name``.
    """
    scheme, sign, rest = source.rpartition("://")
    path = re.split(r"[?#@]" if sign else r"$", rest or scheme)[0].rstrip("/")
    short = path.rpartition("/")[2].removesuffix(".gguf")
    shorter = (path if scheme == "hf" else "", short)
    return tuple(dict.fromkeys((source, *(name for name in shorter if name not in ("", ".", "..")))))
