"""A manifest's text and its value: `parse` tells every fault at once, with its line; `dump` writes canonical YAML.

``parse(dump(manifest)) == manifest``, and the same holds of `plain` written as JSON. What was read stands in drafts
first, so that what refers to a faulty model is not a fault of its own. The environment comes in as a value; nothing is
opened or read here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import yaml

from lockstep.cluster.dispatch import NONE_OF_THESE, DispatchRule, parse_literal, parse_rule
from lockstep.cluster.manifest import Entry, Manifest, Resources, Routing, SessionLimits, Tier
from lockstep.cluster.manifest_keys import (
    RESOURCES,
    SESSIONS,
    Key,
    check_name,
    check_set_name,
    entry_keys,
    name,
    read_fields,
    text,
    written,
)
from lockstep.cluster.manifest_yaml import FAULTY, ManifestDumper, Place, Reading, shown
from lockstep.cluster.quantities import size_text
from lockstep.errors import ConfigError, ManifestError, Problem
from lockstep.spelling import did_you_mean, listed

TOP_KEYS = ("cluster", "resources", "models", "fallback", "routing", "sessions", "rollouts")
ROUTING_KEYS = ("entry", "dispatch_rule", "literal")
FALLBACK_ID = "fallback"
"""What the model under ``fallback:`` is called that has no ``id:``."""
_LINE_CHARS = 120
MAX_LISTED = 8
"""Models that a message about bytes names."""
Validator = Callable[[object], Sequence[Problem]]
"""Checks another room's block, given as plain dicts, lists and scalars. The line of a problem may be 0: it is found by
`where`, a path from the top of the manifest."""


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


Vet = Callable[[EntryDraft, Reading], None]
"""Looks at a model as far as it could be read, and notes what its author may not name."""


def parse(
    text: str,
    name: str = "manifest",
    validators: Mapping[str, Validator] = {},
    environment: Mapping[str, str] | None = {},
    vet: Vet | None = None,
) -> Manifest:
    """Read a manifest.

    Args:
        text: YAML.
        name: what the text is called in errors, e.g. its file.
        validators: by key, of the blocks that belong to other rooms; a block without one is a fault.
        environment: what ``${NAME}`` stands for in ``remote:``; None, for texts from the network: it is a fault.
        vet: of texts from the network, looks at every model; None: its author may name anything.

    Raises:
        ManifestError: it has faults; all of them, in the order of lines.
    """
    reading = Reading()
    manifest = None
    root = reading.compose(text)
    if root is not None:
        manifest = _manifest(root, validators, environment, vet)
    if manifest is None or reading.problems:
        raise ManifestError(sorted(reading.problems, key=lambda problem: problem.line), name)
    return manifest


def dump(manifest: Manifest) -> str:
    """`plain` as YAML."""
    parts = [
        yaml.dump({key: block}, Dumper=ManifestDumper, sort_keys=False, allow_unicode=True, width=_LINE_CHARS)
        for key, block in plain(manifest).items()
    ]
    return "\n".join(parts)


def plain(manifest: Manifest) -> dict[str, Any]:
    """The canonical form as maps, lists and scalars: keys in one order, defaults left out, quantities in their shortest
    form."""
    keys = {"id": Key(name), **entry_keys({})}
    top: dict[str, Any] = {"cluster": manifest.cluster}
    blocks = {
        "resources": written(RESOURCES, manifest.resources),
        "models": {},
        "fallback": manifest.fallback,
        "routing": None if manifest.routing is None else _routing_written(manifest.routing),
        "sessions": written(SESSIONS, manifest.sessions),
        "rollouts": manifest.rollouts,
    }
    models: dict[str, Any] = {}
    last = len(manifest.entries) - 1
    for index, entry in enumerate(manifest.entries):
        block = written(keys, entry, ("id", "source", "tier"))
        if entry.remote is not None and entry.source == entry.remote.base_url:
            del block["source"]
        if entry.set is not None:
            models.setdefault(entry.set, []).append(block)
        elif index == last and manifest.fallback == entry.id and index:
            blocks["fallback"] = block
            if entry.id == FALLBACK_ID:
                del block["id"]
        else:
            models[block.pop("id")] = block
    blocks["models"] = models
    return top | {key: block for key, block in blocks.items() if block not in (None, {})}


def _routing_written(routing: Routing) -> dict[str, Any]:
    block: dict[str, Any] = {"entry": routing.entry, "dispatch_rule": str(routing.rule)}
    if routing.rule.literal:
        block["literal"] = dict(routing.rule.literal)
    return block


def _manifest(
    root: Place,
    validators: Mapping[str, Validator],
    environment: Mapping[str, str] | None,
    vet: Vet | None,
) -> Manifest | None:
    """The value; None when something was noted."""
    draft, reading = ManifestDraft(), root.reading
    try:
        places = root.known_entries(TOP_KEYS, ("cluster", "models"))
    except ConfigError as error:
        reading.fault("", str(error))
        return None
    keys = entry_keys(environment)
    if "cluster" in places:
        draft.cluster = _or_none(places["cluster"].read(name))
    if "resources" in places:
        draft.resources = _or_none(places["resources"].read(lambda place: read_fields(place, RESOURCES))) or {}
    if "models" in places:
        places["models"].read(lambda place: _models(place, draft, keys))
    if "fallback" in places:
        places["fallback"].read(lambda place: _fallback(place, draft, keys))
    if "routing" in places:
        places["routing"].read(lambda place: _routing(place, draft))
    if "sessions" in places:
        draft.sessions = _or_none(places["sessions"].read(lambda place: read_fields(place, SESSIONS))) or {}
    if "rollouts" in places:
        draft.rollouts = _or_none(places["rollouts"].read(lambda place: _foreign(place, validators)))
    check_draft(draft, reading)
    if vet is not None:
        for entry in draft.entries:
            vet(entry, reading)
    return None if reading.problems else _built(draft, tuple(map(str, reading.notes)))


def _or_none(value: Any) -> Any:
    return None if value is FAULTY else value


def _models(place: Place, draft: ManifestDraft, keys: Mapping[str, Key]) -> None:
    places = place.entries()
    for key, child in places.items():
        if child.is_list:
            _check_key(child, check_set_name, key)
            child.read(partial(_set, draft, keys, key))
        else:
            _check_key(child, check_name, key)
            child.read(partial(_model, draft, keys, None, key))
    if not places:
        raise ConfigError("is empty; name at least one model")


def _check_key(place: Place, check: Callable[[str], str], key: str) -> None:
    place.read(lambda _: check(key))


def _set(draft: ManifestDraft, keys: Mapping[str, Key], set_: str, place: Place) -> None:
    items = place.items()
    if not items:
        raise ConfigError("is an empty list; name at least one model, or leave it out")
    for item in items:
        item.read(partial(_model, draft, keys, set_, None))


def _model(draft: ManifestDraft, keys: Mapping[str, Key], set_: str | None, key: str | None, place: Place) -> None:
    draft.entries.append(_entry(place, keys, set_, key))


def _fallback(place: Place, draft: ManifestDraft, keys: Mapping[str, Key]) -> None:
    """A model of its own, or the name of another."""
    if not place.is_map:
        draft.fallback = str(name(place))
        return
    entry = _entry(place, keys, None, None)
    if "fallback.id" not in place.reading.lines:
        entry.id, entry.id_where = FALLBACK_ID, place.where
    draft.entries.append(entry)
    draft.fallback = entry.id


def _entry(place: Place, keys: Mapping[str, Key], set_: str | None, key: str | None) -> EntryDraft:
    """A model; its id is its key, or its ``id:``."""
    own = {"id": Key(name if key is None else partial(_equal, key)), **keys}
    fields = read_fields(place, own, () if set_ is None else ("id",))
    id_ = fields.pop("id", None)
    lines, where = place.reading.lines, place.where
    if f"{where}.source" not in lines:
        if "remote" in fields:
            fields["source"] = fields["remote"].base_url
        elif f"{where}.remote" not in lines:
            place.reading.fault(where, "has no `source:`; write hf://org/name, a path, or `remote: {base_url: …}`")
    id_where = f"{where}.id" if f"{where}.id" in lines and key is None else where
    return EntryDraft(where, set_, key or id_, fields, id_where)


def _equal(key: str, place: Place) -> str:
    if (value := text(place)) != key:
        raise ConfigError(f"is {shown(value)}, but its key {key!r} is its id; leave `id:` out")
    return value


def _routing(place: Place, draft: ManifestDraft) -> None:
    places = place.known_entries(ROUTING_KEYS, ("entry", "dispatch_rule"))
    literal: dict[str, str] = {}
    if "entry" in places:
        draft.entry = _or_none(places["entry"].read(name))
    if "literal" in places:
        literal = _or_none(places["literal"].read(_literal)) or {}
    if "dispatch_rule" in places:
        draft.rule = _or_none(places["dispatch_rule"].read(lambda rule: parse_rule(text(rule), literal)))


def _literal(place: Place) -> dict[str, str]:
    """A map, or ``value=id`` pairs in one string."""
    if not place.is_map:
        literal = parse_literal(text(place))
    else:
        read = {key: child.read(name) for key, child in place.entries().items()}
        literal = {key: id_ for key, id_ in read.items() if id_ is not FAULTY}
    if not literal and not place.reading.problems:
        raise ConfigError("is empty; write value=id pairs, or leave it out")
    for value in literal:
        check_name(value)
        if value.lower() == NONE_OF_THESE:
            raise ConfigError(f"renames {value!r}, the word for no specialist, which leads to the fallback")
    return literal


def _foreign(place: Place, validators: Mapping[str, Validator]) -> object:
    """Another room's block; a FAULTY one was noted."""
    if place.where not in validators:
        raise ConfigError("is of no use here: nothing that was started reads it; leave it out")
    block = place.plain()
    problems = validators[place.where](block)
    for problem in problems:
        place.reading.fault(problem.where or place.where, problem.message, problem.line or None)
    return FAULTY if problems else block


def _built(draft: ManifestDraft, notes: tuple[str, ...]) -> Manifest:
    """The value of a draft without faults."""
    entries = []
    for entry in draft.entries:
        if "remote" in entry.fields:
            entry.fields["tier"] = Tier.REMOTE
        entries.append(Entry(id=str(entry.id), set=entry.set, **entry.fields))
    return Manifest(
        cluster=str(draft.cluster),
        entries=tuple(entries),
        resources=Resources(**draft.resources),
        routing=None if draft.entry is None or draft.rule is None else Routing(draft.entry, draft.rule),
        fallback=draft.fallback,
        sessions=SessionLimits(**draft.sessions),
        rollouts=draft.rollouts,
        notes=notes,
    )


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
    router = next((entry for entry in draft.entries if entry.id == rule.entry), None)
    if router is not None and router.set == rule.set and rule.entry == draft.entry:
        reading.fault(router.id_where, f"is {rule.entry!r}, the entry, which cannot be a target of its own rule")
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
    """Refuse models of known sizes that cannot fit, before anything is loaded."""
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
