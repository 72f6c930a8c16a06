"""Drafters: propose drafts for the sequences of an engine before each step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Protocol

from lockstep.engine.draft_counts import Acceptance, Price, draft_counts
from lockstep.engine.draft_methods import AnswerCorpora, Guess, TokenBuffer, ngram_guess, suffix_guess
from lockstep.engine.generation import Generation
from lockstep.engine.speculative_config import SpeculativeConfig
from lockstep.errors import ConfigError, RequestFailedError, TraceError

Drafts = Mapping[int, Sequence[int]]
"""Sequence id to its drafts."""


class Drafter(Protocol):
    """Source of drafts, called on the engine's thread."""

    def propose(self, generations: Iterable[Generation]) -> Drafts:
        """Drafts for the next step; sequences without any are left out.

        Args:
            generations: the unfinished sequences, by id.
        """
        ...

    def ended(self, generation: Generation) -> None:
        """Report a sequence that has ended."""
        ...


class _Track:
    """A drafter's record of one sequence."""

    __slots__ = ("acceptance", "guess", "num_seen", "tokens")

    def __init__(self) -> None:
        self.tokens = TokenBuffer()
        self.acceptance = Acceptance()
        self.guess = Guess()
        """Guess at its last step."""


class Speculator:
    """Proposes drafts by a method without a model.

    Args:
        prices: durations of steps by number of rows; see `lockstep.engine.draft_prices`.
    """

    def __init__(self, config: SpeculativeConfig, prices: Sequence[Price]) -> None:
        self.config = config
        self.prices = tuple(prices)
        self._tracks: dict[int, _Track] = {}
        self._corpora = AnswerCorpora()

    @classmethod
    def of(cls, text: str) -> Speculator:
        """A speculator that decides like the one whose `text` this is.

        Raises:
            TraceError: it is no such text.
        """
        try:
            facts = json.loads(text)
            return cls(SpeculativeConfig.of(facts["config"]), [Price(*price) for price in facts["step_us"]])
        except (ValueError, KeyError, TypeError, ConfigError) as error:
            raise TraceError(f"the recording has no valid configuration of drafts: {error!r}") from error

    def text(self) -> str:
        """Configuration and prices as JSON, for recordings."""
        return json.dumps({"config": asdict(self.config), "step_us": [list(price) for price in self.prices]})

    def propose(self, generations: Iterable[Generation]) -> Drafts:
        """See the protocol. Drafts after a token that a grammar forbids are cut."""
        guesses: dict[int, tuple[int, ...]] = {}
        odds: dict[int, tuple[int, int]] = {}
        num_rows = 0
        for generation in generations:
            if generation.num_output == 0 or generation.finish_reason is not None:
                continue
            num_rows += 1
            track = self._observed(generation)
            guess = track.guess = self._guess(track, generation.live.request.cache_salt)
            if guess.tokens:
                guesses[generation.seq_id] = guess.tokens
                odds[generation.seq_id] = track.acceptance.odds(guess.num_matched), len(guess.tokens)
        if not odds:
            return {}
        counts = draft_counts(self.prices, num_rows, odds)
        drafts: dict[int, Sequence[int]] = {}
        for generation in generations if counts else ():
            seq_id = generation.seq_id
            if seq_id in counts and (tokens := _permitted(generation, guesses[seq_id][: counts[seq_id]])):
                drafts[seq_id] = tokens
        return drafts

    def ended(self, generation: Generation) -> None:
        """See the protocol. Its answer becomes a source of later guesses of requests with the same cache salt."""
        self._tracks.pop(generation.seq_id, None)
        if self.config.method == "suffix" and not generation.live.request.gives_vector:
            self._corpora.add(generation.live.request.cache_salt, generation.tokens, generation.prompt_len)

    def _observed(self, generation: Generation) -> _Track:
        """The sequence's track, with all its tokens."""
        track = self._tracks.get(generation.seq_id)
        if track is None:
            track = self._tracks[generation.seq_id] = _Track()
        new = generation.tokens[len(track.tokens) :]
        if track.guess.tokens:
            track.acceptance.observe(track.guess.tokens, new, track.guess.num_matched)
        track.tokens.extend(new)
        return track

    def _guess(self, track: _Track, salt: str) -> Guess:
        config, tokens = self.config, track.tokens.tokens
        least, most, count = config.prompt_lookup_min, config.most_compared, config.num_speculative_tokens
        if config.method == "ngram":
            return ngram_guess(tokens, least, most, count)
        return suffix_guess(tokens, self._corpora.of(salt), least, most, count)


def _permitted(generation: Generation, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Cut the drafts before the first one that the sequence's grammar forbids. A grammar that fails here permits none,
    and fails the request when the next token is sampled."""
    if generation.grammar is None:
        return tokens
    try:
        return tokens[: generation.grammar.num_permitted(tokens)]
    except RequestFailedError:
        return ()
