"""Block ``routing:`` of a manifest: reads and writes the entry model, and the rule by which it selects another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.cluster.dispatch import NONE_OF_THESE, parse_literal, parse_rule
from lockstep.cluster.manifest import Routing
from lockstep.cluster.manifest_keys import (
    ManifestKey,
    NameShape,
    check_name,
    name,
    one_of,
    one_or_many,
    option,
    read_fields,
    text,
)
from lockstep.cluster.nearest import MAX_EXAMPLES, NearestRule
from lockstep.errors import ConfigError
from lockstep.option_fields import OptionType, Range
from lockstep.yaml_reading import INVALID, YamlNode

NEAREST = "nearest"


def routing_block(node: YamlNode) -> dict[str, Any]:
    """Read ``routing:`` as the fields of `Routing`; the ones that are valid."""
    values = read_fields(node, ROUTING, ("entry",))
    literal, dispatch = values.pop("literal", {}), values.pop("dispatch", None)
    lines, where = node.reading.lines, node.where
    if "rule" in values:  # read last, because the rule depends on the map
        values["rule"] = values["rule"].read(lambda rule: parse_rule(text(rule), literal))
        if f"{where}.dispatch" in lines:
            node.reading.fault(f"{where}.dispatch", "is given beside `dispatch_rule:`; leave one of them out")
    elif f"{where}.dispatch" not in lines and f"{where}.dispatch_rule" not in lines:
        node.reading.fault(where, "has no `dispatch_rule:`, and no `dispatch: {kind: nearest, ...}` in its place")
    elif dispatch is not None:
        values["rule"] = dispatch
        if literal:
            node.reading.fault(f"{where}.literal", "belongs to `dispatch_rule:`; examples name their models themselves")
    return {key: value for key, value in values.items() if value is not INVALID}


def routing_written(routing: Routing) -> dict[str, Any]:
    """Write a routing as `routing_block` reads it."""
    rule = routing.rule
    if isinstance(rule, NearestRule):
        examples = {id_: list(texts) for id_, texts in rule.examples.items()}
        score = {} if rule.min_score is None else {"min_score": rule.min_score}
        return {"entry": routing.entry, "dispatch": {"kind": NEAREST, "set": rule.set, "examples": examples, **score}}
    literal = {"literal": dict(rule.literal)} if rule.literal else {}
    return {"entry": routing.entry, "dispatch_rule": str(rule), **literal}


def _dispatch(node: YamlNode) -> object:
    before = len(node.reading.problems)
    values = read_fields(node, DISPATCH, ("kind", "set", "examples"))
    if len(node.reading.problems) > before:
        return INVALID
    del values["kind"]  # there is only one
    return NearestRule(**values)


def _set_name(node: YamlNode) -> str:
    return check_name(text(node), NameShape.SET)


def _examples(node: YamlNode) -> dict[str, tuple[str, ...]]:
    """Read ``examples:``, one or several texts for each model."""
    examples = {key: child.read(one_or_many(text)) for key, child in node.entries().items()}
    for key in examples:
        check_name(key)
    num_texts = sum(len(texts) for texts in examples.values() if texts is not INVALID)
    if not 1 <= num_texts <= MAX_EXAMPLES or not all(examples.values()):
        raise ConfigError(f"has {num_texts} texts; each model needs one, and all together have at most {MAX_EXAMPLES}")
    return examples


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


DISPATCH: Mapping[str, ManifestKey] = {
    "kind": ManifestKey(one_of({NEAREST: NEAREST})),
    "set": ManifestKey(_set_name),
    "examples": ManifestKey(_examples),
    "min_score": ManifestKey(option(OptionType(float, Range(-1, 1)))),
}
ROUTING: Mapping[str, ManifestKey] = {
    "entry": ManifestKey(name),
    "dispatch_rule": ManifestKey(lambda node: node, "rule"),
    "literal": ManifestKey(_literal),
    "dispatch": ManifestKey(_dispatch),
}
