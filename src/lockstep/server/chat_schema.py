"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from lockstep.engine.chat_messages import MAX_CONTENT_PARTS, MAX_MESSAGES
from lockstep.server.schema import (
    MAX_LABEL_CHARS,
    MAX_SEQUENCE_TOKENS,
    Body,
    GenerationBody,
    JsonObject,
    Name,
    absent,
    in_pieces,
    text_or_list,
    text_or_object,
)

MAX_TOOLS = 128
MAX_TOP_LOGPROBS = 20
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Marked(Body):
    """What clients put beside a part of a conversation, for others than the model."""

    cache_control: JsonObject | None = None
    """Unused: prefixes are found in the cache without it."""
    provider_specific_fields: JsonObject | None = None
    """Unused: LiteLLM's notes."""


class TextPart(Marked):
    type: Literal["text"]
    text: str


class RefusalPart(Marked):
    """What an assistant said instead of an answer; content like any other."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def part_kind(value: object) -> str:
    """Which kind of content part a value is meant to be."""
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


class Function(Marked):
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    """A JSON schema; absent: no parameters."""
    strict: bool | None = None
    """The arguments obey the schema."""


class Tool(Marked):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: FunctionName


class NamedToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(Body):
    """Some of the tools: the model is told of all, and may call these."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choice_kind(value: object) -> str:
    """Which form of `tool_choice` a value is meant to be."""
    if isinstance(value, dict):
        return "[allowed]" if value.get("type") == "allowed_tools" else "[object]"
    return "[text]"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("[text]")]
    | Annotated[NamedToolChoice, Tag("[object]")]
    | Annotated[AllowedToolsChoice, Tag("[allowed]")],
    Discriminator(choice_kind),
]
FunctionChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag("[text]")] | Annotated[NamedFunction, Tag("[object]")],
    Discriminator(text_or_object),
]


class ChatBody(GenerationBody):
    """What a model is to answer, and how."""

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
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=MAX_SEQUENCE_TOKENS)] = None
    """Tokens of the answer, thoughts included; absent: what the context leaves."""
    max_tokens: Annotated[int | None, Field(ge=1, le=MAX_SEQUENCE_TOKENS)] = None
    """The older name of `max_completion_tokens`."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    """Only with `logprobs`."""
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    chat_template_kwargs: JsonObject | None = None
    """Variables for the model's chat template, e.g. `enable_thinking`; a warning says which it does not read."""
    add_generation_prompt: bool | None = None
    """False: the prompt does not end with the beginning of an assistant's message."""
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
