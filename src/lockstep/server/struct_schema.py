"""What a route says of its answer in the OpenAPI document where that answer is a msgspec struct."""

from __future__ import annotations

from typing import Any

import msgspec


def described(struct: type[msgspec.Struct]) -> dict[int | str, dict[str, Any]]:
    """The success of a route that answers with such a struct as JSON."""
    schema = schema_of(struct)
    return {200: {"description": "What was asked for.", "content": {"application/json": {"schema": schema}}}}


def schema_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Its JSON schema in one piece. Structs that hold themselves have none."""
    ([reference], definitions) = msgspec.json.schema_components([struct], ref_template="{name}")
    schema: dict[str, Any] = _inlined(reference, definitions)
    return schema


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"]], definitions)
    return {name: _inlined(value, definitions) for name, value in schema.items()}
