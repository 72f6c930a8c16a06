"""Compiles constraints for a model: a grammar per sequence, its compilation bounded in size, work and time.

`GrammarCompiler` belongs to a model and builds a `Grammar` per sequence with llguidance's parser. Copies of an
llguidance matcher share a lexer whose budgets they use up together, so one sequence's fate could hang on the others'.
What is remembered of a constraint is therefore its checked source, and each sequence gets a matcher of its own. Only of
a short choice, whose whole lexer is far smaller than its budgets, the matcher is remembered, and all that its copies
have found out.

Sizes, lexer work, parser items and compile time are bounded; what exceeds them is refused at submission, or ends the
one request that it belongs to. A native compiler that recurses over its input ends the process when the stack does; a
stack in proportion to the largest input that is let in cannot end first, so it runs on a `DeepStack`.
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
from lockstep.executors.grammar import AnyGrammar, ChoiceGrammar, ChoiceStates, Grammar, is_panic, short_message

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_CACHED_GRAMMARS = 256
MAX_COMPILE_S = 5.0
"""The last resort: the limits below end a compilation well before."""
MAX_BUILDERS = 2
STACK_BYTES = 128 << 20
"""16 KB per level of nesting were seen, and a level takes no fewer than 10 bytes of the source."""
INITIAL_LEXER_FUEL = 100_000
STEP_LEXER_FUEL = 100_000
MAX_LEXER_STATES = 20_000
MAX_COPIED_BYTES = 8_192
"""Bound of the texts of a choice whose matcher is copied. Its lexer has about one state per byte, and making all of
them takes about two units of fuel per byte: less than half of `MAX_LEXER_STATES`, and a sixth of the fuel of a step."""
NUM_REHEARSED_TOKENS = 16
"""Tokens for which a new constraint is tried, so that one that explodes is refused instead of stopping the engine."""
SENTINEL = "\x02"
"""A character that no merge crosses, before texts whose tokenizer puts a space in front."""
Result = TypeVar("Result")


class GrammarCompiler:
    """Builds grammars for one model's vocabulary. May be shared by threads.

    Args:
        load_vocabulary: gives the model's tokens; called once, when the first constraint comes. None: it has no table.
        vocab_size: rows of the model's output, at least as many as the tokenizer has tokens.
        end_token_ids: tokens that may come exactly where a grammar lets the text end.
    """

    def __init__(
        self, load_vocabulary: Callable[[], Vocabulary | None], vocab_size: int, end_token_ids: Sequence[int]
    ) -> None:
        self._load_vocabulary = load_vocabulary
        self._vocab_size = vocab_size
        self._end_token_ids = list(end_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._checked: OrderedDict[Constraint, _Checked] = OrderedDict()
        self._states = ChoiceStates()
        self._deep_stack = DeepStack(STACK_BYTES, MAX_BUILDERS)

    def build(self, constraint: Constraint, count: int = 1) -> tuple[AnyGrammar, ...]:
        """Grammars for ``count`` sequences, each at its beginning. Unless `is_ready` is true, the call blocks for about
        a millisecond, at most `MAX_COMPILE_S`; the GIL is free meanwhile.

        Raises:
            InvalidParameterError: the constraint is wrong, too large, or cannot be used with this model.
            QueueFullError: too many are being compiled.
        """
        try:
            if (pristine := self._pristine(constraint)) is not None:
                return self._copies(constraint, pristine, count)
            tokenizer = self._ready_tokenizer(constraint)
            return self._deep_stack.run(lambda: self._build(tokenizer, constraint, count), MAX_COMPILE_S)
        except TimeoutError:
            raise _refused(constraint, f"compiling it takes longer than {MAX_COMPILE_S:g} s; make it simpler") from None
        except LockstepError:
            raise
        except BaseException as error:
            if not is_panic(error):
                raise
            raise _refused(constraint, f"the compiler broke on it: {error}") from None

    def is_ready(self, constraint: Constraint) -> bool:
        """True if `build` has nothing to compile, so that any thread may call it at any time."""
        try:
            return self._pristine(constraint) is not None
        except TypeError:  # it was not validated yet, and holds what has no hash
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
                while len(self._checked) > MAX_CACHED_GRAMMARS:
                    self._checked.popitem(last=False)
        if checked.error is not None:
            raise _refused(constraint, checked.error)
        if checked.pristine is not None:
            return self._copies(constraint, checked.pristine, count)
        return tuple(Grammar(self._matcher(tokenizer, checked.source), self._vocab_size) for _ in range(count))

    def _copies(self, constraint: Constraint, pristine: LLMatcher, count: int) -> tuple[AnyGrammar, ...]:
        def forget() -> None:  # what one copy broke may be shared by all
            with self._lock:
                self._checked.pop(constraint, None)

        return tuple(ChoiceGrammar(pristine, self._vocab_size, self._states, forget) for _ in range(count))

    def _check(self, constraint: Constraint, tokenizer: LLTokenizer) -> _Checked:
        """Compile it and try it on a few tokens."""
        try:
            source = grammar_source(constraint)
        except ValueError as error:
            return _Checked("", str(error))
        matcher = self._matcher(tokenizer, source)
        if matcher.is_error():
            return _Checked("", matcher.get_error())
        pristine = matcher.deep_copy() if _may_be_copied(constraint) else None
        try:
            rehearse(Grammar(matcher, self._vocab_size), self._vocab_size)
        except RequestFailedError as error:
            return _Checked("", matcher.get_error() or str(error))
        return _Checked(source, None, pristine)

    def _matcher(self, tokenizer: LLTokenizer, source: str) -> LLMatcher:
        from llguidance import LLMatcher

        return LLMatcher(tokenizer, source, log_level=0, limits=_limits())

    def _ready_tokenizer(self, constraint: Constraint) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                if not self._end_token_ids:
                    raise _refused(constraint, "this model has no end token, so that no grammar could end")
                vocabulary = self._load_vocabulary()
                if vocabulary is None:
                    raise _refused(constraint, "this model's tokens cannot spell every text byte by byte")
                try:
                    vocabulary = vocabulary.padded(self._vocab_size)
                    self._tokenizer = LLTokenizer(vocabulary, self._vocab_size, self._end_token_ids)  # type: ignore[arg-type]  # as good as its wrapper
                except ValueError as error:
                    raise _refused(constraint, f"this model's tokenizer cannot be used: {error}") from None
            return self._tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """A model's tokens as `LLTokenizer` takes them in place of a tokenizer; it reads these names.

    Given by us and not read by it from a ``tokenizer.json``, so that the bytes are those of the answer's text, and so
    that text that spells a special token stays text: read from there, it becomes that token, which no grammar accepts.
    """

    tokens: Sequence[bytes]
    """The bytes of each token, the spelling of a special one."""
    special_token_ids: Sequence[int]
    eos_token_id: int
    encode: Callable[[str], list[int]]
    """Tokens of a text in which a special token is only its characters."""
    bos_token_id: int | None = None
    is_tokenizer_wrapper: bool = True

    def padded(self, vocab_size: int) -> Vocabulary:
        """With a token of no bytes for each row of the model that has no text: such a token never comes.

        Raises:
            ValueError: the model has fewer rows than there are tokens.
        """
        surplus = vocab_size - len(self.tokens)
        if surplus < 0:
            raise ValueError(f"it has {len(self.tokens)} tokens, the model only {vocab_size} rows")
        return replace(self, tokens=[*self.tokens, *([b""] * surplus)])

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens whose bytes are exactly the text's; none where the tokenizer cannot write it."""
        text = text if isinstance(text, str) else text.decode()
        ids = self.encode(text)
        if self._spelled(ids) == text.encode():
            return ids
        prefix, ids = self.encode(SENTINEL), self.encode(SENTINEL + text)
        ids = ids[len(prefix) :]
        return ids if self._spelled(ids) == text.encode() else []

    def _spelled(self, ids: Sequence[int]) -> bytes:
        return b"".join([self.tokens[token] for token in ids])


def rehearse(grammar: Grammar, vocab_size: int) -> None:
    """Walk a grammar for a few tokens, the same ones every time.

    Raises:
        RequestFailedError: it cannot go on.
    """
    for step in range(1, NUM_REHEARSED_TOKENS + 1):
        ids = np.flatnonzero(np.unpackbits(grammar.allowed(), count=vocab_size, bitorder="little"))
        if grammar.is_complete or not len(ids):
            return
        grammar.accept(int(ids[step * 7919 % len(ids)]), 0)


def schema_fault(schema: object) -> str:
    """The reason for which no grammar can be made of a JSON schema, whatever the model; empty: one can.

    Its depth is for the caller to bound.
    """
    from llguidance import LLMatcher

    try:
        source = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=COMPACT)  # type: ignore[arg-type]  # total=False
        fault: str = LLMatcher.validate_grammar(source, limits=_limits())
    except BaseException as error:
        if not (isinstance(error, ValueError) or is_panic(error)):
            raise
        fault = str(error) or type(error).__name__
    return short_message(fault) if fault else ""


def grammar_source(constraint: Constraint) -> str:
    """The source in one of llguidance's own languages; whether it can be compiled is not known yet.

    Raises:
        ValueError: the schema is not JSON.
    """
    from llguidance import LLMatcher

    kind, source = constraint.kind, constraint.source
    if kind is ConstraintKind.CHOICE:
        return f"start: {' | '.join(map(_literal, source))}"
    assert isinstance(source, str), "validation lets only a choice have several texts"
    if kind is ConstraintKind.REGEX:
        return LLMatcher.grammar_from_regex(source)
    if kind is ConstraintKind.LARK:
        return LLMatcher.grammar_from_lark(source)
    schema = schema_text(constraint)
    if schema.strip() == "false":  # options need an object
        return LLMatcher.grammar_from_json_schema(schema)
    schema = "{}" if schema.strip() == "true" else schema
    return LLMatcher.grammar_from_json_schema(schema, defaults=COMPACT)  # type: ignore[arg-type]  # total=False


class DeepStack:
    """Runs work whose recursion depth the caller's input decides, each call on a new thread with a large stack.

    Only touched pages cost memory.

    Args:
        stack_bytes: of each thread.
        max_threads: how many may run at once; others wait for a slot.
    """

    _starting: ClassVar[threading.Lock] = threading.Lock()
    """The stack size of new threads is a setting of the whole process."""

    def __init__(self, stack_bytes: int, max_threads: int) -> None:
        self._stack_bytes = stack_bytes
        self._slots = threading.BoundedSemaphore(max_threads)

    def run(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """The function's result, or what it raised.

        A function that is not done in time is left to end on its own and keeps its slot until then.

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
            except BaseException as error:  # handed to the caller, native panics included
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
    """Result of checking a constraint, which is remembered."""

    source: str
    """For llguidance."""
    error: str | None
    """Reason for which it cannot be used with this model."""
    pristine: LLMatcher | None = None
    """At its beginning, only ever copied; None: it must be built anew."""


def _may_be_copied(constraint: Constraint) -> bool:
    is_choice = constraint.kind is ConstraintKind.CHOICE
    return is_choice and sum(len(text.encode()) for text in constraint.source) <= MAX_COPIED_BYTES


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )


def _refused(constraint: Constraint, message: str) -> InvalidParameterError:
    return InvalidParameterError(
        f"the {constraint.kind} constraint cannot be used: {short_message(message)}", param=PARAM
    )


def _literal(text: str) -> str:
    """A Lark string; DEL, alone of the control characters, is not escaped by JSON and not taken by the lexer."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
