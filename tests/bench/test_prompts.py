"""From recipes to prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.bench.prompts import WORDS, RequestTemplate, Units, calibrate, prompt_of
from lockstep.bench.protocol import Target
from lockstep.bench.remote import RemoteServer
from lockstep.bench.samples import RandomLengths, Sample, TokenSegment, random_samples
from tests.bench.conftest import Start
from tests.bench.standin import MODEL, count_tokens

IDS = Units(ids=tuple(range(100, 300)))
TEXT = Units(words=tuple(f" {word}" for word in WORDS))


@given(st.integers(1, 500), st.integers(0, 500), st.integers(0, 2**32 - 1))
def test_a_shorter_segment_is_the_beginning_of_a_longer_one(short: int, more: int, seed: int) -> None:
    few, many = IDS.fill([TokenSegment((2, 5), short)], seed), IDS.fill([TokenSegment((2, 5), short + more)], seed)
    assert len(few) == short
    assert many[:short] == few


def test_equal_keys_are_equal_tokens_and_others_are_not() -> None:
    shared, own, other = TokenSegment((2, 1), 64), TokenSegment((1, 1), 64), TokenSegment((1, 2), 64)
    first, second = IDS.fill([shared, own], 3), IDS.fill([shared, other], 3)
    assert first[:64] == second[:64]
    assert first[64:] != second[64:]
    assert IDS.fill([shared], 3) != IDS.fill([shared], 4)


def test_text_has_the_number_of_words_for_the_requested_tokens() -> None:
    text = TEXT.fill([TokenSegment((1, 0), 40), TokenSegment((1, 1), 2)], 0)
    assert isinstance(text, str)
    assert len(text.split()) == 42
    half = Units(words=TEXT.words, tokens_per_word=2.0).fill([TokenSegment((1, 0), 40)], 0)
    assert isinstance(half, str)
    assert len(half.split()) == 20


def test_corrections_lengthen_or_shorten_the_last_segment_only() -> None:
    sample = Sample((TokenSegment((0,), 10), TokenSegment((1, 7), 5)), 1)
    assert len(prompt_of(sample, IDS, 0, {})) == 15
    assert len(prompt_of(sample, IDS, 0, {(1, 7): 3})) == 18
    assert len(prompt_of(sample, IDS, 0, {(1, 7): -9})) == 11
    assert prompt_of(Sample("as it is", 1), IDS, 0, {}) == "as it is"


def test_body_requests_a_stream_with_usage_and_extra_fields_override_it() -> None:
    chat = RequestTemplate("m", True, 0.0, ignore_eos=True, extra=(("temperature", 0.5), ("top_k", 1))).body("hi", 7)
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
    assert RequestTemplate("m", False).body([1, 2], 3)["prompt"] == [1, 2]
    assert "temperature" not in RequestTemplate("m", False, None).body([1], 1)


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RANDOM = random_samples(12, RandomLengths(30, 4, range_ratio=0.3, prefix_tokens=5), 1)


def test_prompts_of_a_file_need_no_units(standin: Start) -> None:
    url, behaviour = standin()
    with RemoteServer(Target.parse(url)) as remote:
        found = calibrate(remote, RequestTemplate(MODEL, True), CHAT, [Sample("as it is", 1)], 0)
    assert found.units.method == "as given"
    assert behaviour.bodies == [], "nobody was asked"


def test_completions_take_token_ids_where_the_server_does(standin: Start) -> None:
    url, _ = standin()
    with RemoteServer(Target.parse(url)) as remote:
        found = calibrate(remote, RequestTemplate(MODEL, False), COMPLETIONS, RANDOM, 0)
    assert found.units.method == "exact: token ids"
    prompts = [prompt_of(sample, found.units, 0, found.corrections) for sample in RANDOM]
    assert [len(prompt) for prompt in prompts] == [sample.input_tokens for sample in RANDOM]


@pytest.mark.parametrize(("is_chat", "path"), [(True, CHAT), (False, COMPLETIONS)])
def test_words_are_counted_where_ids_are_not_taken_until_lengths_are_exact(
    standin: Start, is_chat: bool, path: str
) -> None:
    url, _ = standin(takes_ids=False)
    with RemoteServer(Target.parse(url)) as remote:
        found = calibrate(remote, RequestTemplate(MODEL, is_chat), path, RANDOM, 0)
    assert found.units.method == "exact: words counted by /tokenize"
    prompts = [prompt_of(sample, found.units, 0, found.corrections) for sample in RANDOM]
    assert [count_tokens(prompt) for prompt in prompts] == [sample.input_tokens for sample in RANDOM]


def test_words_are_estimated_where_only_usage_counts_tokens(standin: Start) -> None:
    """By the difference that more of them make: the template's own tokens cancel out."""
    url, _ = standin(has_tokenize=False)
    with RemoteServer(Target.parse(url)) as remote:
        found = calibrate(remote, RequestTemplate(MODEL, True), CHAT, RANDOM, 0)
    assert found.units.method.startswith("estimated")
    assert found.units.tokens_per_word == pytest.approx(1.0)
    assert found.corrections == {}
