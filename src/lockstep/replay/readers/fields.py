"""Checks of values from foreign files: each error gives the location, the value and the expected form."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NoReturn, cast

from lockstep.errors import TraceError

MAX_TOKENS = 1 << 30
"""Maximum tokens of one request; far more than any context."""
MAX_ID = (1 << 63) - 1
"""Maximum id of a block's content."""
MAX_NAME_CHARS = 256
PS_PER_S = 1_000_000_000_000
PS_PER_NS = 1_000
MAX_TIME_PS = 10_000 * 366 * 86_400 * PS_PER_S
"""Maximum time: ten thousand years. Timestamps may count from any origin, but a greater number is an error."""
_SHOWN_CHARS = 40


def shown(value: object) -> str:
    """Foreign value for a message: on one line, and short."""
    short = reprlib.Repr()  # does not descend into nested values
    short.maxlevel = 1
    short.maxstring = short.maxother = short.maxlong = _SHOWN_CHARS
    text = str(value) if isinstance(value, Decimal) else short.repr(value)
    return text if len(text) <= 2 * _SHOWN_CHARS else text[: 2 * _SHOWN_CHARS] + "..."


def whole(value: object, what: str, place: str, least: int = 0, most: int = MAX_TOKENS) -> int:
    """Check that a value is an integer within limits; 512.0 is accepted."""
    if isinstance(value, int | Decimal) and not isinstance(value, bool) and least <= value <= most:
        number = int(value)
        if number == value:
            return number
    raise TraceError(f"{place}: {what} is {shown(value)}; it must be a whole number from {least} to {most}")


def content_ids(values: Sequence[object], what: str, place: str) -> tuple[int, ...]:
    """Check integers that identify contents. They are checked together first, since traces consist mostly of these."""
    if set(map(type, values)) == {int}:
        ids = cast(Sequence[int], values)
        if min(ids) >= 0 and max(ids) <= MAX_ID:
            return tuple(ids)
    return tuple([whole(each, what, place, 0, MAX_ID) for each in values])


def time_ps(value: object, what: str, place: str, unit_ps: int) -> int:
    """Check a time of at least 0, and return it in integer picoseconds, rounded down."""
    if isinstance(value, int | Decimal) and not isinstance(value, bool) and 0 <= value <= MAX_TIME_PS // unit_ps:
        return int(value * unit_ps)
    most = MAX_TIME_PS // unit_ps
    raise TraceError(f"{place}: {what} is {shown(value)}; it must be a number from 0 to {most}")


def text(value: object, what: str, place: str) -> str:
    """Check that a value is a short printable text."""
    if not isinstance(value, str) or not value.isprintable() or len(value) > MAX_NAME_CHARS:
        raise TraceError(
            f"{place}: {what} is {shown(value)}; it must be text of at most {MAX_NAME_CHARS} printable characters"
        )
    return value


def array(value: object, what: str, place: str) -> Sequence[object]:
    """Check that a value is a list."""
    if not isinstance(value, list):
        raise TraceError(f"{place}: {what} is {shown(value)}; it must be a list")
    return value


def check_keys(keys: Iterable[str], known: Sequence[str], required: Sequence[str], place: str) -> None:
    """Check that all keys are known and none is missing."""
    given = list(keys)
    for key in given:
        if key not in known:
            raise TraceError(f"{place}: unknown key {shown(key)}; the keys are {', '.join(known)}")
    missing = [key for key in required if key not in given]
    if missing:
        raise TraceError(f"{place}: missing {' and '.join(missing)}")


def json_object(line: str, place: str) -> dict[str, Any]:
    """Parse a line as an object; fractions retain their digits."""
    try:
        value = EXACT_JSON.decode(line)
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise TraceError(f"{place}: not JSON ({json_fault(error)})") from None
    if not isinstance(value, dict):
        raise TraceError(f"{place}: a JSON object expected, not {shown(value)}")
    return value


def json_object_at(fields: Mapping[str, object], key: str, place: str) -> Mapping[str, Any]:
    """Check that a member is an object."""
    value = fields.get(key)
    if not isinstance(value, dict):
        raise TraceError(f"{place}: {key} is {shown(value)}; it must be an object")
    return value


def json_fault(error: Exception) -> str:
    """Fault of a JSON text on one line."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    if isinstance(error, ArithmeticError):
        return "a number is too large"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys: list[str] = [key for key, _ in pairs]
        raise ValueError(f"{shown(next(key for key in keys if keys.count(key) > 1))} appears twice")
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


EXACT_JSON = json.JSONDecoder(parse_float=Decimal, parse_constant=_no_number, object_pairs_hook=_unique)
"""Decoder that refuses NaN, Infinity and repeated keys; fractions retain their digits."""
