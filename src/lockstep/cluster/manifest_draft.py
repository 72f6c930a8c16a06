"""Manifest drafts: holds what could be read of a manifest, and checks its parts against each other, e.g. for unknown
names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockstep.cluster.dispatch import NONE_OF_THESE, DispatchRule
from lockstep.cluster.manifest import Hosts, Manifest, ModelEntry, Resources, Routing, SessionLimits, Tier
from lockstep.cluster.nearest import NearestRule
from lockstep.cluster.quantities import size_text
from lockstep.spelling import did_you_mean, listed
from lockstep.yaml_reading import Reading

MAX_LISTED = 8
"""Maximum number of models listed in a message about budgets."""


@dataclass(slots=True)
class EntryDraft:
    """One model's entry, as far as it could be read."""

    where: str
    """Path of the entry from the top of the manifest, e.g. ``models.chat``."""
    set: str | None
    """Name of the list that contains the model; None: the model has its own key."""
    id: str | None
    """Id of the model; None: no id could be read."""
    fields: dict[str, Any]
    id_where: str = ""
    """Path of the id."""

    def entry(self) -> ModelEntry:
        """Build the entry; the draft must be valid."""
        tier = {"tier": Tier.REMOTE} if "remote" in self.fields else {}
        return ModelEntry(**{"id": self.id, "set": self.set, **self.fields, **tier})

    @property
    def is_remote(self) -> bool:
        return "remote" in self.fields or self.fields.get("tier") is Tier.REMOTE

    @property
    def replica_key(self) -> object:
        """Key that is equal for models that share a replica, as far as the text determines it."""
        fields = self.fields
        engine = repr(sorted(fields.get("engine", {}).items()))
        return (fields.get("source"), engine, fields.get("chat_template"), fields.get("task"))


@dataclass(slots=True)
class ManifestDraft:
    """Manifest as far as it could be read, by its keys."""

    cluster: str | None = None
    resources: dict[str, int] = field(default_factory=dict)
    models: list[EntryDraft] = field(default_factory=list)
    fallback: EntryDraft | str | None = None
    """Draft of the fallback model, or the id of another model."""
    routing: dict[str, Any] = field(default_factory=dict)
    """Fields of `Routing`."""
    sessions: dict[str, Any] = field(default_factory=dict)
    hosts: dict[str, Any] | None = None
    """Fields of `Hosts`."""
    rollouts: Any = None

    @property
    def entries(self) -> list[EntryDraft]:
        return [*self.models, *([self.fallback] if isinstance(self.fallback, EntryDraft) else [])]

    @property
    def ids(self) -> list[str]:
        return [entry.id for entry in self.entries if entry.id is not None]

    @property
    def fallback_id(self) -> str | None:
        return self.fallback.id if isinstance(self.fallback, EntryDraft) else self.fallback

    def manifest(self, notes: tuple[str, ...]) -> Manifest:
        """Build the manifest; the draft must be valid."""
        return Manifest(
            cluster=str(self.cluster),
            entries=tuple(entry.entry() for entry in self.entries),
            resources=Resources(**self.resources),
            routing=Routing(**self.routing) if self.routing else None,
            fallback=self.fallback_id,
            sessions=SessionLimits(**self.sessions),
            hosts=None if self.hosts is None else Hosts(**self.hosts),
            rollouts=self.rollouts,
            notes=notes,
        )


class AuthorCheck(Protocol):
    """Check of a manifest's author: reports names of files and servers that the author may not use
    (cluster/manifest_permissions.py)."""

    def entry(self, entry: EntryDraft, reading: Reading) -> None:
        """Check the files and servers that a model names."""
        ...

    def hosts(self, fields: dict[str, Any] | None, reading: Reading) -> None:
        """Check the files and addresses in ``hosts:``; None: the manifest has no such block."""
        ...


def check_draft(draft: ManifestDraft, reading: Reading) -> None:
    """Report every problem between entries: unknown names, duplicate names, and budgets that are too small."""
    _check_names(draft, reading)
    for entry in draft.entries:
        _check_entry(entry, draft, reading)
    if draft.fallback_id is not None:
        _check_fallback(draft, draft.fallback_id, reading)
    if "entry" in draft.routing:
        _check_known("routing.entry", draft.routing["entry"], draft.ids, reading)
    rule = draft.routing.get("rule")
    if isinstance(rule, NearestRule):
        _check_nearest(draft, rule, reading)
    elif rule is not None:
        _check_rule(draft, rule, reading)
    _check_replicas(draft, reading)
    _check_bytes(draft, reading)


def _check_known(where: str, name: str, known: Sequence[str], reading: Reading, what: str = "models") -> bool:
    if name in known:
        return True
    hint = did_you_mean(name, known) or (f"known {what} are {listed(known)}" if known else f"there are no {what}")
    reading.fault(where, f"names {name!r}, which is none of the {what}; {hint}")
    return False


def _check_names(draft: ManifestDraft, reading: Reading) -> None:
    """Check that ids, aliases and the cluster's name are unique, because a request may use each as ``model``."""
    ids = [(entry.id, entry.id_where) for entry in draft.entries if entry.id is not None]
    aliases = [each for entry in draft.entries for each in _values_with_paths(entry, "aliases", reading)]
    taken: dict[str, str] = {}
    for index, (called, where) in enumerate([*ids, *aliases]):
        is_id = index < len(ids)
        is_cluster = called == draft.cluster and not (is_id and called == draft.routing.get("entry"))
        if called in taken:
            kinds = "ids" if is_id else "ids and aliases"
            line = reading.line(taken[called])
            reading.fault(where, f"is {called!r}, which line {line} already uses; {kinds} must be unique")
        elif is_cluster:
            way_out = "rename one" if is_id else "choose another"
            reading.fault(where, f"is {called!r}, the cluster's name, which stands for routing; {way_out}")
        if is_id or not is_cluster:
            taken.setdefault(called, where)


def _values_with_paths(entry: EntryDraft, key: str, reading: Reading) -> list[tuple[str, str]]:
    """Values of a key that takes one value or a list, each with its path."""
    where = f"{entry.where}.{key}"
    places = [(value, f"{where}[{index}]") for index, value in enumerate(entry.fields.get(key, ()))]
    return [(value, item if item in reading.lines else where) for value, item in places]


def _check_entry(entry: EntryDraft, draft: ManifestDraft, reading: Reading) -> None:
    for other, where in _values_with_paths(entry, "co_activation", reading):
        if other == entry.id:
            reading.fault(where, f"is {other!r}, the model itself; name the models whose requests warm it")
        else:
            _check_known(where, other, draft.ids, reading)
    tier = entry.fields.get("tier")
    if "remote" in entry.fields and tier not in (None, Tier.REMOTE):
        message = f"is {tier.value!r}, but `remote:` names a server; write remote or leave one out"
        reading.fault(f"{entry.where}.tier", message)
    if entry.is_remote:
        for key in ("adapter", "engine", "size", "chat_template", "task"):
            if f"{entry.where}.{key}" in reading.lines:
                message = "does not apply to a remote model, which another server loads; leave it out"
                reading.fault(f"{entry.where}.{key}", message)


def _check_fallback(draft: ManifestDraft, fallback: str, reading: Reading) -> None:
    where = "fallback.id" if "fallback.id" in reading.lines else "fallback"
    if _check_known(where, fallback, draft.ids, reading) and fallback == draft.routing.get("entry"):
        message = f"is {fallback!r}, the entry; without a fallback the entry's own answer is returned, so leave it out"
        reading.fault(where, message)


def _check_nearest(draft: ManifestDraft, rule: NearestRule, reading: Reading) -> None:
    where = "routing.dispatch"
    sets = list(dict.fromkeys(each.set for each in draft.entries if each.set is not None))
    if not _check_known(f"{where}.set", rule.set, sets, reading, "lists of models"):
        return
    ids = [str(each.id) for each in draft.entries if each.set == rule.set and each.id is not None]
    for id_ in rule.examples:
        _check_known(f"{where}.examples.{id_}", id_, ids, reading, f"models of {rule.set}")
    entry = draft.routing.get("entry")
    if entry in ids:
        reading.fault("routing.entry", f"is {entry!r}, an embedding model, which cannot be a model of {rule.set}")
    if any(each.id == entry and each.is_remote for each in draft.entries):
        reading.fault("routing.entry", f"is {entry!r}, a remote model; examples need a local embedding model")
    if rule.min_score is not None and draft.fallback_id is None:
        message = "has no effect without a `fallback:`, which answers below it; add one, or leave this out"
        reading.fault(f"{where}.min_score", message)


def _check_rule(draft: ManifestDraft, rule: DispatchRule, reading: Reading) -> None:
    where, entry = "routing.dispatch_rule", draft.routing.get("entry")
    is_known = _check_known(where, rule.entry, draft.ids, reading)
    if is_known and entry in draft.ids and rule.entry != entry:
        message = f"reads the output of {rule.entry!r}, but `entry:` is {entry!r}; they must be the same"
        reading.fault(where, message)
    sets = list(dict.fromkeys(each.set for each in draft.entries if each.set is not None))
    if not _check_known(where, rule.set, sets, reading, "lists of models"):
        return
    targets = [each for each in draft.entries if each.set == rule.set and each.id is not None]
    ids = [str(each.id) for each in targets]
    for target in targets:
        if str(target.id).lower() == NONE_OF_THESE:
            reading.fault(target.id_where, f"is {target.id!r}, the value for no matching specialist; rename it")
    router = next((each for each in draft.entries if each.id == rule.entry), None)
    if router is not None and router.set == rule.set and rule.entry == entry:
        reading.fault(router.id_where, f"is {entry!r}, the entry, which cannot be a target of its own rule")
    if rule.target is not None:
        _check_known(where, rule.target, ids, reading, f"models of {rule.set}")
    for value, id_ in rule.literal.items():
        at = f"routing.literal.{value}"
        at = at if at in reading.lines else "routing.literal"
        _check_known(at, id_, ids, reading, f"models of {rule.set}")
        if value in ids and id_ != value and value not in rule.literal.values():
            message = (
                f"takes the value {value!r} from the model with that id, which no other value selects; give it a value"
            )
            reading.fault(at, message)


def _check_replicas(draft: ManifestDraft, reading: Reading) -> None:
    """Reject replicas of remote models, and different demands for the replicas of one artifact."""
    demands = {} if draft.hosts is None else draft.hosts.get("replicas", {})
    drafts = {entry.id: entry for entry in draft.entries}
    first: dict[object, str] = {}
    for id_, demand in demands.items():
        where = f"hosts.replicas.{id_}"
        if not _check_known(where, id_, draft.ids, reading):
            continue
        if drafts[id_].is_remote:
            reading.fault(where, "is a remote model, which has no replicas here; leave it out")
            continue
        other = first.setdefault(drafts[id_].replica_key, id_)
        if demand != demands[other]:
            reading.fault(
                where,
                f"differs from {other!r} on line {reading.line(f'hosts.replicas.{other}')}, but both models share the "
                "same replicas, as they have the same source, engine and template; write equal values, or only one",
            )


def _check_bytes(draft: ManifestDraft, reading: Reading) -> None:
    """Reject models of known size that cannot fit, before anything is loaded."""
    resources = draft.resources
    for key, tier, kv_key, way_out in (
        ("gpu_budget", Tier.RESIDENT, "kv_budget", "standby"),
        ("ram_budget", Tier.STANDBY, "host_kv_budget", "remote"),
    ):
        budget = resources.get(f"{key}_bytes")
        if budget is None:
            continue
        part = resources.get(f"{kv_key}_bytes", 0)
        if part > budget:
            message = f"is {size_text(part)}, more than `{key}:` ({size_text(budget)}), of which it is a part"
            reading.fault(f"resources.{kv_key}", message)
        known = _known_sizes(draft.entries, tier)
        needed = sum(num_bytes for _, num_bytes in known)
        if needed > budget:
            parts = [f"{id_} {size_text(num_bytes)}" for id_, num_bytes in known[:MAX_LISTED]]
            parts += ["…"] if len(known) > MAX_LISTED else []
            reading.fault(
                f"resources.{key}",
                f"is {size_text(budget)}, but the {tier.value} models need {size_text(needed)} ({', '.join(parts)}); "
                f"raise it, or make models {way_out}",
            )


def _known_sizes(entries: Iterable[EntryDraft], tier: Tier) -> list[tuple[str, int]]:
    """Known sizes of a tier's replicas, as pairs of id and bytes; models with the same source and engine share a
    replica."""
    found: dict[object, tuple[str, int]] = {}
    for entry in entries:
        fields = entry.fields
        own_tier = Tier.REMOTE if "remote" in fields else fields.get("tier", Tier.RESIDENT)
        if own_tier is tier and "size_bytes" in fields:
            key = (fields.get("source"), repr(sorted(fields.get("engine", {}).items())))
            if key not in found or found[key][1] < fields["size_bytes"]:
                found[key] = (entry.id or entry.where, fields["size_bytes"])
    return list(found.values())
