"""Enforceable schemas: reduces function schemas to the parts that a grammar can enforce for calls.

The grammar engine implements a subset of JSON Schema and rejects the rest. For a function that is not ``strict``,
unsupported parts are removed, and a warning lists them. For a ``strict`` function, the first unsupported part is an
error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep.errors import InvalidParameterError
from lockstep.executors.constraint import closed
from lockstep.executors.grammar_compiler import schema_fault
from lockstep.server.tools.definitions import CallableTool

ANNOTATIONS = frozenset(
    ["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"]
)
"""Keywords that never make a document invalid. They are removed, because a grammar does not use them."""
UNENFORCED = frozenset([
    *("not", "if", "then", "else", "propertyNames", "uniqueItems", "contains", "minContains", "maxContains"),
    *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
    *("$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef"),
])  # fmt: skip
"""Keywords that the grammar engine does not implement."""
MAX_SHOWN_PARTS = 8
"""Maximum number of parts of one schema that a warning lists."""
MAX_KEY_CHARS = 64
_DEFINITIONS = ("$defs", "definitions")
_MAPS = ("properties", "patternProperties", *_DEFINITIONS)
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_ONES = ("items", "additionalItems", "additionalProperties")
"""Keywords that contain schemas: by name, in a list, and single ones."""
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_$-]+")


def enforced_tools(tools: Sequence[CallableTool]) -> tuple[tuple[CallableTool, ...], tuple[str, ...]]:
    """Return the functions with the schemas that a grammar enforces, and warnings about the parts that it does not.

    Raises:
        InvalidParameterError: a part of a strict function's schema cannot be enforced; ``param`` names the part, for
            example ``tools[2].function.parameters.properties.ids.uniqueItems``.
    """
    enforced, warnings = [], []
    for tool in tools:
        schema, left_out = enforceable(tool.parameters)
        if left_out and tool.strict:
            where = f"{tool.where}.parameters{left_out[0]}"
            reason = _fault(_without_annotations(tool.parameters))
            raise InvalidParameterError(
                f"{where} cannot be enforced ({reason}), but the function {tool.name!r} is strict; remove that part or "
                "strict",
                param=where,
            )
        if left_out:
            shown = ", ".join(part.removeprefix(".") or "the whole schema" for part in left_out[:MAX_SHOWN_PARTS])
            more = f" and {len(left_out) - MAX_SHOWN_PARTS} more" if len(left_out) > MAX_SHOWN_PARTS else ""
            warnings.append(f"{tool.where}.parameters: not enforced in calls of {tool.name}: {shown}{more}")
        enforced.append(replace(tool, parameters=schema))
    return tuple(enforced), tuple(warnings)


def enforceable(schema: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the enforceable part of an object schema, and the paths of the other parts, in order.

    A path starts with a dot or a bracket. An empty path is the whole schema.
    """
    plain = _without_annotations(schema)
    if not _fault(plain):
        return plain, ()
    left_out: list[str] = []
    definitions = {name: plain[name] for name in _DEFINITIONS if name in plain}
    kept = _kept(plain, "", definitions, left_out)
    if _fault(kept) and isinstance(properties := kept.get("properties"), Mapping):
        definitions = {name: kept[name] for name in definitions}
        wrong = [name for name, part in properties.items() if _fault({"properties": {name: part}, **definitions})]
        left_out += [f".properties{_step(name)}" for name in wrong]
        kept["properties"] = {**properties, **{name: {} for name in wrong}}
    return ({}, ("",)) if _fault(kept) else (kept, tuple(left_out))


def _fault(schema: Mapping[str, Any]) -> str:
    return schema_fault(closed({"type": "object", **schema}))


def _without_annotations(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of a schema without annotations, at any depth."""
    plain: dict[str, Any] = {name: value for name, value in schema.items() if name not in ANNOTATIONS}
    for name, key, part in _parts(plain):
        _put(plain, name, key, _without_annotations(part))
    return plain


def _kept(schema: Mapping[str, Any], path: str, definitions: Mapping[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Copy of a schema without unsupported keywords. Their paths are added to ``left_out``.

    Args:
        definitions: definitions of the whole schema, to which parts refer.
    """
    kept: dict[str, Any] = {}
    for name, value in schema.items():
        where = f"{path}{_step(name)}"
        if name in UNENFORCED or (name in ("format", "pattern") and schema_fault({"type": "string", name: value})):
            left_out.append(where)
        elif name == "oneOf" and schema_fault({**definitions, name: value}):
            left_out.append(where)  # exclusive alternatives are not supported; enforced as anyOf
            kept["anyOf"] = value
        elif name == "patternProperties" and isinstance(value, Mapping):
            kept[name] = {key: part for key, part in value.items() if not schema_fault({name: {key: True}})}
            left_out += [f"{where}{_step(key)}" for key in value if key not in kept[name]]
        else:
            kept[name] = value
    for name, key, part in _parts(kept):
        _put(
            kept,
            name,
            key,
            _kept(part, f"{path}{_step(name)}{'' if key is None else _step(key)}", definitions, left_out),
        )
    return kept


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, str | int | None, Mapping[str, Any]]]:
    """Yield subschemas: the keyword, the name or index under it (None for a single schema), and the subschema."""
    found: list[tuple[str, str | int | None, Any]] = []
    for name in _MAPS:
        if isinstance(named := schema.get(name), Mapping):
            found += [(name, key, part) for key, part in named.items()]
    for name in _LISTS:
        if isinstance(several := schema.get(name), list):
            found += [(name, index, part) for index, part in enumerate(several)]
    found += [(name, None, schema.get(name)) for name in _ONES]
    for name, key, part in found:
        if isinstance(part, Mapping):
            yield name, key, part


def _put(schema: dict[str, Any], name: str, key: str | int | None, part: dict[str, Any]) -> None:
    """Replace a subschema. The containers in between are copied, because they belong to the client's schema."""
    if key is None:
        schema[name] = part
    elif isinstance(key, int):
        schema[name] = [part if index == key else each for index, each in enumerate(schema[name])]
    else:
        schema[name] = {**schema[name], key: part}


def _step(key: str | int) -> str:
    """One step of a path."""
    if isinstance(key, int):
        return f"[{key}]"
    return f".{key}" if _PLAIN_KEY.fullmatch(key) else f"[{json.dumps(key[:MAX_KEY_CHARS])}]"
