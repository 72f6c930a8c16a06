"""Request bodies of Ollama's API: the shapes of `/api/chat` and `/api/generate`, and their conversion."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from lockstep.engine.chat_template import MAX_MESSAGES
from lockstep.errors import InvalidParameterError
from lockstep.server.chat import MAX_TOP_LOGPROBS, MAX_WARNINGS, ChatBody
from lockstep.server.chat_adapter import NoEffect, To, dropped, table_of
from lockstep.server.completions import CompletionBody
from lockstep.server.fields import (
    MAX_LABEL_CHARS,
    MAX_SEQUENCE_TOKENS,
    MAX_VALUES,
    NOTHING,
    Body,
    JsonObject,
    Name,
    ParameterBody,
    SamplingBody,
    TokenId,
    in_pieces,
    only_empty,
    sampled,
    text_or_object,
)
from lockstep.server.generation import StopStrings
from lockstep.server.tools.definitions import MAX_TOOLS, Function

LATEST = ":latest"
ENDS_ALONE = (-2, -1, 0)
"""Values of `num_predict` that set no limit."""


def _limit(num_predict: int | None) -> int | None:
    return None if num_predict in ENDS_ALONE else num_predict


NoImages = Annotated[None, only_empty("only text is supported"), NOTHING]


class OllamaOptions(SamplingBody):
    """Options of one answer. Options for running a model are ignored, because `lockstep serve` sets them. As with
    Ollama, an unknown option causes a warning."""

    __pydantic_extra__: dict[str, Any] = Field(init=False)
    num_predict: Annotated[
        int | None,
        Field(ge=-2, le=MAX_SEQUENCE_TOKENS),
        To("max_tokens", _limit),
    ] = None
    """Maximum number of tokens of the answer; -1, -2 and 0: the rest of the context."""
    stop: StopStrings | None = sampled("stop")
    repeat_penalty: Annotated[float | None, To("repetition_penalty")] = sampled("repetition_penalty")
    presence_penalty: float | None = sampled("presence_penalty")
    frequency_penalty: float | None = sampled("frequency_penalty")
    repeat_last_n: Annotated[
        int | None,
        Field(ge=-1, le=MAX_SEQUENCE_TOKENS),
        NoEffect("penalties apply to the whole sequence", unless=lambda number: number == -1),
    ] = None
    """Penalties always apply to the whole sequence. Values other than -1 cause a warning."""
    num_ctx: Annotated[int | None, Field(ge=1, le=MAX_SEQUENCE_TOKENS)] = None
    """The context length is fixed by the server. A larger value causes a warning."""
    tfs_z: Annotated[float | None, Field(ge=1, le=1)] = None
    """Not supported: like the next two, it only accepts the value without effect."""
    typical_p: Annotated[float | None, Field(ge=1, le=1)] = None
    mirostat: Literal[0] | None = None
    mirostat_tau: float | None = None
    """Parameter of mirostat, like the next. Ignored."""
    mirostat_eta: float | None = None
    penalize_newline: bool | None = None
    """Ignored, like all members below."""
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None


KeepAlive = Annotated[
    Annotated[str, Field(max_length=MAX_LABEL_CHARS), Tag("[text]")] | Annotated[float, Tag("[number]")],
    Discriminator(lambda value: "[text]" if isinstance(value, str) else "[number]"),
]
Format = Annotated[
    Annotated[Literal["", "json"], Tag("[text]")] | Annotated[JsonObject, Tag("[object]")],
    Discriminator(text_or_object),
]
Think = Annotated[
    Annotated[Literal["", "low", "medium", "high", "max"], Tag("[text]")] | Annotated[bool, Tag("[bool]")],
    Discriminator(lambda value: "[text]" if isinstance(value, str) else "[bool]"),
]


class OllamaCalled(Body):
    name: Annotated[str, Field(min_length=1, max_length=MAX_LABEL_CHARS)]
    arguments: JsonObject | None = None
    index: int | None = None
    """Ignored. Present when an answer is sent back."""
    description: str | None = None


class OllamaCall(Body):
    function: OllamaCalled
    id: Name | None = None
    type: Literal["function"] | None = None


class OllamaMessage(Body):
    """One turn of the conversation. The `message` of an answer can be sent back unchanged."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    """With role `assistant`: reasoning of the turn, for templates that read it."""
    images: NoImages = None
    tool_calls: Annotated[list[OllamaCall] | None, Field(max_length=MAX_TOOLS)] = None
    tool_name: Name | None = None
    """With role `tool`: name of the function. Without it and `tool_call_id`, the result is of the first open call."""
    name: Name | None = None
    """Older name of `tool_name`."""
    tool_call_id: Name | None = None


class OllamaTool(Body):
    type: Literal["function"] | None = None
    function: Function


def _response_format(given: str | JsonObject | None) -> JsonObject | None:
    if not isinstance(given, dict):
        return {"type": "json_object"} if given else None
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": given}}


def _tools(tools: Sequence[OllamaTool]) -> list[JsonObject] | None:
    return [{"type": "function", "function": tool.function.model_dump(exclude_none=True)} for tool in tools] or None


def _messages_of_prompt(body: OllamaGenerateBody) -> list[JsonObject]:
    system = [{"role": "system", "content": body.system}] if body.system else []
    return [*system, {"role": "user", "content": body.prompt}]


def messages_of(messages: Sequence[OllamaMessage]) -> list[JsonObject]:
    """Convert the conversation to chat messages. Calls receive ids, and results are matched to their calls.

    Raises:
        InvalidParameterError: a result has no matching call.
    """
    turns: list[JsonObject] = []
    waiting: dict[str, str] = {}
    for index, message in enumerate(messages):
        turn: JsonObject = {"role": message.role, "content": message.content or ""}
        if message.role == "tool":
            found = _answered(message, waiting)
            if found is None:
                raise InvalidParameterError(
                    f"messages[{index}] is a tool result, but no earlier message calls that tool",
                    param=f"messages[{index}]",
                )
            turn |= {"tool_call_id": found, "name": waiting.pop(found)}
        if message.thinking:
            turn["reasoning_content"] = message.thinking
        if message.tool_calls:
            turn["tool_calls"] = calls = [_call(call, f"call_{index}_{i}") for i, call in enumerate(message.tool_calls)]
            waiting |= {call["id"]: call["function"]["name"] for call in calls}
        turns.append(turn)
    return turns


def _answered(result: OllamaMessage, waiting: dict[str, str]) -> str | None:
    """Return the call id of a result: by id, otherwise by function name, otherwise the first open call."""
    if result.tool_call_id is not None and result.tool_call_id in waiting:
        return result.tool_call_id
    name = result.tool_name or result.name
    return next((id_ for id_, called in waiting.items() if name in (None, called)), None)


def _call(call: OllamaCall, new_id: str) -> JsonObject:
    function = {"name": call.function.name, "arguments": json.dumps(call.function.arguments or {}, ensure_ascii=False)}
    return {"id": call.id or new_id, "type": "function", "function": function}


class OllamaBody(ParameterBody):
    """Members of all generating requests."""

    model: Name
    """Name of a served model, with or without `:latest`."""
    stream: bool | None = None
    """Default: true."""
    options: OllamaOptions | None = None
    format: Annotated[Format | None, To("response_format", _response_format, dropped)] = None
    """`json`, or a JSON schema that the answer obeys."""
    think: Annotated[
        Think | None,
        To("reasoning_effort", lambda think: think if isinstance(think, str) and think else None),
        To("chat_template_kwargs.enable_thinking", lambda think: think if isinstance(think, bool) else None),
    ] = None
    """Passed to chat templates that read `enable_thinking` or `reasoning_effort`; otherwise a warning."""
    keep_alive: Annotated[KeepAlive | None, NoEffect("the server determines how long models stay loaded")] = None
    """Ignored, with a warning: the server determines how long models stay loaded. In a request without a prompt, 0
    unloads the model, which requires operator permissions."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    """Requires `logprobs`."""
    truncate: bool | None = None
    """Ignored: a conversation that does not fit in the context is rejected."""
    shift: bool | None = None
    """Ignored: an answer ends at the end of the context."""


class OllamaChatBody(OllamaBody):
    """A conversation for a model to answer. Without messages, the model is loaded."""

    messages: Annotated[list[OllamaMessage] | None, Field(max_length=MAX_MESSAGES), To("messages", messages_of)] = None
    tools: Annotated[list[OllamaTool] | None, Field(max_length=MAX_TOOLS), To("tools", _tools)] = None


class OllamaGenerateBody(OllamaBody):
    """A prompt for a model to answer. Without a prompt, the model is loaded."""

    prompt: Annotated[str | None, To("messages", _messages_of_prompt, dropped, of_body=True), To("prompt")] = None
    system: str | None = None
    raw: bool | None = None
    """True: the prompt is completed as given, without the chat template."""
    suffix: Annotated[None, only_empty("fill-in-the-middle is not supported; leave it out"), NOTHING] = None
    template: Annotated[
        None, only_empty("the model's own chat template is used; leave it out, or send a raw full prompt"), NOTHING
    ] = None
    context: Annotated[list[TokenId], *in_pieces(MAX_VALUES, least=0)] | None = None
    """Tokens of an earlier conversation, from the `context` of an answer. The prompt continues them."""
    images: NoImages = None


CHAT, GENERATE = table_of(OllamaChatBody, ChatBody), table_of(OllamaGenerateBody, ChatBody)
RAW = table_of(OllamaGenerateBody, CompletionBody)
"""Parameters of raw prompts, which become completions."""


def completion_body(body: OllamaGenerateBody) -> CompletionBody:
    """Convert a raw prompt to a completion request.

    Raises:
        InvalidParameterError: a parameter is invalid; the error names it.
    """
    others = {"system": body.system, "think": body.think not in (None, ""), "context": body.context}
    if param := next((name for name, value in others.items() if value), None):
        raise InvalidParameterError(
            f"{param} is given with raw, which disables the chat template; include it in the prompt",
            param=param,
        )
    if body.top_logprobs and not body.logprobs:
        raise InvalidParameterError(
            "top_logprobs is given without logprobs; set logprobs to true or leave it out", param="top_logprobs"
        )
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return RAW.request(body, logprobs=logprobs, max_tokens=_limit((body.options or OllamaOptions()).num_predict))


def warnings_of(body: OllamaBody, max_model_len: int | None) -> Iterator[str]:
    """Warnings, one sentence each, about parameters that have no effect."""
    options = body.options or OllamaOptions()
    warnings = [*CHAT.warnings(body)]
    if options.num_ctx is not None and max_model_len is not None and options.num_ctx > max_model_len:
        warnings.append(f"options.num_ctx: has no effect, because the model's context has {max_model_len} tokens")
    yield from sorted(warnings)
    for name in list(options.__pydantic_extra__)[:MAX_WARNINGS]:
        yield f"options.{ascii(name[:MAX_LABEL_CHARS])[1:-1]}: the option is not supported, so it has no effect"


def is_unloading(keep_alive: str | float | None) -> bool:
    """True if ``keep_alive`` is zero, which unloads the model."""
    if isinstance(keep_alive, str):
        return re.fullmatch(r"0+(ms|[smh])?", keep_alive) is not None
    return keep_alive == 0
