"""How a manifest's values are read, each by a function from its place, and written again.

A `Key` has both directions of one key; a table of keys is a block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from lockstep.cluster.manifest_nodes import FAULTY, Place, Reader, did_you_mean, listed, odd_character, shown
from lockstep.cluster.quantities import duration_text, parse_budget, parse_duration, parse_size
from lockstep.errors import ConfigError

MAX_NAME_CHARS = 128
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?")
_ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
_SET = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_SIZE = "a size with a unit, e.g. 18GB"


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a block."""

    read: Reader
    attribute: str = ""
    """The field that it fills; empty: the key's own name."""
    write: Callable[[Any], Any] = _same


def text(place: Place) -> str:
    """A string that is not empty."""
    value = place.scalar()
    if not isinstance(value, str):
        quote = f'; write "{value}" in quotes if that is meant' if value is not None else ""
        raise ConfigError(f"is {shown(value)}; it must be a string{quote}")
    if not value.strip():
        raise ConfigError("is empty; it must be a string")
    return value


def check_name(value: str) -> str:
    """An id, a cluster's name, or a word that an entry says."""
    return _checked(value, _NAME, "letters, digits, `.`, `_` and `-`, first a letter or digit, last no `.`")


def check_alias(value: str) -> str:
    return _checked(value, _ALIAS, "letters, digits and `._-:/@`, first a letter or digit")


def check_set_name(value: str) -> str:
    return _checked(value, _SET, "letters, digits, `_` and `-`, first a letter")


def _checked(value: str, pattern: re.Pattern[str], right: str) -> str:
    if len(value) > MAX_NAME_CHARS or not pattern.fullmatch(value):
        odd = odd_character(value)
        found = f"is {shown(value)}, which {odd}" if odd else f"is {shown(value)}"
        raise ConfigError(f"{found}; a name has at most {MAX_NAME_CHARS} characters: {right}")
    return value


def name(place: Place) -> str:
    return check_name(text(place))


def alias(place: Place) -> str:
    return check_alias(text(place))


def one_of(known: Mapping[str, Any], shown_names: Sequence[str] | None = None) -> Reader:
    """One of some words, as the value that it stands for."""
    names = list(known) if shown_names is None else list(shown_names)

    def read(place: Place) -> Any:
        value = place.scalar()
        if not isinstance(value, str) or value not in known:
            hint = did_you_mean(value, known) if isinstance(value, str) else ""
            raise ConfigError(f"is {shown(value)}; it must be {listed(names, 'or')}{hint and '; '}{hint}")
        return known[value]

    return read


def whole(low: int, high: int | None = None) -> Reader:
    """An integer of a range."""

    def read(place: Place) -> int:
        value = place.scalar()
        right = f"a whole number, at least {low}" if high is None else f"a whole number of {low}..{high}"
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            raise ConfigError(f"is {shown(value)}; it must be {right}")
        return value

    return read


def size(low: int = 0) -> Reader:
    """Bytes, written with a unit."""

    def read(place: Place) -> int:
        return _at_least(low, parse_size(quantity(place, _SIZE)))

    return read


def budget(low: int = 0) -> Reader:
    """As `size`; what was written for NRT is read as NRT read it, and noted."""

    def read(place: Place) -> int:
        num_bytes, note = parse_budget(quantity(place, _SIZE))
        _at_least(low, num_bytes)
        if note:
            place.reading.note(place.where, note)
        return num_bytes

    return read


def _at_least(low: int, num_bytes: int) -> int:
    if num_bytes < low:
        raise ConfigError("is 0; there must be something to share out")
    return num_bytes


def duration(low_s: float = 0.0, read_text: Callable[[Place], str] | None = None) -> Reader:
    """Seconds, written with a unit."""

    def read(place: Place) -> float:
        duration_s = parse_duration((read_text or _duration_text)(place))
        if duration_s < low_s:
            raise ConfigError(f"is {duration_text(duration_s)}; it must be at least {duration_text(low_s)}")
        return duration_s

    return read


def _duration_text(place: Place) -> str:
    return quantity(place, "a duration with a unit, e.g. 30s")


def quantity(place: Place, right: str) -> str:
    """A number with its unit as it was written, which YAML takes for a number where the unit is missing."""
    value = place.scalar()
    if value is None or isinstance(value, bool):
        raise ConfigError(f"is {shown(value)}; it must be {right}")
    return value if isinstance(value, str) else str(getattr(place.node, "value", value))


def unless(word: str, reader: Reader) -> Reader:
    """None for a word, which stands for no bound; else what another reader reads."""

    def read(place: Place) -> Any:
        if place.scalar() == word:
            return None
        try:
            return reader(place)
        except ConfigError as error:
            raise ConfigError(f"{error}, or {word}") from None

    return read


def word_for_none(word: str, write: Callable[[Any], Any] = _same) -> Callable[[Any], Any]:
    """What `unless` reads."""
    return lambda value: word if value is None else write(value)


def one_or_many(reader: Reader) -> Reader:
    """A tuple, of a list or of one value alone; each once."""

    def read(place: Place) -> tuple[Any, ...]:
        if not place.is_list:
            return (reader(place),)
        values: list[Any] = []
        for item in place.items():
            value = item.read(reader)
            if value is not FAULTY and value in values:
                item.reading.fault(item.where, f"is {shown(value)} a second time; name it once")
            elif value is not FAULTY:
                values.append(value)
        return tuple(values)

    return read


def one_or_list(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else list(values)


def read_fields(place: Place, keys: Mapping[str, Key], required: Sequence[str] = ()) -> dict[str, Any]:
    """The well-formed values of a block by field; what is not was noted."""
    values: dict[str, Any] = {}
    for key, child in place.known_entries(keys, required).items():
        value = child.read(keys[key].read)
        if value is not FAULTY:
            values[keys[key].attribute or key] = value
    return values


def filled(place: Place, keys: Mapping[str, Key], of: type, required: Sequence[str] = ()) -> Any:
    """A block as its dataclass; FAULTY where a required key is missing or faulty."""
    values = read_fields(place, keys, required)
    return of(**values) if all((keys[key].attribute or key) in values for key in required) else FAULTY


def written(keys: Mapping[str, Key], value: Any, always: Sequence[str] = ()) -> dict[str, Any]:
    """A dataclass as a block: its fields that differ from their defaults, and those of some keys always."""
    block: dict[str, Any] = {}
    defaults = {each.name: _default(each) for each in fields(value)}
    for key, how in keys.items():
        attribute = how.attribute or key
        mine = getattr(value, attribute)
        if key in always or mine != defaults[attribute]:
            block[key] = how.write(mine)
    return block


def _default(each: Field[Any]) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()
