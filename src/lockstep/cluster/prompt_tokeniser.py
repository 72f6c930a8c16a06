"""Prompts as tokens, without holding up the event loop that streams go over."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.cluster.threads import LONG_BYTES, Workbench
from lockstep.engine.input_processing import tokenised
from lockstep.engine.request import Conversation, GenerationRequest, Prompt
from lockstep.engine.tokenizer import Tokenizer

MAX_INLINE_CHARS = 4_096
"""Longer prompts are tokenised on another thread, so that they do not delay the tokens of others."""
PIECE_CHARS = 16
"""What a message, a number or a list takes beside its text: as much time as so many characters of it."""
MAX_TURN_CHARS = 16_384
"""Of short prompts, so much is tokenised in one turn of the event loop; the others go to another thread as well."""
MAX_WAITING_BYTES = 256 << 20
"""Prompts that wait for such a thread."""


class PromptTokeniser:
    """Tokenises prompts without holding up the event loop: the long ones on another thread. Event loop only."""

    def __init__(self) -> None:
        self._bench = Workbench(MAX_WAITING_BYTES)
        self._num_turn_chars = 0

    async def tokenised(
        self, tokenizer: Tokenizer, max_model_len: int, request: GenerationRequest
    ) -> GenerationRequest:
        """Tokenise a request's prompt, as `lockstep.engine.input_processing.tokenised`.

        Raises:
            QueueFullError: too much waits to be tokenised.
        """
        num_chars = weight_of(request.prompt)
        if self._is_short(num_chars):
            return tokenised(tokenizer, max_model_len, request)
        return await self._bench.do(lambda: tokenised(tokenizer, max_model_len, request), num_chars)

    def _is_short(self, num_chars: int) -> bool:
        if num_chars > min(MAX_INLINE_CHARS, MAX_TURN_CHARS - self._num_turn_chars):
            return False
        if not self._num_turn_chars:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._num_turn_chars += num_chars
        return True

    def _begin_turn(self) -> None:
        self._num_turn_chars = 0


def weight_of(prompt: Prompt) -> int:
    """Characters that there are to tokenise, roughly; token ids are none. The count ends where it is known to be a
    lot."""
    if isinstance(prompt, str):
        return len(prompt)
    if not isinstance(prompt, Conversation):
        return 0
    weight, left = 0, [prompt.messages, prompt.template_kwargs]
    while left and weight <= LONG_BYTES:
        value: Any = left.pop()
        weight += len(value) if isinstance(value, str) else PIECE_CHARS
        if isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, Sequence) and not isinstance(value, str):
            left += value
    return weight
