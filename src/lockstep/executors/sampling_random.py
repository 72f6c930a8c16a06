"""Counter-based randomness: a pure function of a seed and a position, so that there is nothing to carry or to lose.

The generator is Philox4x64-10 (J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) as numpy has
it; numpy promises its raw words for good (NEP 19). The key is the seed, the counter is (block, position, 0, 0).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1


class TokenRandom:
    """Random words for the tokens of one sequence; `at` must be called before each token.

    Holds numpy's generator only because setting its counter is ten times cheaper than making a new one.
    """

    __slots__ = ("_counter", "_generator", "_state")

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Philox(key=seed & _MASK, counter=0)
        self._state = self._generator.state
        self._counter = self._state["state"]["counter"]

    def at(self, position: int) -> None:
        """Begin the words of the token at this position."""
        self._counter[1] = position
        self._generator.state = self._state

    def words(self, count: int) -> Words:
        """The next words of this token, uniform over 64 bits."""
        return self._generator.random_raw(count)

    def uniform(self) -> float:
        """The next number of [0, 1): 52 bits, so that for a positive finite `total`, uniform * total < total."""
        return (self._generator.random_raw() >> 12) * 2.0**-52
