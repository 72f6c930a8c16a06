"""Dispatch rule: maps the entry model's answer to the model that answers the request. Pure.

A rule has one of two forms. In ``<entry>.output.<field> -> <set>.{<field>}`` the field's value is the id of the
answering model. In ``<entry>.output.<field> -> <set>.<id>`` one model answers unless the value is `NONE_OF_THESE`. A
map of literal values renames: with ``refund=billing``, the entry's answer ``refund`` selects ``billing``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.errors import ConfigError

NONE_OF_THESE = "none"
"""Answer of an entry model when no specialist fits; no model of a set may have this id."""
RULE_SHAPE = "<entry>.output.<field> -> <set>.{<field>} or <entry>.output.<field> -> <set>.<id>"
MAX_ANSWER_CHARS = 4096
"""Number of characters of an entry's answer that are examined; a single word is expected."""
_ID = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_RULE = re.compile(
    rf"(?P<entry>{_ID})\.output\.(?P<field>[A-Za-z_]\w*)\s*->\s*"
    rf"(?P<set>[A-Za-z_][\w-]*)\.(?:\{{(?P<named>\w+)\}}|(?P<target>{_ID}))",
    re.ASCII,
)
_AROUND_A_WORD = " \t\r\n\"'`.,;:!"


@dataclass(frozen=True, slots=True)
class DispatchRule:
    """Rule by which an entry's answer selects the model that answers next."""

    entry: str
    field_name: str
    """Field of the entry's output that decides, e.g. ``intent``."""
    set: str
    """List that contains the target models."""
    target: str | None = None
    """Fixed target id; None: the field's value is the id."""
    literal: Mapping[str, str] = field(default_factory=dict)
    """Target ids by value of the field, for values that differ from the id."""

    def __str__(self) -> str:
        """Text of the rule as `parse_rule` reads it, without the literal map."""
        target = f"{{{self.field_name}}}" if self.target is None else self.target
        return f"{self.entry}.output.{self.field_name} -> {self.set}.{target}"

    def constraint_words(self, ids: Sequence[str]) -> tuple[str, ...]:
        """Words to which the entry's answer is constrained: those that select one of these ids, in their order, then
        `NONE_OF_THESE`.

        Args:
            ids: ids of the models in `set`, in order of definition.
        """
        if self.target is not None:
            return (self.target, NONE_OF_THESE)
        renamed = set(self.literal.values())
        words = list(self.literal)
        words += [id_ for id_ in ids if id_ not in renamed and id_ not in self.literal]
        return (*words, NONE_OF_THESE)

    def read(self, answer: str) -> str | None:
        """Extract the field's value from an entry's answer; None: the answer does not contain the field.

        Accepted are a JSON object with the field, ``field=value`` or ``field: value`` on the first line that is not
        empty, and that line alone if it is one word. Quotes and punctuation around a value are removed.
        """
        text = answer[:MAX_ANSWER_CHARS].strip()
        if text.startswith("{"):
            return self._read_json(text)
        line = next((line.strip() for line in text.splitlines() if line.strip()), "")
        name, sign, value = line.partition("=" if "=" in line else ":")
        if sign and name.strip(_AROUND_A_WORD).lower() == self.field_name.lower():
            line = value
        word = line.strip(_AROUND_A_WORD)
        return word if word and not re.search(r"[\s=]", word) else None

    def _read_json(self, text: str) -> str | None:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        value = found.get(self.field_name) if isinstance(found, dict) else None
        return value.strip(_AROUND_A_WORD) or None if isinstance(value, str) else None

    def target_of(self, value: str | None, ids: Sequence[str]) -> str | None:
        """Id of the model that answers; None: the fallback. Case matters only between ids that differ in nothing
        else."""
        if value is None or value.lower() == NONE_OF_THESE:
            return None
        if self.target is not None:
            return self.target if self.target in ids else None
        renamed = self.literal.get(value)
        if renamed is None and value not in ids:
            words = [word for word in (*self.literal, *ids) if word.lower() == value.lower()]
            value = words[0] if len(set(words)) == 1 else value
            renamed = self.literal.get(value)
        target = value if renamed is None else renamed
        return target if target in ids else None


def parse_rule(text: str, literal: Mapping[str, str] | None = None) -> DispatchRule:
    """Parse a rule.

    Raises:
        ConfigError: the text does not match `RULE_SHAPE`, its braces name another field, or there is a literal map
            although the target is fixed.
    """
    found = _RULE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"is {_short(text)!r}; it must be {RULE_SHAPE}")
    if found["named"] not in (None, found["field"]):
        raise ConfigError(
            f"is {_short(text)!r}, which reads {found['field']!r} and names {{{found['named']}}}; "
            f"write {{{found['field']}}}"
        )
    if found["target"] is not None and literal:
        raise ConfigError(
            f"always leads to {found['target']!r}, so the literal map has no effect; "
            f"leave it out, or write {found['set']}.{{{found['field']}}}"
        )
    return DispatchRule(found["entry"], found["field"], found["set"], found["target"], dict(literal or {}))


def parse_literal(text: str) -> dict[str, str]:
    """Parse a literal map written on one line: ``refund=billing, bug=technical``.

    Raises:
        ConfigError: a part is not ``value=id``, or a value occurs twice.
    """
    literal: dict[str, str] = {}
    for part in text.split(","):
        value, sign, id_ = (piece.strip() for piece in part.partition("="))
        if not (value and sign and id_):
            raise ConfigError(f"has {part.strip()!r}; it must be value=id pairs, e.g. refund=billing, bug=technical")
        if value in literal:
            raise ConfigError(f"gives {value!r} twice")
        literal[value] = id_
    return literal


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."


@dataclass(frozen=True, slots=True)
class NearestRule:
    """Rule of `nearest`: examples by the model that should answer messages like them."""

    set: str
    """List that contains the target models."""
    examples: Mapping[str, tuple[str, ...]]
    """Texts by target id, in order of definition."""
    min_score: float | None = None
    """Smallest cosine with which an example decides; below it the fallback answers. None: the best example decides."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All examples, in order."""
        return tuple(text for texts in self.examples.values() for text in texts)
