"""Whether the parts of a manifest fit each other: names, targets and bytes. Everything that does not is noted.

Works on drafts, so that what refers to a faulty model is not a fault of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.cluster.dispatch import NONE_OF_THESE, DispatchRule
from lockstep.cluster.manifest import Tier
from lockstep.cluster.manifest_nodes import Reading, did_you_mean, listed
from lockstep.cluster.quantities import size_text

MAX_LISTED = 8
"""Models that a message about bytes names."""


@dataclass(slots=True)
class EntryDraft:
    """A model as far as it could be read."""

    where: str
    set: str | None
    id: str | None
    """None: it has none that could be read."""
    fields: dict[str, Any]
    id_where: str = ""
    """Where the id stands."""


@dataclass(slots=True)
class ManifestDraft:
    """A manifest as far as it could be read."""

    cluster: str | None = None
    entries: list[EntryDraft] = field(default_factory=list)
    resources: dict[str, int] = field(default_factory=dict)
    sessions: dict[str, Any] = field(default_factory=dict)
    entry: str | None = None
    """``routing.entry``."""
    rule: DispatchRule | None = None
    fallback: str | None = None
    rollouts: Any = None

    @property
    def ids(self) -> list[str]:
        return [entry.id for entry in self.entries if entry.id is not None]

    def ids_of(self, set_: str) -> list[str]:
        return [entry.id for entry in self.entries if entry.id is not None and entry.set == set_]


def check_draft(draft: ManifestDraft, reading: Reading) -> None:
    """Note every fault between the parts."""
    _check_names(draft, reading)
    for entry in draft.entries:
        _check_entry(entry, draft, reading)
    if draft.fallback is not None:
        _check_fallback(draft, draft.fallback, reading)
    if draft.entry is not None:
        _check_known("routing.entry", draft.entry, draft.ids, reading)
    if draft.rule is not None:
        _check_rule(draft, draft.rule, reading)
    _check_bytes(draft, reading)


def _check_known(where: str, name: str, known: Sequence[str], reading: Reading, what: str = "models") -> bool:
    if name in known:
        return True
    hint = did_you_mean(name, known) or (f"known {what} are {listed(known)}" if known else f"there are no {what}")
    reading.fault(where, f"names {name!r}, which is none of the {what}; {hint}")
    return False


def _check_names(draft: ManifestDraft, reading: Reading) -> None:
    """Ids, aliases and the cluster's name share one space: they are what requests call ``model``."""
    taken: dict[str, str] = {}
    for entry in draft.entries:
        if entry.id is None:
            continue
        if entry.id in taken:
            first = reading.line(taken[entry.id])
            reading.fault(entry.id_where, f"is {entry.id!r}, which is taken since line {first}; ids are given once")
            continue
        taken[entry.id] = entry.id_where
        if entry.id == draft.cluster and entry.id != draft.entry:
            reading.fault(entry.id_where, f"is {entry.id!r}, the cluster's name, which stands for routing; rename one")
    for entry in draft.entries:
        for index, alias in enumerate(entry.fields.get("aliases", ())):
            where = _item(f"{entry.where}.aliases", index, reading)
            if alias in taken:
                owner = f"taken since line {reading.line(taken[alias])}"
                reading.fault(where, f"is {alias!r}, which is {owner}; ids and aliases are given once")
            elif alias == draft.cluster:
                reading.fault(where, f"is {alias!r}, the cluster's name, which stands for routing; choose another")
            else:
                taken[alias] = where


def _item(where: str, index: int, reading: Reading) -> str:
    """The place of a list's item, or of the value that stands for a list of one."""
    item = f"{where}[{index}]"
    return item if item in reading.lines else where


def _check_entry(entry: EntryDraft, draft: ManifestDraft, reading: Reading) -> None:
    for index, other in enumerate(entry.fields.get("co_activation", ())):
        where = _item(f"{entry.where}.co_activation", index, reading)
        if other == entry.id:
            reading.fault(where, f"is {other!r}, the model itself; name the models whose requests warm it")
        else:
            _check_known(where, other, draft.ids, reading)
    tier = entry.fields.get("tier")
    if "remote" in entry.fields and tier not in (None, Tier.REMOTE):
        message = f"is {tier.value!r}, but `remote:` names a server; write remote or leave one out"
        reading.fault(f"{entry.where}.tier", message)
    if tier is Tier.REMOTE or "remote" in entry.fields:
        for key in ("engine", "size", "chat_template"):
            if f"{entry.where}.{key}" in reading.lines:
                message = "says nothing of a remote model, which is loaded by another server; leave it out"
                reading.fault(f"{entry.where}.{key}", message)


def _check_fallback(draft: ManifestDraft, fallback: str, reading: Reading) -> None:
    where = "fallback.id" if "fallback.id" in reading.lines else "fallback"
    if _check_known(where, fallback, draft.ids, reading) and fallback == draft.entry:
        message = f"is {fallback!r}, the entry; without a fallback the entry's own answer stands, so leave it out"
        reading.fault(where, message)


def _check_rule(draft: ManifestDraft, rule: DispatchRule, reading: Reading) -> None:
    where = "routing.dispatch_rule"
    is_known = _check_known(where, rule.entry, draft.ids, reading)
    if is_known and draft.entry in draft.ids and rule.entry != draft.entry:
        message = f"reads the output of {rule.entry!r}, but `entry:` is {draft.entry!r}; they must be the same"
        reading.fault(where, message)
    sets = list(dict.fromkeys(entry.set for entry in draft.entries if entry.set is not None))
    if not _check_known(where, rule.set, sets, reading, "lists of models"):
        return
    ids = draft.ids_of(rule.set)
    for entry in draft.entries:
        if entry.set == rule.set and entry.id is not None and entry.id.lower() == NONE_OF_THESE:
            reading.fault(entry.id_where, f"is {entry.id!r}, the word for no specialist; rename it")
    asked = next((entry for entry in draft.entries if entry.id == rule.entry), None)
    if asked is not None and asked.set == rule.set and rule.entry == draft.entry:
        reading.fault(asked.id_where, f"is {rule.entry!r}, the entry, which cannot be a target of its own rule")
    if rule.target is not None:
        _check_known(where, rule.target, ids, reading, f"models of {rule.set}")
    for value, id_ in rule.literal.items():
        at = f"routing.literal.{value}"
        at = at if at in reading.lines else "routing.literal"
        _check_known(at, id_, ids, reading, f"models of {rule.set}")
        if value in ids and id_ != value and value not in rule.literal.values():
            message = f"takes the word {value!r} from the model of that id, which nothing else names; give it a word"
            reading.fault(at, message)


def _check_bytes(draft: ManifestDraft, reading: Reading) -> None:
    """Where sizes are known, what cannot fit is refused before anything is loaded."""
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
            message = f"is {size_text(part)}, more than `{key}:` ({size_text(budget)}), which it is a part of"
            reading.fault(f"resources.{kv_key}", message)
        known = _known_sizes(draft.entries, tier)
        needed = sum(num_bytes for _, num_bytes in known)
        if needed > budget:
            parts = [f"{id_} {size_text(num_bytes)}" for id_, num_bytes in known[:MAX_LISTED]]
            parts += ["…"] if len(known) > MAX_LISTED else []
            reading.fault(
                f"resources.{key}",
                f"is {size_text(budget)}, but what is {tier.value} needs {size_text(needed)} ({', '.join(parts)}); "
                f"raise it, or make models {way_out}",
            )


def _known_sizes(entries: Iterable[EntryDraft], tier: Tier) -> list[tuple[str, int]]:
    """Sizes of replicas: models of one source and one engine are loaded once."""
    found: dict[object, tuple[str, int]] = {}
    for entry in entries:
        fields = entry.fields
        is_remote = "remote" in fields
        own_tier = Tier.REMOTE if is_remote else fields.get("tier", Tier.RESIDENT)
        if own_tier is tier and "size_bytes" in fields:
            key = (fields.get("source"), repr(sorted(fields.get("engine", {}).items())))
            if key not in found or found[key][1] < fields["size_bytes"]:
                found[key] = (entry.id or entry.where, fields["size_bytes"])
    return list(found.values())
