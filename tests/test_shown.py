"""Sizes keep three digits or more, and foreign text steers nothing."""

from __future__ import annotations

import pytest

from lockstep.shown import printable, size


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1 kB"),
        (4_250_000, "4.25 MB"),
        (10_040_000, "10 MB"),
        (800_000_000, "800 MB"),
        (999_499, "999 kB"),
        (999_600, "1 MB"),
        (2_400_000_000, "2.4 GB"),
        (20_800_000_000_000, "20,800 GB"),
    ],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_text_of_others_moves_no_terminal() -> None:
    assert printable("a\x1b[2Jb\r\nc\x07\u202e") == "a�[2Jb��c��"
