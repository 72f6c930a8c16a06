"""Banned words: their token sequences, by vLLM's rules, in any sequence and under any constraint."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engine.input_processing import banned_runs
from lockstep.engine.output_rules import BadWords, Runs
from lockstep.engine.outputs import RequestOutput
from lockstep.engine.request import GenerationRequest
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import RequestFailedError
from lockstep.executors.constraint import Constraint
from lockstep.executors.sampling_params import SamplingParams
from lockstep.executors.stub import stub_tokenizer_parts
from tests.engine import text_models
from tests.engine.chat_templates import CHATML
from tests.engine.conftest import MakeEngine

REPLY = "[stub:alpha] ok len=5 max=100"
RUN = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)


def output_of(make_engine: MakeEngine, **params: object) -> RequestOutput:
    engine = make_engine()
    values = {"max_tokens": 100, "temperature": 0.0, **params}
    request_id = engine.submit(GenerationRequest("hello", SamplingParams(**values)))  # type: ignore[arg-type]  # by name
    engine.run_until_idle()
    engine.scheduler.check()
    output = engine.result(request_id)
    assert output is not None
    return output


@settings(max_examples=150)
@given(st.lists(RUN, max_size=6), st.lists(st.integers(0, 3), max_size=8), st.integers(0, 4))
def test_only_tokens_that_complete_a_banned_word_are_banned(
    runs: list[tuple[int, ...]], tokens: list[int], begin: int
) -> None:
    output = tokens[begin:]
    by_definition = {
        run[-1] for run in runs if len(run) <= len(output) + 1 and [*output, run[-1]][-len(run) :] == list(run)
    }
    assert set(BadWords(tuple(runs)).after(tokens, min(begin, len(tokens)))) == by_definition


def test_a_word_is_also_banned_with_a_leading_space() -> None:
    tokenizer = Tokenizer(text_models.parts(text_models.byte_level(), CHATML))

    def runs(*texts: str) -> Runs:
        return tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)

    for word in ("hello", " hello", "Berlin", "xyzzy"):
        bare, spaced = runs(word.strip(), f" {word.strip()}")
        is_both = spaced[0] != bare[0] and len(spaced) == len(bare)
        assert banned_runs(tokenizer, [word]) == ((bare, spaced) if is_both else (bare,))
    assert banned_runs(Tokenizer(stub_tokenizer_parts()), ["ok", "ok"]) == ((*b"ok",),)


@pytest.mark.parametrize("word", ["ok", "o", "stub:alpha", "max=100"])
def test_a_banned_word_is_not_generated(make_engine: MakeEngine, word: str) -> None:
    assert output_of(make_engine).text == REPLY
    text = output_of(make_engine, bad_words=(word,)).text
    assert word not in text
    assert text.startswith(REPLY[: REPLY.index(word) + len(word) - 1])


def test_a_bad_word_that_begins_in_the_prompt_is_not_blocked(make_engine: MakeEngine) -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=3, temperature=0.0, bad_words=("o[",))
    request_id = engine.submit(GenerationRequest("hello", params))
    engine.run_until_idle()
    output = engine.result(request_id)
    assert output is not None
    assert output.text == REPLY[:3]


def test_a_constraint_avoids_banned_words_if_possible(make_engine: MakeEngine) -> None:
    """Also within jump-forward segments, whose tokens are then sampled one by one."""
    choice = Constraint.choice(["billing", "technical"])
    assert output_of(make_engine, constraint=choice, bad_words=("bil",)).error is not None
    assert output_of(make_engine, constraint=choice, bad_words=("b",)).text == "technical"
    assert output_of(make_engine, constraint=Constraint.regex("(ab|ac)c"), bad_words=("ab",)).text == "acc"


def test_a_constraint_that_requires_a_banned_word_fails_with_the_reason(make_engine: MakeEngine) -> None:
    output = output_of(make_engine, constraint=Constraint.choice(["yes"]), bad_words=("es",))
    assert isinstance(output.error, RequestFailedError)
    assert "bad_words" in str(output.error)
