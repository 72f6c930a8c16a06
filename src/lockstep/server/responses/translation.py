"""Translation of Responses requests to chat requests: converts input to items, and items to messages.

All functions are pure. Items are stored and returned; messages are passed to the model. Consecutive reasoning, text and
tool call items of the assistant become one message. So a conversation produces the same prompt whether it is continued
by id or sent in full.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lockstep.engine.chat_template import MAX_MESSAGES
from lockstep.errors import InvalidParameterError
from lockstep.server.chat import ChatBody
from lockstep.server.chat_adapter import table_of
from lockstep.server.responses.schema import (
    LOGPROBS,
    Content,
    CustomToolCallItem,
    CustomToolCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    ResponseBody,
)
from lockstep.server.responses.tools import arguments_of, shown_name

JsonObject = Mapping[str, Any]
NewId = Callable[[str], str]
"""Makes a unique id from a prefix."""

REASONING_PREFIX, MESSAGE_PREFIX, CALL_PREFIX, CALL_OUTPUT_PREFIX = "rs", "msg", "fc", "fco"
CUSTOM_CALL_PREFIX = "ctc"


def items_of(given: str | Sequence[Item], new_id: NewId) -> tuple[JsonObject, ...]:
    """Convert a request's input to items with ids, in the form in which they are listed.

    Raises:
        InvalidParameterError: a call's arguments are not a JSON object; `param` names the item.
    """
    if isinstance(given, str):
        given = (MessageItem(role="user", content=given),)
    return tuple(_item(item, f"input[{index}]", new_id) for index, item in enumerate(given))


def _item(item: Item, where: str, new_id: NewId) -> JsonObject:
    if isinstance(item, MessageItem):
        kind = "output_text" if item.role == "assistant" else "input_text"
        return {
            "id": item.id or new_id(MESSAGE_PREFIX),
            "type": "message",
            "role": item.role,
            "status": item.status or "completed",
            "content": [_part(kind, text) for text in _texts(item.content)],
        }
    if isinstance(item, ReasoningItem):
        return {
            "id": item.id or new_id(REASONING_PREFIX),
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": part.text} for part in item.summary or ()],
            "content": [{"type": "reasoning_text", "text": part.text} for part in item.content or ()],
            "status": item.status or "completed",
        }
    if isinstance(item, FunctionCallItem):
        if not _is_object(item.arguments):
            raise InvalidParameterError(
                f"{where}.arguments is not a JSON object serialized as a string", param=f"{where}.arguments"
            )
        return {
            "id": item.id or new_id(CALL_PREFIX),
            "type": "function_call",
            "call_id": item.call_id,
            "name": item.name,
            **_of_namespace(item.namespace),
            "arguments": item.arguments,
            "status": item.status or "completed",
        }
    if isinstance(item, CustomToolCallItem):
        return {
            "id": item.id or new_id(CUSTOM_CALL_PREFIX),
            "type": "custom_tool_call",
            "call_id": item.call_id,
            "name": item.name,
            **_of_namespace(item.namespace),
            "input": item.input,
        }
    assert isinstance(item, FunctionCallOutputItem | CustomToolCallOutputItem), "the schema has no other item types"
    output = item.output
    return {
        "id": item.id or new_id(CALL_OUTPUT_PREFIX),
        "type": item.type,
        "call_id": item.call_id,
        "output": output if isinstance(output, str) else [_part("input_text", part.text) for part in output],
        "status": item.status or "completed",
    }


def _of_namespace(namespace: str | None) -> JsonObject:
    return {} if namespace is None else {"namespace": namespace}


def _texts(content: Content) -> list[str]:
    return [content] if isinstance(content, str) else [part.text for part in content]


def _part(kind: str, text: str) -> JsonObject:
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}


def _is_object(text: str) -> bool:
    """True if a string is a JSON object. An empty string counts as an empty object."""
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def messages_of(instructions: str | None, items: Iterable[JsonObject]) -> Sequence[JsonObject]:
    """Convert a conversation to messages for the chat template.

    Args:
        items: items of the whole conversation, as returned by `items_of` and in responses.

    Raises:
        InvalidParameterError: there are too many messages, or an output has no matching call.
    """
    messages: list[dict[str, Any]] = []
    called: dict[str, str] = {}
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        match item["type"]:
            case "reasoning":
                thoughts = "\n".join(part["text"] for part in item.get("content") or ())
                if thoughts:
                    _open_turn(messages, "content", "tool_calls", "reasoning_content")["reasoning_content"] = thoughts
            case "function_call" | "custom_tool_call":
                turn, name = _open_turn(messages), shown_name(item.get("namespace"), item["name"])
                turn.setdefault("tool_calls", []).append(_tool_call(item, name))
                called[item["call_id"]] = name
            case "function_call_output" | "custom_tool_call_output":
                messages.append(_tool_message(item, called))
            case _:
                text = "\n".join(part["text"] for part in item["content"])
                if item["role"] == "assistant":
                    _open_turn(messages, "content", "tool_calls")["content"] = text
                else:
                    messages.append({"role": item["role"], "content": text})
    if len(messages) > MAX_MESSAGES:
        raise InvalidParameterError(
            f"the conversation has {len(messages)} messages; it must have at most {MAX_MESSAGES}", param="input"
        )
    return messages


def _open_turn(messages: list[dict[str, Any]], *before: str) -> dict[str, Any]:
    """Return the assistant message for the next item: the last one, unless it has a member listed in ``before``."""
    if not messages or messages[-1]["role"] != "assistant" or any(key in messages[-1] for key in before):
        messages.append({"role": "assistant"})
    return messages[-1]


def _tool_call(item: JsonObject, name: str) -> JsonObject:
    arguments = arguments_of(item["input"]) if item["type"] == "custom_tool_call" else item["arguments"]
    return {"id": item["call_id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_message(item: JsonObject, called: Mapping[str, str]) -> dict[str, Any]:
    call_id, output = item["call_id"], item["output"]
    if call_id not in called:
        raise InvalidParameterError(
            f"No tool call found for function call output with call_id {call_id}.", param="input"
        )
    text = output if isinstance(output, str) else "\n".join(part["text"] for part in output)
    return {"role": "tool", "tool_call_id": call_id, "name": called[call_id], "content": text}


TABLE = table_of(ResponseBody, ChatBody)


def chat_body(body: ResponseBody, messages: Sequence[JsonObject]) -> ChatBody:
    """Convert a body to a chat request.

    Raises:
        InvalidParameterError: a parameter is invalid; the error names it.
    """
    if not messages:
        raise InvalidParameterError("input has no message; it must contain text, a message or a call", param="input")
    has_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not has_logprobs:
        raise InvalidParameterError(
            f'top_logprobs is given without include of "{LOGPROBS}"; give both or neither',
            param="top_logprobs",
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidParameterError(
            "stream_options is given without stream; set stream or leave it out", param="stream_options"
        )
    return TABLE.request(body, messages=messages)
