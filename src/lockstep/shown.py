"""Sizes and foreign text as people see them: in messages, tables, pages and logs."""

from __future__ import annotations

UNITS = ("B", "kB", "MB", "GB")


def size(num_bytes: int) -> str:
    """Bytes in decimal units, to three digits: ``512 B``, ``12.5 kB``, ``640 MB``, ``1.32 GB``."""
    rest, place = float(num_bytes), 0
    while round(rest) >= 1000 and place < len(UNITS) - 1:
        rest, place = rest / 1000, place + 1
    digits = 2 if rest < 10 else 1 if rest < 100 else 0
    text = f"{rest:,.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if digits else text} {UNITS[place]}"


def printable(text: str) -> str:
    """Text without what could steer a terminal, break a line or be no XML: such characters stand as �."""
    return "".join(each if each.isprintable() else "\ufffd" for each in text)
