"""A choice that is asked for again is compiled once, and carries nothing over."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits

from lockstep.errors import InvalidParameterError, RequestFailedError
from lockstep.executors import grammar as grammar_module
from lockstep.executors import grammar_compiler
from lockstep.executors.constraint import Constraint, ConstraintKind
from lockstep.executors.grammar import ChoiceGrammar
from lockstep.executors.grammar_compiler import MAX_LEXER_STATES, STEP_LEXER_FUEL, GrammarCompiler, grammar_source
from lockstep.executors.stub import VOCAB_SIZE
from tests.executors.grammars import FAMILIES, compiler_of, ids_of, pick, tokenizer_of

INTENTS = ("billing", "billing-eu", "technical", "none", "intent=billing", "intent=technical", "größe")


def marks(compiler: GrammarCompiler, family: str, constraint: Constraint, seed: int) -> list[tuple[list[int], int]]:
    """What was allowed at each token of a random walk, and which token was taken."""
    (grammar,) = compiler.build(constraint)
    rng = random.Random(seed)
    seen = []
    while not grammar.is_complete:
        allowed = ids_of(grammar.allowed())
        token = rng.choice(allowed)
        seen.append((allowed, token))
        if token in tokenizer_of(family).end_token_ids:
            break
        seen += [([forced], forced) for forced in grammar.accept(token, seed % 4)]
    return seen


class TestAChoiceThatIsAskedForAgain:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_carries_nothing_over_from_the_requests_before_or_beside_it(
        self, family: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Copies of one matcher allow what matchers of their own do, whatever others took."""
        tokenizer = tokenizer_of(family)
        copying = GrammarCompiler(tokenizer.vocabulary, tokenizer.vocab_size, tokenizer.end_token_ids)
        choice = Constraint.choice(INTENTS)
        copying.build(choice)
        beside = copying.build(choice, 3)
        for grammar in beside[:2]:
            with contextlib.suppress(RequestFailedError):
                grammar.accept(0, 0)
        copied = [marks(copying, family, choice, seed) for seed in range(20)]
        assert copying.is_ready(choice)
        monkeypatch.setattr(grammar_compiler, "MAX_COPIED_BYTES", 0)
        anew = GrammarCompiler(tokenizer.vocabulary, tokenizer.vocab_size, tokenizer.end_token_ids)
        assert copied == [marks(anew, family, choice, seed) for seed in range(20)]
        assert not anew.is_ready(choice)
        assert ids_of(beside[2].allowed()) == copied[0][0][0]

    def test_is_compiled_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compiler = GrammarCompiler(tokenizer_of("stub").vocabulary, VOCAB_SIZE, (259,))
        choice = Constraint.choice(INTENTS)
        assert not compiler.is_ready(choice)
        compiler.build(choice)

        def refuse(*_: object) -> None:
            raise AssertionError("compiled again")

        monkeypatch.setattr(compiler, "_matcher", refuse)
        monkeypatch.setattr(compiler._deep_stack, "run", refuse)
        for grammar in compiler.build(choice, 5):
            pick(grammar, "intent=technical")
            assert grammar.is_complete
        assert compiler.is_ready(Constraint.choice(INTENTS))

    def test_is_compiled_anew_where_a_copy_has_broken(self) -> None:
        class PanicException(BaseException):
            """As the one that Rust code raises: no `Exception`."""

        class Broken:
            """As a matcher whose lexer a native panic has left locked."""

            def deep_copy(self) -> object:
                raise PanicException("poisoned")

        compiler = GrammarCompiler(tokenizer_of("stub").vocabulary, VOCAB_SIZE, (259,))
        choice = Constraint.choice(INTENTS)
        compiler.build(choice)
        compiler._checked[choice] = grammar_compiler._Checked("", None, Broken())  # type: ignore[arg-type]  # as good
        with pytest.raises(InvalidParameterError, match="the compiler crashed: poisoned"):
            compiler.build(choice)
        (grammar,) = compiler.build(choice)
        pick(grammar, "none")

    def test_needs_no_parser_for_known_states_and_keeps_a_limited_number_of_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compiler = GrammarCompiler(tokenizer_of("stub").vocabulary, VOCAB_SIZE, (259,))
        choice = Constraint.choice(INTENTS)
        pick(compiler.build(choice)[0], "technical")
        walked: list[tuple[int, ...]] = []
        look = ChoiceGrammar._copy_after

        def count(grammar: ChoiceGrammar, taken: tuple[int, ...]) -> Any:
            walked.append(taken)
            return look(grammar, taken)

        monkeypatch.setattr(ChoiceGrammar, "_copy_after", count)
        pick(compiler.build(choice)[0], "technical")
        assert not walked
        monkeypatch.setattr(grammar_module, "MAX_CHOICE_STATES", 4)
        for _ in range(2):
            pick(compiler.build(choice)[0], "billing-eu")
        assert len(compiler._states._known) == 4
        assert (*b"billing",) in walked

    def test_fails_its_sequence_where_a_copy_cannot_go_on(self) -> None:
        """With limits that a choice which is copied cannot reach."""
        rng = random.Random(3)
        texts = ["".join(rng.choice("abcdef") for _ in range(60)) for _ in range(8)]
        compiler = GrammarCompiler(tokenizer_of("stub").vocabulary, VOCAB_SIZE, (259,))
        choice = Constraint.choice(texts)
        compiler.build(choice)
        limits = LLParserLimits(max_lexer_states=60, verbose_errors=False)
        poor = LLMatcher(compiler._ready_tokenizer(choice), grammar_source(choice), log_level=0, limits=limits)
        compiler._checked[choice] = grammar_compiler._Checked("", None, poor)
        (grammar,) = compiler.build(choice)
        with pytest.raises(RequestFailedError, match="the constraint cannot continue"):
            pick(grammar, texts[0])
        _, furthest = max(compiler._states._known, key=lambda key: len(key[1]))
        state = compiler._states.find(poor, furthest)
        assert state is not None
        assert state.mask is None, "what a copy in trouble says is not remembered"

    def test_is_copied_only_where_its_whole_lexer_stays_far_from_the_limits(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Half of the limits are enough for every state of the largest choice, made by one lexer."""
        rng = random.Random(8)
        texts = [
            "".join(rng.choice("abcdef") for _ in range(32)) for _ in range(grammar_compiler.MAX_COPIED_BYTES // 32)
        ]
        monkeypatch.setattr(grammar_compiler, "MAX_LEXER_STATES", MAX_LEXER_STATES // 2)
        monkeypatch.setattr(grammar_compiler, "STEP_LEXER_FUEL", STEP_LEXER_FUEL // 2)
        compiler = GrammarCompiler(tokenizer_of("stub").vocabulary, VOCAB_SIZE, (259,))
        for text in texts:
            (grammar,) = compiler.build(Constraint.choice(texts))
            pick(grammar, text)
        assert compiler.is_ready(Constraint.choice(texts))
        compiler.build(Constraint.choice([*texts, "a"]))
        assert not compiler.is_ready(Constraint.choice([*texts, "a"]))

    def test_other_constraints_are_never_ready(self) -> None:
        compiler = compiler_of("stub")
        compiler.build(Constraint.regex("a|b"))
        assert not compiler.is_ready(Constraint.regex("a|b"))
        unhashable = Constraint(ConstraintKind.CHOICE, ["a"])  # type: ignore[arg-type]  # as a careless caller makes it
        assert not compiler.is_ready(unhashable)
