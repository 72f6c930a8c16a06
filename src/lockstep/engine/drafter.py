"""Drafters: propose drafts for the sequences of an engine before each step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Protocol

from lockstep.engine.draft_counts import Acceptance, Price, Prices, draft_counts, least_chance
from lockstep.engine.draft_methods import (
    RELIABLE_MATCH,
    AnswerCorpora,
    Guess,
    matched_guess,
    missed_part,
    resumed_guess,
    text_of,
    tokens_of,
)
from lockstep.engine.generation import Generation
from lockstep.engine.speculative_config import SpeculativeConfig
from lockstep.errors import ConfigError, RequestFailedError, TraceError

LEARNING_TOKENS = 8
"""Where no draft can pay, a sequence's next tokens are guessed after each of this many, so that its acceptance is still
learnt."""
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

    __slots__ = ("acceptance", "guesses", "missed", "text")

    def __init__(self) -> None:
        self.text = ""
        """Its tokens until its last guess."""
        self.acceptance = Acceptance()
        self.guesses: list[Guess] = []
        """Its last guesses."""
        self.missed = ""
        """Rest of the last reliable guess after a difference."""

    def observe(self, tokens: Sequence[int]) -> None:
        """Compare the last guesses with the tokens since then."""
        new = text_of(tokens[len(self.text) :])
        for guess in self.guesses:
            self.acceptance.observe(guess.text, new, guess.num_matched)
            if guess.is_reliable:
                self.missed = missed_part(guess, new) or self.missed
        self.text += new

    def guess(self, config: SpeculativeConfig, corpus: str) -> Guess | None:
        """Guess its next tokens; None: no place matches."""
        guesses = [matched_guess(self.text, corpus, config.prompt_lookup_min, config.most_compared)]
        if config.method == "suffix" and guesses[0].num_matched < RELIABLE_MATCH:
            guesses.append(resumed_guess(self.text, self.missed))
        self.guesses = [guess for guess in guesses if guess.text]
        return max(self.guesses, key=lambda each: self.acceptance.odds(each.num_matched), default=None)


class Speculator:
    """Proposes drafts by a method without a model.

    Args:
        prices: measured by `lockstep.engine.draft_prices`.
    """

    def __init__(self, config: SpeculativeConfig, prices: Prices) -> None:
        self.config = config
        self.prices = prices
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
            steps = tuple([Price(*price) for price in facts["step_us"]])
            return cls(SpeculativeConfig.of(facts["config"]), Prices(steps, facts["context_ns"]))
        except (ValueError, KeyError, TypeError, ConfigError) as error:
            raise TraceError(f"the recording has no valid configuration of drafts: {error!r}") from error

    def text(self) -> str:
        """Configuration and prices as JSON, for recordings."""
        facts = {"config": asdict(self.config), "step_us": self.prices.steps, "context_ns": self.prices.context_ns}
        return json.dumps(facts)

    def propose(self, generations: Iterable[Generation]) -> Drafts:
        """See the protocol. Drafts after a token that a grammar forbids are cut."""
        running = [each for each in generations if each.num_output and each.finish_reason is None]
        most, tracks = self.config.num_speculative_tokens, self._tracks
        if not running:
            return {}
        num_rows, num_context = len(running), sum([len(each.tokens) for each in running])
        least = least_chance(self.prices, num_rows, num_context, most)
        guesses: dict[int, tuple[Generation, str]] = {}
        odds: dict[int, tuple[int, int]] = {}
        for generation in running:
            seq_id = generation.seq_id
            track = tracks.get(seq_id) or tracks.setdefault(seq_id, _Track())
            if track.acceptance.best < least and (generation.num_output + seq_id) % LEARNING_TOKENS:
                continue
            track.observe(generation.tokens)
            guess = track.guess(self.config, self._corpora.of(generation.live.request.cache_salt))
            if guess is not None:
                text = guess.text[:most]
                guesses[seq_id] = generation, text
                odds[seq_id] = track.acceptance.odds(guess.num_matched), len(text)
        counts = draft_counts(self.prices, num_rows, num_context, odds) if odds else {}
        drafts: dict[int, Sequence[int]] = {}
        for seq_id, (generation, text) in guesses.items():
            if seq_id in counts and (tokens := _permitted(generation, tokens_of(text[: counts[seq_id]]))):
                drafts[seq_id] = tokens
        return drafts

    def ended(self, generation: Generation) -> None:
        """See the protocol. Its answer becomes a source of later guesses of requests with the same cache salt."""
        self._tracks.pop(generation.seq_id, None)
        if self.config.method == "suffix" and not generation.live.request.gives_vector:
            self._corpora.add(generation.live.request.cache_salt, generation.tokens, generation.prompt_len)


def _permitted(generation: Generation, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Cut the drafts before the first one that the sequence's grammar forbids. A grammar that fails here permits none,
    and fails the request when the next token is sampled."""
    if generation.grammar is None:
        return tokens
    try:
        return tokens[: generation.grammar.num_permitted(tokens)]
    except RequestFailedError:
        return ()
