"""What short choices allow at each place, remembered: a choice that is asked for again needs no parser.

Where a choice stands follows from its texts and the tokens so far, and with it all that it allows there. Only for a
place where nobody was before, or not lately, a copy of its matcher walks there.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_PLACES = 1_024
"""Of all choices of a model: with the largest vocabularies 20 MB."""


class Matcher(Protocol):
    """What a grammar asks of llguidance's matcher."""

    def consume_token(self, token: int, /) -> bool: ...

    def try_consume_tokens(self, tokens: list[int], /) -> int: ...

    def compute_ff_tokens(self) -> list[int]: ...

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int, /) -> None: ...

    def is_stopped(self) -> bool: ...

    def is_error(self) -> bool: ...

    def get_error(self) -> str: ...


@dataclass(slots=True)
class _Place:
    """All that is known of a choice after some tokens."""

    is_stopped: bool
    forced: tuple[int, ...]
    mask: bytes | None = None
    """None: nobody has asked yet."""


class Places:
    """The places of a model's choices where somebody was last. May be shared by threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[LLMatcher, tuple[int, ...]], _Place] = OrderedDict()

    def find(self, pristine: LLMatcher, taken: tuple[int, ...]) -> _Place | None:
        """Where a choice stands after some tokens."""
        key = pristine, taken
        with self._lock:
            place = self._known.get(key)
            if place is not None:
                self._known.move_to_end(key)
            return place

    def keep(self, pristine: LLMatcher, taken: tuple[int, ...], place: _Place) -> None:
        with self._lock:
            self._known[pristine, taken] = place
            while len(self._known) > MAX_PLACES:
                self._known.popitem(last=False)


class RememberingMatcher:
    """One sequence's place in a choice; a `Matcher` that mostly remembers.

    Args:
        pristine: the choice's matcher at its beginning; only copies of it are moved.
        on_broken: called where a copy fails in a way of its own: it may have broken all that it shares with the others.
    """

    __slots__ = ("_error", "_on_broken", "_place", "_places", "_pristine", "_taken")

    def __init__(self, pristine: LLMatcher, places: Places, on_broken: Callable[[], None]) -> None:
        self._pristine = pristine
        self._places = places
        self._on_broken = on_broken
        self._error = ""
        self._taken: tuple[int, ...] = ()
        self._place = self._look(())

    def consume_token(self, token: int, /) -> bool:
        """False, and an error from then on, where it does not fit."""
        if not self.try_consume_tokens([token]):
            self._error = self._error or f"token {token} does not fit"
        return not self._error

    def try_consume_tokens(self, tokens: Sequence[int], /) -> int:
        """How many of them were taken; all or none."""
        taken = (*self._taken, *tokens)
        place = self._look(taken)
        if place is None:
            return 0
        self._taken, self._place = taken, place
        return len(tokens)

    def compute_ff_tokens(self) -> list[int]:
        return list(self._at.forced)

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int, /) -> None:
        place = self._at
        if place.mask is None:
            mask = ctypes.create_string_buffer(num_bytes)
            with self._copied(self._taken) as copy:
                if copy is not None:
                    copy.unsafe_compute_mask_ptr(ctypes.addressof(mask), num_bytes)
                    self._error = copy.get_error()
            if copy is None or self._error:
                self._error = self._error or "its beginning does not fit any more"
                return
            place.mask = mask.raw
        ctypes.memmove(address, place.mask, num_bytes)

    def is_stopped(self) -> bool:
        return self._at.is_stopped

    def is_error(self) -> bool:
        return bool(self._error)

    def get_error(self) -> str:
        return self._error

    @property
    def _at(self) -> _Place:
        assert self._place is not None, "every choice has a beginning"
        return self._place

    def _look(self, taken: tuple[int, ...]) -> _Place | None:
        """The place after some tokens; None: they do not fit."""
        place = self._places.find(self._pristine, taken)
        if place is not None:
            return place
        with self._copied(taken) as copy:
            if copy is None:
                return None
            is_stopped = copy.is_stopped()
            place = _Place(is_stopped, () if is_stopped else tuple(copy.compute_ff_tokens()))
            self._error = copy.get_error()
        if not self._error:
            self._places.keep(self._pristine, taken, place)
        return place

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
