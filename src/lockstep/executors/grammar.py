"""A sequence's place in its grammar: which tokens may come next, and which must.

The parser is llguidance's: its masks are a pure function of the grammar and the tokens so far. So what a short choice
allows after some tokens is remembered (`CachedMatcher`), and a choice that is asked for again needs no parser: only
where nobody was before, or not lately, a copy of its matcher is moved there.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from lockstep.errors import RequestFailedError
from lockstep.executors.constraint import PARAM

if TYPE_CHECKING:
    from llguidance import LLMatcher

TokenBits = npt.NDArray[np.uint8]
"""[at least vocab / 8] one bit per token, the lowest bit of a byte first; 1: it may come."""
MAX_MESSAGE_CHARS, MAX_WORD_CHARS = 400, 60
MAX_MATCHER_STATES = 1_024
"""Of all choices of a model: with the largest vocabularies 20 MB."""


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


class Matcher(Protocol):
    """What a grammar asks of llguidance's matcher."""

    def consume_token(self, token: int, /) -> bool: ...

    def try_consume_tokens(self, tokens: list[int], /) -> int: ...

    def compute_ff_tokens(self) -> list[int]: ...

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int, /) -> None: ...

    def is_stopped(self) -> bool: ...

    def is_error(self) -> bool: ...

    def get_error(self) -> str: ...


class CachedMatcher:
    """One sequence's state in a choice; a `Matcher` that mostly remembers.

    Args:
        pristine: the choice's matcher at its beginning; only copies of it are moved.
        on_broken: called where a copy fails in a way of its own: it may have broken all that it shares with the others.
    """

    __slots__ = ("_error", "_on_broken", "_pristine", "_state", "_states", "_taken")

    def __init__(self, pristine: LLMatcher, states: MatcherStates, on_broken: Callable[[], None]) -> None:
        self._pristine = pristine
        self._states = states
        self._on_broken = on_broken
        self._error = ""
        self._taken: tuple[int, ...] = ()
        self._state = self._look(())

    def consume_token(self, token: int, /) -> bool:
        """False, and an error from then on, where it does not fit."""
        if not self.try_consume_tokens([token]):
            self._error = self._error or f"token {token} does not fit"
        return not self._error

    def try_consume_tokens(self, tokens: Sequence[int], /) -> int:
        """How many of them were taken; all or none."""
        taken = (*self._taken, *tokens)
        state = self._look(taken)
        if state is None:
            return 0
        self._taken, self._state = taken, state
        return len(tokens)

    def compute_ff_tokens(self) -> list[int]:
        return list(self._at.forced)

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int, /) -> None:
        state = self._at
        if state.mask is None:
            mask = ctypes.create_string_buffer(num_bytes)
            with self._copied(self._taken) as copy:
                if copy is not None:
                    copy.unsafe_compute_mask_ptr(ctypes.addressof(mask), num_bytes)
                    self._error = copy.get_error()
            if copy is None or self._error:
                self._error = self._error or "its beginning does not fit any more"
                return
            state.mask = mask.raw
        ctypes.memmove(address, state.mask, num_bytes)

    def is_stopped(self) -> bool:
        return self._at.is_stopped

    def is_error(self) -> bool:
        return bool(self._error)

    def get_error(self) -> str:
        return self._error

    @property
    def _at(self) -> _MatcherState:
        assert self._state is not None, "every choice has a beginning"
        return self._state

    def _look(self, taken: tuple[int, ...]) -> _MatcherState | None:
        """The state after some tokens; None: they do not fit."""
        state = self._states.find(self._pristine, taken)
        if state is not None:
            return state
        with self._copied(taken) as copy:
            if copy is None:
                return None
            is_stopped = copy.is_stopped()
            state = _MatcherState(is_stopped, () if is_stopped else tuple(copy.compute_ff_tokens()))
            self._error = copy.get_error()
        if not self._error:
            self._states.keep(self._pristine, taken, state)
        return state

    @contextmanager
    def _copied(self, taken: tuple[int, ...]) -> Iterator[LLMatcher | None]:
        """A matcher after some tokens; None: they do not fit."""
        try:
            copy = self._pristine.deep_copy()
            fits = copy.try_consume_tokens([*taken]) == len(taken)
            self._error = copy.get_error()
            yield copy if fits else None
        except BaseException:
            self._on_broken()
            raise


class MatcherStates:
    """What a model's choices allow after some tokens, the most lately used states. May be shared by threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[LLMatcher, tuple[int, ...]], _MatcherState] = OrderedDict()

    def find(self, pristine: LLMatcher, taken: tuple[int, ...]) -> _MatcherState | None:
        """Where a choice stands after some tokens."""
        key = pristine, taken
        with self._lock:
            state = self._known.get(key)
            if state is not None:
                self._known.move_to_end(key)
            return state

    def keep(self, pristine: LLMatcher, taken: tuple[int, ...], state: _MatcherState) -> None:
        with self._lock:
            self._known[pristine, taken] = state
            while len(self._known) > MAX_MATCHER_STATES:
                self._known.popitem(last=False)


@dataclass(slots=True)
class _MatcherState:
    """What is known of a choice after some tokens."""

    is_stopped: bool
    forced: tuple[int, ...]
    mask: bytes | None = None
    """None: nobody has asked yet."""


def is_panic(error: BaseException) -> bool:
    """Whether Rust code gave up. Its exception has no importable type and is no `Exception`."""
    return type(error).__name__ == "PanicException"


def short_message(message: Any) -> str:
    """Messages may quote the whole source."""
    words = str(message).replace("<non-verbose/>", "").split()
    text = " ".join(word if len(word) <= MAX_WORD_CHARS else f"{word[:MAX_WORD_CHARS]}..." for word in words)
    if text == "NoExtensionBias":
        return "nothing that this model can write satisfies it (NoExtensionBias)"
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}..."


def _failure(error: BaseException) -> BaseException:
    """What to raise for what a matcher raised."""
    return _failed(str(error)) if is_panic(error) else error


def _failed(message: str) -> RequestFailedError:
    return RequestFailedError(f"the constraint cannot go on: {short_message(message)}", param=PARAM)
