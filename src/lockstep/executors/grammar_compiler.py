"""Grammar compiler: compiles constraints for a model into one grammar per sequence, within limits of size, work and
time.

`GrammarCompiler` belongs to a model and builds a `Grammar` per sequence with llguidance's parser. Copies of an
llguidance matcher share a lexer and its budgets, so that one sequence could exhaust the budgets of others. Therefore
the cache holds the checked source of a constraint, and each sequence gets a matcher of its own. The exception is a
short choice, whose whole lexer is far smaller than its budgets: the cache holds its matcher, and all results of its
copies.

Sizes, lexer work, parser items and compile time are limited. What exceeds the limits is rejected at submission, or ends
only its own request. A native compiler that recurses over its input crashes the process if the stack overflows. It runs
on a `DeepStack`, whose size is in proportion to the largest accepted input, so that it cannot overflow.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np

from lockstep.errors import InvalidParameterError, LockstepError, QueueFullError, RequestFailedError
from lockstep.executors.constraint import COMPACT, PARAM, Constraint, ConstraintKind, schema_text
from lockstep.executors.grammar import (
    MAX_CHOICE_STATES,
    AnyGrammar,
    ChoiceGrammar,
    ChoiceStates,
    Grammar,
    is_panic,
    short_message,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_COMPILE_S = 5.0
"""Time limit of a compilation in seconds. The limits below normally end a compilation much earlier."""
STACK_BYTES = 128 << 20
"""Stack size of compiling threads in bytes. A level of nesting was measured to take 16 KB of the stack, and takes at
least 10 bytes of the source."""
NUM_TRIAL_TOKENS = 16
"""Number of tokens for which a new constraint is tried, so that one that explodes is rejected instead of blocking the
engine."""
SENTINEL = "\x02"
"""A character that no merge crosses, put before texts if the tokenizer adds a space in front."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of the constraints of one model."""

    initial_lexer_fuel: int = 100_000
    step_lexer_fuel: int = 100_000
    max_lexer_states: int = 20_000
    max_copied_bytes: int = 8_192
    """Maximum size of the texts of a choice whose matcher is copied. Its lexer has about one state per byte, and
    creating all of them takes about two units of fuel per byte: less than half of `max_lexer_states`, and a sixth of
    the fuel of a step."""
    max_cached: int = 256
    """Maximum number of constraints that are cached."""
    max_choice_states: int = MAX_CHOICE_STATES
    max_builders: int = 2
    """Maximum number of constraints that are compiled at the same time."""

    def of_parser(self) -> LLParserLimits:
        """The limits of one matcher."""
        from llguidance import LLParserLimits

        return LLParserLimits(
            initial_lexer_fuel=self.initial_lexer_fuel,
            step_lexer_fuel=self.step_lexer_fuel,
            max_lexer_states=self.max_lexer_states,
            verbose_errors=False,
        )


class GrammarCompiler:
    """Builds grammars for one model's vocabulary. Threads may share it.

    Args:
        load_vocabulary: returns the model's tokens; called once, for the first constraint. None: they cannot be used.
        vocab_size: rows of the model's output, at least the number of the tokenizer's tokens.
        end_token_ids: tokens that are allowed exactly where the grammar lets the text end.
    """

    def __init__(
        self,
        load_vocabulary: Callable[[], Vocabulary | None],
        vocab_size: int,
        end_token_ids: Sequence[int],
        limits: GrammarLimits | None = None,
    ) -> None:
        self._limits = limits or GrammarLimits()
        self._load_vocabulary = load_vocabulary
        self._vocab_size = vocab_size
        self._end_token_ids = list(end_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._checked: OrderedDict[Constraint, _Checked] = OrderedDict()
        self._states = ChoiceStates(self._limits.max_choice_states)
        self._deep_stack = DeepStack(STACK_BYTES, self._limits.max_builders)

    def build(self, constraint: Constraint, count: int = 1) -> tuple[AnyGrammar, ...]:
        """Build grammars for ``count`` sequences, each in its initial state.

        Unless `is_ready` is true, the call blocks for about a millisecond, at most `MAX_COMPILE_S`, without holding the
        GIL.

        Raises:
            InvalidParameterError: the constraint is invalid, too large, or cannot be used with this model.
            QueueFullError: too many grammars are being compiled.
        """
        try:
            if (pristine := self._pristine(constraint)) is not None:
                return self._copies(constraint, pristine, count)
            tokenizer = self._ready_tokenizer(constraint)
            return self._deep_stack.run(lambda: self._build(tokenizer, constraint, count), MAX_COMPILE_S)
        except TimeoutError:
            raise _refused(constraint, f"compiling it takes longer than {MAX_COMPILE_S:g} s; simplify it") from None
        except LockstepError:
            raise
        except BaseException as error:
            if not is_panic(error):
                raise
            raise _refused(constraint, f"the compiler crashed: {error}") from None

    def is_ready(self, constraint: Constraint) -> bool:
        """True if `build` has nothing to compile, so that any thread may call it at any time."""
        try:
            return self._pristine(constraint) is not None
        except TypeError:  # not validated yet, and contains a value without a hash
            return False

    def _pristine(self, constraint: Constraint) -> LLMatcher | None:
        checked = self._known(constraint)
        return None if checked is None else checked.pristine

    def _known(self, constraint: Constraint) -> _Checked | None:
        with self._lock:
            checked = self._checked.get(constraint)
            if checked is not None:
                self._checked.move_to_end(constraint)
            return checked

    def _build(self, tokenizer: LLTokenizer, constraint: Constraint, count: int) -> tuple[AnyGrammar, ...]:
        checked = self._known(constraint)
        if checked is None:
            checked = self._check(constraint, tokenizer)
            with self._lock:
                self._checked[constraint] = checked
                while len(self._checked) > self._limits.max_cached:
                    self._checked.popitem(last=False)
        if checked.error is not None:
            raise _refused(constraint, checked.error)
        if checked.pristine is not None:
            return self._copies(constraint, checked.pristine, count)
        return tuple(Grammar(self._matcher(tokenizer, checked.source), self._vocab_size) for _ in range(count))

    def _copies(self, constraint: Constraint, pristine: LLMatcher, count: int) -> tuple[AnyGrammar, ...]:
        def forget() -> None:  # copies may share the broken state
            with self._lock:
                self._checked.pop(constraint, None)

        return tuple(ChoiceGrammar(pristine, self._vocab_size, self._states, forget) for _ in range(count))

    def _check(self, constraint: Constraint, tokenizer: LLTokenizer) -> _Checked:
        """Compile a constraint and try it on a few tokens."""
        try:
            source = grammar_source(constraint)
        except ValueError as error:
            return _Checked("", str(error))
        matcher = self._matcher(tokenizer, source)
        if matcher.is_error():
            return _Checked("", matcher.get_error())
        pristine = matcher.deep_copy() if _may_be_copied(constraint, self._limits.max_copied_bytes) else None
        try:
            try_grammar(Grammar(matcher, self._vocab_size), self._vocab_size)
        except RequestFailedError as error:
            return _Checked("", matcher.get_error() or str(error))
        return _Checked(source, None, pristine)

    def _matcher(self, tokenizer: LLTokenizer, source: str) -> LLMatcher:
        from llguidance import LLMatcher

        return LLMatcher(tokenizer, source, log_level=0, limits=self._limits.of_parser())

    def _ready_tokenizer(self, constraint: Constraint) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                if not self._end_token_ids:
                    raise _refused(constraint, "this model has no end token, so no grammar could end")
                vocabulary = self._load_vocabulary()
                if vocabulary is None:
                    raise _refused(constraint, "this model's tokens do not cover every byte")
                try:
                    vocabulary = vocabulary.padded(self._vocab_size)
                    self._tokenizer = LLTokenizer(vocabulary, self._vocab_size, self._end_token_ids)  # type: ignore[arg-type]  # has what its wrapper has
                except ValueError as error:
                    raise _refused(constraint, f"this model's tokenizer cannot be used: {error}") from None
            return self._tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """A model's tokens in the form that `LLTokenizer` accepts in place of a tokenizer. It reads these names.

    We pass the tokens instead of a ``tokenizer.json`` for two reasons. The bytes are then those of the answer's text.
    And a text that spells a special token stays text; read from the file, it would become that token, which no grammar
    accepts.
    """

    tokens: Sequence[bytes]
    """Bytes of each token; for a special token, its spelling."""
    special_token_ids: Sequence[int]
    eos_token_id: int
    encode: Callable[[str], list[int]]
    """Tokenises a text and treats special tokens in it as ordinary characters."""
    bos_token_id: int | None = None
    is_tokenizer_wrapper: bool = True

    def padded(self, vocab_size: int) -> Vocabulary:
        """Add an empty token for each row of the model that has no text. Such a token is never generated.

        Raises:
            ValueError: the model has fewer rows than there are tokens.
        """
        surplus = vocab_size - len(self.tokens)
        if surplus < 0:
            raise ValueError(f"it has {len(self.tokens)} tokens, but the model has only {vocab_size} rows")
        return replace(self, tokens=[*self.tokens, *([b""] * surplus)])

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens whose bytes are exactly the text's; empty if the tokenizer cannot encode it."""
        text = text if isinstance(text, str) else text.decode()
        ids = self.encode(text)
        if self._spelled(ids) == text.encode():
            return ids
        prefix, ids = self.encode(SENTINEL), self.encode(SENTINEL + text)
        ids = ids[len(prefix) :]
        return ids if self._spelled(ids) == text.encode() else []

    def _spelled(self, ids: Sequence[int]) -> bytes:
        return b"".join([self.tokens[token] for token in ids])


def try_grammar(grammar: Grammar, vocab_size: int) -> None:
    """Advance a grammar by a few tokens, the same ones every time.

    Raises:
        RequestFailedError: it cannot continue.
    """
    for step in range(1, NUM_TRIAL_TOKENS + 1):
        ids = np.flatnonzero(np.unpackbits(grammar.allowed(), count=vocab_size, bitorder="little"))
        if grammar.is_complete or not len(ids):
            return
        grammar.accept(int(ids[step * 7919 % len(ids)]), 0)


def schema_fault(schema: object) -> str:
    """The reason why no grammar can be made from a JSON schema for any model; empty: one can.

    The caller must limit its depth.
    """
    from llguidance import LLMatcher

    try:
        source = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=COMPACT)  # type: ignore[arg-type]  # total=False
        fault: str = LLMatcher.validate_grammar(source, limits=GrammarLimits().of_parser())
    except BaseException as error:
        if not (isinstance(error, ValueError) or is_panic(error)):
            raise
        fault = str(error) or type(error).__name__
    return short_message(fault) if fault else ""


def grammar_source(constraint: Constraint) -> str:
    """The source in one of llguidance's own languages, which may still fail to compile.

    Raises:
        ValueError: the schema is not JSON.
    """
    from llguidance import LLMatcher

    kind, source = constraint.kind, constraint.source
    if kind is ConstraintKind.CHOICE:
        return f"start: {' | '.join(map(_literal, source))}"
    assert isinstance(source, str), "validation allows several texts only in a choice"
    if kind is ConstraintKind.REGEX:
        return LLMatcher.grammar_from_regex(source)
    if kind is ConstraintKind.LARK:
        return LLMatcher.grammar_from_lark(source)
    schema = schema_text(constraint)
    if schema.strip() == "false":  # options require an object
        return LLMatcher.grammar_from_json_schema(schema)
    schema = "{}" if schema.strip() == "true" else schema
    return LLMatcher.grammar_from_json_schema(schema, defaults=COMPACT)  # type: ignore[arg-type]  # total=False


class DeepStack:
    """Runs work whose recursion depth depends on the caller's input. Each call gets a new thread with a large stack.

    Only touched pages cost memory.

    Args:
        stack_bytes: stack size of each thread.
        max_threads: maximum number of threads; further calls wait for a slot.
    """

    _starting: ClassVar[threading.Lock] = threading.Lock()
    """Guards the stack size of new threads, which is a setting of the whole process."""

    def __init__(self, stack_bytes: int, max_threads: int) -> None:
        self._stack_bytes = stack_bytes
        self._slots = threading.BoundedSemaphore(max_threads)

    def run(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """Return the function's result, or raise its error.

        A function that exceeds the time limit runs on in its thread and keeps its slot until it ends.

        Raises:
            TimeoutError: it ran too long.
            QueueFullError: no slot became free in that time.
        """
        if not self._slots.acquire(timeout=timeout_s):
            raise QueueFullError("too many grammars are being compiled; try again later")
        results: list[Result] = []
        errors: list[BaseException] = []

        def body() -> None:
            try:
                results.append(work())
            except BaseException as error:  # raised in the caller, including native panics
                errors.append(error)
            finally:
                self._slots.release()

        thread = threading.Thread(target=body, name="lockstep-deep-stack", daemon=True)
        with self._starting:
            usual = threading.stack_size(self._stack_bytes)
            try:
                thread.start()
            except BaseException:
                self._slots.release()
                raise
            finally:
                threading.stack_size(usual)
        thread.join(timeout_s)
        if results:
            return results[0]
        if errors:
            raise errors[0]
        raise TimeoutError(f"not done after {timeout_s:g} s")


@dataclass(frozen=True, slots=True)
class _Checked:
    """Cached result of checking a constraint."""

    source: str
    """Source for llguidance."""
    error: str | None
    """The reason why it cannot be used with this model."""
    pristine: LLMatcher | None = None
    """Matcher in its initial state, which is only copied; None: each sequence needs a new matcher."""


def _may_be_copied(constraint: Constraint, max_bytes: int) -> bool:
    is_choice = constraint.kind is ConstraintKind.CHOICE
    return is_choice and sum(len(text.encode()) for text in constraint.source) <= max_bytes


def _refused(constraint: Constraint, message: str) -> InvalidParameterError:
    return InvalidParameterError(
        f"the {constraint.kind} constraint cannot be used: {short_message(message)}", param=PARAM
    )


def _literal(text: str) -> str:
    """A Lark string. DEL is the only control character that JSON does not escape and the lexer does not accept."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
