"""The manifest in a request's body: YAML, or JSON, which becomes YAML. Pure."""

from __future__ import annotations

import json
import re

import msgspec

from lockstep.errors import InvalidJsonError, InvalidParameterError

JSON_TYPE = "application/json"
YAML_TYPE = "application/yaml"
YAML_TYPES = frozenset({YAML_TYPE, "application/x-yaml", "text/yaml", "text/x-yaml"})
_NOT_YAML = re.compile(r"\t|\\u[dD][89a-fA-F]")
"""What JSON may hold and YAML reads otherwise: tabs between values, characters as pairs of escapes."""


def manifest_text(body: bytes, content_type: str) -> str:
    """The text for `lockstep.cluster.manifest_file.parse`; lines are the body's wherever that can be.

    Raises:
        InvalidParameterError: it is empty.
        InvalidJsonError: it is not the JSON that it claims to be.
    """
    text = body.decode()
    if not text.strip():
        raise InvalidParameterError("the body is empty; send a manifest as YAML or JSON")
    if kind_of(content_type) in YAML_TYPES:
        return text
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise InvalidJsonError(f"the body is not valid JSON: {error}; YAML has type {YAML_TYPE}") from None
    return json.dumps(value, indent=2, ensure_ascii=False) if _NOT_YAML.search(text) else text


def kind_of(content_type: str) -> str:
    """A content type without its parameters."""
    return content_type.partition(";")[0].strip().lower()
