"""Request body of `POST /v1/responses`: the shapes of OpenAI's Responses API that a text model can support."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from lockstep.engine.chat_template import MAX_CONTENT_PARTS, MAX_MESSAGES
from lockstep.errors import InvalidParameterError
from lockstep.server.chat import MAX_TOP_LOGPROBS, ReasoningEffort, RefusalPart, part_kind
from lockstep.server.chat_adapter import To, dropped, flat
from lockstep.server.fields import (
    MAX_LABEL_CHARS,
    MAX_SEQUENCE_TOKENS,
    Body,
    JsonObject,
    Marked,
    TextOr,
    in_pieces,
)
from lockstep.server.generation import ConversationBody, Labels
from lockstep.server.responses.tools import FunctionTool, ResponseTool, shown_name, shown_tools
from lockstep.server.tools.definitions import MAX_TOOLS, FunctionName, choice_kind

MAX_ID_CHARS = 128
MAX_CLIENT_METADATA = 64
Id = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
Status = Literal["in_progress", "completed", "incomplete"]
LOGPROBS = "message.output_text.logprobs"
ITEM_KINDS = (
    *("message", "reasoning", "function_call", "function_call_output"),
    *("custom_tool_call", "custom_tool_call_output"),
)


class ResponseTextPart(Marked):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[JsonObject] | None = None
    """Ignored, like the next two. Present when an answer is sent back."""
    logprobs: list[JsonObject] | None = None
    parsed: Any = None


Part = Annotated[
    Annotated[ResponseTextPart, Tag("[text]")] | Annotated[RefusalPart, Tag("[refusal]")], Discriminator(part_kind)
]
Content = TextOr[Annotated[list[Part], Field(max_length=MAX_CONTENT_PARTS)]]


class MessageItem(Body):
    """A message of the conversation. The `output` of an answer can be sent back unchanged."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: Id | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    """Ignored."""


class SummaryPart(Body):
    type: Literal["summary_text"]
    text: str


class ThoughtPart(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """Reasoning of a model, for templates that read it."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryPart] | None, Field(max_length=MAX_CONTENT_PARTS)] = None
    """Ignored."""
    content: Annotated[list[ThoughtPart], Field(max_length=MAX_CONTENT_PARTS)] | None = None
    id: Id | None = None
    status: Status | None = None
    encrypted_content: str | None = None
    """Ignored: this server does not encrypt reasoning, and cannot read that of another server."""


class FunctionCallItem(Marked):
    """A function call by a model."""

    type: Literal["function_call"]
    call_id: Id
    name: FunctionName
    namespace: FunctionName | None = None
    arguments: str
    """A JSON object, serialized as a string."""
    parsed_arguments: Any = None
    """Ignored. The official client adds the parsed form of `arguments`."""
    id: Id | None = None
    status: Status | None = None


class FunctionCallOutputItem(Body):
    """Output of a function call."""

    type: Literal["function_call_output"]
    call_id: Id
    output: Content
    id: Id | None = None
    status: Status | None = None


class CustomToolCallItem(Marked):
    """A call by a model of a tool with free-text input."""

    type: Literal["custom_tool_call"]
    call_id: Id
    name: FunctionName
    namespace: FunctionName | None = None
    input: str
    id: Id | None = None
    status: Status | None = None


class CustomToolCallOutputItem(Body):
    """Output of a custom tool call."""

    type: Literal["custom_tool_call_output"]
    call_id: Id
    name: FunctionName | None = None
    output: Content
    id: Id | None = None
    status: Status | None = None


def _item_kind(value: object) -> str | None:
    kind = (value.get("type") or "message") if isinstance(value, dict) else "message"
    return f"[{kind}]" if kind in ITEM_KINDS else None


Item = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")]
    | Annotated[FunctionCallItem, Tag("[function_call]")]
    | Annotated[FunctionCallOutputItem, Tag("[function_call_output]")]
    | Annotated[CustomToolCallItem, Tag("[custom_tool_call]")]
    | Annotated[CustomToolCallOutputItem, Tag("[custom_tool_call_output]")],
    Discriminator(
        _item_kind,
        custom_error_type="item_kind",
        custom_error_message=f"An item's type must be one of {', '.join(ITEM_KINDS)}; other types are not supported",
    ),
]
Input = TextOr[Annotated[list[Item], *in_pieces(MAX_MESSAGES)]]


class NamedTool(Body):
    type: Literal["function", "custom"]
    name: FunctionName
    namespace: FunctionName | None = None


class ResponseAllowedTools(Body):
    """A subset of the tools. The model is shown all tools but can only call these."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("[text]")]
    | Annotated[NamedTool, Tag("[object]")]
    | Annotated[ResponseAllowedTools, Tag("[allowed]")],
    Discriminator(choice_kind),
]


def _tool_choice(choice: ToolChoice) -> str | JsonObject:
    if isinstance(choice, str):
        return choice
    if isinstance(choice, ResponseAllowedTools):
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]},
        }
    return _named(choice)


def _named(tool: NamedTool) -> JsonObject:
    return {"type": "function", "function": {"name": shown_name(tool.namespace, tool.name)}}


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] | None = None
    """Absent: text."""
    name: Annotated[str | None, Field(min_length=1, max_length=MAX_LABEL_CHARS)] = None
    """With type `json_schema`, like all members below."""
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None
    """Ignored: the answer always obeys the schema."""


def as_json(body: Body) -> JsonObject:
    """Serialize a part of the body as the client sent it, without unset members."""
    return body.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)


def _response_format(given: TextFormat) -> JsonObject:
    about = as_json(given)
    kind = about.pop("type", "text")
    if kind != "json_schema":
        if about:
            raise InvalidParameterError(
                f"text.format.{next(iter(about))} is given with type {kind}; it requires type json_schema",
                param="text.format",
            )
        return {"type": kind}
    for name in ("schema", "name"):
        if name not in about:
            raise InvalidParameterError(
                f"text.format.{name} is missing; type json_schema requires it", param=f"text.format.{name}"
            )
    return {"type": kind, "json_schema": about}


class TextConfig(Body):
    format: Annotated[TextFormat | None, To("response_format", _response_format, flat)] = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Passed to chat templates that read it. Otherwise values other than `medium` cause a warning."""


class Reasoning(Body):
    effort: Annotated[ReasoningEffort | None, To("reasoning_effort")] = None
    """Passed to chat templates that read it; `none` also sets `enable_thinking` to false. Otherwise a warning."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Ignored: reasoning is returned in full, not as a summary."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """Deprecated name of `summary`."""
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


def _functions(tools: Sequence[ResponseTool]) -> list[JsonObject] | None:
    return [{"type": "function", "function": shown.function} for shown in shown_tools(tools)] or None


class ResponseBody(ConversationBody):
    """A conversation for a model to answer, with the parameters of the answer."""

    input: Annotated[Input, To("messages", inner=dropped)]
    instructions: str | None = None
    """System message before the conversation. It is not inherited from the previous response."""
    previous_response_id: Id | None = None
    """Id of a stored response that this one continues."""
    store: bool | None = None
    """Whether to store the response, so that it can be continued. Default: true."""
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1, le=MAX_SEQUENCE_TOKENS), To("max_tokens")] = None
    """Maximum number of tokens of the answer, including reasoning. Absent: the rest of the context."""
    text: TextConfig | None = None
    tools: Annotated[list[ResponseTool] | None, Field(max_length=MAX_TOOLS), To("tools", _functions, flat)] = None
    tool_choice: Annotated[ToolChoice | None, To("tool_choice", _tool_choice, flat)] = None
    reasoning: Reasoning | None = None
    include: Annotated[list[Includable] | None, To("logprobs", lambda names: LOGPROBS in names or None)] = None
    """Additional output: log-probabilities. Other values have no effect: reasoning is always returned as plain text,
    and the server has no built-in tools."""
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    """Requires `message.output_text.logprobs` in `include`."""
    truncation: Literal["auto", "disabled"] | None = None
    """Ignored: a conversation that does not fit in the context is rejected."""
    background: Literal[False] | None = None
    """Only false is supported."""
    metadata: Labels | None = None
    """Labels that are stored with the response and logged."""
    client_metadata: Annotated[dict[str, Any] | None, Field(max_length=MAX_CLIENT_METADATA)] = None
    """Ignored: data for the client's own use."""
    max_tool_calls: None = None
    """Not supported: it applies to built-in tools only."""
    conversation: None = None
    """Not supported: use `previous_response_id`."""
    prompt: None = None
    """Not supported: use `instructions` and `input`."""


def response_base(body: ResponseBody, response_id: str, model: str, created_s: int) -> JsonObject:
    """Members of a response object that describe its request. They never change."""
    text = {} if body.text is None else as_json(body.text)
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_s,
        "model": model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {**text, "format": {"type": "text", **(text.get("format") or {})}},
        "tool_choice": _choice_as_json(body),
        "tools": [_tool_as_json(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _tool_as_json(tool: ResponseTool) -> JsonObject:
    written = as_json(tool)
    return {"parameters": None, "strict": False, **written} if isinstance(tool, FunctionTool) else written


def _choice_as_json(body: ResponseBody) -> str | JsonObject:
    choice = body.tool_choice
    if choice is None:
        return "auto"
    return choice if isinstance(choice, str) else as_json(choice)
