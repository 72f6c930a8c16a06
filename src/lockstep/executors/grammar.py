"""Constraints at work: which tokens may come next in one sequence, and which must.

`GrammarCompiler` belongs to a model and builds a `Grammar` per sequence; a grammar belongs to its sequence. The parser
is llguidance's: its masks are a pure function of the grammar and the tokens so far. Copies of an llguidance matcher
share a lexer whose budgets they use up together, so one sequence's fate could hang on the others'. What is remembered
of a constraint is therefore its checked source, and each sequence gets a matcher of its own. Only of a short choice,
whose whole lexer is far smaller than its budgets, the matcher is remembered, and all that its copies have found out.

Sizes, lexer work, parser items and compile time are bounded; what exceeds them is refused at submission, or ends the
one request that it belongs to.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import InvalidParameterError, LockstepError, RequestFailedError
from lockstep.executors.constraint import PARAM, Constraint, ConstraintKind
from lockstep.executors.deep_stack import DeepStack
from lockstep.executors.grammar_places import Matcher, Places, RememberingMatcher
from lockstep.executors.grammar_source import grammar_source
from lockstep.executors.grammar_vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

TokenBits = npt.NDArray[np.uint8]
"""[at least vocab / 8] one bit per token, the lowest bit of a byte first; 1: it may come."""

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
"""Of the texts of a choice whose matcher is copied. Its lexer has about one state per byte, and making all of them
takes about two units of fuel per byte: less than half of `MAX_LEXER_STATES` and a sixth of the fuel of one step."""
NUM_REHEARSED_TOKENS = 16
"""How far a new constraint is tried, so that one that explodes is refused instead of stopping the engine."""
MAX_MESSAGE_CHARS, MAX_WORD_CHARS = 400, 60


class Grammar:
    """One sequence's place in its grammar. `allowed` before a token is chosen, `accept` after; engine thread only."""

    __slots__ = ("_bits", "_forced", "_mask", "_matcher", "is_complete")

    def __init__(self, matcher: Matcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask = ctypes.create_string_buffer((vocab_size + 31) // 32 * 4)
        self._bits: TokenBits = np.frombuffer(memoryview(self._mask), np.uint8)
        """The same memory; an array's own address costs ten times as much to ask for."""
        self.is_complete = False
        """Whether no text can follow: the sequence needs no end token."""
        self._forced: int | None = None
        """The token that must come next, when there is one."""
        self._look_ahead(0)

    def allowed(self, avoided: Sequence[int] = ()) -> TokenBits:
        """The tokens that may come next; valid until the next call.

        Args:
            avoided: tokens that may not come as long as anything else may.

        Raises:
            RequestFailedError: the grammar cannot go on; the message is llguidance's.
        """
        bits = self._bits
        if self._forced is not None:
            bits.fill(0)
            bits[self._forced >> 3] = 1 << (self._forced & 7)
            return bits
        try:
            self._matcher.unsafe_compute_mask_ptr(ctypes.addressof(self._mask), len(self._mask))
        except BaseException as error:
            raise _failure(error) from None
        if self._matcher.is_error():
            raise _failed(self._matcher.get_error())
        if avoided:
            before = bits.copy()
            for token in avoided:
                bits[token >> 3] &= ~(1 << (token & 7)) & 0xFF
            if not bits.any():
                bits[:] = before
        return bits

    def accept(self, token: int, room: int) -> list[int]:
        """Move on by a token that was allowed, and by those that it forces.

        Returns:
            The tokens that must follow, at most ``room`` of them; the grammar has moved on by them as well.

        Raises:
            RequestFailedError: the token does not fit, or the grammar cannot go on.
        """
        try:
            taken = self._matcher.consume_token(token)
        except BaseException as error:
            raise _failure(error) from None
        if not taken:
            raise _failed(self._matcher.get_error())
        return self._look_ahead(room)

    def _look_ahead(self, room: int) -> list[int]:
        matcher = self._matcher
        self._forced = None
        try:
            if not matcher.is_stopped():
                forced = matcher.compute_ff_tokens()
                taken = forced[:room]
                if taken:
                    taken = taken[: matcher.try_consume_tokens(taken)]
                if len(taken) < len(forced) and not matcher.is_stopped():
                    self._forced = forced[len(taken)]
            else:
                taken = []
            self.is_complete = matcher.is_stopped()
        except BaseException as error:
            raise _failure(error) from None
        if matcher.is_error():
            raise _failed(matcher.get_error())
        return taken


@dataclass(frozen=True, slots=True)
class _Checked:
    """What is remembered of a constraint."""

    source: str
    """For llguidance."""
    error: str | None
    """Why it cannot be used with this model."""
    pristine: LLMatcher | None = None
    """At its beginning, only ever copied; None: it must be built anew."""


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
        self._places = Places()
        self._deep_stack = DeepStack(STACK_BYTES, MAX_BUILDERS)

    def build(self, constraint: Constraint, count: int = 1) -> tuple[Grammar, ...]:
        """Grammars for ``count`` sequences, each at its beginning. Unless `is_ready` says so it blocks for about a
        millisecond, at most `MAX_COMPILE_S`; the GIL is free meanwhile.

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
            if not _is_panic(error):
                raise
            raise _refused(constraint, f"the compiler broke on it: {error}") from None

    def is_ready(self, constraint: Constraint) -> bool:
        """Whether `build` has nothing to compile, so that anybody may call it at any time."""
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

    def _build(self, tokenizer: LLTokenizer, constraint: Constraint, count: int) -> tuple[Grammar, ...]:
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

    def _copies(self, constraint: Constraint, pristine: LLMatcher, count: int) -> tuple[Grammar, ...]:
        def forget() -> None:  # what one copy broke may be shared by all
            with self._lock:
                self._checked.pop(constraint, None)

        matchers = (RememberingMatcher(pristine, self._places, forget) for _ in range(count))
        return tuple(Grammar(matcher, self._vocab_size) for matcher in matchers)

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


def _is_panic(error: BaseException) -> bool:
    """Whether Rust code gave up. Its exception has no importable type and is no `Exception`."""
    return type(error).__name__ == "PanicException"


def _failure(error: BaseException) -> BaseException:
    """What to raise for what a matcher raised."""
    return _failed(str(error)) if _is_panic(error) else error


def _failed(message: str) -> RequestFailedError:
    return RequestFailedError(f"the constraint cannot go on: {_short(message)}", param=PARAM)


def _refused(constraint: Constraint, message: str) -> InvalidParameterError:
    return InvalidParameterError(f"the {constraint.kind} constraint cannot be used: {_short(message)}", param=PARAM)


def _short(message: Any) -> str:
    """Messages may quote the whole source."""
    words = str(message).replace("<non-verbose/>", "").split()
    text = " ".join(word if len(word) <= MAX_WORD_CHARS else f"{word[:MAX_WORD_CHARS]}..." for word in words)
    if text == "NoExtensionBias":
        return "nothing that this model can write satisfies it (NoExtensionBias)"
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}..."
