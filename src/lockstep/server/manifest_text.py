"""The manifest on the wire: YAML, or JSON, which becomes YAML where it comes in. Pure."""

from __future__ import annotations

import json
import re

import msgspec

from lockstep.errors import InvalidJsonError, InvalidParameterError

JSON_TYPE = "application/json"
YAML_TYPE = "application/yaml"
YAML_TYPES = (YAML_TYPE, "application/x-yaml", "text/yaml", "text/x-yaml")
_RANGES = {"*/*": (0, JSON_TYPE), "application/*": (1, JSON_TYPE), "text/*": (1, "text/yaml")} | {
    each: (2, each) for each in (JSON_TYPE, *YAML_TYPES)
}
"""By what an ``Accept`` may say: how exactly it says it, and what is meant."""
_UNPRINTED = re.compile("[\x7f-\x9f\u2028\u2029\ufffe\uffff]")
"""What stands for itself in JSON, while in YAML it ends a line or may only be written as an escape."""
_NOT_YAML = re.compile(rf"\t|\\u[dD][89a-fA-F]|{_UNPRINTED.pattern}")
"""What JSON may hold and YAML reads otherwise: these, tabs between values, and characters as pairs of escapes."""


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
    if not _NOT_YAML.search(text):
        return text
    return _UNPRINTED.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, indent=2, ensure_ascii=False))


def wanted_type(accept: str) -> str:
    """In which of our types to answer a request with such an ``Accept``: the one that it likes best, of several the one
    that it names most exactly, then first; JSON where it names none of them."""
    best, wanted = (0.0, len(_RANGES)), JSON_TYPE  # better than whatever has no weight
    for part in accept.split(","):
        exactness, kind = _RANGES.get(kind_of(part), (0, ""))
        if kind and (rank := (_weight(part), exactness)) > best:
            best, wanted = rank, kind
    return wanted


def _weight(part: str) -> float:
    """The ``q`` of a range in an ``Accept``; 1 where it has none that can be read."""
    for parameter in part.split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            return float(value) if re.fullmatch(r"\s*[01](\.\d{0,3})?\s*", value) else 1.0
    return 1.0


def kind_of(content_type: str) -> str:
    """A content type without its parameters."""
    return content_type.partition(";")[0].strip().lower()
