"""Schemas of single arguments: resolves local references and finds the types that a value can have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_REFERENCES = 32
"""Maximum number of consecutive references, and depth of nested choices, that are followed."""
_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"),
)  # fmt: skip


def resolved(schema: object, root: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve the local references of a schema. The result is empty if the schema has no constraints.

    Args:
        root: the schema of all arguments, in which references are resolved.
    """
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return dict(schema)
        schema = _target(reference, root)
    return {}


def _target(reference: str, root: Mapping[str, Any]) -> object:
    node: object = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        node = node.get(key) if isinstance(node, dict) else None
    return node if reference.startswith("#") else None


def list_of(schema: Mapping[str, Any], key: str) -> list[Any]:
    """The list under a keyword; empty if it is missing or not a list, because schemas come from clients."""
    value = schema.get(key)
    return value if isinstance(value, list) else []


def size_of(schema: Mapping[str, Any], key: str) -> int | None:
    """The size limit under a keyword; None if it is missing or invalid."""
    value = schema.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if value >= 0 and float(value).is_integer() else None


def type_of(value: object) -> str:
    """JSON Schema type name of a value."""
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "null")


def types_of(schema: object, root: Mapping[str, Any], level: int = 0) -> frozenset[str]:
    """Types that a schema allows; empty if it does not restrict them."""
    schema = resolved(schema, root)
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset([named])
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    if isinstance(values := schema.get("enum"), list):
        return frozenset(map(type_of, values))
    if "const" in schema:
        return frozenset([type_of(schema["const"])])
    if level == MAX_REFERENCES:
        return frozenset()
    choices = [choice for key in ("anyOf", "oneOf", "allOf") for choice in list_of(schema, key)]
    return frozenset[str]().union(*(types_of(choice, root, level + 1) for choice in choices))


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The declared arguments of a function by name."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def property_of(key: str, schema: Mapping[str, Any]) -> object:
    """Schema of one argument of a function: its own, or that of undeclared arguments."""
    root = resolved(schema, schema)
    return properties_of(root).get(key, root.get("additionalProperties"))
