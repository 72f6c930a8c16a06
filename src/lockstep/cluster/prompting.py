"""From a call to the engine's request: the prompt as tokens of the model that answers."""

from __future__ import annotations

import asyncio

from lockstep.cluster.base import Call, Conversation, Prompt
from lockstep.engine.chat import chat_request
from lockstep.engine.outputs import GenerationRequest
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError

MAX_INLINE_CHARS = 4096
"""Longer prompts are tokenised on another thread, so that they delay nobody's tokens."""


async def prepared_request(tokenizer: Tokenizer, max_model_len: int, call: Call) -> GenerationRequest:
    """As `generation_request`, without holding up the event loop."""
    if _is_long(call.prompt):
        return await asyncio.to_thread(generation_request, tokenizer, max_model_len, call)
    return generation_request(tokenizer, max_model_len, call)


def generation_request(tokenizer: Tokenizer, max_model_len: int, call: Call) -> GenerationRequest:
    """The call in the terms of an engine, its prompt tokenised and cut.

    Raises:
        InvalidParameterError, ChatTemplateError: the prompt or its truncation is wrong.
    """
    prompt = call.prompt
    if isinstance(prompt, Conversation):
        chat = chat_request(
            tokenizer, prompt.messages, template_kwargs=prompt.template_kwargs, reasoning=prompt.reasoning
        )
        ids, reasoning = chat.prompt, chat.reasoning
    else:
        ids, reasoning = prompt, None
    if isinstance(ids, str):
        ids = tokenizer.encode(ids)
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


def _is_long(prompt: Prompt) -> bool:
    """Whether tokenising it would be felt by others."""
    if isinstance(prompt, Conversation):
        return sum(len(str(message.get("content"))) for message in prompt.messages) > MAX_INLINE_CHARS
    return isinstance(prompt, str) and len(prompt) > MAX_INLINE_CHARS
