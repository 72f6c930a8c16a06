"""Formatting for messages, tables, pages and logs: sizes, times, rates, aligned columns, and text of other sources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

UNITS = ("B", "kB", "MB", "GB")


def size(num_bytes: int) -> str:
    """Bytes in decimal units, to three digits: ``512 B``, ``12.5 kB``, ``640 MB``, ``1.32 GB``."""
    rest, place = float(num_bytes), 0
    while round(rest) >= 1000 and place < len(UNITS) - 1:
        rest, place = rest / 1000, place + 1
    digits = 2 if rest < 10 else 1 if rest < 100 else 0
    text = f"{rest:,.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if digits else text} {UNITS[place]}"


def duration(seconds: float) -> str:
    """A time in its largest unit: ``90 s``, ``42 min``, ``3.1 h``, ``2.3 d``."""
    for unit, scale in (("d", 86_400), ("h", 3_600)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{max(0.0, seconds):.0f} s"


def milliseconds(seconds: float) -> str:
    """A short time: ``4 ms``, ``2,500 ms``, and from 10 seconds ``12.0 s``."""
    return f"{seconds:.1f} s" if seconds >= 10 else f"{1e3 * seconds:,.0f} ms"


def rate(per_s: float) -> str:
    """A count per second: ``1,234``, ``99.0``, ``1.2``, ``0``."""
    return f"{per_s:,.0f}" if per_s >= 100 or per_s == 0 else f"{per_s:.1f}"


def percent(share: float) -> str:
    """A share of a whole: ``42%``."""
    return f"{100 * share:.0f}%"


def signed_percent(share: float, digits: str = ".3g") -> str:
    """A relative change: ``+4.25 %``, ``-12 %``; ``digits`` is the number's format, as `format` takes it."""
    return f"{100 * share:+{digits}} %"


def aligned(rows: Iterable[Sequence[str]], indent: str = "") -> str:
    """Rows as lines, their columns two spaces apart, each as wide as its widest cell."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"{indent}{line.rstrip()}" for line in lines)


def printable(text: str) -> str:
    """Replace characters that could control a terminal, break a line or be invalid in XML, each by �."""
    return "".join(each if each.isprintable() else "\ufffd" for each in text)
