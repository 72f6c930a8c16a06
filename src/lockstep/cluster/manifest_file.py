"""Manifest files: `parse` makes a manifest of YAML nodes (`lockstep.yaml_reading`), `dump` writes canonical YAML.

``parse(dump(manifest)) == manifest``, and the same holds for `plain` written as JSON. Models and blocks are read into
drafts first, so that a reference to an invalid model is not reported as a second problem. The environment is passed in,
and no file is opened here. Drafts and the checks between them are in manifest_draft.py, the keys of a model in
manifest_keys.py, those of ``hosts:`` in manifest_hosts.py, and YAML with its lines in yaml_reading.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import yaml

from lockstep.cluster.dispatch import NONE_OF_THESE, parse_literal, parse_rule
from lockstep.cluster.manifest import Manifest, Routing
from lockstep.cluster.manifest_draft import AuthorCheck, EntryDraft, ManifestDraft, check_draft
from lockstep.cluster.manifest_hosts import hosts_block, hosts_written
from lockstep.cluster.manifest_keys import (
    RESOURCES,
    SESSIONS,
    ManifestKey,
    NameShape,
    check_name,
    entry_keys,
    mapping,
    name,
    read_fields,
    text,
    written,
)
from lockstep.errors import ConfigError, ManifestError, Problem
from lockstep.yaml_reading import INVALID, PlainDumper, Reading, YamlNode, shown

REQUIRED = ("cluster", "models")
FALLBACK_ID = "fallback"
"""Id of a model under ``fallback:`` that has no ``id:``."""
_LINE_CHARS = 120
Validator = Callable[[object], Sequence[Problem]]
"""Check of a block that belongs to another package (``rollouts:``), given as plain dicts, lists and scalars. A
problem's line may be 0; it is then found by `where`, a path from the top of the manifest."""


def parse(
    text: str,
    name: str = "manifest",
    validators: Mapping[str, Validator] = {},
    environment: Mapping[str, str] | None = {},
    author_check: AuthorCheck | None = None,
) -> Manifest:
    """Read a manifest.

    Args:
        text: YAML.
        name: name of the text in errors, e.g. its file.
        validators: validators of the blocks that belong to other packages, by key; a block without one is an error.
        environment: environment variables for ``${NAME}`` in ``remote:``. None, for texts from the network: ``${NAME}``
            is an error.
        author_check: check of the entries and hosts of texts from the network; None: the author may name anything.

    Raises:
        ManifestError: the text has problems; the error lists all of them, in order of lines.
    """
    reading, draft = Reading(), ManifestDraft()
    root = reading.compose(text)
    if root is None and not reading.problems:
        reading.fault("", "is empty; it needs at least `cluster:` and `models:`", 1)
    values: Any = INVALID if root is None else root.read(mapping(top_keys(validators, environment), REQUIRED))
    if values is not INVALID:
        draft = ManifestDraft(**values)
        check_draft(draft, reading)
        if author_check is not None:
            for entry in draft.entries:
                author_check.entry(entry, reading)
            author_check.hosts(draft.hosts, reading)
    if reading.problems:
        raise ManifestError(sorted(reading.problems, key=lambda problem: problem.line), name)
    return draft.manifest(tuple(map(str, reading.warnings)))


def dump(manifest: Manifest) -> str:
    """Write a manifest as canonical YAML, which `parse` reads back to an equal manifest."""
    parts = [
        yaml.dump({key: block}, Dumper=PlainDumper, sort_keys=False, allow_unicode=True, width=_LINE_CHARS)
        for key, block in plain(manifest).items()
    ]
    return "\n".join(parts)


def plain(manifest: Manifest) -> dict[str, Any]:
    """Convert a manifest to maps, lists and scalars in canonical form.

    Keys have a fixed order, defaults are omitted, and quantities have their shortest form.
    """
    keys = {"id": ManifestKey(name), **entry_keys({})}
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
        "hosts": None if manifest.hosts is None else hosts_written(manifest.hosts),
        "rollouts": manifest.rollouts,
    }
    return {key: block for key, block in blocks.items() if block not in (None, {})}


def _routing_written(routing: Routing) -> dict[str, Any]:
    literal = {"literal": dict(routing.rule.literal)} if routing.rule.literal else {}
    return {"entry": routing.entry, "dispatch_rule": str(routing.rule), **literal}


def top_keys(validators: Mapping[str, Validator], environment: Mapping[str, str] | None) -> Mapping[str, ManifestKey]:
    """Top-level keys of a manifest, each with the reader of its block."""
    keys = entry_keys(environment)
    return {
        "cluster": ManifestKey(name),
        "resources": ManifestKey(mapping(RESOURCES)),
        "models": ManifestKey(partial(_models, keys)),
        "fallback": ManifestKey(partial(_fallback, keys)),
        "routing": ManifestKey(_routing),
        "sessions": ManifestKey(mapping(SESSIONS)),
        "hosts": ManifestKey(hosts_block),
        "rollouts": ManifestKey(partial(_validated_block, validators)),
    }


def _models(keys: Mapping[str, ManifestKey], node: YamlNode) -> list[EntryDraft]:
    """Read ``models:``: single models by id, and lists of models by name of the list."""
    drafts: list[EntryDraft] = []
    nodes = node.entries()
    for key, child in nodes.items():
        if child.is_list:
            child.read(partial(_check_key, key, NameShape.SET))
            drafts += _valid_values(child.read(partial(_set, keys, key)))
        else:
            child.read(partial(_check_key, key, NameShape.NAME))
            drafts += _valid_values([child.read(partial(_entry, keys, None, key))])
    if not nodes:
        raise ConfigError("is empty; name at least one model")
    return drafts


def _check_key(key: str, shape: NameShape, _: YamlNode) -> str:
    return check_name(key, shape)


def _set(keys: Mapping[str, ManifestKey], set_: str, node: YamlNode) -> list[EntryDraft]:
    items = node.items()
    if not items:
        raise ConfigError("is an empty list; name at least one model, or leave it out")
    return _valid_values(item.read(partial(_entry, keys, set_, None)) for item in items)


def _valid_values(values: Any) -> list[Any]:
    """Return the valid values of a list; empty if the list itself is invalid."""
    return [] if values is INVALID else [value for value in values if value is not INVALID]


def _fallback(keys: Mapping[str, ManifestKey], node: YamlNode) -> EntryDraft | str:
    """Read ``fallback:``: a model, or the id of another model."""
    if not node.is_map:
        return name(node)
    entry = _entry(keys, None, None, node)
    if "fallback.id" not in node.reading.lines:
        entry.id, entry.id_where = FALLBACK_ID, node.where
    return entry


def _entry(keys: Mapping[str, ManifestKey], set_: str | None, key: str | None, node: YamlNode) -> EntryDraft:
    """Read one model; its id is its key or its ``id:``."""
    own = {"id": ManifestKey(name if key is None else partial(_id_equal_to_key, key)), **keys}
    fields = read_fields(node, own, () if set_ is None else ("id",))
    id_ = fields.pop("id", None)
    lines, where = node.reading.lines, node.where
    if f"{where}.source" not in lines:
        if "remote" in fields:
            fields["source"] = fields["remote"].base_url
        elif f"{where}.remote" not in lines:
            node.reading.fault(where, "has no `source:`; write hf://org/name, a path, or `remote: {base_url: …}`")
    id_where = f"{where}.id" if f"{where}.id" in lines and key is None else where
    return EntryDraft(where, set_, key or id_, fields, id_where)


def _id_equal_to_key(key: str, node: YamlNode) -> str:
    if (value := text(node)) != key:
        raise ConfigError(f"is {shown(value)}, but the key {key!r} is the model's id; leave `id:` out")
    return value


def _routing(node: YamlNode) -> dict[str, Any]:
    values = read_fields(node, ROUTING, ("entry", "dispatch_rule"))
    literal = values.pop("literal", {})
    if "rule" in values:  # read last, because the rule depends on the map
        values["rule"] = values["rule"].read(lambda rule: parse_rule(text(rule), literal))
    return {key: value for key, value in values.items() if value is not INVALID}


def _literal(node: YamlNode) -> dict[str, str]:
    """Read ``literal:``, the id for each output of the router: a map, or ``value=id`` pairs in one string."""
    if not node.is_map:
        literal = parse_literal(text(node))
    else:
        read = {key: child.read(name) for key, child in node.entries().items()}
        literal = {key: id_ for key, id_ in read.items() if id_ is not INVALID}
    if not literal and not node.reading.problems:
        raise ConfigError("is empty; write value=id pairs, or leave it out")
    for value in literal:
        check_name(value)
        if value.lower() == NONE_OF_THESE:
            raise ConfigError(f"renames {value!r}, the value for no matching specialist, which leads to the fallback")
    return literal


ROUTING: Mapping[str, ManifestKey] = {
    "entry": ManifestKey(name),
    "dispatch_rule": ManifestKey(lambda node: node, "rule"),
    "literal": ManifestKey(_literal),
}


def _validated_block(validators: Mapping[str, Validator], node: YamlNode) -> object:
    """Read a block that another package validates; INVALID if its problems were reported."""
    if node.where not in validators:
        raise ConfigError("is not supported by this command; leave it out")
    value = node.plain()
    problems = validators[node.where](value)
    for problem in problems:
        node.reading.fault(problem.where or node.where, problem.message, problem.line or None)
    return INVALID if problems else value
