"""Request body of `POST /v1/messages`: the shapes of Anthropic's Messages API, and their conversion to chat
requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from lockstep.engine.chat_template import MAX_CONTENT_PARTS, MAX_MESSAGES
from lockstep.errors import InvalidParameterError
from lockstep.executors.sampling_params import MAX_STOP_STRINGS
from lockstep.server.adapters.anthropic_tools import MessagesTool, check_choosable, functions_of, tool_warnings
from lockstep.server.chat import ChatBody
from lockstep.server.chat_adapter import NoEffect, ParameterTable, To, dropped, flat, table_of
from lockstep.server.fields import (
    MAX_SEQUENCE_TOKENS,
    NOTHING,
    Body,
    JsonObject,
    Marked,
    Name,
    ParameterBody,
    TextOr,
    in_pieces,
    only_empty,
    sampled,
    unsupported,
)
from lockstep.server.generation import SharedBody, StopString
from lockstep.server.tools.definitions import MAX_TOOLS, FunctionName

Id = Annotated[str, Field(min_length=1, max_length=128)]
MAX_EDITS = 16
BLOCK_KINDS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking", "document", "search_result")


class TextBlock(Marked):
    type: Literal["text"]
    text: str
    citations: list[JsonObject] | None = None
    """Ignored. Present when an answer is sent back."""


Texts = TextOr[Annotated[list[TextBlock], Field(max_length=MAX_CONTENT_PARTS)]]


class Citations(Body):
    enabled: Literal[False] | None = None
    """Only false is supported: answers have no citations."""


class DocumentSource(Body):
    type: Literal["text", "content"]
    """Only text is supported."""
    media_type: Literal["text/plain"] | None = None
    data: str | None = None
    """With type `text`: the text."""
    content: Texts | None = None
    """With type `content`: the blocks."""


class DocumentBlock(Marked):
    """A plain-text document, which becomes part of the message text."""

    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class SearchResultBlock(Marked):
    type: Literal["search_result"]
    source: str
    title: str
    content: Annotated[list[TextBlock], Field(max_length=MAX_CONTENT_PARTS)]
    citations: Citations | None = None


class ThinkingBlock(Marked):
    """Reasoning of an earlier answer, for templates that read it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    """Ignored: signatures are not checked."""


class RedactedThinkingBlock(Marked):
    """Encrypted reasoning that only the server that wrote it can read. Left out, with a warning."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Marked):
    type: Literal["tool_use"]
    id: Id
    name: FunctionName
    input: JsonObject
    caller: JsonObject | None = None
    """Ignored. Present when an answer is sent back."""


def _block_kind(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"[{kind}]" if kind in BLOCK_KINDS else None


def _blocks(kinds: str) -> Discriminator:
    return Discriminator(
        _block_kind,
        custom_error_type="block_kind",
        custom_error_message=f"A block's type must be one of {kinds}; only text is supported, no images or files",
    )


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[DocumentBlock, Tag("[document]")]
    | Annotated[SearchResultBlock, Tag("[search_result]")],
    _blocks("text, document, search_result"),
]


Result = TextOr[Annotated[list[ResultBlock], Field(max_length=MAX_CONTENT_PARTS)]]


class ToolResultBlock(Marked):
    """Result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Id
    content: Result | None = None
    is_error: bool | None = None
    """True: the content that the model receives starts with "Error:"."""


Block = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[ToolUseBlock, Tag("[tool_use]")]
    | Annotated[ToolResultBlock, Tag("[tool_result]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[RedactedThinkingBlock, Tag("[redacted_thinking]")]
    | Annotated[DocumentBlock, Tag("[document]")]
    | Annotated[SearchResultBlock, Tag("[search_result]")],
    _blocks(", ".join(BLOCK_KINDS)),
]


class TurnMessage(Body):
    """One turn of the conversation. The `content` of an answer can be sent back unchanged."""

    role: Literal["user", "assistant", "system"]
    content: TextOr[Annotated[list[Block], Field(max_length=MAX_CONTENT_PARTS)]]


class MessagesToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    """With type `tool`: name of the tool."""
    disable_parallel_tool_use: Annotated[
        bool | None, To("parallel_tool_calls", lambda is_disabled: False if is_disabled else None)
    ] = None
    """True: the answer has at most one call."""


class Thinking(Body):
    type: Literal["enabled", "adaptive", "disabled"]
    """Passed as `enable_thinking` to chat templates that read it; otherwise a warning. `adaptive`: the model's
    choice."""
    budget_tokens: Annotated[
        int | None,
        Field(ge=1, le=MAX_SEQUENCE_TOKENS),
        NoEffect("max_tokens limits thinking and text together"),
    ] = None
    """Not enforced separately: `max_tokens` limits thinking and text together. A warning reports this."""
    display: Literal["summarized", "omitted"] | None = None
    """`omitted`: thinking blocks are empty. Otherwise they have the full text, not a summary."""


class JsonOutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


def _response_format(given: JsonOutputFormat) -> JsonObject:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given.schema_, "strict": True}}


AS_RESPONSE_FORMAT = To("response_format", _response_format, flat)


class OutputConfig(Body):
    effort: Annotated[Literal["low", "medium", "high", "xhigh", "max"] | None, To("reasoning_effort")] = None
    """Passed as `reasoning_effort` to chat templates that read it; otherwise a warning."""
    format: Annotated[JsonOutputFormat | None, AS_RESPONSE_FORMAT] = None
    """JSON schema that the answer obeys."""


class ContextManagement(Body):
    edits: Annotated[list[JsonObject] | None, Field(max_length=MAX_EDITS)] = None

    @property
    def keeps_all(self) -> bool:
        """True if the edits leave all messages as they are."""
        return all(edit.get("keep") in ("all", {"type": "all"}) for edit in self.edits or ())


class RequestMetadata(Body):
    user_id: Annotated[Name | None, To("user")] = None
    """Logged. Without API keys, the scheduler's fair share is per user."""


def messages_of(body: CountBody) -> list[JsonObject]:
    """Convert the conversation to chat messages. Tool results become separate messages.

    Raises:
        InvalidParameterError: a block belongs to another role; ``param`` names it.
    """
    messages: list[JsonObject] = []
    if body.system:
        texts = [body.system] if isinstance(body.system, str) else [block.text for block in body.system]
        messages.append({"role": "system", "content": _parts(texts)})
    called: dict[str, str] = {}
    for index, message in enumerate(body.messages):
        where = f"messages[{index}].content"
        blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        if message.role == "assistant":
            messages.append(_assistant_turn(blocks, where, called))
        else:
            messages += _other_turn(message.role, blocks, where, called)
    return messages


def _assistant_turn(blocks: Sequence[Block], where: str, called: dict[str, str]) -> JsonObject:
    turn: JsonObject = {"role": "assistant"}
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        if isinstance(block, ToolUseBlock):
            called[block.id] = block.name
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, TextBlock):
            texts.append(block.text)
        elif not isinstance(block, RedactedThinkingBlock):
            raise _misplaced(block, f"{where}[{index}]", "user")
    if texts or not (calls or thoughts):
        turn["content"] = _parts(texts)
    if any(thoughts):
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _other_turn(role: str, blocks: Sequence[Block], where: str, called: Mapping[str, str]) -> Iterator[JsonObject]:
    """Chat messages of a user or system turn. Tool results within a user turn become messages of role tool."""
    texts: list[str] = []
    for index, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock) and role == "user":
            if texts:
                yield {"role": role, "content": _parts(texts)}
                texts = []
            yield _tool_message(block, f"{where}[{index}]", called)
        elif isinstance(block, TextBlock | DocumentBlock | SearchResultBlock):
            texts.append(_text(block, f"{where}[{index}]"))
        else:
            raise _misplaced(block, f"{where}[{index}]", "user" if role == "system" else "assistant")
    if texts or not blocks:
        yield {"role": role, "content": _parts(texts)}


def _tool_message(block: ToolResultBlock, where: str, called: Mapping[str, str]) -> JsonObject:
    if block.tool_use_id not in called:
        raise InvalidParameterError(
            f"{where}.tool_use_id is {block.tool_use_id!r}; no tool_use before it has that id",
            param=f"{where}.tool_use_id",
        )
    given = block.content
    texts = [given or ""] if not isinstance(given, list) else [_text(part, where) for part in given]
    if block.is_error:
        texts = ["Error:", *texts]
    content = _parts(texts) if texts else ""
    return {"role": "tool", "tool_call_id": block.tool_use_id, "name": called[block.tool_use_id], "content": content}


def _text(block: TextBlock | DocumentBlock | SearchResultBlock, where: str) -> str:
    """Text of a content block, preceded by its title and source."""
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, SearchResultBlock):
        return "\n".join([block.title, block.source, *(part.text for part in block.content)])
    source = block.source
    data = source.data if source.type == "text" else source.content
    if data is None:
        member = "data" if source.type == "text" else "content"
        raise InvalidParameterError(f"{where}.source.{member} is missing", param=f"{where}.source.{member}")
    text = data if isinstance(data, str) else "\n".join(part.text for part in data)
    return "\n".join([part for part in (block.title, block.context) if part] + [text])


def _misplaced(block: Block, where: str, role: str) -> InvalidParameterError:
    return InvalidParameterError(f"{where} is a {block.type} block, which is only valid with role {role}", param=where)


def _parts(texts: Sequence[str]) -> str | list[dict[str, str]]:
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _inner_of_tool(inner: str) -> str:
    return flat(inner).replace("].parameters", "].input_schema", 1)


def _tool_choice(body: CountBody) -> str | JsonObject | None:
    choice, tools = body.tool_choice, body.tools or ()
    assert choice is not None, "only a given choice is converted"
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidParameterError(
            f"tool_choice.name is {'missing' if choice.name is None else 'given'} with type {choice.type}; "
            "it is required with type tool and invalid with other types",
            param="tool_choice.name",
        )
    if choice.name is not None:
        check_choosable(choice.name, tools)
        return {"type": "function", "function": {"name": choice.name}}
    if functions_of(tools):
        return "required" if choice.type == "any" else choice.type
    if choice.type == "any":
        raise InvalidParameterError("tool_choice is 'any', but the request has no tools", param="tool_choice")
    return None


def _enables_thinking(thinking: Thinking) -> bool | None:
    return None if thinking.type == "adaptive" else thinking.type == "enabled"


def _without_bound(schema: JsonObject) -> None:
    """Remove `maxItems` from the schema. The limit on body bytes applies long before it, and request generators that
    read the OpenAPI document would produce messages of this length."""
    schema.pop("maxItems", None)


_HELLO: Any = {"role": "user", "content": "I was charged twice."}


class CountBody(ParameterBody):
    """A conversation, with the parameters that affect its prompt."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"messages": [_HELLO]}]})

    model: Name | None = None
    """Name of a served model. Absent: the model that the routing selects, or the only model."""
    messages: Annotated[
        list[TurnMessage],
        *in_pieces(MAX_MESSAGES),
        Field(json_schema_extra=_without_bound),
        To("messages", messages_of, dropped, of_body=True),
        To("continue_final_message", lambda turns: turns[-1].role == "assistant" or None),
    ]
    system: Texts | None = None
    tools: Annotated[
        list[MessagesTool] | None,
        Field(max_length=MAX_TOOLS),
        To("tools", lambda tools: list(functions_of(tools).values()) or None, _inner_of_tool),
    ] = None
    tool_choice: Annotated[MessagesToolChoice | None, To("tool_choice", _tool_choice, flat, of_body=True)] = None
    thinking: Annotated[Thinking | None, To("chat_template_kwargs.enable_thinking", _enables_thinking)] = None
    output_config: OutputConfig | None = None
    output_format: Annotated[JsonOutputFormat | None, AS_RESPONSE_FORMAT] = None
    """Older name of `output_config.format`."""
    cache_control: JsonObject | None = None
    """Ignored everywhere: the prefix cache does not need it."""
    context_management: Annotated[
        ContextManagement | None,
        NoEffect("messages are never cleared or summarized", unless=lambda given: given.keeps_all),
    ] = None
    """Ignored: messages are never cleared or summarized. A warning reports edits that would have an effect."""
    mcp_servers: Annotated[None, only_empty("this server does not call MCP servers"), NOTHING] = None
    thread: Annotated[None, unsupported("conversations are not stored; send all messages")] = None
    speed: Literal["standard"] | None = None
    chat_template_kwargs: JsonObject | None = None
    """Extension of this server: variables for the model's chat template."""


class MessagesBody(SharedBody, CountBody):
    """A conversation for a model to answer, with the parameters of the answer."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"max_tokens": 4, "messages": [_HELLO], "system": "Be brief."},
                {"max_tokens": 4, "messages": [_HELLO], "stream": True, "temperature": 0, "stop_sequences": ["."]},
            ]
        }
    )

    max_tokens: Annotated[int, Field(ge=1, le=MAX_SEQUENCE_TOKENS)]
    """Maximum number of tokens of the answer, including thinking."""
    stop_sequences: Annotated[list[StopString] | None, To("stop")] = sampled("stop", max_length=MAX_STOP_STRINGS)
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    """Ignored. The answer always reports `standard`."""
    container: Annotated[None, unsupported("containers are not supported")] = None


TABLE = table_of(MessagesBody, ChatBody)
"""Parameters of the Messages API. Bodies of token counts have a part of them."""


def chat_body(body: CountBody) -> ChatBody:
    """Convert a body to a chat request.

    Raises:
        InvalidParameterError: a parameter is invalid; the error names it.
    """
    if body.output_format is not None and body.output_config is not None and body.output_config.format is not None:
        raise InvalidParameterError(
            "output_format is the older name of output_config.format; give only one of them", param="output_format"
        )
    return TABLE.request(body)


def table_for(body: CountBody) -> ParameterTable[ChatBody]:
    """Parameter table of this request. Indexes of tools count the tools that were left out."""
    return TABLE.with_tools(list(functions_of(body.tools or ())))


def warnings_of(body: CountBody) -> Iterator[str]:
    """Warnings, one sentence each, about parameters that have no effect."""
    yield from TABLE.warnings(body)
    yield from tool_warnings(body.tools or ())
    blocks = (block for message in body.messages if not isinstance(message.content, str) for block in message.content)
    if any(isinstance(block, RedactedThinkingBlock) for block in blocks):
        yield "messages: redacted thinking is left out because only the server that wrote it can read it"
