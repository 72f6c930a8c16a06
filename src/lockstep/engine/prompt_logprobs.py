"""Log-probabilities of a prompt's own tokens, collected while the prompt is computed.

The logits of a position judge the token after it; the first token has none before it. Rows come in position order,
chunk by chunk, and where a preempted prompt is recomputed they are not asked for again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lockstep.executors.logits import TokenLogprobs, token_logprobs


class PromptLogprobs:
    """Collects one prompt's.

    Args:
        prompt_ids: the whole prompt.
        count: how many of the most likely tokens are wanted beside each; 0: none.
    """

    __slots__ = ("_count", "_entries", "_prompt_ids")

    def __init__(self, prompt_ids: Sequence[int], count: int) -> None:
        self._prompt_ids = prompt_ids
        self._count = count
        self._entries: list[TokenLogprobs | None] = [None]

    def rows_of(self, start: int, length: int) -> range:
        """Offsets in a chunk whose logits are still wanted."""
        end = min(start + length, len(self._prompt_ids) - 1)
        return range(max(len(self._entries) - 1, start) - start, max(end, start) - start)

    def add(self, rows: npt.NDArray[np.float32]) -> int | None:
        """Take the logits [len(offsets), vocab] that ``rows_of`` asked for last.

        Returns:
            The position whose logits are not finite, where one is: nothing is known of what follows it. Else None.
        """
        for row in rows:
            position = len(self._entries) - 1
            if not np.isfinite(np.maximum.reduce(row)):
                return position
            self._entries.append(token_logprobs(row, self._prompt_ids[position + 1], self._count))
        return None

    def entries(self) -> tuple[TokenLogprobs | None, ...] | None:
        """One per prompt token; None while the prompt is not computed to its end."""
        return tuple(self._entries) if len(self._entries) == len(self._prompt_ids) else None
