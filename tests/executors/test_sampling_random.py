"""Randomness is a function of seed and position."""

from __future__ import annotations

import numpy as np

from lockstep.executors.sampling_random import TokenRandom


def words(seed: int, position: int, count: int = 8) -> list[int]:
    random = TokenRandom(seed)
    random.at(position)
    return [int(word) for word in random.words(count)]


def test_the_words_are_philox_as_published() -> None:
    """Known answer of Random123 (kat_vectors, philox4x64 10 rounds, all zero): numpy counts up before it generates."""
    generator = np.random.Philox(key=0, counter=2**256 - 1)
    expected = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert [int(word) for word in generator.random_raw(4)] == expected


def test_the_words_are_numpys_for_this_key_and_counter() -> None:
    expected = np.random.Philox(key=1_234, counter=77 << 64).random_raw(8)
    assert words(1_234, 77) == [int(word) for word in expected]


def test_a_position_has_its_words_whatever_was_drawn_before() -> None:
    random = TokenRandom(5)
    random.at(3)
    random.words(7)
    random.uniform()
    random.at(9)
    assert [int(word) for word in random.words(8)] == words(5, 9)
    random.at(3)
    assert [int(word) for word in random.words(8)] == words(5, 3)


def test_seeds_and_positions_differ() -> None:
    drawn = {tuple(words(seed, position)) for seed in (0, 1, -1, 2**63) for position in (0, 1, 2**20)}
    assert len(drawn) == 12
    assert words(-1, 0) == words(2**64 - 1, 0)


def test_uniforms_stay_below_one_times_any_total() -> None:
    largest = ((2**64 - 1) >> 12) * 2.0**-52
    for total in np.random.default_rng(3).random(1_000) * 10.0 ** np.arange(-300, 300, 0.6):
        assert largest * total < total
