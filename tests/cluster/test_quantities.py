"""Sizes and durations mean what they say, exactly, in both directions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cluster.quantities import (
    MAX_DURATION_S,
    MAX_SIZE_BYTES,
    MIN_PLAIN_BYTES,
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
    ("text", "num_bytes", "read", "advice"),
    [
        ("18G", 18 * 10**9, "18GB", "NRT reads it as 18GiB; write 18GB or 18GiB"),
        ("18gb", 18 * 10**9, "18GB", "NRT reads it as 18GiB; write 18GB or 18GiB"),
        ("1.5 g", 1_500_000_000, "1.5GB", "NRT reads it as 1.5GiB; write 1.5GB or 1.5GiB"),
        ("512m", 512 * 10**6, "512MB", "NRT reads it as 512MiB; write 512MB or 512MiB"),
        ("2gib", 2 * 2**30, "2GiB", "write 2GiB"),
        ("18000000000", 18 * 10**9, "18000000000B", "write 18000000000B"),
        (str(MIN_PLAIN_BYTES), MIN_PLAIN_BYTES, f"{MIN_PLAIN_BYTES}B", f"write {MIN_PLAIN_BYTES}B"),
    ],
)
def test_a_budget_without_an_exact_unit_is_read_with_a_warning(
    text: str, num_bytes: int, read: str, advice: str
) -> None:
    assert parse_budget(text) == (num_bytes, f"is {text!r}, which is read as {read} ({num_bytes:,} bytes); {advice}")


@pytest.mark.parametrize("text", ["18GB", "18GiB", "18432MiB", "18432B", "1.5 GiB"])
def test_a_budget_with_a_unit_is_read_as_any_size(text: str) -> None:
    assert parse_budget(text) == (parse_size(text), "")


@pytest.mark.parametrize("text", ["18432", "0", "1.5", "1e3", " 32768 ", str(MIN_PLAIN_BYTES - 1)])
def test_a_plain_number_that_nrt_reads_as_mib_is_refused_with_both_readings(text: str) -> None:
    number = text.strip()
    with pytest.raises(ConfigError, match=rf"without a unit; write {number}MiB .* NRT.* or {number}B for bytes"):
        parse_budget(text)


@given(st.integers(0, 2**50))
def test_a_plain_number_is_bytes_or_an_error_and_never_another_unit(number: int) -> None:
    try:
        num_bytes, warning = parse_budget(str(number))
    except ConfigError:
        assert number < MIN_PLAIN_BYTES
    else:
        assert (num_bytes, bool(warning)) == (number, True)


@pytest.mark.parametrize("text", ["18GX", "18Gi", "-18G", "-18432", "lots", "9000000T"])
def test_invalid_budget_is_rejected(text: str) -> None:
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
def test_invalid_size_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"it must be a number with a unit|at most"):
        parse_size(text)


@pytest.mark.parametrize("text", ["1e300d", "3651d", "-1s", "5", "5 sec", "1m30s"])
def test_invalid_duration_is_rejected(text: str) -> None:
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
