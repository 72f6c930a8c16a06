"""Sizes and numbers keep the digits that matter, and foreign text steers nothing."""

from __future__ import annotations

import pytest

from lockstep.shown import aligned, duration, milliseconds, percent, printable, rate, signed_percent, size


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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1.0, "0 s"), (90, "90 s"), (150, "2 min"), (9_000, "2.5 h"), (200_000, "2.3 d")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_figures_are_short() -> None:
    assert [rate(value) for value in (0.0, 1.25, 99.0, 1_234.5)] == ["0", "1.2", "99.0", "1,234"]
    assert [milliseconds(value) for value in (0.0042, 2.5, 12.0)] == ["4 ms", "2,500 ms", "12.0 s"]
    assert percent(0.424) == "42%"
    assert [signed_percent(value) for value in (0.0425, -0.12, 0.0)] == ["+4.25 %", "-12 %", "+0 %"]
    assert signed_percent(0.0425, ".1f") == "+4.2 %"


def test_columns_are_two_spaces_apart() -> None:
    assert aligned([("a", "1", "yes"), ("long", "12", "")], "- ") == "- a     1   yes\n- long  12"


def test_text_of_others_moves_no_terminal() -> None:
    assert printable("a\x1b[2Jb\r\nc\x07\u202e") == "a�[2Jb��c��"
