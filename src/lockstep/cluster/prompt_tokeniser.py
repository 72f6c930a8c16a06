"""Prompt tokeniser: tokenises prompts without blocking the event loop that serves streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.cluster.threads import LONG_BYTES, WorkerThreads
from lockstep.engine.input_processing import tokenised
from lockstep.engine.request import Conversation, GenerationRequest, Prompt
from lockstep.engine.tokenizer import Tokenizer
from lockstep.system import SYSTEM, System

MAX_INLINE_CHARS = 4_096
"""Longest prompt in characters that is tokenised on the event loop; longer ones use another thread, so they do not
delay other requests' tokens."""
PIECE_CHARS = 16
"""Cost of a message, a number or a list besides its text, as an equivalent number of characters."""
MAX_LOOP_CHARS = 16_384
"""Maximum characters of short prompts tokenised in one iteration of the event loop; further prompts use another thread
too."""
MAX_WAITING_BYTES = 256 << 20
"""Maximum amount of prompt data that waits for such a thread."""


class PromptTokeniser:
    """Tokeniser of prompts that moves long ones to another thread. Event loop only."""

    def __init__(self, system: System = SYSTEM) -> None:
        self._threads = WorkerThreads(MAX_WAITING_BYTES, system)
        self._num_loop_chars = 0

    async def tokenised(
        self,
        tokenizer: Tokenizer,
        max_model_len: int,
        request: GenerationRequest,
        convert: Callable[[GenerationRequest], GenerationRequest] | None = None,
    ) -> GenerationRequest:
        """Tokenise a request's prompt; see `lockstep.engine.input_processing.tokenised`.

        Args:
            convert: what is done to the request first, on the same thread.

        Raises:
            QueueFullError: too many prompts wait to be tokenised.
        """

        def work() -> GenerationRequest:
            return tokenised(tokenizer, max_model_len, request if convert is None else convert(request))

        num_chars = weight_of(request.prompt) + len(request.document or "")
        return work() if self._is_short(num_chars) else await self._threads.do(work, num_chars)

    def _is_short(self, num_chars: int) -> bool:
        if num_chars > min(MAX_INLINE_CHARS, MAX_LOOP_CHARS - self._num_loop_chars):
            return False
        if not self._num_loop_chars:
            asyncio.get_running_loop().call_soon(self._reset_loop_chars)
        self._num_loop_chars += num_chars
        return True

    def _reset_loop_chars(self) -> None:
        self._num_loop_chars = 0


def weight_of(prompt: Prompt) -> int:
    """Approximate number of characters to tokenise; token ids count as none. Counting stops once the prompt is known to
    be long."""
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
