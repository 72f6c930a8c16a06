"""`POST /v1/chat/completions`: the body, the route, and the call that a request becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec.structs
from fastapi import APIRouter
from pydantic import ConfigDict, Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from lockstep.cluster.base import Accepted
from lockstep.engine.chat_template import MAX_CONTENT_PARTS, MAX_MESSAGES, checked_messages
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError
from lockstep.executors.constraint import Constraint, ConstraintKind
from lockstep.server.answer import documented, is_dispatch, metadata_of
from lockstep.server.answer_response import Answer, AnswerResponse
from lockstep.server.body import LongBodyRoute
from lockstep.server.choices import open_choices
from lockstep.server.chunk_encoder import ChatCompletion, ChatEncoder
from lockstep.server.errors import ERROR_RESPONSES
from lockstep.server.fields import (
    MAX_LABEL_CHARS,
    JsonObject,
    Marked,
    TextOr,
    in_pieces,
    unsupported,
)
from lockstep.server.generation import (
    Caller,
    Constrained,
    ConversationBody,
    GenerationBody,
    MaxTokens,
    bounded,
    call_of,
    caller_of,
    check_shared,
    check_tokens_known,
    constraint_of,
    labels_of,
    param_names,
    sampling_params,
)
from lockstep.server.request_context import context_of
from lockstep.server.serving import card_of, serving_of, translated
from lockstep.server.tools.definitions import (
    MAX_TOOLS,
    ChoiceMode,
    Function,
    FunctionChoice,
    NamedFunction,
    NamedToolChoice,
    Tool,
    ToolChoice,
)
from lockstep.server.tools.tool_use import ToolUse, resolve_tools

MAX_TOP_LOGPROBS = 20
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextPart(Marked):
    type: Literal["text"]
    text: str


class RefusalPart(Marked):
    """A refusal that an assistant returned instead of an answer. It is treated like any other content."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def part_kind(value: object) -> str:
    """Tag of the content part type that a value is parsed as."""
    return "[refusal]" if isinstance(value, dict) and value.get("type") == "refusal" else "[text]"


Part = Annotated[
    Annotated[TextPart, Tag("[text]")] | Annotated[RefusalPart, Tag("[refusal]")], Discriminator(part_kind)
]
Content = TextOr[Annotated[list[Part], Field(max_length=MAX_CONTENT_PARTS)]]


class CalledFunction(Marked):
    name: Annotated[str, Field(min_length=1, max_length=MAX_LABEL_CHARS)]
    arguments: str
    """A JSON object, serialized as a string."""
    parsed_arguments: Any = None
    """Ignored. The official client adds the parsed form of `arguments`."""


class ToolCall(Marked):
    id: str
    type: Literal["function"] | None = None
    function: CalledFunction
    index: int | None = None
    """Ignored. Present when a streamed call is sent back."""


class Message(Marked):
    """One turn of the conversation. The `message` of an answer can be sent back unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: Annotated[str | None, Field(max_length=MAX_LABEL_CHARS)] = None
    """Author name, for templates that read it. With the deprecated role `function`: name of the function."""
    tool_call_id: str | None = None
    """With role `tool`: id of the call that this message answers."""
    tool_calls: list[ToolCall] | None = None
    """With role `assistant`: tool calls of the turn."""
    function_call: CalledFunction | None = None
    """With role `assistant`: one call in its deprecated form."""
    reasoning_content: str | None = None
    """With role `assistant`: reasoning of the turn, for templates that read it."""
    reasoning: str | None = None
    """Alternative name of `reasoning_content`; used if `reasoning_content` is absent."""
    refusal: str | None = None
    """With role `assistant`: used as the content if there is no other."""
    audio: Annotated[None, unsupported("only text is supported")] = None
    annotations: list[JsonObject] | None = None
    """Ignored, as is `parsed`. The official client adds both to the content."""
    parsed: Any = None


class ChatBody(ConversationBody, GenerationBody):
    """A conversation for a model to answer, with the parameters of the answer."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"messages": [{"role": "user", "content": "I was charged twice."}], "max_completion_tokens": 16},
                {
                    "messages": [
                        {"role": "system", "content": "Answer in one word."},
                        {"role": "user", "content": [{"type": "text", "text": "Is this urgent?"}]},
                    ],
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "urgency", "schema": {"type": "boolean"}, "strict": True},
                    },
                    "temperature": 0,
                    "seed": 1,
                    "max_completion_tokens": 8,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                },
            ]
        }
    )

    messages: Annotated[list[Message], *in_pieces(MAX_MESSAGES)]
    max_completion_tokens: MaxTokens | None = None
    """Maximum number of tokens of the answer, including reasoning. Absent or -1: the rest of the context."""
    max_tokens: MaxTokens | None = None
    """Older name of `max_completion_tokens`."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    """Requires `logprobs`."""
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice | None = None
    add_generation_prompt: bool | None = None
    """False: the prompt does not end with the start of an assistant message."""
    add_special_tokens: Literal[False] | None = None
    """Only false is supported, since the template adds the special tokens."""
    continue_final_message: bool | None = None
    """True: the answer continues the last message, which is left open."""
    echo: bool | None = None
    """True: the answer starts with the last message, if its role is `assistant`."""
    reasoning_effort: ReasoningEffort | None = None
    """Passed to chat templates that read it; `none` also sets `enable_thinking` to false. Otherwise a warning."""
    lockstep_hops: bool | None = None
    """False: the router's decision is not shown as a call of the function `dispatch_to_specialist`. It is never shown
    to requests that have `tools` of their own."""
    modalities: Annotated[list[Literal["text"]] | None, Field(min_length=1, max_length=1)] = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Passed to chat templates that read it. Otherwise values other than `medium` cause a warning."""
    cache_control: JsonObject | None = None
    """Ignored: the prefix cache does not need it."""
    functions: Annotated[list[Function] | None, Field(min_length=1, max_length=MAX_TOOLS)] = None
    """Deprecated form of `tools`. The answer has at most one call, as `function_call`."""
    function_call: FunctionChoice | None = None
    """Deprecated form of `tool_choice`, for use with `functions`."""
    audio: Annotated[None, unsupported("only text output is supported")] = None
    prediction: Annotated[None, unsupported("predicted outputs are not supported")] = None
    web_search_options: Annotated[None, unsupported("web search is not supported")] = None


router = APIRouter(route_class=LongBodyRoute, tags=["completions"], responses=ERROR_RESPONSES)


@router.post("/v1/chat/completions", responses=documented(ChatCompletion))
async def create_chat_completion(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    card, context = card_of(request, body.model), context_of(request)
    context.labels, context.session_id = labels_of(body), body.session_id
    caller, tokenizer = caller_of(request), card.tokenizer
    call, reply = await translated(request, lambda: chat_call(body, caller, tokenizer))

    def make_answer(accepted: Sequence[Accepted]) -> Answer:
        [first] = accepted
        answering, returns_ids = serving_of(request).cluster.card(first.model), bool(body.return_token_ids)
        own, metadata = answering.tokenizer, metadata_of("chatcmpl", answering, body)
        context.warnings = [*body.warnings, *reply.warnings(own)]
        check_tokens_known(
            own,
            {"return_token_ids": returns_ids, "stream_options.continuous_usage_stats": metadata.continuous_usage},
        )
        choices = open_choices(call.params, own, first, tool_use=reply.tool_use, returns_ids=returns_ids)
        encoder = ChatEncoder(
            metadata,
            own,
            len(choices),
            has_logprobs=bool(body.logprobs),
            returns_ids=returns_ids,
            has_functions=body.functions is not None,
            echo=_echo(body, call),
            hops=first.hops if _shows_route(body) else (),
        )
        return Answer(accepted, choices, encoder, context)

    return AnswerResponse(
        request,
        (call,),
        make_answer,
        reply.names,
        is_stream=bool(body.stream),
        shows_route=_shows_route(body),
    )


def _shows_route(body: ChatBody) -> bool:
    """True if the router's decision is shown as a call. Clients with their own tools would try to execute that call."""
    return not (body.tools or body.functions) and body.lockstep_hops is not False


def _echo(body: ChatBody, call: GenerationRequest) -> str:
    """Text of the last message, if ``echo`` requests it and the assistant wrote it; otherwise an empty string."""
    prompt = call.prompt
    if not body.echo or body.messages[-1].role != "assistant" or not isinstance(prompt, Conversation):
        return ""
    [last] = checked_messages(prompt.messages[-1:], supports_developer=True)
    return str(last["content"])


JSON_KINDS = (ConstraintKind.JSON_OBJECT, ConstraintKind.JSON_SCHEMA)
"""Kinds of constraints that can be combined with tools."""
MAX_WARNINGS = 16
"""Maximum number of warnings per request. They are sent in a header."""
OLD_CALL_ID = "call_function_"
"""Prefix of the ids given to calls in the deprecated form, which have none."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Rules for reading the answer to a chat: its calls, its warnings, and the request's names of parameters."""

    tool_use: ToolUse
    names: Mapping[str, str]
    template_params: Mapping[str, frozenset[str]]
    """Parameters for the chat template, with the template variables for each. A template that reads one of them is
    enough."""

    def warnings(self, tokenizer: Tokenizer) -> list[str]:
        """Warnings, one sentence each, about schemas that are not enforced and parameters that the chat template of the
        answering model does not read."""
        warnings = list(self.tool_use.warnings)
        if self.template_params and tokenizer.vocab_size > 0:  # a remote server's template is unknown
            read = tokenizer.template_variables
            unread = [param for param, names in self.template_params.items() if names.isdisjoint(read)]
            warnings += [
                f"{param}: the model's chat template does not read it, so it has no effect" for param in unread
            ]
        return warnings[:MAX_WARNINGS]


def chat_call(body: ChatBody, caller: Caller, tokenizer: Tokenizer) -> tuple[GenerationRequest, ChatReply]:
    """Translate a chat request into a call of the cluster, and into how its answer is read.

    Raises:
        InvalidParameterError: names the parameter.
    """
    check_shared(body, caller.options)
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidParameterError(
            "continue_final_message and add_generation_prompt are both true; set only one of them",
            param="continue_final_message",
        )
    if body.top_logprobs and not body.logprobs:
        raise InvalidParameterError(
            "top_logprobs is given without logprobs; set logprobs to true or leave it out", param="top_logprobs"
        )
    length = _length(body)
    kwargs = {**caller.options.chat_template_kwargs, **_template_kwargs(body)}
    given = constraint_of(body)
    tool_use = _tool_use(body, tokenizer, kwargs, given.constraint)
    constrained = _constrained(given, tool_use)
    params = sampling_params(
        body,
        max_tokens=length[1],
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        constraint=constrained.constraint,
    )
    if tool_use.stop_ids:
        params = msgspec.structs.replace(params, stop_token_ids=(*params.stop_token_ids, *tool_use.stop_ids))
    conversation = Conversation(
        tool_use.messages(template_messages(body.messages)),
        {**kwargs, **tool_use.template_kwargs},
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
        shown_specials=tool_use.shown_specials,
    )
    logprobs_name = "top_logprobs" if body.top_logprobs else "logprobs"
    names = param_names(constrained.param, max_tokens=length[0], logprobs=logprobs_name, prompt="messages")
    return call, ChatReply(tool_use, names, _template_params(body))


def _tool_use(body: ChatBody, tokenizer: Tokenizer, kwargs: Mapping[str, Any], given: Constraint | None) -> ToolUse:
    json_constraint = given if given is not None and given.kind in JSON_KINDS else None
    if body.functions is not None or body.function_call is not None:
        return _functions_use(body, tokenizer, kwargs, json_constraint)
    functions = [tool.function for tool in body.tools or ()]
    return resolve_tools(
        tokenizer, functions, body.tool_choice, body.parallel_tool_calls is not False, kwargs, json_constraint
    )


def _functions_use(
    body: ChatBody, tokenizer: Tokenizer, kwargs: Mapping[str, Any], json_constraint: Constraint | None
) -> ToolUse:
    """Like `_tool_use`, for the deprecated parameters, which allow one call only."""
    if body.tools is not None or body.tool_choice is not None:
        raise InvalidParameterError(
            "functions and function_call are the deprecated form of tools and tool_choice; give one form",
            param="functions" if body.functions is not None else "function_call",
        )
    named = body.function_call
    choice = NamedToolChoice(type="function", function=named) if isinstance(named, NamedFunction) else named
    try:
        return resolve_tools(tokenizer, body.functions or (), choice, False, kwargs, json_constraint)
    except InvalidParameterError as error:
        param = None if error.param is None else _as_functions(error.param)
        raise InvalidParameterError(_as_functions(str(error)), param=param) from None


def _as_functions(text: str) -> str:
    """Replace parameter names of tools by the names of the deprecated parameters."""
    for new, old in (("tools[", "functions["), ("].function", "]"), ("tool_choice.function", "function_call")):
        text = text.replace(new, old)
    return text.replace("tool_choice", "function_call")


def _constrained(given: Constrained, tool_use: ToolUse) -> Constrained:
    """Constraint of the answer: that of the tools if they have one, otherwise that of a parameter."""
    constraint = given.constraint
    is_free = bool(tool_use.names) and tool_use.choice.mode is ChoiceMode.AUTO
    if constraint is not None and constraint.kind not in JSON_KINDS and is_free:
        raise InvalidParameterError(
            f"{given.param} and tools both define the answer, and only JSON can be distinguished from a call; "
            "leave one out, or send tool_choice none or required",
            param=given.param,
        )
    return given if tool_use.constraint is None else Constrained(tool_use.constraint, "tools")


def _length(body: ChatBody) -> tuple[str, int | None]:
    """Return the maximum length of the answer, with the name of the parameter that set it."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise InvalidParameterError(
            f"max_completion_tokens is {new} and max_tokens is {old}; give only one of them",
            param="max_tokens",
        )
    return ("max_completion_tokens", bounded(new)) if new is not None else ("max_tokens", bounded(old))


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert messages to the form of chat templates: only the members that are set, under the template's names."""
    rewritten: list[dict[str, Any]] = []
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
            "tool_calls": [_template_call(*call) for call in calls] or None,
            "reasoning_content": message.reasoning if message.reasoning_content is None else message.reasoning_content,
        }
        rewritten.append({name: value for name, value in members.items() if value is not None})
    return rewritten


def _content(message: Message) -> str | list[dict[str, str]] | None:
    content = message.content
    if isinstance(content, list):
        return [{"type": "text", "text": part.text} for part in content]
    return message.refusal if content is None else content


def _template_call(call_id: str, function: CalledFunction) -> dict[str, Any]:
    members = {"name": function.name, "arguments": function.arguments}
    return {"id": call_id, "type": "function", "function": members}


def _template_kwargs(body: ChatBody) -> dict[str, Any]:
    """Variables for the chat template. Unread variables are reported once the answering model is known."""
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            kwargs.setdefault("enable_thinking", False)
    if body.verbosity is not None:
        kwargs.setdefault("verbosity", body.verbosity)
    return kwargs


def _template_params(body: ChatBody) -> dict[str, frozenset[str]]:
    params = {
        f"chat_template_kwargs.{ascii(name[:MAX_LABEL_CHARS])[1:-1]}": frozenset([name])
        for name in body.chat_template_kwargs or ()
    }
    effort = body.reasoning_effort
    if effort is not None:
        params["reasoning_effort"] = frozenset(["reasoning_effort", *(["enable_thinking"] if effort == "none" else [])])
    if body.verbosity not in (None, "medium"):
        params["verbosity"] = frozenset(["verbosity"])
    return params
