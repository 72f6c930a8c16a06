"""A choice that is asked for again is compiled once, and carries nothing over."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from lockstep.errors import InvalidParameterError, RequestFailedError
from lockstep.executors import grammar_compiler
from lockstep.executors.constraint import Constraint, ConstraintKind
from lockstep.executors.grammar import ChoiceGrammar, ChoiceStates
from lockstep.executors.grammar_compiler import GrammarCompiler, GrammarLimits, grammar_source
from lockstep.executors.stub import VOCAB_SIZE
from tests.executors.grammars import FAMILIES, CountedTexts, compiler_of, ids_of, pick, tokenizer_of
from tests.waiting import HANG_S

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


def matcher_of(texts: Sequence[str], **limits: int) -> LLMatcher:
    """The matcher of a choice in its initial state."""
    vocabulary = tokenizer_of("stub").vocabulary()
    assert vocabulary is not None
    tokenizer = LLTokenizer(vocabulary.padded(VOCAB_SIZE), VOCAB_SIZE, [259])  # type: ignore[arg-type]  # has what its wrapper has
    source = grammar_source(Constraint.choice(texts))
    return LLMatcher(tokenizer, source, log_level=0, limits=GrammarLimits(**limits).of_parser())


class Copied:
    """A matcher that counts its copies."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.num_copies = 0

    def deep_copy(self) -> LLMatcher:
        self.num_copies += 1
        return self._matcher.deep_copy()


class TestAChoiceThatIsAskedForAgain:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_carries_nothing_over_from_the_requests_before_or_beside_it(self, family: str) -> None:
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
        limits = GrammarLimits(max_copied_bytes=0)
        anew = GrammarCompiler(tokenizer.vocabulary, tokenizer.vocab_size, tokenizer.end_token_ids, limits)
        assert copied == [marks(anew, family, choice, seed) for seed in range(20)]
        assert not anew.is_ready(choice)
        assert ids_of(beside[2].allowed()) == copied[0][0][0]

    def test_is_compiled_once(self) -> None:
        """It is built again although another one that is being compiled takes all threads for it."""
        compiler = GrammarCompiler(tokenizer_of("stub").vocabulary, VOCAB_SIZE, (259,), GrammarLimits(max_builders=1))
        texts = CountedTexts(INTENTS)
        choice = Constraint(ConstraintKind.CHOICE, texts)
        assert not compiler.is_ready(choice)
        compiler.build(choice)
        num_reads, has_begun, may_end = texts.num_reads, threading.Event(), threading.Event()

        class Slow(tuple[str, ...]):
            def __iter__(self) -> Iterator[str]:
                has_begun.set()
                may_end.wait(HANG_S)
                return super().__iter__()

        other = threading.Thread(target=compiler.build, args=(Constraint(ConstraintKind.CHOICE, Slow(("a",))),))
        other.start()
        assert has_begun.wait(HANG_S)
        for grammar in compiler.build(choice, 5):
            pick(grammar, "intent=technical")
            assert grammar.is_complete
        assert texts.num_reads == num_reads
        assert compiler.is_ready(Constraint.choice(INTENTS))
        may_end.set()
        other.join(HANG_S)

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

    def test_needs_no_parser_for_known_states_and_keeps_a_limited_number_of_them(self) -> None:
        pristine: Any = Copied(matcher_of(INTENTS))
        states = ChoiceStates()
        for num_copies in (len("technical") + 1, 0):
            pristine.num_copies = 0
            pick(ChoiceGrammar(pristine, VOCAB_SIZE, states, pytest.fail), "technical")
            assert (pristine.num_copies > 0) is (num_copies > 0)
        few = ChoiceStates(max_states=4)
        for _ in range(2):
            pristine.num_copies = 0
            pick(ChoiceGrammar(pristine, VOCAB_SIZE, few, pytest.fail), "billing-eu")
            assert len(few) == 4
            assert pristine.num_copies > 0, "what was forgotten is parsed again"

    def test_fails_its_sequence_where_a_copy_cannot_go_on(self) -> None:
        """With limits that a choice which is copied cannot reach."""
        rng = random.Random(3)
        texts = ["".join(rng.choice("abcdef") for _ in range(60)) for _ in range(8)]
        poor, states = matcher_of(texts, max_lexer_states=60), ChoiceStates()
        with pytest.raises(RequestFailedError, match="the constraint cannot continue"):
            pick(ChoiceGrammar(poor, VOCAB_SIZE, states, lambda: None), texts[0])
        found = [states.find(poor, (*texts[0].encode()[:length],)) for length in range(len(texts[0]) + 1)]
        *_, furthest = [state for state in found if state is not None]
        assert furthest.mask is None, "what a copy in trouble says is not remembered"

    def test_is_copied_only_where_its_whole_lexer_stays_far_from_the_limits(self) -> None:
        """Half of the limits are enough for every state of the largest choice, made by one lexer."""
        rng = random.Random(8)
        usual = GrammarLimits()
        texts = ["".join(rng.choice("abcdef") for _ in range(32)) for _ in range(usual.max_copied_bytes // 32)]
        half = GrammarLimits(max_lexer_states=usual.max_lexer_states // 2, step_lexer_fuel=usual.step_lexer_fuel // 2)
        compiler = GrammarCompiler(tokenizer_of("stub").vocabulary, VOCAB_SIZE, (259,), half)
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
