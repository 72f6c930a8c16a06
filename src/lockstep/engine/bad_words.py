"""Words that must not come, as runs of tokens. The rules are vLLM's, for its parameter `bad_words`.

A word is tokenised as it stands and with a space before it, since most vocabularies have other tokens there; where the
space is a token of its own, or changes how many there are, the second run would ban more than the word and is left
out. A run's last token may not come where the output ends with all others of it. So it is runs that are banned, not
spellings: a word whose tokens are cut otherwise still comes.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.engine.tokenizer import Tokenizer

Runs = tuple[tuple[int, ...], ...]


def banned_runs(tokenizer: Tokenizer, words: Sequence[str]) -> Runs:
    """The runs of tokens that some words are, each once, in the order of the words."""
    runs: list[tuple[int, ...]] = []
    for word in words:
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False)) if word.strip() else ()
        spaced = tuple(tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False))
        if bare:
            runs.append(bare)
        if spaced and (not bare or (spaced[0] != bare[0] and len(spaced) == len(bare))):
            runs.append(spaced)
    return tuple(dict.fromkeys(runs))


class BadWords:
    """The runs that one sequence must not complete."""

    __slots__ = ("_longer", "_single")

    def __init__(self, runs: Runs) -> None:
        self._single = tuple(run[0] for run in runs if len(run) == 1)
        self._longer: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        """By the token before the last: the run without its last token, and that."""
        for run in runs:
            if len(run) > 1:
                self._longer.setdefault(run[-2], []).append((run[:-1], run[-1]))

    def after(self, tokens: Sequence[int], begin: int) -> tuple[int, ...]:
        """The tokens that may not follow.

        Args:
            tokens: of the sequence so far.
            begin: where its output begins; what stands before is nobody's fault.
        """
        if len(tokens) <= begin:
            return self._single
        completing = [
            last
            for head, last in self._longer.get(tokens[-1], ())
            if len(tokens) - begin >= len(head) and tuple(tokens[-len(head) :]) == head
        ]
        return (*self._single, *completing)
