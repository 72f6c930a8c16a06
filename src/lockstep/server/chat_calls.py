"""From a chat request to the call that answers it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.cluster.base import Call, Conversation
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError
from lockstep.server.calls import (
    Caller,
    Constrained,
    call_of,
    check_shared,
    constraint_of,
    param_names,
    sampling_params,
)
from lockstep.server.chat_schema import ChatBody, Message, NamedToolChoice
from lockstep.server.hops import is_dispatch
from lockstep.server.tools.plan import ToolPlan, plan_tools


@dataclass(frozen=True, slots=True)
class ChatCall:
    """The call, how its answer is read, and what the request calls the engine's parameters."""

    call: Call
    plan: ToolPlan
    names: Mapping[str, str]


def chat_call(body: ChatBody, caller: Caller, tokenizer: Tokenizer) -> ChatCall:
    """What the cluster is asked.

    Raises:
        InvalidParameterError: names the parameter.
    """
    check_shared(body, caller.options)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidParameterError(
            "top_logprobs is given without logprobs; set logprobs to true or leave it out", param="top_logprobs"
        )
    length = _length(body)
    kwargs = {**caller.options.chat_template_kwargs, **_template_kwargs(body, tokenizer)}
    plan = _plan(body, tokenizer, kwargs)
    constrained = _constrained(body, plan)
    params = sampling_params(
        body,
        max_tokens=length[1],
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        constraint=constrained.constraint,
    )
    messages = plan.messages([template_message(message) for message in body.messages])
    call = call_of(
        body,
        caller,
        Conversation(messages, {**kwargs, **plan.template_kwargs}, caller.options.reasoning),
        params,
        prompt_logprobs=body.prompt_logprobs,
        shown_specials=plan.shown_specials,
    )
    said_logprobs = "logprobs" if body.top_logprobs is None else "top_logprobs"
    names = param_names(constrained.param, max_tokens=length[0], logprobs=said_logprobs, prompt="messages")
    return ChatCall(call, plan, names)


def _plan(body: ChatBody, tokenizer: Tokenizer, kwargs: Mapping[str, Any]) -> ToolPlan:
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    choice = body.tool_choice
    chosen = choice.model_dump() if isinstance(choice, NamedToolChoice) else choice
    if not tools and body.parallel_tool_calls is not None:
        raise InvalidParameterError(
            "parallel_tool_calls is given without tools; leave it out", param="parallel_tool_calls"
        )
    return plan_tools(tokenizer, tools, chosen, body.parallel_tool_calls is not False, kwargs)


def _constrained(body: ChatBody, plan: ToolPlan) -> Constrained:
    """What the answer must be: by the tools, or by a parameter that says so; a model that must obey a format could
    never call a function."""
    said = constraint_of(body)
    if said.constraint is not None and plan.names:
        raise InvalidParameterError(
            f"{said.param} and tools both say what the answer must be; leave one out, or send tool_choice none",
            param=said.param,
        )
    return said if plan.constraint is None else Constrained(plan.constraint, "tools")


def _length(body: ChatBody) -> tuple[str, int | None]:
    """The limit of the answer, and the parameter that gave it."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise InvalidParameterError(
            f"max_completion_tokens is {new} and max_tokens {old}; they are one parameter, so give one of them",
            param="max_tokens",
        )
    return ("max_completion_tokens", new) if new is not None else ("max_tokens", old)


def template_message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: the members that were given, under the names that they know."""
    content = message.content
    calls = [call for call in message.tool_calls or () if not is_dispatch(call.id, call.function.name)]
    thoughts = message.reasoning if message.reasoning_content is None else message.reasoning_content
    told: dict[str, Any] = {
        "role": message.role,
        "content": [part.model_dump() for part in content] if isinstance(content, list) else content,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": [call.model_dump(exclude={"index"}) for call in calls] or None,
        "reasoning_content": thoughts,
    }
    return {name: value for name, value in told.items() if value is not None}


def _template_kwargs(body: ChatBody, tokenizer: Tokenizer) -> dict[str, Any]:
    """The template's own variables; what it would not read is refused."""
    kwargs = dict(body.chat_template_kwargs or {})
    for name in kwargs:
        if name not in tokenizer.template_variables:
            raise InvalidParameterError(
                f"the model's chat template does not read {name!r}; leave it out", param="chat_template_kwargs"
            )
    effort = body.reasoning_effort
    if effort is None:
        return kwargs
    if "reasoning_effort" in tokenizer.template_variables:
        kwargs.setdefault("reasoning_effort", effort)
    elif effort == "none" and "enable_thinking" in tokenizer.template_variables:
        kwargs.setdefault("enable_thinking", False)
    else:
        raise InvalidParameterError(
            f"reasoning_effort is {effort!r}, but the model's chat template does not read it; leave it out",
            param="reasoning_effort",
        )
    return kwargs
