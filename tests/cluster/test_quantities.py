"""Sizes and durations mean what they say, exactly, in both directions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cluster.quantities import (
    MAX_DURATION_S,
    MAX_SIZE_BYTES,
    duration_text,
    parse_budget,
    parse_duration,
    parse_size,
    size_text,
)
from lockstep.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("18GB", 18 * 10**9),
        ("1GiB", 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("0B", 0),
        ("1e3KB", 10**6),
        ("2KiB", 2048),
        ("+1TB", 10**12),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes", "taken"),
    [
        ("18GB", 18 * 10**9, ""),
        ("18GiB", 18 * 2**30, ""),
        ("18G", 18 * 10**9, "18GB"),
        ("18gb", 18 * 10**9, "18GB"),
        ("1.5 g", 1_500_000_000, "1.5GB"),
        ("512m", 512 * 10**6, "512MB"),
        ("2gib", 2 * 2**30, "2GiB"),
        ("18000000000", 18 * 10**9, "18000000000B"),
        ("18", 18, "18B"),
    ],
)
def test_budgets_are_taken_as_nrt_took_them(text: str, num_bytes: int, taken: str) -> None:
    """And what is not written as sizes are written here is told with what it was taken for."""
    note = f"is {text!r}, and taken for {taken} ({num_bytes:,} bytes); write {taken}, or what is meant"
    assert parse_budget(text) == (num_bytes, note if taken else "")


@pytest.mark.parametrize("text", ["18GX", "18Gi", "-18G", "lots", "1.5", "9000000T"])
def test_what_is_no_budget(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_budget(text)


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [("30s", 30.0), ("250ms", 0.25), ("5m", 300.0), ("1.5h", 5400.0), ("2d", 172800.0), ("0s", 0.0)],
)
def test_durations(text: str, duration_s: float) -> None:
    assert parse_duration(text) == duration_s


@pytest.mark.parametrize(
    "text", ["", "GB", "1 2GB", "1GB2", "0x10GB", "\u0661GB", "1__0GB", "nanGB", "infGB", "1e9999GB", "9" * 99 + "B"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match=r"it must be a number with a unit|at most"):
        parse_size(text)


@pytest.mark.parametrize("text", ["1e300d", "3651d", "-1s", "5", "5 sec", "1m30s"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_duration(text)


@given(st.integers(0, MAX_SIZE_BYTES))
def test_a_size_is_written_as_itself(num_bytes: int) -> None:
    assert parse_size(size_text(num_bytes)) == num_bytes


@given(st.floats(0, MAX_DURATION_S, allow_subnormal=False) | st.integers(0, 10**6).map(lambda ms: ms / 1000))
def test_a_duration_is_written_as_itself(duration_s: float) -> None:
    assert parse_duration(duration_text(duration_s)) == duration_s


def test_the_shortest_text_is_written() -> None:
    assert [size_text(n) for n in (18 * 10**9, 2**30, 1500 * 10**6, 1536, 0)] == [
        "18GB",
        "1GiB",
        "1500MB",
        "1536B",
        "0B",
    ]
    assert [duration_text(s) for s in (0.25, 30.0, 300.0, 3600.0, 0.1 + 0.2, 0.0)] == [
        "250ms",
        "30s",
        "5m",
        "1h",
        "0.30000000000000004s",
        "0s",
    ]
