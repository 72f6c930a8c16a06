"""Stop strings end a text at any position, and are emitted only on request."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engine.output_rules import StopStrings
from lockstep.engine.outputs import RequestOutput
from lockstep.engine.request import GenerationRequest
from lockstep.executors.constraint import Constraint
from lockstep.executors.sampling_params import SamplingParams
from lockstep.executors.stub import END_ID
from tests.engine.conftest import MakeEngine

STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=5)


def whole(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Reference: the first position where a stop string is complete; of those that end there, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def streamed(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    finder = StopStrings(stops)
    shown = []
    for piece in pieces:
        text, stop = finder.append(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, finder.flush()], None


@settings(max_examples=500)
@given(st.lists(st.text("abcd", max_size=6), max_size=12), STOPS)
def test_streamed_text_does_not_depend_on_chunking(pieces: list[str], stops: list[str]) -> None:
    shown, stop = streamed(pieces, stops)
    assert ("".join(shown), stop) == whole("".join(pieces), stops)


@settings(max_examples=300)
@given(st.text("abcd", max_size=40), STOPS)
def test_only_possible_beginnings_of_stops_are_withheld(text: str, stops: list[str]) -> None:
    finder = StopStrings(stops)
    shown = ""
    for index, char in enumerate(text):
        piece, stop = finder.append(char)
        if stop is not None:
            return
        shown += piece
        held = text[len(shown) : index + 1]
        begun = [
            k for k in range(index + 2) if any(len(stop) > k and text[: index + 1].endswith(stop[:k]) for stop in stops)
        ]
        assert len(held) == max(begun)


def test_a_stop_is_found_across_pieces() -> None:
    assert streamed(["Hello wo", "rl", "d. E", "N", "D of it"], ["END"]) == (["Hello wo", "rl", "d. ", "", ""], "END")


def test_a_false_beginning_is_released() -> None:
    assert streamed(["aE", "N", "ENx", "E"], ["END"]) == (["a", "", "ENENx", "", "E"], None)


@pytest.mark.parametrize(("stops", "expected"), [(["b", "abc"], ("xa", "b")), (["bc", "abc"], ("x", "abc"))])
def test_the_first_complete_stop_wins_and_of_two_the_longer(stops: list[str], expected: tuple[str, str]) -> None:
    for order in (stops, stops[::-1]):
        shown, stop = streamed(["xabcd"], order)
        assert ("".join(shown), stop) == expected


def test_many_long_stops_cost_a_step_per_character() -> None:
    """64 strings that almost match everywhere: work is bounded, and the match is at the end."""
    stops = ["a" * 200 + chr(ord("b") + index % 20) * (index + 1) for index in range(64)]
    shown, stop = streamed(["a"] * 2_000 + ["b"], stops)
    assert stop == "a" * 200 + "b"
    assert "".join(shown) == "a" * 1_800


def test_an_empty_stop_is_a_programming_error() -> None:
    with pytest.raises(AssertionError):
        StopStrings([""])


def output_of(make_engine: MakeEngine, **params: object) -> RequestOutput:
    engine = make_engine()
    values = {"max_tokens": 99, "temperature": 0.0, **params}
    request_id = engine.submit(GenerationRequest("hello", SamplingParams(**values)))  # type: ignore[arg-type]  # by name
    engine.run_until_idle()
    output = engine.result(request_id)
    assert output is not None
    return output


@pytest.mark.parametrize(
    ("params", "text", "end", "stop_reason"),
    [
        ({"stop": ("ok",)}, "[stub:alpha] ", "ok", "ok"),
        ({"stop": ("ok", "k l")}, "[stub:alpha] ", "ok", "ok"),
        ({"stop_token_ids": (ord("k"),)}, "[stub:alpha] o", "k", ord("k")),
        ({"stop_token_ids": (ord("k"),), "stop": ("ok",)}, "[stub:alpha] o", "k", ord("k")),
        ({}, "[stub:alpha] ok len=5 max=99", "", END_ID),
    ],
)
def test_the_stop_is_included_on_request(
    make_engine: MakeEngine, params: dict[str, object], text: str, end: str, stop_reason: int | str
) -> None:
    for shown, skip, expected in (
        (False, True, text),
        (True, True, text + end),
        (False, False, text),
        (True, False, text + (end or "<|end|>")),
    ):
        output = output_of(make_engine, include_stop_str_in_output=shown, skip_special_tokens=skip, **params)
        assert output.text == expected
        if not (shown and len(params) == 2):  # the token's text completes the string, which is then what ended it
            assert output.completions[0].stop_reason == stop_reason


def test_special_tokens_are_included_if_not_skipped(make_engine: MakeEngine) -> None:
    constraint = Constraint.lark("start: <|user|> <|system|> <|user|>")
    for skip, text in ((True, ""), (False, "<|user|><|system|><|user|>")):
        assert output_of(make_engine, constraint=constraint, skip_special_tokens=skip).text == text
