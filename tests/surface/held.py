"""Texts that are held: what users see today, as files beside the tests, and compared line by line."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
WRITE = "LOCKSTEP_WRITE_SURFACE"
"""`make surface` sets it: then texts are written, and the difference is the reviewer's to read."""
MAX_SHOWN_LINES = 60


def hold(name: str, lines: Iterable[str]) -> None:
    """Fail with the difference if a text is not what the file says."""
    path = FOLDER / name
    text = "".join(f"{line}\n" for line in lines)
    if WRITE in os.environ:
        path.write_text(text)
        return
    held = path.read_text()
    if text == held:
        return
    shown = list(_difference(held, text, name))
    more = [f"... and {len(shown) - MAX_SHOWN_LINES} lines more"] if len(shown) > MAX_SHOWN_LINES else []
    told = "\n".join([*shown[:MAX_SHOWN_LINES], *more])
    raise AssertionError(f"users would see something else; if that is meant, `make surface` writes it:\n{told}")


def _difference(held: str, text: str, name: str) -> Iterator[str]:
    return difflib.unified_diff(held.splitlines(), text.splitlines(), f"{name}, held", f"{name}, now", lineterm="", n=2)
