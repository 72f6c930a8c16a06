"""The body of `POST /v1/responses`, in the shapes of OpenAI's Responses API as far as a text model can serve them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from lockstep.engine.chat_template import MAX_CONTENT_PARTS, MAX_MESSAGES
from lockstep.server.chat import MAX_TOP_LOGPROBS, ReasoningEffort, RefusalPart, part_kind
from lockstep.server.fields import (
    MAX_LABEL_CHARS,
    MAX_SEQUENCE_TOKENS,
    Body,
    JsonObject,
    Marked,
    Name,
    in_pieces,
    text_or_list,
)
from lockstep.server.generation import DeadlineMs, Labels, RequestBody
from lockstep.server.responses.tools import FunctionTool, ResponseTool
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
    """Left over from an answer; unused, as are the following."""
    logprobs: list[JsonObject] | None = None
    parsed: Any = None


Part = Annotated[
    Annotated[ResponseTextPart, Tag("[text]")] | Annotated[RefusalPart, Tag("[refusal]")], Discriminator(part_kind)
]
Content = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[list[Part], Field(max_length=MAX_CONTENT_PARTS), Tag("[list]")],
    Discriminator(text_or_list),
]


class MessageItem(Body):
    """A message of the conversation. An answer's `output` may be sent back as it came."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: Id | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    """Unused."""


class SummaryPart(Body):
    type: Literal["summary_text"]
    text: str


class ThoughtPart(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """Thoughts of a model, for templates that read them."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryPart] | None, Field(max_length=MAX_CONTENT_PARTS)] = None
    """Unused."""
    content: Annotated[list[ThoughtPart], Field(max_length=MAX_CONTENT_PARTS)] | None = None
    id: Id | None = None
    status: Status | None = None
    encrypted_content: str | None = None
    """Unused: nothing is encrypted here; encrypted content is for another server."""


class FunctionCallItem(Marked):
    """A tool that a model called."""

    type: Literal["function_call"]
    call_id: Id
    name: FunctionName
    namespace: FunctionName | None = None
    arguments: str
    """A JSON object, as text."""
    parsed_arguments: Any = None
    """Unused: what the official client read from `arguments`."""
    id: Id | None = None
    status: Status | None = None


class FunctionCallOutputItem(Body):
    """The answer of a tool."""

    type: Literal["function_call_output"]
    call_id: Id
    output: Content
    id: Id | None = None
    status: Status | None = None


class CustomToolCallItem(Marked):
    """A tool that a model called with a text."""

    type: Literal["custom_tool_call"]
    call_id: Id
    name: FunctionName
    namespace: FunctionName | None = None
    input: str
    id: Id | None = None
    status: Status | None = None


class CustomToolCallOutputItem(Body):
    """The answer of such a tool."""

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
        custom_error_message=f"An item's type must be one of {', '.join(ITEM_KINDS)}; other kinds are not served",
    ),
]
Input = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[list[Item], *in_pieces(MAX_MESSAGES), Tag("[list]")],
    Discriminator(text_or_list),
]


class NamedTool(Body):
    type: Literal["function", "custom"]
    name: FunctionName
    namespace: FunctionName | None = None


class ResponseAllowedTools(Body):
    """Some of the tools: the model is informed of all, and may call these."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("[text]")]
    | Annotated[NamedTool, Tag("[object]")]
    | Annotated[ResponseAllowedTools, Tag("[allowed]")],
    Discriminator(choice_kind),
]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] | None = None
    """Absent: text."""
    name: Annotated[str | None, Field(min_length=1, max_length=MAX_LABEL_CHARS)] = None
    """Of type `json_schema`, as are the following."""
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None
    """The answer always obeys the schema, whatever is set here."""


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Where the model's chat template reads it; else only `medium` is without a warning."""


class Reasoning(Body):
    effort: ReasoningEffort | None = None
    """Where the model's chat template reads it; `none` also where it reads `enable_thinking`; else a warning."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Thoughts are given as they are, which is more than a summary."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The deprecated name of `summary`."""
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


class ResponseBody(RequestBody):
    """A conversation for a model to answer, and parameters of the answer."""

    input: Input
    model: Name | None = None
    """A served name; absent: the one model that is served."""
    instructions: str | None = None
    """A system message before everything else; not inherited from the previous response."""
    previous_response_id: Id | None = None
    """A stored response that this one continues."""
    store: bool | None = None
    """Whether the response is kept, so that others may continue it; default true."""
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1, le=MAX_SEQUENCE_TOKENS)] = None
    """Tokens of the answer, thoughts included; absent: what the context leaves."""
    text: TextConfig | None = None
    tools: Annotated[list[ResponseTool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    reasoning: Reasoning | None = None
    include: list[Includable] | None = None
    """Output beside the text: log-probabilities. Thoughts are plain text anyway, and the server has no tools of its
    own."""
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    """Only with `include` of `message.output_text.logprobs`."""
    truncation: Literal["auto", "disabled"] | None = None
    """Nothing is left out: a conversation that does not fit is refused, whatever is set here."""
    background: Literal[False] | None = None
    """Not done here, so only false."""
    metadata: Labels | None = None
    """Labels that are kept with the response, and logged."""
    client_metadata: Annotated[dict[str, Any] | None, Field(max_length=MAX_CLIENT_METADATA)] = None
    """Notes of the client for itself; unused."""
    safety_identifier: Name | None = None
    """Logged, as `user`."""
    prompt_cache_key: Name | None = None
    """A hint where to run; there is one place here, and its prefix cache needs none."""
    prompt_cache_retention: Name | None = None
    prompt_cache_options: JsonObject | None = None
    deadline_ms: DeadlineMs | None = None
    """The answer is complete by then, or the request ends with 504 or a failed response."""
    chat_template_kwargs: JsonObject | None = None
    """Variables for the model's chat template, e.g. `enable_thinking`; a warning names those that it does not read."""
    max_tool_calls: None = None
    """Of built-in tools, which are not served."""
    conversation: None = None
    """Not done here: send `previous_response_id`."""
    prompt: None = None
    """Not done here: send `instructions` and `input`."""


def as_json(body: Body) -> dict[str, Any]:
    """A part of the body as the client wrote it, without what it left out."""
    return body.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)


def response_base(body: ResponseBody, response_id: str, model: str, created_s: int) -> dict[str, Any]:
    """Members of a response object that tell its request, the same from beginning to end."""
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


def _tool_as_json(tool: ResponseTool) -> dict[str, Any]:
    written = as_json(tool)
    return {"parameters": None, "strict": False, **written} if isinstance(tool, FunctionTool) else written


def _choice_as_json(body: ResponseBody) -> Any:
    choice = body.tool_choice
    if choice is None:
        return "auto"
    return choice if isinstance(choice, str) else as_json(choice)
