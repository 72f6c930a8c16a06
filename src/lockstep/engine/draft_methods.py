"""Draft methods: guess the next tokens of a sequence from earlier places with the same last tokens.

A guess is a pure function of token ids. It never affects an answer, only how many tokens a step may give.

Token ids are kept as a text with one character for each, since Python searches texts at the speed of C: the longest
match in 1,000 tokens takes some 5 microseconds. So no tree of suffixes has to follow the growing texts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

SEPARATOR = chr(0x10FFFF)
"""Character between texts of a corpus; no vocabulary has so many tokens."""
MAX_SEARCHED = 1 << 16
"""Maximum number of tokens of a sequence that are searched, the latest ones."""
MAX_CORPUS_TOKENS = 1 << 16
"""Maximum number of tokens of earlier answers that are kept for each cache salt."""
MAX_CORPORA = 64
"""Maximum number of cache salts whose answers are kept, the most recently used ones; with `MAX_CORPUS_TOKENS` each they
take 16 MiB."""
NUM_LEAD_TOKENS = 8
"""Number of tokens before an answer that are kept with it, so that its first tokens can be guessed."""
NUM_FOLLOWING = 48
"""Maximum number of tokens of a guess. After a difference, the sequence is expected to continue within them."""
RELIABLE_MATCH = 3
"""Matches of at least this length are not replaced by `resumed_guess`, and are those after which it resumes."""


class Guess(NamedTuple):
    """Tokens that followed at an earlier place."""

    text: str = ""
    """Up to `NUM_FOLLOWING` tokens; empty: no place matched."""
    num_matched: int = 0
    """Number of last tokens that matched at the place; 0: it resumes after a difference."""

    @property
    def is_reliable(self) -> bool:
        return self.num_matched == 0 or self.num_matched >= RELIABLE_MATCH


NO_GUESS = Guess()


def text_of(tokens: Iterable[int]) -> str:
    """Token ids as a text."""
    return "".join(map(chr, tokens))


def tokens_of(text: str) -> tuple[int, ...]:
    """Token ids of a text."""
    return tuple(map(ord, text))


def longest_match(text: str, end: str, most: int) -> tuple[int, int]:
    """The latest place in ``text`` after the longest possible part of the end of another text.

    Args:
        text: its end is no place, since nothing follows there. Places before its last `MAX_SEARCHED` tokens do not
            count.
        end: the last tokens of a sequence.
        most: maximum length of the part.

    Returns:
        Index of the token that follows, and the length of the part; (0, 0): none.
    """
    first, last = max(0, len(text) - MAX_SEARCHED), len(text) - 1
    place, length, too_long = 0, 0, min(most, len(end)) + 1
    while length + 1 < too_long:
        tried = min((length + too_long) // 2, 2 * length + 1)  # most matches are short
        found = text.rfind(end[-tried:], first, last)
        if found < 0:
            too_long = tried
        else:
            place, length = found + tried, tried
    return place, length


def matched_guess(text: str, corpus: str, least: int, most: int) -> Guess:
    """Continue the longest match of the sequence's end, in the sequence or in a corpus; if equally long, in the
    sequence.

    Args:
        least: minimum number of tokens that must match.
        most: maximum number of tokens that are compared.
    """
    end = text[-most:]
    source, (place, length) = text, longest_match(text, end, most)
    if corpus:
        other_place, other_length = longest_match(corpus, end, most)
        if other_length > length:
            source, place, length = corpus, other_place, other_length
    if length == 0 or length < least:
        return NO_GUESS
    following = source[place : place + NUM_FOLLOWING].partition(SEPARATOR)[0]
    return Guess(following, length) if following else NO_GUESS


def resumed_guess(text: str, missed: str) -> Guess:
    """Continue a guess after a difference, such as another value of the same field, or a changed name: where the
    sequence's last token comes next in the rest of the guess.

    Args:
        missed: see `missed_part`.
    """
    following = missed.partition(text[-1:])[2] if missed else ""
    return Guess(following) if following else NO_GUESS


def missed_part(guess: Guess, got: str) -> str:
    """The rest of a guess from the first token that differs from those that the sequence got; empty: none differs."""
    for place, (guessed, token) in enumerate(zip(guess.text, got, strict=False)):
        if guessed != token:
            return guess.text[place:]
    return ""


class AnswerCorpora:
    """Earlier answers by cache salt, as one text each, the latest tokens of which are kept. Answers of one salt are
    never guessed for another one."""

    def __init__(self, max_tokens: int = MAX_CORPUS_TOKENS, max_corpora: int = MAX_CORPORA) -> None:
        self._max_tokens = max_tokens
        self._max_corpora = max_corpora
        self._of_salt: OrderedDict[str, str] = OrderedDict()

    def of(self, salt: str) -> str:
        """The answers with this salt, each followed by `SEPARATOR`."""
        corpus = self._of_salt.get(salt)
        if corpus is None:
            return ""
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
        own = text_of(tokens[max(0, num_prompt - NUM_LEAD_TOKENS) :])
        self._of_salt[salt] = (self.of(salt) + own + SEPARATOR)[-self._max_tokens :]
        self._of_salt.move_to_end(salt)
        while len(self._of_salt) > self._max_corpora:
            self._of_salt.popitem(last=False)

    def __len__(self) -> int:
        return len(self._of_salt)
