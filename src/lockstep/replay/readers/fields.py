"""Values of foreign files, checked one by one: each error names the place, the value and what would be right."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NoReturn, cast

from lockstep.errors import TraceError

MAX_TOKENS = 1 << 30
"""Tokens of one request; far above any context."""
MAX_ID = (1 << 63) - 1
"""Greatest id of a block's content."""
MAX_NAME_CHARS = 256
PS_PER_S = 1_000_000_000_000
PS_PER_NS = 1_000
MAX_TIME_PS = 10_000 * 366 * 86_400 * PS_PER_S
"""Ten thousand years: stamps may count from any origin, but a number beyond is a mistake."""
_SHOWN_CHARS = 40


def shown(value: object) -> str:
    """A foreign value in a message: on one line, and short."""
    short = reprlib.Repr()  # goes no deeper into what is nested
    short.maxlevel = 1
    short.maxstring = short.maxother = short.maxlong = _SHOWN_CHARS
    text = str(value) if isinstance(value, Decimal) else short.repr(value)
    return text if len(text) <= 2 * _SHOWN_CHARS else text[: 2 * _SHOWN_CHARS] + "..."


def whole(value: object, what: str, place: str, least: int = 0, most: int = MAX_TOKENS) -> int:
    """A whole number within limits; 512.0 is one."""
    if isinstance(value, int | Decimal) and not isinstance(value, bool) and least <= value <= most:
        number = int(value)
        if number == value:
            return number
    raise TraceError(f"{place}: {what} is {shown(value)}; it must be a whole number from {least} to {most}")


def content_ids(values: Sequence[object], what: str, place: str) -> tuple[int, ...]:
    """Whole numbers that name contents. Traces are mostly made of these, so all are looked at together first."""
    if set(map(type, values)) == {int}:
        ids = cast(Sequence[int], values)
        if min(ids) >= 0 and max(ids) <= MAX_ID:
            return tuple(ids)
    return tuple([whole(each, what, place, 0, MAX_ID) for each in values])


def time_ps(value: object, what: str, place: str, unit_ps: int) -> int:
    """A time from 0 on in whole picoseconds; what is finer is cut."""
    if isinstance(value, int | Decimal) and not isinstance(value, bool) and 0 <= value <= MAX_TIME_PS // unit_ps:
        return int(value * unit_ps)
    most = MAX_TIME_PS // unit_ps
    raise TraceError(f"{place}: {what} is {shown(value)}; it must be a number from 0 to {most}")


def text(value: object, what: str, place: str) -> str:
    """A short text that can be printed."""
    if not isinstance(value, str) or not value.isprintable() or len(value) > MAX_NAME_CHARS:
        raise TraceError(
            f"{place}: {what} is {shown(value)}; it must be text of at most {MAX_NAME_CHARS} printable characters"
        )
    return value


def array(value: object, what: str, place: str) -> Sequence[object]:
    """A list of anything."""
    if not isinstance(value, list):
        raise TraceError(f"{place}: {what} is {shown(value)}; it must be a list")
    return value


def check_keys(keys: Iterable[str], known: Sequence[str], required: Sequence[str], place: str) -> None:
    """Nothing unknown, nothing missing."""
    given = list(keys)
    for key in given:
        if key not in known:
            raise TraceError(f"{place}: {shown(key)} is not known here; known are {', '.join(known)}")
    missing = [key for key in required if key not in given]
    if missing:
        raise TraceError(f"{place}: {' and '.join(missing)} missing")


def json_object(line: str, place: str) -> dict[str, Any]:
    """A line as an object, with fractions as they were written."""
    try:
        value = EXACT_JSON.decode(line)
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise TraceError(f"{place}: not JSON ({json_fault(error)})") from None
    if not isinstance(value, dict):
        raise TraceError(f"{place}: a JSON object expected, not {shown(value)}")
    return value


def json_object_at(fields: Mapping[str, object], key: str, place: str) -> Mapping[str, Any]:
    """A member that is an object."""
    value = fields.get(key)
    if not isinstance(value, dict):
        raise TraceError(f"{place}: {key} is {shown(value)}; it must be an object")
    return value


def json_fault(error: Exception) -> str:
    """Fault of a JSON text, on one line."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    if isinstance(error, ArithmeticError):
        return "a number beyond all limits"
    return "nested too deep" if isinstance(error, RecursionError) else str(error)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys: list[str] = [key for key, _ in pairs]
        raise ValueError(f"{shown(next(key for key in keys if keys.count(key) > 1))} appears twice")
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


EXACT_JSON = json.JSONDecoder(parse_float=Decimal, parse_constant=_no_number, object_pairs_hook=_unique)
"""Refuses NaN, Infinity and repeated keys; fractions keep the digits that they were written with."""
