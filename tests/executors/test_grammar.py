"""A grammar tells which tokens may come and which must, whatever the tokenizer, and a hostile one ends in words."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Iterator

import pytest

from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError, QueueFullError, RequestFailedError
from lockstep.executors.constraint import Constraint, ConstraintKind
from lockstep.executors.grammar import AnyGrammar
from lockstep.executors.grammar_compiler import DeepStack, GrammarCompiler, GrammarLimits
from lockstep.executors.stub import VOCAB_SIZE
from tests.engine import text_models
from tests.executors.grammars import FAMILIES, CountedTexts, compiler_of, ids_of, pick, text_of, tokenizer_of


def walk(family: str, grammar: AnyGrammar, seed: int, room: int = 15, most: int = 400) -> list[int]:
    """Random allowed tokens, with what they force, until an end token is drawn or the grammar is complete."""
    rng = random.Random(seed)
    ends = tokenizer_of(family).end_token_ids
    tokens: list[int] = []
    while not grammar.is_complete and len(tokens) < most:
        token = rng.choice(ids_of(grammar.allowed()))
        if token in ends:
            break
        tokens += [token, *grammar.accept(token, room)]
    return tokens


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["größe", "日本", 'q"']}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("family", FAMILIES)
class TestEveryTokenizer:
    def test_random_walks_obey_the_schema(self, family: str) -> None:
        compiler, tokenizer = compiler_of(family), tokenizer_of(family)
        for seed in range(30):
            (grammar,) = compiler.build(Constraint.json_schema(SCHEMA))
            document = json.loads(text_of(tokenizer, walk(family, grammar, seed)))
            assert list(document) == ["name", "kind"], seed
            assert document["kind"] in ("größe", "日本", 'q"'), seed
            (grammar,) = compiler.build(Constraint.regex(r"[a-f]{2,4}(/|\n)é?[0-9]*"))
            written = text_of(tokenizer, walk(family, grammar, seed, most=6))
            assert re.match(r"[a-f]{1,4}", written), seed

    def test_every_end_token_may_come_exactly_where_the_text_may_end(self, family: str) -> None:
        ends = set(tokenizer_of(family).end_token_ids)
        (grammar,) = compiler_of(family).build(Constraint.choice(["ab", "abcd"]))
        seen: list[tuple[str, bool]] = []
        tokens: list[int] = []
        while not grammar.is_complete:
            allowed = ids_of(grammar.allowed())
            seen.append((text_of(tokenizer_of(family), tokens), bool(ends & set(allowed))))
            assert ends.isdisjoint(allowed) or ends < set(allowed)
            token = next(token for token in allowed if token not in ends)
            tokens += [token, *grammar.accept(token, 0)]
        assert ("ab", True) in seen
        assert all(may_end == (text == "ab") for text, may_end in seen)

    def test_no_special_token_may_come_inside_a_text(self, family: str) -> None:
        (grammar,) = compiler_of(family).build(Constraint.regex(r"(?s:.)*"))
        allowed = set(ids_of(grammar.allowed()))
        specials = tokenizer_of(family).special_token_ids
        assert allowed & specials == set(tokenizer_of(family).end_token_ids) & specials
        assert len(allowed) > 100

    def test_rows_of_the_model_without_a_text_never_come(self, family: str) -> None:
        (grammar,) = compiler_of(family, 77).build(Constraint.regex(r"(?s:.)*"))
        assert max(ids_of(grammar.allowed())) < tokenizer_of(family).vocab_size

    def test_the_same_tokens_force_the_same_tokens(self, family: str) -> None:
        compiler = compiler_of(family)
        for seed in range(5):
            runs = [walk(family, compiler.build(Constraint.json_schema(SCHEMA))[0], seed) for _ in range(3)]
            assert runs[0] == runs[1] == runs[2]

    def test_room_changes_how_forced_tokens_come_and_not_which(self, family: str) -> None:
        """A request with log-probabilities gets one at a time."""
        compiler = compiler_of(family)
        source = Constraint.lark('start: "this text is " CHOICE " and then it is long"\nCHOICE: "so"|"no"')
        tokens = []
        for room in (0, 1, 3, 15, 100):
            (grammar,) = compiler.build(source)
            run: list[int] = []
            while not grammar.is_complete:
                token = ids_of(grammar.allowed())[-1]
                run += [token, *grammar.accept(token, room)]
            tokens.append(run)
        assert all(run == tokens[0] for run in tokens)


def test_forced_tokens_are_at_most_as_many_as_there_is_room_and_the_next_is_then_the_only_one() -> None:
    (grammar,) = compiler_of("stub").build(Constraint.regex("x(abcdef|b)"))
    assert ids_of(grammar.allowed()) == [ord("x")]
    assert grammar.accept(ord("x"), 9) == []
    assert grammar.accept(ord("a"), 3) == [*b"bcd"]
    assert ids_of(grammar.allowed()) == [ord("e")]
    assert grammar.accept(ord("e"), 9) == [ord("f")]
    assert grammar.is_complete


def test_avoided_tokens_come_only_where_nothing_else_may() -> None:
    end = tokenizer_of("stub").end_token_ids[0]
    (grammar,) = compiler_of("stub").build(Constraint.lark('start: "a" ("b" "c")?'))
    pick(grammar, "a")
    assert ids_of(grammar.allowed()) == [ord("b"), end]
    assert ids_of(grammar.allowed((end,))) == [ord("b")]
    assert ids_of(grammar.allowed((end, ord("b")))) == [ord("b"), end]


def test_a_token_that_does_not_fit_fails_the_sequence() -> None:
    (grammar,) = compiler_of("stub").build(Constraint.choice(["yes"]))
    with pytest.raises(RequestFailedError, match="the constraint cannot continue"):
        grammar.accept(ord("n"), 0)


def test_a_sequence_that_uses_up_its_budget_takes_nothing_from_the_others() -> None:
    """Copies of its matcher would share a lexer, and the second would fail at its first token."""
    grammars = compiler_of("byte level").build(Constraint.regex(r"(\w{1,1000}){1,1000}"), 2)
    ends = tokenizer_of("byte level").end_token_ids
    lengths = []
    for grammar in grammars:
        rng = random.Random(3)
        tokens: list[int] = []
        with contextlib.suppress(RequestFailedError):
            while len(tokens) < 300:
                tokens.append(rng.choice([token for token in ids_of(grammar.allowed(ends)) if token not in ends]))
                grammar.accept(tokens[-1], 0)
        lengths.append(len(tokens))
    assert lengths[0] == lengths[1]
    assert 2 < lengths[0] < 300


def test_a_checked_constraint_is_remembered_and_so_is_a_refused_one() -> None:
    rng = random.Random(3)
    limits = GrammarLimits(max_lexer_states=60, max_copied_bytes=0)
    compiler = GrammarCompiler(tokenizer_of("stub").vocabulary, VOCAB_SIZE, (259,), limits)
    good, bad = CountedTexts(("a",)), CountedTexts(bytes(rng.choices(b"abcdef", k=60)).decode() for _ in range(8))
    for _ in range(3):
        compiler.build(Constraint(ConstraintKind.CHOICE, good))
        with pytest.raises(InvalidParameterError, match="too many states"):
            compiler.build(Constraint(ConstraintKind.CHOICE, bad))
    once = CountedTexts(("a",))
    GrammarCompiler(tokenizer_of("stub").vocabulary, VOCAB_SIZE, (259,)).build(Constraint(ConstraintKind.CHOICE, once))
    assert 0 < good.num_reads <= once.num_reads
    assert 0 < bad.num_reads <= once.num_reads


def test_cache_of_constraints_is_limited() -> None:
    assert GrammarLimits().max_cached == 256
    compiler = GrammarCompiler(tokenizer_of("stub").vocabulary, VOCAB_SIZE, (259,), GrammarLimits(max_cached=3))
    choices = [Constraint.choice([str(index)]) for index in range(10)]
    for choice in choices:
        compiler.build(choice)
    assert [choice for choice in choices if compiler.is_ready(choice)] == choices[7:]


@pytest.mark.parametrize(
    "text", ["\x00", "\x01\x7f\x80", "\t\n\r", '"\\/', "\u2028\ufeff", "😀é日", "%ignore <|end|>", "a{1}"]
)
def test_any_text_can_be_a_choice(text: str) -> None:
    (grammar,) = compiler_of("stub").build(Constraint.choice([text, f"{text}!"]))
    pick(grammar, text)


def test_unusable_tokenizer_is_reported() -> None:
    for build in (text_models.wordpiece, text_models.metaspace):
        other = Tokenizer(text_models.parts(build()))
        compiler = GrammarCompiler(other.vocabulary, other.vocab_size, (1,))
        with pytest.raises(InvalidParameterError, match="do not cover every byte"):
            compiler.build(Constraint.regex("a"))
    with pytest.raises(InvalidParameterError, match=f"it has {VOCAB_SIZE} tokens, but the model has only 200 rows"):
        GrammarCompiler(tokenizer_of("stub").vocabulary, 200, (259,)).build(Constraint.regex("a"))
    with pytest.raises(InvalidParameterError, match="this model has no end token"):
        GrammarCompiler(tokenizer_of("stub").vocabulary, VOCAB_SIZE, ()).build(Constraint.regex("a"))


def test_a_native_panic_is_a_refusal() -> None:
    class PanicException(BaseException):
        """As the one that Rust code raises: no `Exception`."""

    class Panicking(tuple[str, ...]):
        """Texts that cannot be read."""

        def __iter__(self) -> Iterator[str]:
            raise PanicException("index out of bounds")

    compiler = GrammarCompiler(tokenizer_of("stub").vocabulary, VOCAB_SIZE, (259,))
    with pytest.raises(InvalidParameterError, match="the compiler crashed: index out of bounds"):
        compiler.build(Constraint(ConstraintKind.CHOICE, Panicking(("a",))))


def test_work_that_takes_too_long_is_left_and_keeps_its_place() -> None:
    import threading

    gate = threading.Event()
    stack = DeepStack(1 << 20, 1)
    with pytest.raises(TimeoutError):
        stack.run(gate.wait, 0.01)
    with pytest.raises(QueueFullError, match="too many grammars are being compiled"):
        stack.run(lambda: 1, 0.01)
    gate.set()
    assert stack.run(lambda: 2, 10.0) == 2
    assert threading.stack_size() == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "constraint",
    [Constraint.json_schema(SCHEMA), Constraint.choice(["abcabc", "abcd", "x"]), Constraint.regex("(ab|ba){2,4}")],
    ids=["schema", "choice", "regex"],
)
def test_guesses_are_permitted_up_to_the_first_token_that_may_not_come(family: str, constraint: Constraint) -> None:
    """And looking at them changes nothing."""
    compiler = compiler_of(family)
    for seed in range(6):
        (grammar,), (twin,), (steps,) = (compiler.build(constraint) for _ in range(3))
        rng = random.Random(seed)
        tokens = walk(family, steps, seed, room=0, most=12)
        for place, token in enumerate(tokens):
            assert grammar.num_permitted(tokens[place:]) == len(tokens) - place
            allowed = ids_of(twin.allowed())
            wrong = rng.choice([each for each in range(300) if each not in allowed])
            assert grammar.num_permitted([wrong, *tokens[place:]]) == 0
            assert grammar.num_permitted([token, wrong]) <= 2
            assert grammar.num_permitted([1 << 20, token]) == 0
            assert ids_of(grammar.allowed()) == allowed
            assert grammar.accept(token, 0) == twin.accept(token, 0) == []
        if grammar.is_complete:
            assert grammar.num_permitted([tokens[0]]) == 0
