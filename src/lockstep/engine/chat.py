"""From a conversation to a request: the prompt by the model's template, and how to tell thoughts from content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.engine.outputs import GenerationRequest
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError
from lockstep.executors.sampling_params import SamplingParams

REASONING = ("auto", "off")


def chat_request(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams | None = None,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final: bool = False,
    reasoning: str = "auto",
    most: int | None = None,
) -> GenerationRequest:
    """A request that answers a conversation.

    Args:
        template_kwargs: further variables of the template, e.g. ``enable_thinking``.
        add_generation_prompt, continue_final: how the prompt ends; see `Tokenizer.encode_chat`.
        reasoning: ``auto`` keeps thoughts apart where the model's template has tags for them, ``off`` never does.
        most: tokens that the prompt may have; None: any number.

    Raises:
        InvalidParameterError, ChatTemplateError: see `Tokenizer.render_chat`.
        PromptTooLongError: it has more than ``most``.
    """
    if reasoning not in REASONING:
        raise InvalidParameterError(
            f"reasoning is {reasoning!r}; it must be one of {', '.join(REASONING)}", param="reasoning"
        )
    prompt = tokenizer.encode_chat(
        messages,
        template_kwargs=template_kwargs,
        add_generation_prompt=add_generation_prompt,
        continue_final=continue_final,
        most=most,
    )
    found = tokenizer.reasoning_after(prompt) if reasoning == "auto" else None
    return GenerationRequest(prompt, params or SamplingParams(), reasoning=found)
