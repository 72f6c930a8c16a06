"""From the entry model's answer to the model that answers the request. Closed: values in, values out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DispatchRule:
    """``<entry>.output.<field> -> <set>.{<field>}``, ``... -> <set>.<id>`` or a map of literal values."""

    entry: str
    field_name: str
    """What of the entry's output decides, e.g. ``intent``."""
    set: str
    """The list that targets stand in."""
    target: str | None = None
    """A fixed id; None: the field's value is the id."""
    literal: Mapping[str, str] = field(default_factory=dict)
    """Values of the field that mean another id."""
