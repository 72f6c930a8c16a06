"""Names are guessed whatever their case and their letters' script, and what a character hides is said."""

from __future__ import annotations

import pytest

from lockstep.spelling import MAX_LISTED, did_you_mean, listed, nearest, odd_character


@pytest.mark.parametrize("name", ["tiers", "TIER", "ti\u0435r", "ti\u200ber", "\uff54ier"])
def test_the_nearest_name_is_found_in_any_disguise(name: str) -> None:
    assert nearest(name, ["tier", "priority", "source"]) == ["tier"]
    assert did_you_mean(name, ["tier", "priority", "source"]) == "did you mean 'tier'?"


def test_what_is_near_nothing_is_not_guessed() -> None:
    assert nearest("zzz", ["tier", "source"]) == []
    assert did_you_mean("zzz", ["tier", "source"]) == ""


def test_several_names_may_be_near_and_keep_their_own_case() -> None:
    assert nearest("q8", ["Q8_0", "Q8_1", "F16"], n=3, cutoff=0.5) == ["Q8_1", "Q8_0"]


def test_a_list_is_a_sentence_and_no_longer_than_one_bears() -> None:
    assert [listed(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]
    assert listed(["a", "b"], "or") == "a or b"
    assert listed([str(i) for i in range(MAX_LISTED + 5)]).endswith("15 and …")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("plain-name_1", ""),
        ("a\tb", "has a tab; write spaces"),
        ("a\u200bb", "U+200B ZERO WIDTH SPACE, which cannot be seen"),
        ("\u0430b", "U+0430 CYRILLIC SMALL LETTER A, which looks like a; write a"),
        ("r\u00e9serve", ""),
    ],
)
def test_a_character_that_is_not_what_it_looks_like_is_named(text: str, words: str) -> None:
    assert words in odd_character(text)
    assert bool(odd_character(text)) == bool(words)


def test_letters_that_can_be_seen_are_left_alone_where_only_the_unseen_matter() -> None:
    assert odd_character("\u0430", only_unseen=True) == ""
    assert odd_character("\u00a0", only_unseen=True)
