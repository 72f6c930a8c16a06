"""From a chat request to the call that answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError
from lockstep.executors.constraint import Constraint, ConstraintKind
from lockstep.server.calls import (
    Caller,
    Constrained,
    call_of,
    check_shared,
    constraint_of,
    param_names,
    sampling_params,
)
from lockstep.server.chat_schema import CalledFunction, ChatBody, Message, NamedFunction
from lockstep.server.hops import is_dispatch
from lockstep.server.schema import MAX_LABEL_CHARS
from lockstep.server.tools.definitions import ChoiceMode
from lockstep.server.tools.plan import ToolPlan, plan_tools

JSON_KINDS = (ConstraintKind.JSON_OBJECT, ConstraintKind.JSON_SCHEMA)
"""What an answer may have to be although there are tools."""
MAX_WARNINGS = 16
"""Of one request; they are told in a header."""
OLD_CALL_ID = "call_function_"
"""Begins the ids that calls get whose deprecated form has none."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """The call, how its answer is read, and what the request calls the engine's parameters."""

    call: GenerationRequest
    plan: ToolPlan
    names: Mapping[str, str]
    wishes: Mapping[str, frozenset[str]]
    """What the chat template is asked to heed: the variables by which it would, of which one is enough."""

    def unheeded(self, tokenizer: Tokenizer) -> list[str]:
        """What the template of the model that answers does not read, a sentence each."""
        if tokenizer.vocab_size == 0 or not self.wishes:  # another server's template is not known here
            return []
        read = tokenizer.template_variables
        unread = [wish for wish, names in self.wishes.items() if names.isdisjoint(read)]
        return [
            f"{wish}: the model's chat template does not read it, so it changes nothing"
            for wish in unread[:MAX_WARNINGS]
        ]


def chat_call(body: ChatBody, caller: Caller, tokenizer: Tokenizer) -> ChatCall:
    """What the cluster is asked.

    Raises:
        InvalidParameterError: names the parameter.
    """
    check_shared(body, caller.options)
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidParameterError(
            "continue_final_message and add_generation_prompt are both true; a prompt ends in one way only",
            param="continue_final_message",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidParameterError(
            "top_logprobs is given without logprobs; set logprobs to true or leave it out", param="top_logprobs"
        )
    length = _length(body)
    kwargs = {**caller.options.chat_template_kwargs, **_template_kwargs(body)}
    said = constraint_of(body)
    plan = _plan(body, tokenizer, kwargs, said.constraint)
    constrained = _constrained(said, plan)
    params = sampling_params(
        body,
        max_tokens=length[1],
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        constraint=constrained.constraint,
    )
    conversation = Conversation(
        plan.messages(template_messages(body.messages)),
        {**kwargs, **plan.template_kwargs},
        caller.options.reasoning,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final=bool(body.continue_final_message),
    )
    call = call_of(
        body,
        caller,
        conversation,
        params,
        prompt_logprobs=body.prompt_logprobs,
        shown_specials=plan.shown_specials,
    )
    said_logprobs = "logprobs" if body.top_logprobs is None else "top_logprobs"
    names = param_names(constrained.param, max_tokens=length[0], logprobs=said_logprobs, prompt="messages")
    return ChatCall(call, plan, names, _wishes(body))


def _plan(body: ChatBody, tokenizer: Tokenizer, kwargs: Mapping[str, Any], said: Constraint | None) -> ToolPlan:
    told = said if said is not None and said.kind in JSON_KINDS else None
    if body.functions is not None or body.function_call is not None:
        return _plan_functions(body, tokenizer, kwargs, told)
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    choice = body.tool_choice
    chosen = choice if choice is None or isinstance(choice, str) else choice.model_dump()
    return plan_tools(tokenizer, tools, chosen, body.parallel_tool_calls is not False, kwargs, told)


def _plan_functions(
    body: ChatBody, tokenizer: Tokenizer, kwargs: Mapping[str, Any], told: Constraint | None
) -> ToolPlan:
    """The same of the deprecated parameters, which know one call only."""
    if body.tools is not None or body.tool_choice is not None:
        raise InvalidParameterError(
            "functions and function_call are the deprecated form of tools and tool_choice; give one form",
            param="functions" if body.functions is not None else "function_call",
        )
    tools = [{"type": "function", "function": each.model_dump(exclude_none=True)} for each in body.functions or ()]
    choice = body.function_call
    chosen = {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedFunction) else choice
    try:
        return plan_tools(tokenizer, tools, chosen, False, kwargs, told)
    except InvalidParameterError as error:
        param = None if error.param is None else _as_functions(error.param)
        raise InvalidParameterError(_as_functions(str(error)), param=param) from None


def _as_functions(text: str) -> str:
    """What is said of tools, in the words of the deprecated parameters."""
    for new, old in (("tools[", "functions["), ("].function", "]"), ("tool_choice.function", "function_call")):
        text = text.replace(new, old)
    return text.replace("tool_choice", "function_call")


def _constrained(said: Constrained, plan: ToolPlan) -> Constrained:
    """What the answer must be: by the tools, by a parameter that says so, or a call or else what that says."""
    constraint = said.constraint
    is_free = bool(plan.names) and plan.choice.mode is ChoiceMode.AUTO
    if constraint is not None and constraint.kind not in JSON_KINDS and is_free:
        raise InvalidParameterError(
            f"{said.param} and tools both say what the answer must be, and only JSON can be told from a call; leave "
            "one out, or send tool_choice none or required",
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


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: the members that were given, under the names that they know."""
    told: list[dict[str, Any]] = []
    old_id = OLD_CALL_ID
    for index, message in enumerate(messages):
        calls = [
            (call.id, call.function)
            for call in message.tool_calls or ()
            if not is_dispatch(call.id, call.function.name)
        ]
        if message.function_call is not None:
            old_id = f"{OLD_CALL_ID}{index}"
            calls.append((old_id, message.function_call))
        is_old = message.role == "function"
        members: dict[str, Any] = {
            "role": "tool" if is_old else message.role,
            "content": _content(message),
            "name": message.name,
            "tool_call_id": old_id if is_old else message.tool_call_id,
            "tool_calls": [_told_call(*call) for call in calls] or None,
            "reasoning_content": message.reasoning if message.reasoning_content is None else message.reasoning_content,
        }
        told.append({name: value for name, value in members.items() if value is not None})
    return told


def _content(message: Message) -> str | list[dict[str, str]] | None:
    content = message.content
    if isinstance(content, list):
        return [{"type": "text", "text": part.text} for part in content]
    return message.refusal if content is None else content


def _told_call(call_id: str, function: CalledFunction) -> dict[str, Any]:
    told = {"name": function.name, "arguments": function.arguments}
    return {"id": call_id, "type": "function", "function": told}


def _template_kwargs(body: ChatBody) -> dict[str, Any]:
    """The template's own variables. Which of them it reads is asked when it is known who answers."""
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            kwargs.setdefault("enable_thinking", False)
    if body.verbosity is not None:
        kwargs.setdefault("verbosity", body.verbosity)
    return kwargs


def _wishes(body: ChatBody) -> dict[str, frozenset[str]]:
    wishes = {
        f"chat_template_kwargs.{ascii(name[:MAX_LABEL_CHARS])[1:-1]}": frozenset([name])
        for name in body.chat_template_kwargs or ()
    }
    effort = body.reasoning_effort
    if effort is not None:
        wishes["reasoning_effort"] = frozenset(["reasoning_effort", *(["enable_thinking"] if effort == "none" else [])])
    if body.verbosity not in (None, "medium"):
        wishes["verbosity"] = frozenset(["verbosity"])
    return wishes
