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
    Shape,
    check_name,
    entry_keys,
    mapping,
    name,
    read_fields,
    text,
    written,
)
from lockstep.cluster.manifest_yaml import FAULTY, ManifestDumper, Place, Reading, shown
from lockstep.cluster.quantities import size_text
from lockstep.errors import ConfigError, ManifestError, Problem
from lockstep.spelling import did_you_mean, listed

REQUIRED = ("cluster", "models")
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

    def entry(self) -> Entry:
        """The model, where it has no fault."""
        tier = {"tier": Tier.REMOTE} if "remote" in self.fields else {}
        return Entry(**{"id": self.id, "set": self.set, **self.fields, **tier})


@dataclass(slots=True)
class ManifestDraft:
    """A manifest as far as it could be read, by its keys."""

    cluster: str | None = None
    resources: dict[str, int] = field(default_factory=dict)
    models: list[EntryDraft] = field(default_factory=list)
    fallback: EntryDraft | str | None = None
    """A model of its own, or the id of another one."""
    routing: dict[str, Any] = field(default_factory=dict)
    """Fields of `Routing`."""
    sessions: dict[str, Any] = field(default_factory=dict)
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
        """The manifest, where it has no fault."""
        return Manifest(
            cluster=str(self.cluster),
            entries=tuple(entry.entry() for entry in self.entries),
            resources=Resources(**self.resources),
            routing=Routing(**self.routing) if self.routing else None,
            fallback=self.fallback_id,
            sessions=SessionLimits(**self.sessions),
            rollouts=self.rollouts,
            notes=notes,
        )


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
    reading, draft = Reading(), ManifestDraft()
    root = reading.compose(text)
    values: Any = FAULTY if root is None else root.read(mapping(top_keys(validators, environment), REQUIRED))
    if values is not FAULTY:
        draft = ManifestDraft(**values)
        check_draft(draft, reading)
        if vet is not None:
            for entry in draft.entries:
                vet(entry, reading)
    if reading.problems:
        raise ManifestError(sorted(reading.problems, key=lambda problem: problem.line), name)
    return draft.manifest(tuple(map(str, reading.notes)))


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
    models: dict[str, Any] = {}
    fallback: object = manifest.fallback
    last = len(manifest.entries) - 1
    for index, entry in enumerate(manifest.entries):
        block = written(keys, entry, ("id", "source", "tier"))
        if entry.remote is not None and entry.source == entry.remote.base_url:
            del block["source"]
        if entry.set is not None:
            models.setdefault(entry.set, []).append(block)
        elif index == last and manifest.fallback == entry.id and index:
            fallback = block
            if entry.id == FALLBACK_ID:
                del block["id"]
        else:
            models[block.pop("id")] = block
    blocks = {
        "cluster": manifest.cluster,
        "resources": written(RESOURCES, manifest.resources),
        "models": models,
        "fallback": fallback,
        "routing": None if manifest.routing is None else _routing_written(manifest.routing),
        "sessions": written(SESSIONS, manifest.sessions),
        "rollouts": manifest.rollouts,
    }
    return {key: block for key, block in blocks.items() if block not in (None, {})}


def _routing_written(routing: Routing) -> dict[str, Any]:
    literal = {"literal": dict(routing.rule.literal)} if routing.rule.literal else {}
    return {"entry": routing.entry, "dispatch_rule": str(routing.rule), **literal}


def top_keys(validators: Mapping[str, Validator], environment: Mapping[str, str] | None) -> Mapping[str, Key]:
    """The keys of a manifest, each with what reads its block."""
    keys = entry_keys(environment)
    return {
        "cluster": Key(name),
        "resources": Key(mapping(RESOURCES)),
        "models": Key(partial(_models, keys)),
        "fallback": Key(partial(_fallback, keys)),
        "routing": Key(_routing),
        "sessions": Key(mapping(SESSIONS)),
        "rollouts": Key(partial(_foreign, validators)),
    }


def _models(keys: Mapping[str, Key], place: Place) -> list[EntryDraft]:
    """Models by their ids, and lists of models by their names."""
    drafts: list[EntryDraft] = []
    places = place.entries()
    for key, child in places.items():
        if child.is_list:
            child.read(partial(_check_key, key, Shape.SET))
            drafts += _kept(child.read(partial(_set, keys, key)))
        else:
            child.read(partial(_check_key, key, Shape.NAME))
            drafts += _kept([child.read(partial(_entry, keys, None, key))])
    if not places:
        raise ConfigError("is empty; name at least one model")
    return drafts


def _check_key(key: str, shape: Shape, _: Place) -> str:
    return check_name(key, shape)


def _set(keys: Mapping[str, Key], set_: str, place: Place) -> list[EntryDraft]:
    items = place.items()
    if not items:
        raise ConfigError("is an empty list; name at least one model, or leave it out")
    return _kept(item.read(partial(_entry, keys, set_, None)) for item in items)


def _kept(values: Any) -> list[Any]:
    """Values without the faulty ones; none where the whole is."""
    return [] if values is FAULTY else [value for value in values if value is not FAULTY]


def _fallback(keys: Mapping[str, Key], place: Place) -> EntryDraft | str:
    """A model of its own, or the name of another."""
    if not place.is_map:
        return name(place)
    entry = _entry(keys, None, None, place)
    if "fallback.id" not in place.reading.lines:
        entry.id, entry.id_where = FALLBACK_ID, place.where
    return entry


def _entry(keys: Mapping[str, Key], set_: str | None, key: str | None, place: Place) -> EntryDraft:
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


def _routing(place: Place) -> dict[str, Any]:
    values = read_fields(place, ROUTING, ("entry", "dispatch_rule"))
    literal = values.pop("literal", {})
    if "rule" in values:  # its place: what it means depends on the map
        values["rule"] = values["rule"].read(lambda rule: parse_rule(text(rule), literal))
    return {key: value for key, value in values.items() if value is not FAULTY}


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


ROUTING: Mapping[str, Key] = {
    "entry": Key(name),
    "dispatch_rule": Key(lambda place: place, "rule"),
    "literal": Key(_literal),
}


def _foreign(validators: Mapping[str, Validator], place: Place) -> object:
    """Another room's block; a FAULTY one was noted."""
    if place.where not in validators:
        raise ConfigError("is of no use here: nothing that was started reads it; leave it out")
    value = place.plain()
    problems = validators[place.where](value)
    for problem in problems:
        place.reading.fault(problem.where or place.where, problem.message, problem.line or None)
    return FAULTY if problems else value


def check_draft(draft: ManifestDraft, reading: Reading) -> None:
    """Note every fault between the parts."""
    _check_names(draft, reading)
    for entry in draft.entries:
        _check_entry(entry, draft, reading)
    if draft.fallback_id is not None:
        _check_fallback(draft, draft.fallback_id, reading)
    if "entry" in draft.routing:
        _check_known("routing.entry", draft.routing["entry"], draft.ids, reading)
    if "rule" in draft.routing:
        _check_rule(draft, draft.routing["rule"], reading)
    _check_bytes(draft, reading)


def _check_known(where: str, name: str, known: Sequence[str], reading: Reading, what: str = "models") -> bool:
    if name in known:
        return True
    hint = did_you_mean(name, known) or (f"known {what} are {listed(known)}" if known else f"there are no {what}")
    reading.fault(where, f"names {name!r}, which is none of the {what}; {hint}")
    return False


def _check_names(draft: ManifestDraft, reading: Reading) -> None:
    """Ids, aliases and the cluster's name share one space: they are what requests call ``model``."""
    ids = [(entry.id, entry.id_where) for entry in draft.entries if entry.id is not None]
    aliases = [each for entry in draft.entries for each in _items(entry, "aliases", reading)]
    taken: dict[str, str] = {}
    for index, (called, where) in enumerate([*ids, *aliases]):
        is_id = index < len(ids)
        is_cluster = called == draft.cluster and not (is_id and called == draft.routing.get("entry"))
        if called in taken:
            kinds = "ids" if is_id else "ids and aliases"
            line = reading.line(taken[called])
            reading.fault(where, f"is {called!r}, which is taken since line {line}; {kinds} are given once")
        elif is_cluster:
            way_out = "rename one" if is_id else "choose another"
            reading.fault(where, f"is {called!r}, the cluster's name, which stands for routing; {way_out}")
        if is_id or not is_cluster:
            taken.setdefault(called, where)


def _items(entry: EntryDraft, key: str, reading: Reading) -> list[tuple[str, str]]:
    """Values of a key that takes one or a list, each with its place."""
    where = f"{entry.where}.{key}"
    places = [(value, f"{where}[{index}]") for index, value in enumerate(entry.fields.get(key, ()))]
    return [(value, item if item in reading.lines else where) for value, item in places]


def _check_entry(entry: EntryDraft, draft: ManifestDraft, reading: Reading) -> None:
    for other, where in _items(entry, "co_activation", reading):
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
    if _check_known(where, fallback, draft.ids, reading) and fallback == draft.routing.get("entry"):
        message = f"is {fallback!r}, the entry; without a fallback the entry's own answer stands, so leave it out"
        reading.fault(where, message)


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
            reading.fault(target.id_where, f"is {target.id!r}, the word for no specialist; rename it")
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
        own_tier = Tier.REMOTE if "remote" in fields else fields.get("tier", Tier.RESIDENT)
        if own_tier is tier and "size_bytes" in fields:
            key = (fields.get("source"), repr(sorted(fields.get("engine", {}).items())))
            if key not in found or found[key][1] < fields["size_bytes"]:
                found[key] = (entry.id or entry.where, fields["size_bytes"])
    return list(found.values())
