"""Quantities: parses sizes and durations that are written with a unit, and formats them in the shortest exact form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from lockstep.errors import ConfigError

SIZE_UNITS: Mapping[str, int] = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_LOOSE_UNITS = {
    "": "B",
    **{known.lower(): known for known in SIZE_UNITS},
    **{known[0].lower(): known for known in ("KB", "MB", "GB", "TB")},
}
"""Exact unit for each unit of a budget in lower case, for its first letter, and for no unit, which means bytes."""
MIN_PLAIN_BYTES = 2**30
"""Smallest budget in bytes that may be written without a unit. As MiB, the number would be a PiB or more, which no
machine has."""
DURATION_UNITS: Mapping[str, Fraction] = {
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
MAX_SIZE_BYTES = 2**60
"""Upper limit of sizes, larger than any memory."""
MAX_DURATION_S = 10.0 * 365 * 86400
"""Upper limit of durations, longer than any process runs."""
MAX_CHARS = 40
"""Maximum length of a number with its unit; a longer text is a mistake and would only take time to parse."""
_SIZE_EXAMPLES = "18GB (10^9 bytes each) or 16GiB (2^30)"
_NUMBER = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]{1,3})?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Parse a size in bytes, e.g. ``18GB`` (10^9 bytes each) or ``1.5GiB`` (2^30 bytes each).

    Raises:
        ConfigError: no number, a missing or unknown unit, a negative size, or a fraction of a byte.
    """
    number, unit = _split(text, _SIZE_EXAMPLES)
    if not unit:
        raise ConfigError(f"is {text!r}, a size without a unit; write e.g. {text}MB, {text}GB or {text}GiB")
    if unit not in SIZE_UNITS:
        raise ConfigError(f"is {text!r}, in an unknown unit; {_unit_hint(unit)}")
    return _whole_bytes(text, number, unit)


def parse_budget(text: str) -> tuple[int, str]:
    """Parse a budget in bytes. It accepts the forms of `parse_size`, a short or lower-case unit such as ``18G`` or
    ``18gb``, and a plain number that can only be bytes.

    NRT manifests are accepted too, but NRT reads some of these forms differently: its ``GB`` is 2^30 bytes, and its
    plain numbers are MiB. Short and lower-case units are therefore accepted with a warning, and a plain number below
    `MIN_PLAIN_BYTES` is rejected.

    Returns:
        The bytes, and a warning if the unit is not one of `SIZE_UNITS`; otherwise an empty text.

    Raises:
        ConfigError: as in `parse_size`, except for these forms.
    """
    number, unit = _split(text, _SIZE_EXAMPLES)
    written = text.strip().removesuffix(unit).strip()
    if not unit and 0 <= number < MIN_PLAIN_BYTES:
        raise ConfigError(
            f"is {text!r}, a size without a unit; write {written}MiB if it comes from NRT, which counts in MiB, or "
            f"{written}B for bytes"
        )
    known = _LOOSE_UNITS.get(unit.lower())
    if unit in SIZE_UNITS or known is None:
        return parse_size(text), ""
    num_bytes = _whole_bytes(text, number, known)
    read = f"{written}{known}"
    in_nrt = f"{written}{known[0]}iB" if len(known) == 2 else ""
    advice = f"NRT reads it as {in_nrt}; write {read} or {in_nrt}" if in_nrt else f"write {read}"
    return num_bytes, f"is {text!r}, which is read as {read} ({num_bytes:,} bytes); {advice}"


def _whole_bytes(text: str, number: Fraction, unit: str) -> int:
    num_bytes = number * SIZE_UNITS[unit]
    if num_bytes < 0:
        raise ConfigError(f"is {text!r}; a size cannot be negative")
    if num_bytes.denominator != 1:
        raise ConfigError(f"is {text!r}, which is not a whole number of bytes")
    if num_bytes > MAX_SIZE_BYTES:
        raise ConfigError(f"is {text!r}; it must be at most {size_text(MAX_SIZE_BYTES)}")
    return num_bytes.numerator


def size_text(num_bytes: int) -> str:
    """Shortest exact text of a size; of equally short texts the one with the larger unit."""
    texts = [
        f"{num_bytes // factor}{unit}"
        for unit, factor in sorted(SIZE_UNITS.items(), key=lambda each: -each[1])
        if num_bytes % factor == 0
    ]
    return "0B" if num_bytes == 0 else min(texts, key=len)


def parse_duration(text: str) -> float:
    """Parse a duration in seconds, e.g. ``250ms``, ``30s``, ``5m``, ``2h`` or ``1d``.

    Raises:
        ConfigError: no number, a missing or unknown unit, or a negative duration.
    """
    number, unit = _split(text, "250ms, 30s or 5m")
    if not unit:
        raise ConfigError(f"is {text!r}, a duration without a unit; write e.g. {text}s, {text}ms or {text}m")
    if unit not in DURATION_UNITS:
        raise ConfigError(f"is {text!r}, in an unknown unit; known are {', '.join(DURATION_UNITS)}")
    duration = number * DURATION_UNITS[unit]
    if duration < 0:
        raise ConfigError(f"is {text!r}; a duration cannot be negative")
    if duration > MAX_DURATION_S:
        raise ConfigError(f"is {text!r}; it must be at most {duration_text(MAX_DURATION_S)}")
    return float(duration)


def duration_text(duration_s: float) -> str:
    """Shortest text that parses to exactly this duration; of equally short texts the one with the larger unit."""
    texts = [f"{float(duration_s)!r}s"]
    for unit, factor in DURATION_UNITS.items():
        whole = Fraction(duration_s) / factor
        near = round(whole)
        if float(near * factor) == duration_s and near < 10**6:
            texts.append(f"{near}{unit}")
    return "0s" if duration_s == 0 else min(reversed(texts), key=len)


def _split(text: str, example: str) -> tuple[Fraction, str]:
    found = _NUMBER.fullmatch(text.strip()) if len(text) <= MAX_CHARS else None
    if found is None:
        shown = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"
        raise ConfigError(f"is {shown!r}; it must be a number with a unit, e.g. {example}")
    return Fraction(found[1]), found[2]


def _unit_hint(unit: str) -> str:
    for known in SIZE_UNITS:
        if known.lower() == unit.lower():
            return f"did you mean {known}?"
    long = unit.upper()
    if f"{long}B" in SIZE_UNITS:
        return f"write {long}B (decimal) or {long}iB (binary)"
    return f"known are {', '.join(SIZE_UNITS)}"
