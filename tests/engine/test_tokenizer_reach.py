"""Lower bounds of a text's tokens from its length: never higher than the actual number."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from lockstep.engine.token_reach import TokenReach
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import PromptTooLongError
from tests.engine.text_models import SPECIALS, byte_level, metaspace, parts, sentencepiece, wordpiece
from tests.waiting import until


def _changed(normalizer: normalizers.Normalizer | None = None, **token: bool) -> Library:
    library = Library.from_str(byte_level().to_str())
    library.normalizer = normalizer
    if token:
        library.add_special_tokens([AddedToken("<|blank|>", **token)])
    return library


def _splitting(behavior: str) -> Library:
    library = Library.from_str(byte_level().to_str())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", behavior), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return library


@cache
def tokenizers_with_bound() -> dict[str, Library]:
    """Tokenizers with a known bound."""
    return {
        "byte level": byte_level(),
        "sentencepiece": sentencepiece(),
        "composing": _changed(normalizers.NFC()),
        "composing and replacing": _changed(normalizers.NFKC()),
        "decomposing": _changed(normalizers.NFD()),
        "swallowing blanks": _changed(rstrip=True),
        "splitting": _splitting("merged_with_next"),
    }


@cache
def tokenizers_without_bound() -> dict[str, Library]:
    """Tokenizers in which a token may stand for any number of characters, or none for some."""
    return {
        "unknown words": wordpiece(),
        "unknown characters": metaspace(),
        "collapsing": _changed(normalizers.Replace("aa", "a")),
        "stripping": _changed(normalizers.Strip()),
        "dropping": _splitting("removed"),
    }


TEXTS = st.text(
    st.sampled_from("abe \n\t\u3000\u00e9e\u0301\u1f82\u03b1\u0313\u0300\u0345\uac01\u1100\u1161\u11a8<|>😀日"),
    max_size=60,
).flatmap(lambda text: st.sampled_from(["", *SPECIALS, "<|blank|>"]).map(lambda special: text + special + text))


@given(TEXTS, st.integers(1, 40))
def test_text_within_the_limit_does_not_exceed_it(text: str, repeats: int) -> None:
    text = text * repeats
    for name, library in tokenizers_with_bound().items():
        num_tokens = len(library.encode(text, add_special_tokens=False).ids)
        assert not TokenReach(library).exceeds([text], num_tokens), name
        assert not TokenReach(library).exceeds([text[:3], text[3:]], num_tokens), name


@pytest.mark.parametrize("name", [*tokenizers_with_bound()])
def test_a_text_that_is_far_too_long_is_refused_by_its_length(name: str) -> None:
    assert TokenReach(tokenizers_with_bound()[name]).exceeds(["x" * 100_000], 100)
    assert TokenReach(tokenizers_with_bound()[name]).exceeds(["x" * 1_000] * 100, 100)


@pytest.mark.parametrize("name", [*tokenizers_without_bound()])
def test_no_text_is_refused_by_length_if_a_token_may_absorb_any_text(name: str) -> None:
    assert not TokenReach(tokenizers_without_bound()[name]).exceeds(["x" * 100_000], 1)


def test_blanks_absorbed_by_a_token_do_not_count() -> None:
    text = "<|blank|>" + " \n\u3000" * 30_000
    library = tokenizers_with_bound()["swallowing blanks"]
    assert len(library.encode(text).ids) == 1
    assert not TokenReach(library).exceeds([text], 1)


@pytest.mark.parametrize("make", [byte_level, sentencepiece, wordpiece])
def test_a_long_text_has_the_librarys_tokens(make: Callable[[], Library]) -> None:
    library = make()
    text = "The quick <|im_start|> brown fox;\n\nsüße Äpfel 😀 </s> " * 200
    tokenizer = Tokenizer(parts(library))
    for adds in (False, True):
        assert tokenizer.encode(text, adds) == library.encode(text, add_special_tokens=adds).ids
    expected = Library.from_str(library.to_str())
    expected.encode_special_tokens = True
    assert tokenizer.encode_plain([text, "<s>"]) == [
        expected.encode(each, add_special_tokens=False).ids for each in (text, "<s>")
    ]


def test_too_many_tokens_are_refused_with_their_number_or_their_characters() -> None:
    tokenizer = Tokenizer(parts(byte_level()))
    text = "x y " * 2_000
    count = len(tokenizer.encode(text))
    assert len(tokenizer.encode(text, most=count)) == count
    with pytest.raises(PromptTooLongError, match=f"has {count} tokens, but the context holds {count} "):
        tokenizer.encode(text, most=count - 1)
    with pytest.raises(PromptTooLongError, match="has 8000 characters, but the context holds 11 tokens"):
        tokenizer.encode(text, most=10)


def test_other_threads_run_while_a_long_text_is_tokenised() -> None:
    """A thread that only runs between two texts would observe many of them per turn."""
    tokenizer, text = Tokenizer(parts(byte_level())), "one two three " * 100_000
    num_texts, is_enough = 0, threading.Event()

    def tokenise() -> None:
        nonlocal num_texts
        while not is_enough.is_set():
            tokenizer.encode(text)
            num_texts += 1

    def took_turns_within_one() -> bool:
        before = num_texts
        for _ in range(4):
            time.sleep(0.002)
            assert tokenizer.encode("<s>") != tokenizer.encode_plain(["<s>"])[0]
        return num_texts == before

    thread = threading.Thread(target=tokenise)
    thread.start()
    try:
        until(took_turns_within_one, "short texts are tokenised beside a long one")
    finally:
        is_enough.set()
        thread.join()
