"""Grammar state of a sequence: computes which tokens may come next, and which must.

The parser is llguidance's, whose masks are a pure function of the grammar and the tokens so far. The masks of a short
choice are cached by the tokens so far (`ChoiceGrammar`), so that a repeated choice needs no parser: a copy of its
matcher is advanced only for tokens that are not in the cache.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import RequestFailedError
from lockstep.executors.constraint import PARAM

if TYPE_CHECKING:
    from llguidance import LLMatcher

TokenBits = npt.NDArray[np.uint8]
"""[at least vocab / 8] one bit per token, the lowest bit of a byte first; 1: the token may come."""
MAX_MESSAGE_CHARS, MAX_WORD_CHARS = 400, 60
MAX_CHOICE_STATES = 1_024
"""Limit for all choices of a model; with the largest vocabularies the states take 20 MB."""


class Grammar:
    """Grammar state of one sequence. Call `allowed` before a token is chosen and `accept` after. Engine thread only."""

    __slots__ = ("_bits", "_forced", "_mask", "_matcher", "is_complete")

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask = ctypes.create_string_buffer(_mask_bytes(vocab_size))
        self._bits: TokenBits = np.frombuffer(memoryview(self._mask), np.uint8)
        """View of the same memory, since reading the address of an array costs ten times as much."""
        self.is_complete = False
        """True once no text can follow, so that the sequence needs no end token."""
        self._forced: int | None = None
        """The token that must come next, if there is one."""
        self._look_ahead(0)

    def allowed(self, avoided: Sequence[int] = ()) -> TokenBits:
        """The tokens that may come next. Valid until the next call.

        Args:
            avoided: tokens that are excluded as long as any other token is allowed.

        Raises:
            RequestFailedError: the grammar cannot continue; the message is llguidance's.
        """
        if self._forced is not None:
            return _only(self._bits, self._forced)
        try:
            self._matcher.unsafe_compute_mask_ptr(ctypes.addressof(self._mask), len(self._mask))
        except BaseException as error:
            raise _failure(error) from None
        if self._matcher.is_error():
            raise _failed(self._matcher.get_error())
        return _without(self._bits, avoided)

    def accept(self, token: int, room: int) -> list[int]:
        """Advance by an allowed token, and by the tokens that it forces.

        Returns:
            The tokens that must follow, at most ``room`` of them; the grammar has advanced by them as well.

        Raises:
            RequestFailedError: the token does not fit, or the grammar cannot continue.
        """
        try:
            taken = self._matcher.consume_token(token)
        except BaseException as error:
            raise _failure(error) from None
        if not taken:
            raise _failed(self._matcher.get_error())
        return self._look_ahead(room)

    def num_permitted(self, tokens: Sequence[int]) -> int:
        """Number of first tokens of a guess that may come next, one after the other. Changes nothing: it uses a
        copy, since a token outside of the vocabulary would end the parser.

        Raises:
            RequestFailedError: the grammar failed.
        """
        if self.is_complete:
            return 0
        try:
            return max(0, int(self._matcher.deep_copy().validate_tokens([*tokens])))
        except BaseException as error:
            raise _failure(error) from None

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


class ChoiceGrammar:
    """State of one sequence in a choice, mostly read from a cache; otherwise like `Grammar`.

    Args:
        pristine: the choice's matcher in its initial state; only copies of it are advanced.
        on_broken: called if a copy fails unexpectedly, since it may have corrupted the data that it shares with others.

    Raises:
        RequestFailedError: the choice cannot begin.
    """

    __slots__ = ("_bits", "_on_broken", "_pristine", "_state", "_states", "_taken")

    def __init__(
        self, pristine: LLMatcher, vocab_size: int, states: ChoiceStates, on_broken: Callable[[], None]
    ) -> None:
        self._pristine = pristine
        self._states = states
        self._on_broken = on_broken
        self._bits: TokenBits = np.zeros(_mask_bytes(vocab_size), np.uint8)
        self._taken: tuple[int, ...] = ()
        self._state = self._state_after(())

    @property
    def is_complete(self) -> bool:
        """True once no text can follow, so that the sequence needs no end token."""
        return self._state.is_stopped

    def allowed(self, avoided: Sequence[int] = ()) -> TokenBits:
        """See `Grammar.allowed`."""
        state = self._state
        if state.forced:
            return _only(self._bits, state.forced[0])
        if state.mask is None:
            mask = ctypes.create_string_buffer(len(self._bits))
            try:
                with self._copy_after(self._taken) as copy:
                    copy.unsafe_compute_mask_ptr(ctypes.addressof(mask), len(mask))
            except BaseException as error:
                raise _failure(error) from None
            state.mask = np.frombuffer(mask.raw, np.uint8)
        np.copyto(self._bits, state.mask)
        return _without(self._bits, avoided)

    def accept(self, token: int, room: int) -> list[int]:
        """See `Grammar.accept`."""
        try:
            self._move((token,))
            forced = self._state.forced[:room]
            if forced:
                self._move(forced)
        except BaseException as error:
            raise _failure(error) from None
        return list(forced)

    def num_permitted(self, tokens: Sequence[int]) -> int:
        """See `Grammar.num_permitted`."""
        if self.is_complete:
            return 0
        try:
            with self._copy_after(self._taken) as copy:
                return max(0, int(copy.deep_copy().validate_tokens([*tokens])))
        except BaseException as error:
            raise _failure(error) from None

    def _move(self, tokens: tuple[int, ...]) -> None:
        taken = (*self._taken, *tokens)
        self._state, self._taken = self._state_after(taken), taken

    def _state_after(self, taken: tuple[int, ...]) -> _ChoiceState:
        """The state after some tokens."""
        state = self._states.find(self._pristine, taken)
        if state is None:
            with self._copy_after(taken) as copy:
                is_stopped = copy.is_stopped()
                state = _ChoiceState(is_stopped, () if is_stopped else tuple(copy.compute_ff_tokens()))
            self._states.keep(self._pristine, taken, state)
        return state

    @contextmanager
    def _copy_after(self, taken: tuple[int, ...]) -> Iterator[LLMatcher]:
        """Yield a copy of the matcher that has consumed these tokens.

        Raises:
            RequestFailedError: the tokens do not fit, or the copy fails afterwards.
        """
        try:
            copy = self._pristine.deep_copy()
            fits = copy.try_consume_tokens([*taken]) == len(taken)
            if fits:
                yield copy
        except BaseException:
            self._on_broken()
            raise
        if copy.is_error() or not fits:
            raise _failed(copy.get_error() or f"token {taken[-1]} does not fit")


AnyGrammar = Grammar | ChoiceGrammar


class ChoiceStates:
    """Cache of the states of a model's choices by the tokens taken, least recently used first. Threads may share it."""

    def __init__(self, max_states: int = MAX_CHOICE_STATES) -> None:
        self._max_states = max_states
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[LLMatcher, tuple[int, ...]], _ChoiceState] = OrderedDict()

    def find(self, pristine: LLMatcher, taken: tuple[int, ...]) -> _ChoiceState | None:
        """State of a choice after some tokens; None: it is not cached."""
        key = pristine, taken
        with self._lock:
            state = self._known.get(key)
            if state is not None:
                self._known.move_to_end(key)
            return state

    def __len__(self) -> int:
        with self._lock:
            return len(self._known)

    def keep(self, pristine: LLMatcher, taken: tuple[int, ...], state: _ChoiceState) -> None:
        with self._lock:
            self._known[pristine, taken] = state
            while len(self._known) > self._max_states:
                self._known.popitem(last=False)


@dataclass(slots=True)
class _ChoiceState:
    """Cached state of a choice after some tokens."""

    is_stopped: bool
    forced: tuple[int, ...]
    mask: TokenBits | None = None
    """Mask of the allowed tokens; None: not computed yet."""


def _mask_bytes(vocab_size: int) -> int:
    """Size of the mask in bytes: whole words of 32 bits, as llguidance writes them."""
    return (vocab_size + 31) // 32 * 4


def _only(bits: TokenBits, token: int) -> TokenBits:
    bits.fill(0)
    bits[token >> 3] = 1 << (token & 7)
    return bits


def _without(bits: TokenBits, avoided: Sequence[int]) -> TokenBits:
    """Remove tokens, unless no other would be left."""
    if avoided:
        before = bits.copy()
        for token in avoided:
            bits[token >> 3] &= ~(1 << (token & 7)) & 0xFF
        if not bits.any():
            bits[:] = before
    return bits


def is_panic(error: BaseException) -> bool:
    """True if the error is a Rust panic. Its exception has no importable type and is no `Exception`."""
    return type(error).__name__ == "PanicException"


def short_message(message: Any) -> str:
    """Shorten a message, since it may quote the whole source."""
    words = str(message).replace("<non-verbose/>", "").split()
    text = " ".join(word if len(word) <= MAX_WORD_CHARS else f"{word[:MAX_WORD_CHARS]}..." for word in words)
    if text == "NoExtensionBias":
        return "this model's tokens cannot satisfy it (NoExtensionBias)"
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}..."


def _failure(error: BaseException) -> BaseException:
    """The error to raise for one that a matcher raised."""
    return _failed(str(error)) if is_panic(error) else error


def _failed(message: str) -> RequestFailedError:
    return RequestFailedError(f"the constraint cannot continue: {short_message(message)}", param=PARAM)
