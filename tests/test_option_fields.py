"""A field's type and range are declared once, and every reader uses them: values, texts, faults, help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from lockstep.errors import ConfigError, UsageError
from lockstep.option_fields import MOST, OneOf, OptionType, Range, check_options, field_docs, option_types


@dataclass(frozen=True)
class Base:
    """Fields that others have as well."""

    count: Annotated[int, Range(1, 64)] = 4
    """How many.

    A second paragraph, which help does not show."""
    share: Annotated[float | None, Range(0, 1, above_low=True)] = None


@dataclass(frozen=True)
class Options(Base):
    """One field of each kind."""

    is_on: bool = True
    mode: Literal["slow", "fast"] = "slow"
    """``fast`` or ``slow``."""
    isa: Annotated[str | None, OneOf(("a", "b"))] = None
    names: Mapping[str, int] | None = None


TYPES = option_types(Options)


def test_an_annotation_declares_type_range_words_and_none() -> None:
    assert TYPES["count"] == OptionType(int, Range(1, 64))
    assert TYPES["share"] == OptionType(float, Range(0, 1, above_low=True), is_optional=True)
    assert TYPES["mode"] == OptionType(str, words=("slow", "fast"))
    assert TYPES["isa"] == OptionType(str, words=("a", "b"), is_optional=True)
    assert TYPES["names"].fits({"a": 1}), "what is no plain value is checked elsewhere"


@pytest.mark.parametrize(
    ("name", "fits", "others"),
    [
        ("count", [1, 64], [0, 65, True, 1.0, "1", None]),
        ("share", [1, 1.0, 0.5, None], [0, 0.0, 1.1, float("nan"), float("inf"), True, "0.5"]),
        ("is_on", [True, False], [0, 1, "true", None]),
        ("mode", ["slow"], ["", "SLOW", None, 1, ["slow"]]),
        ("isa", ["a", None], ["c", 1]),
    ],
)
def test_a_value_fits_its_type_and_range(name: str, fits: list[Any], others: list[Any]) -> None:
    assert [value for value in fits if not TYPES[name].fits(value)] == []
    assert [value for value in others if TYPES[name].fits(value)] == []


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("count", " 1_0 ", 10),
        ("share", "0.5", 0.5),
        ("share", "none", None),
        ("share", "NULL", None),
        ("is_on", "off", False),
        ("is_on", "True", True),
        ("mode", "fast", "fast"),
    ],
)
def test_a_text_is_read_as_its_type(name: str, text: str, value: object) -> None:
    assert TYPES[name].parse(text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [("count", "x"), ("count", "none"), ("count", "1.5"), ("is_on", "maybe"), ("mode", "none")],
)
def test_a_text_that_is_none_of_the_values_is_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        TYPES[name].parse(text)


@pytest.mark.parametrize(
    ("type_", "right"),
    [
        (OptionType(int), "a whole number"),
        (OptionType(int, Range(1)), "a whole number, at least 1"),
        (OptionType(int, Range(high=2048)), "a whole number, at most 2,048"),
        (OptionType(float, Range(0, 1e6)), "a number, 0 to 1,000,000"),
        (OptionType(float, Range(0, above_low=True)), "a number above 0"),
        (OptionType(float, Range(0.5, 1, above_low=True)), "a number above 0.5, at most 1"),
        (OptionType(bool), "true or false"),
        (OptionType(str), "a string"),
        (OptionType(str, words=("a", "b", "c")), "a, b or c"),
    ],
)
def test_the_right_values_are_described_in_words(type_: OptionType, right: str) -> None:
    assert type_.right() == right


def test_a_bound_that_is_no_help_is_shown_to_who_is_beyond_it() -> None:
    count = OptionType(int, Range(1, MOST))
    assert count.right(0) == "a whole number, at least 1"
    assert count.right(MOST + 1) == "a whole number, 1 to 1,099,511,627,776"


def test_the_first_field_that_does_not_fit_is_refused_by_name() -> None:
    check_options(Options())
    with pytest.raises(ConfigError, match="count is 0; it must be a whole number, 1 to 64"):
        check_options(Options(count=0))
    with pytest.raises(UsageError, match="isa is 'c'; it must be a or b"):
        check_options(Options(isa="c"), UsageError)


def test_the_first_paragraph_under_a_field_is_its_help_and_bases_are_read() -> None:
    assert field_docs(Options) == {"count": "How many.", "mode": "fast or slow."}
