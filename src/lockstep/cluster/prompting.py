"""From a call to the engine's request: the prompt as tokens of the model that answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.cluster.aside import LONG_BYTES, Workbench
from lockstep.cluster.base import Call, Conversation, Prompt
from lockstep.engine.chat import chat_request
from lockstep.engine.outputs import GenerationRequest
from lockstep.engine.tokenizer import Tokenizer, too_many_tokens
from lockstep.errors import InvalidParameterError

MAX_INLINE_CHARS = 4_096
"""Longer prompts are tokenised on another thread, so that they delay nobody's tokens."""
PIECE_CHARS = 16
"""What a message, a number or a list takes beside its text: as much time as so many characters of it."""
MAX_TURN_CHARS = 16_384
"""Of short prompts, so much is tokenised in one turn of the event loop; the others go to another thread as well."""
MAX_WAITING_BYTES = 256 << 20
"""Prompts that wait for such a thread."""


class Prompting:
    """Makes requests of calls without holding up the event loop, from which alone it is used."""

    def __init__(self) -> None:
        self._bench = Workbench(MAX_WAITING_BYTES)
        self._num_turn_chars = 0

    async def request(self, tokenizer: Tokenizer, max_model_len: int, call: Call) -> GenerationRequest:
        """As `generation_request`.

        Raises:
            QueueFullError: too much waits to be tokenised.
        """
        num_chars = weight_of(call.prompt)
        if self._is_short(num_chars):
            return generation_request(tokenizer, max_model_len, call)
        return await self._bench.do(lambda: generation_request(tokenizer, max_model_len, call), num_chars)

    def _is_short(self, num_chars: int) -> bool:
        if num_chars > min(MAX_INLINE_CHARS, MAX_TURN_CHARS - self._num_turn_chars):
            return False
        if not self._num_turn_chars:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._num_turn_chars += num_chars
        return True

    def _begin_turn(self) -> None:
        self._num_turn_chars = 0


def generation_request(tokenizer: Tokenizer, max_model_len: int, call: Call) -> GenerationRequest:
    """The call in the terms of an engine, its prompt tokenised and cut.

    Raises:
        InvalidParameterError, ChatTemplateError: the prompt or its truncation is wrong.
        PromptTooLongError: the context cannot hold it. A conversation is measured as it was sent: what the template
            would leave out of it counts.
    """
    prompt, reasoning = call.prompt, None
    said: str | Sequence[int]
    most = max_model_len - 1 if call.truncate_prompt_tokens is None else None
    if isinstance(prompt, Conversation):
        if most is not None:
            tokenizer.check_length(_contents(prompt), most)
        chat = chat_request(
            tokenizer,
            prompt.messages,
            template_kwargs=prompt.template_kwargs,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final=prompt.continue_final,
            reasoning=prompt.reasoning,
            most=most,
        )
        said, reasoning = chat.prompt, chat.reasoning
    else:
        said = prompt
    ids = tokenizer.encode(said, most=most) if isinstance(said, str) else said
    if most is not None and len(ids) > most:
        raise too_many_tokens(len(ids), most)
    return GenerationRequest(
        _truncated(tuple(ids), max_model_len, call),
        call.params,
        priority=call.priority,
        tenant=call.tenant,
        cache_salt=call.cache_salt,
        deadline_s=call.deadline_s,
        queue_deadline_s=call.queue_deadline_s,
        reasoning=reasoning,
        pooling=call.pooling,
        shown_specials=call.shown_specials,
        session_id=call.session_id,
        prompt_logprobs=call.prompt_logprobs,
    )


def weight_of(prompt: Prompt) -> int:
    """Characters that there are to tokenise, roughly; token ids are none. Of many small pieces it is told no more
    precisely than that they are a lot."""
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


def _contents(conversation: Conversation) -> list[str]:
    """The texts of its messages; what is none is refused where the messages are checked."""
    texts = []
    for message in conversation.messages:
        content = message.get("content")
        parts = [part.get("text") for part in content] if isinstance(content, list) else [content]
        texts += [part for part in parts if isinstance(part, str)]
    return texts


def _truncated(ids: tuple[int, ...], max_model_len: int, call: Call) -> tuple[int, ...]:
    """The last tokens of the prompt, as many as the call wants to keep."""
    wanted = call.truncate_prompt_tokens
    if wanted is None:
        return ids
    room = max_model_len - (call.params.max_tokens or 1)
    if not (wanted == -1 or 1 <= wanted <= room):
        raise InvalidParameterError(
            f"truncate_prompt_tokens is {wanted}; it must be -1 or an integer of 1..{room}",
            param="truncate_prompt_tokens",
        )
    return ids[-(room if wanted == -1 else wanted) :]
