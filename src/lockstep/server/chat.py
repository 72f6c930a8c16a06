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
from lockstep.cluster.cluster import Cluster
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
    Name,
    absent,
    in_pieces,
    text_or_list,
)
from lockstep.server.generation import (
    Caller,
    Constrained,
    GenerationBody,
    MaxTokens,
    bounded,
    call_of,
    check_shared,
    check_tokens_known,
    constraint_of,
    labels_of,
    param_names,
    sampling_params,
)
from lockstep.server.request_context import RequestContext, context_of
from lockstep.server.serving import serving_of, translated
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
    """A refusal that an assistant gave instead of an answer; content like any other."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def part_kind(value: object) -> str:
    """The kind of content part that a value is intended to be, as a tag."""
    return "[refusal]" if isinstance(value, dict) and value.get("type") == "refusal" else "[text]"


Part = Annotated[
    Annotated[TextPart, Tag("[text]")] | Annotated[RefusalPart, Tag("[refusal]")], Discriminator(part_kind)
]
Content = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[list[Part], Field(max_length=MAX_CONTENT_PARTS), Tag("[list]")],
    Discriminator(text_or_list),
]


class CalledFunction(Marked):
    name: Annotated[str, Field(min_length=1, max_length=MAX_LABEL_CHARS)]
    arguments: str
    """A JSON object, as text."""
    parsed_arguments: Any = None
    """Unused: what the official client read from `arguments`."""


class ToolCall(Marked):
    id: str
    type: Literal["function"] | None = None
    function: CalledFunction
    index: int | None = None
    """Left over from a stream; unused."""


class Message(Marked):
    """One turn of the conversation. An answer's `message` may be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: Annotated[str | None, Field(max_length=MAX_LABEL_CHARS)] = None
    """For templates that read it. Of the deprecated role `function`: who answers."""
    tool_call_id: str | None = None
    """Of role `tool`: the call that this answers."""
    tool_calls: list[ToolCall] | None = None
    """Of role `assistant`."""
    function_call: CalledFunction | None = None
    """Of role `assistant`: the deprecated form of one call."""
    reasoning_content: str | None = None
    """Of role `assistant`: its thoughts, for templates that read them."""
    reasoning: str | None = None
    """The same under its other name; read where `reasoning_content` is absent."""
    refusal: str | None = None
    """Of role `assistant`: content, where there is no other."""
    audio: Annotated[None, absent("models here know text only")] = None
    annotations: list[JsonObject] | None = None
    """Unused, as is `parsed`: what the official client read from the content."""
    parsed: Any = None


class ChatBody(GenerationBody):
    """A conversation for a model to answer, and parameters of the answer."""

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
    """Tokens of the answer, thoughts included; absent or -1: what the context leaves."""
    max_tokens: MaxTokens | None = None
    """The older name of `max_completion_tokens`."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    """Only with `logprobs`."""
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    chat_template_kwargs: JsonObject | None = None
    """Variables for the model's chat template, e.g. `enable_thinking`; a warning names those that it does not read."""
    add_generation_prompt: bool | None = None
    """False: the prompt does not end with the beginning of an assistant's message."""
    add_special_tokens: Literal[False] | None = None
    """The template writes special tokens, so only false."""
    continue_final_message: bool | None = None
    """True: the answer goes on with the last message, which is not closed."""
    echo: bool | None = None
    """Begin the answer with the last message, where that is the assistant's."""
    reasoning_effort: ReasoningEffort | None = None
    """Where the model's chat template reads it; `none` also where it reads `enable_thinking`; else a warning."""
    lockstep_hops: bool | None = None
    """False: what a router decided is not shown as a call of the function `dispatch_to_specialist`. Requests with
    `tools` of their own are never shown it."""
    modalities: Annotated[list[Literal["text"]] | None, Field(min_length=1, max_length=1)] = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Where the model's chat template reads it; else only `medium` is without a warning."""
    safety_identifier: Name | None = None
    """Logged, as `user`."""
    prompt_cache_key: Name | None = None
    """Logged; prefixes are found in the cache without it."""
    prompt_cache_retention: Name | None = None
    """A hint, as the two that follow: what is cached stays as long as there is room."""
    prompt_cache_options: JsonObject | None = None
    cache_control: JsonObject | None = None
    functions: Annotated[list[Function] | None, Field(min_length=1, max_length=MAX_TOOLS)] = None
    """Deprecated form of `tools`; a call comes as `function_call`, and at most one."""
    function_call: FunctionChoice | None = None
    """Deprecated form of `tool_choice`; with `functions`."""
    audio: Annotated[None, absent("models here speak in text only")] = None
    prediction: Annotated[None, absent("predicted outputs are not done here")] = None
    web_search_options: Annotated[None, absent("models here do not search the web")] = None


router = APIRouter(route_class=LongBodyRoute, tags=["completions"], responses=ERROR_RESPONSES)


@router.post("/v1/chat/completions", responses=documented(ChatCompletion))
async def create_chat_completion(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    serving, context = serving_of(request), context_of(request)
    context.model = serving.cluster.card(body.model).name
    context.labels, context.session_id = labels_of(body), body.session_id
    caller = Caller(context.tenant, serving.options, context.request_id, context.segment)
    tokenizer = serving.cluster.tokenizer(body.model)
    chat = await translated(request, lambda: chat_call(body, caller, tokenizer))

    def make_answer(accepted: Sequence[Accepted]) -> Answer:
        return chat_answer(serving.cluster, body, chat, accepted[0], context)

    return AnswerResponse(
        request,
        (chat.call,),
        make_answer,
        chat.names,
        is_stream=bool(body.stream),
        shows_route=_shows_route(body),
    )


def chat_answer(
    cluster: Cluster, body: ChatBody, chat: ChatCall, accepted: Accepted, context: RequestContext
) -> Answer:
    """The answer to an accepted call, still empty."""
    tokenizer, returns_ids = cluster.tokenizer(accepted.model), bool(body.return_token_ids)
    context.warnings = [*body.warnings, *chat.warnings(tokenizer)]
    metadata = metadata_of("chatcmpl", cluster.card(accepted.model), body)
    check_tokens_known(
        tokenizer,
        {"return_token_ids": returns_ids, "stream_options.continuous_usage_stats": metadata.continuous_usage},
    )
    choices = open_choices(chat.call.params, tokenizer, accepted, tool_use=chat.tool_use, returns_ids=returns_ids)
    hops = accepted.hops if _shows_route(body) else ()
    encoder = ChatEncoder(
        metadata,
        tokenizer,
        len(choices),
        has_logprobs=bool(body.logprobs),
        returns_ids=returns_ids,
        has_functions=body.functions is not None,
        echo=_echo(body, chat),
        hops=hops,
    )
    return Answer([accepted], choices, encoder, context)


def _shows_route(body: ChatBody) -> bool:
    """True if the router's decision is shown as a call: clients with tools of their own would try to execute it."""
    return not (body.tools or body.functions) and body.lockstep_hops is not False


def _echo(body: ChatBody, chat: ChatCall) -> str:
    """The beginning of an answer that repeats the last message: where that is the assistant's and it is requested."""
    prompt = chat.call.prompt
    if not body.echo or body.messages[-1].role != "assistant" or not isinstance(prompt, Conversation):
        return ""
    [last] = checked_messages(prompt.messages[-1:], supports_developer=True)
    return str(last["content"])


JSON_KINDS = (ConstraintKind.JSON_OBJECT, ConstraintKind.JSON_SCHEMA)
"""What an answer may have to be although there are tools."""
MAX_WARNINGS = 16
"""Of one request; a header has them."""
OLD_CALL_ID = "call_function_"
"""Begins the ids that calls get whose deprecated form has none."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """The call, how its answer is read, and what the request calls the engine's parameters."""

    call: GenerationRequest
    tool_use: ToolUse
    names: Mapping[str, str]
    wishes: Mapping[str, frozenset[str]]
    """Parameters for the chat template, each with the variables by which it may read it; one is enough."""

    def warnings(self, tokenizer: Tokenizer) -> list[str]:
        """Warnings, a sentence each: schemas that are not enforced, and wishes that the template of the model that
        answers does not read."""
        warnings = list(self.tool_use.warnings)
        if self.wishes and tokenizer.vocab_size > 0:  # another server's template is not known here
            read = tokenizer.template_variables
            unread = [wish for wish, names in self.wishes.items() if names.isdisjoint(read)]
            warnings += [
                f"{wish}: the model's chat template does not read it, so it changes nothing" for wish in unread
            ]
        return warnings[:MAX_WARNINGS]


def chat_call(body: ChatBody, caller: Caller, tokenizer: Tokenizer) -> ChatCall:
    """Translate a chat request into a call of the cluster.

    Raises:
        InvalidParameterError: names the parameter.
    """
    check_shared(body, caller.options)
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidParameterError(
            "continue_final_message and add_generation_prompt are both true; a prompt ends in one way only",
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
    return ChatCall(call, tool_use, names, _wishes(body))


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
    """The same of the deprecated parameters, which know one call only."""
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
    """Put a text about tools into the words of the deprecated parameters."""
    for new, old in (("tools[", "functions["), ("].function", "]"), ("tool_choice.function", "function_call")):
        text = text.replace(new, old)
    return text.replace("tool_choice", "function_call")


def _constrained(given: Constrained, tool_use: ToolUse) -> Constrained:
    """The constraint of an answer: by the tools, by a parameter, or a call or else the constraint of a parameter."""
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
    """The limit of the answer, and the parameter that gave it."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise InvalidParameterError(
            f"max_completion_tokens is {new} and max_tokens {old}; they are one parameter, so give one of them",
            param="max_tokens",
        )
    return ("max_completion_tokens", bounded(new)) if new is not None else ("max_tokens", bounded(old))


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: the members that were given, under the names that they know."""
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
    """The template's own variables. Which of them it reads is checked once the answering model is known."""
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
