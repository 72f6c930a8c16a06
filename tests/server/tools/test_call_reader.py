"""The scanner agrees with the standard library on what JSON is, wherever the text is cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.server.tools.call_reader import MAX_DEPTH, JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
SCRAPS = (
    "{", "}", "[", "]", ",", ":", '"', '"a"', "\\", "\\u00", "e9", "0", "12", "-", ".", "e", "E+", "true", "nul", "l",
    " ", "\n", "é", "\x01",
)  # fmt: skip


def scan(pieces: list[str]) -> tuple[int, bool, bool]:
    """How much was taken, whether the value is complete, whether it is broken."""
    scanner, taken, text = JsonScanner(), 0, ""
    for piece in pieces:
        text += piece
        taken = scanner.read(text, taken)
    return taken, scanner.is_complete, scanner.is_broken


def cut(text: str, at: list[int]) -> list[str]:
    borders = [0, *sorted(min(border, len(text)) for border in at), len(text)]
    return [text[begin:end] for begin, end in pairwise(borders)]


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    return True


@settings(max_examples=150)
@given(value=VALUES, indent=st.sampled_from([None, 1]), ascii_only=st.booleans(), at=st.lists(st.integers(0, 80)))
def test_a_document_is_complete_with_its_last_character(
    value: object, indent: int | None, ascii_only: bool, at: list[int]
) -> None:
    text = json.dumps([value], indent=indent, ensure_ascii=ascii_only)
    for length in range(len(text)):
        assert scan([text[:length]])[1:] == (False, False)
    assert scan(cut(text, at)) == (len(text), True, False)
    assert scan([text + "}{"]) == (len(text), True, False)


@settings(max_examples=800)
@given(scraps=st.lists(st.sampled_from(SCRAPS), max_size=12), at=st.lists(st.integers(0, 30), max_size=4))
def test_reader_accepts_the_same_json_as_the_library_cut_anywhere(scraps: list[str], at: list[int]) -> None:
    text = "[" + "".join(scraps) + "]"
    taken, is_complete, is_broken = scan([text])
    assert (is_complete and taken == len(text)) == is_json(text)
    assert scan(list(text))[1:] == (is_complete, is_broken)
    assert scan(cut(text, at))[1:] == (is_complete, is_broken)
    assert not (is_complete and is_broken)


@pytest.mark.parametrize(
    "text", ["01", "1.", "-", "1e", "+1", ".5", "NaN", "tru ", '"\\x"', '"\\u12g4"', '"\n"', "'a'"]
)
def test_invalid_json_is_rejected(text: str) -> None:
    assert scan([f"[{text}]"])[1:] == (False, True)


def test_depth_is_bounded() -> None:
    assert scan(["[" * MAX_DEPTH + "]" * MAX_DEPTH])[1:] == (True, False)
    assert scan(["[" * (MAX_DEPTH + 1)])[2]
