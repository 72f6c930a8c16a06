"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Literal

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


class TextPart(Body):
    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[list[TextPart], Field(max_length=MAX_CONTENT_PARTS), Tag("[list]")],
    Discriminator(text_or_list),
]


class CalledFunction(Body):
    name: Annotated[str, Field(min_length=1, max_length=MAX_LABEL_CHARS)]
    arguments: str
    """A JSON object, as text."""


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Left over from a stream; unused."""


class Message(Body):
    """One turn of the conversation. An answer's `message` may be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Annotated[str | None, Field(max_length=MAX_LABEL_CHARS)] = None
    """For templates that read it."""
    tool_call_id: str | None = None
    """Of role `tool`: the call that this answers."""
    tool_calls: list[ToolCall] | None = None
    """Of role `assistant`."""
    reasoning_content: str | None = None
    """Of role `assistant`: its thoughts, for templates that read them."""
    reasoning: str | None = None
    """The same under its other name; read where `reasoning_content` is absent."""
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[None] | None, Field(max_length=0)] = None


class Function(Body):
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    """A JSON schema; absent: no parameters."""
    strict: bool | None = None
    """The arguments obey the schema."""


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: FunctionName


class NamedToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("[text]")] | Annotated[NamedToolChoice, Tag("[object]")],
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
    """Variables that the model's chat template reads, e.g. `enable_thinking`; others are refused."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """Where the model's chat template reads it; `none` also where it reads `enable_thinking`."""
    lockstep_hops: bool | None = None
    """False: what a router decided is not shown as a call of the function `dispatch_to_specialist`. Requests with
    `tools` of their own are never shown it."""
    modalities: Annotated[list[Literal["text"]] | None, Field(min_length=1, max_length=1)] = None
    verbosity: Literal["medium"] | None = None
    """The only one there is."""
    safety_identifier: Name | None = None
    """Logged, as `user`."""
    prompt_cache_key: Name | None = None
    """Logged; prefixes are found in the cache without it."""
    prompt_cache_retention: Literal["in_memory"] | None = None
    functions: Annotated[None, absent("functions are sent as tools here, the parameter that replaced it")] = None
    function_call: Annotated[None, absent("send tool_choice, the parameter that replaced it")] = None
    audio: Annotated[None, absent("models here speak in text only")] = None
    prediction: Annotated[None, absent("predicted outputs are not done here")] = None
    web_search_options: Annotated[None, absent("models here do not search the web")] = None
