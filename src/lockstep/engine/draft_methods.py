"""Draft methods: guess the next tokens of a sequence from earlier places with the same last tokens.

A guess is a pure function of token ids. It never affects an answer, only how many tokens a step may give.

Both methods scan arrays instead of keeping a tree of suffixes: a scan of 65,536 tokens takes some 20 microseconds,
needs no memory beyond the tokens, and finds the same longest match.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
SEPARATOR = -1
"""Value between texts of a corpus; no token id."""
MAX_MATCHES = 1024
"""Maximum number of places that are compared further, the latest ones."""
MAX_CORPUS_TOKENS = 1 << 16
"""Maximum number of tokens of earlier answers that are kept for each cache salt."""
MAX_CORPORA = 64
"""Maximum number of cache salts whose answers are kept, the most recently used ones; with `MAX_CORPUS_TOKENS` each they
take 16 MiB."""
NUM_LEAD_TOKENS = 8
"""Number of tokens before an answer that are kept with it, so that its first tokens can be guessed."""


class Guess(NamedTuple):
    """Guessed next tokens, and the number of last tokens that matched at their place; empty: no place matched."""

    tokens: tuple[int, ...] = ()
    num_matched: int = 0


NO_GUESS = Guess()


class TokenBuffer:
    """Token ids of one sequence as an array that grows by doubling."""

    __slots__ = ("_array", "_size")

    def __init__(self) -> None:
        self._array: Tokens = np.empty(256, np.int32)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def tokens(self) -> Tokens:
        """[size], a view that is valid until the next `extend`."""
        return self._array[: self._size]

    def extend(self, tokens: Sequence[int]) -> None:
        size = self._size + len(tokens)
        if size > len(self._array):
            grown = np.empty(max(size, 2 * len(self._array)), np.int32)
            grown[: self._size] = self.tokens
            self._array = grown
        self._array[self._size : size] = tokens
        self._size = size


def longest_matches(tokens: Tokens, suffix: Tokens, most: int) -> tuple[npt.NDArray[np.int64], int]:
    """Places in ``tokens`` after the longest possible part of the end of ``suffix``.

    Args:
        tokens: [n]; a place at its end is none, since nothing follows there.
        suffix: the last tokens of a sequence.
        most: maximum length of the part.

    Returns:
        Indices of the tokens that follow, ascending, and the length of the part.
    """
    most = min(most, len(suffix))
    found = np.flatnonzero(tokens[:-1] == suffix[-1]) + 1 if most else np.empty(0, np.int64)
    found, length = found[-MAX_MATCHES:], 1
    while len(found) and length < most:
        longer = found[found > length]
        longer = longer[tokens[longer - 1 - length] == suffix[-1 - length]]
        if not len(longer):
            break
        found, length = longer, length + 1
    return found, length if len(found) else 0


def ngram_guess(tokens: Tokens, least: int, most: int, count: int) -> Guess:
    """Continue the latest of the places where the longest part of the sequence's end occurred before."""
    found, length = longest_matches(tokens, tokens[-most:], most)
    if not len(found) or length < least:
        return NO_GUESS
    begin = int(found[-1])
    return Guess(tuple(tokens[begin : begin + count].tolist()), length)


def suffix_guess(tokens: Tokens, corpus: Tokens, least: int, most: int, count: int) -> Guess:
    """Continue the longest match of the sequence's end, in the sequence itself or in a corpus. Of several places, each
    next token is the most frequent one, and of equally frequent ones the one that came last."""
    end = tokens[-most:]
    best, places, length = tokens, *longest_matches(tokens, end, most)
    if len(corpus):
        others, other_length = longest_matches(corpus, end, most)
        if other_length > length:
            best, places, length = corpus, others, other_length
    if not len(places) or length < least:
        return NO_GUESS
    guessed: list[int] = []
    while len(guessed) < count:
        following = best[places]
        token = _most_frequent(following)
        if token == SEPARATOR:
            break
        guessed.append(token)
        places = places[following == token] + 1
        places = places[places < len(best)]
        if not len(places):
            break
    return Guess(tuple(guessed), length)


def _most_frequent(tokens: Tokens) -> int:
    if len(tokens) == 1:
        return int(tokens[0])
    values, firsts, counts = np.unique(tokens[::-1], return_index=True, return_counts=True)
    best = np.flatnonzero(counts == counts.max())
    return int(values[best[np.argmin(firsts[best])]])


class AnswerCorpora:
    """Earlier answers by cache salt, as one array each, the latest tokens of which are kept. Answers of one salt are
    never guessed for another one."""

    def __init__(self, max_tokens: int = MAX_CORPUS_TOKENS, max_corpora: int = MAX_CORPORA) -> None:
        self._max_tokens = max_tokens
        self._max_corpora = max_corpora
        self._of_salt: OrderedDict[str, Tokens] = OrderedDict()

    def of(self, salt: str) -> Tokens:
        """The answers with this salt, separated by `SEPARATOR`."""
        corpus = self._of_salt.get(salt)
        if corpus is None:
            return np.empty(0, np.int32)
        self._of_salt.move_to_end(salt)
        return corpus

    def add(self, salt: str, tokens: Sequence[int], num_prompt: int) -> None:
        """Add an answer.

        Args:
            tokens: tokens of the prompt and of the answer.
            num_prompt: number of those of the prompt.
        """
        if len(tokens) == num_prompt:
            return
        own = tokens[max(0, num_prompt - NUM_LEAD_TOKENS) :]
        new = np.array([*own[-self._max_tokens + 1 :], SEPARATOR], np.int32)
        self._of_salt[salt] = np.concatenate([self.of(salt), new])[-self._max_tokens :]
        self._of_salt.move_to_end(salt)
        while len(self._of_salt) > self._max_corpora:
            self._of_salt.popitem(last=False)

    def __len__(self) -> int:
        return len(self._of_salt)
