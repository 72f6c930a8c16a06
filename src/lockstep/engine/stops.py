"""Stop strings in a text that arrives in pieces: found across borders, and shown only where that is wanted.

One Aho-Corasick automaton (A. Aho, M. Corasick, "Efficient string matching", CACM 1975) over all stop strings: a step
per character, however many strings there are. The depth of its state is the length of the longest end of the text that
may yet become a stop string, and exactly that much is held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_ROOT = 0


class StopStrings:
    """Lets text through until a stop string is complete.

    The first one to be complete wins; of two that end together, the longer. That depends on the text alone and not on
    where it was cut, so a streamed answer is the answer.
    """

    __slots__ = ("_depth", "_fail", "_goto", "_held", "_hit", "_shows_stop", "_state")

    def __init__(self, stops: Sequence[str], *, shows_stop: bool = False) -> None:
        self._shows_stop = shows_stop
        """Whether the stop string is let through as well."""
        assert all(stops), "an empty stop string would stop at once; validation refuses it"
        self._goto: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fail = [_ROOT]
        self._hit: list[str | None] = [None]
        """Per state: the longest stop string that ends here."""
        self._state = _ROOT
        self._held = ""
        for stop in stops:
            self._insert(stop)
        self._link()

    def append(self, text: str) -> tuple[str, str | None]:
        """What may be shown now, and the stop string that was completed (nothing after it counts), or None."""
        goto, fail = self._goto, self._fail
        state = self._state
        for index, char in enumerate(text):
            while char not in goto[state] and state != _ROOT:
                state = fail[state]
            state = goto[state].get(char, _ROOT)
            stop = self._hit[state]
            if stop is not None:
                shown = self._held + text[: index + 1]
                self._state, self._held = _ROOT, ""
                return shown if self._shows_stop else shown[: -len(stop)], stop
        self._state = state
        whole = self._held + text
        cut = len(whole) - self._depth[state]
        self._held = whole[cut:]
        return whole[:cut], None

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held, self._state = self._held, "", _ROOT
        return held

    def _insert(self, stop: str) -> None:
        state = _ROOT
        for char in stop:
            following = self._goto[state].get(char)
            if following is None:
                following = len(self._goto)
                self._goto[state][char] = following
                self._goto.append({})
                self._depth.append(self._depth[state] + 1)
                self._fail.append(_ROOT)
                self._hit.append(None)
            state = following
        self._hit[state] = stop

    def _link(self) -> None:
        """Breadth first: where to go on when a character does not fit, and which shorter stop ends there as well."""
        queue = deque(self._goto[_ROOT].values())
        while queue:
            state = queue.popleft()
            for char, following in self._goto[state].items():
                back = self._fail[state]
                while char not in self._goto[back] and back != _ROOT:
                    back = self._fail[back]
                self._fail[following] = self._goto[back].get(char, _ROOT)
                if self._hit[following] is None:
                    self._hit[following] = self._hit[self._fail[following]]
                queue.append(following)
