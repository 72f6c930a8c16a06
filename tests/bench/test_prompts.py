"""From recipes to prompts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.bench.prompts import WORDS, Asking, Units, prompt_of
from lockstep.bench.samples import Sample, Segment

IDS = Units(ids=tuple(range(100, 300)))
TEXT = Units(words=tuple(f" {word}" for word in WORDS))


@given(st.integers(1, 500), st.integers(0, 500), st.integers(0, 2**32 - 1))
def test_a_shorter_segment_is_the_beginning_of_a_longer_one(short: int, more: int, seed: int) -> None:
    few, many = IDS.fill([Segment((2, 5), short)], seed), IDS.fill([Segment((2, 5), short + more)], seed)
    assert len(few) == short
    assert many[:short] == few


def test_equal_keys_are_equal_tokens_and_others_are_not() -> None:
    shared, own, other = Segment((2, 1), 64), Segment((1, 1), 64), Segment((1, 2), 64)
    first, second = IDS.fill([shared, own], 3), IDS.fill([shared, other], 3)
    assert first[:64] == second[:64]
    assert first[64:] != second[64:]
    assert IDS.fill([shared], 3) != IDS.fill([shared], 4)


def test_text_has_as_many_words_as_tokens_were_asked_for() -> None:
    text = TEXT.fill([Segment((1, 0), 40), Segment((1, 1), 2)], 0)
    assert isinstance(text, str)
    assert len(text.split()) == 42
    half = Units(words=TEXT.words, tokens_per_word=2.0).fill([Segment((1, 0), 40)], 0)
    assert isinstance(half, str)
    assert len(half.split()) == 20


def test_corrections_lengthen_or_shorten_the_last_segment_only() -> None:
    sample = Sample((Segment((0,), 10), Segment((1, 7), 5)), 1)
    assert len(prompt_of(sample, IDS, 0, {})) == 15
    assert len(prompt_of(sample, IDS, 0, {(1, 7): 3})) == 18
    assert len(prompt_of(sample, IDS, 0, {(1, 7): -9})) == 11
    assert prompt_of(Sample("as it is", 1), IDS, 0, {}) == "as it is"


def test_a_body_asks_for_a_stream_with_usage_and_lets_extra_fields_win() -> None:
    chat = Asking("m", True, 0.0, ignore_eos=True, extra=(("temperature", 0.5), ("top_k", 1))).body("hi", 7)
    assert chat == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 7,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_k": 1,
    }
    assert Asking("m", False).body([1, 2], 3)["prompt"] == [1, 2]
    assert "temperature" not in Asking("m", False, None).body([1], 1)
