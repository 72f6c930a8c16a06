"""From a completion request to the calls that answer it, one per prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.engine.request import GenerationRequest
from lockstep.errors import InvalidParameterError
from lockstep.server.calls import Caller, call_of, check_shared, constraint_of, param_names, sampling_params
from lockstep.server.completion_schema import CompletionBody

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompletionCalls:
    """The calls, and what the request calls the engine's parameters."""

    calls: tuple[GenerationRequest, ...]
    prompts: tuple[Prompt, ...]
    names: Mapping[str, str]


def completion_calls(body: CompletionBody, caller: Caller) -> CompletionCalls:
    """What the cluster is asked.

    Raises:
        InvalidParameterError: names the parameter.
    """
    check_shared(body, caller.options)
    if body.echo and body.logprobs is not None and body.stream:
        raise InvalidParameterError(
            "echo with logprobs cannot be streamed; leave out one of echo, logprobs and stream", param="echo"
        )
    constrained = constraint_of(body)
    params = sampling_params(
        body, max_tokens=body.max_tokens, logprobs=body.logprobs, constraint=constrained.constraint
    )
    of_prompt = max(
        (k for k in (body.prompt_logprobs, body.logprobs if body.echo else None) if k is not None), default=None
    )
    prompts = prompts_of(body.prompt)
    calls = tuple(call_of(body, caller, prompt, params, prompt_logprobs=of_prompt) for prompt in prompts)
    return CompletionCalls(calls, prompts, param_names(constrained.param))


def prompts_of(given: str | Sequence[int] | Sequence[str | Sequence[int]]) -> tuple[Prompt, ...]:
    """Each prompt by itself."""
    if isinstance(given, str):
        return (given,)
    if isinstance(given[0], int):
        return (tuple(given),)  # type: ignore[arg-type]  # token ids, by its first
    return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in given)  # type: ignore[arg-type]  # as above
