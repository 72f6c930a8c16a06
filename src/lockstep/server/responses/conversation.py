"""Items of the Responses API and the messages that chat templates read: pure.

Items are what is stored and shown; messages are what a model is given. A run of thoughts, text and tool calls of the
assistant is one message, however many items it has, so that a conversation reads the same whether it was continued by
id or sent as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lockstep.engine.chat_messages import MAX_MESSAGES
from lockstep.errors import InvalidParameterError
from lockstep.server.responses.schema import (
    Content,
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
)

JsonObject = Mapping[str, Any]
NewId = Callable[[str], str]
"""From a prefix to an id that nobody else has."""

REASONING_PREFIX, MESSAGE_PREFIX, CALL_PREFIX, CALL_OUTPUT_PREFIX = "rs", "msg", "fc", "fco"


def items_of(said: str | Sequence[Item], new_id: NewId) -> tuple[JsonObject, ...]:
    """A request's input as items with ids, in the shape in which they are listed.

    Raises:
        InvalidParameterError: a call's arguments are not a JSON object; `param` names the place.
    """
    if isinstance(said, str):
        said = (MessageItem(role="user", content=said),)
    return tuple(_item(item, f"input[{index}]", new_id) for index, item in enumerate(said))


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
                f"{where}.arguments is not a JSON object, written as text", param=f"{where}.arguments"
            )
        return {
            "id": item.id or new_id(CALL_PREFIX),
            "type": "function_call",
            "call_id": item.call_id,
            "name": item.name,
            "arguments": item.arguments,
            "status": item.status or "completed",
        }
    assert isinstance(item, FunctionCallOutputItem), "the schema knows no other kind"
    output = item.output
    return {
        "id": item.id or new_id(CALL_OUTPUT_PREFIX),
        "type": "function_call_output",
        "call_id": item.call_id,
        "output": output if isinstance(output, str) else [_part("input_text", part.text) for part in output],
        "status": item.status or "completed",
    }


def _texts(content: Content) -> list[str]:
    return [content] if isinstance(content, str) else [part.text for part in content]


def _part(kind: str, text: str) -> JsonObject:
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}


def _is_object(text: str) -> bool:
    """Whether text is a JSON object; none at all is one without members."""
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def messages_of(instructions: str | None, items: Iterable[JsonObject]) -> Sequence[JsonObject]:
    """The conversation as a chat template reads it.

    Args:
        items: of the whole conversation, as `items_of` and answers wrote them.

    Raises:
        InvalidParameterError: the items are no conversation: too many, or an output of a call that was not made.
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
            case "function_call":
                turn = _open_turn(messages)
                turn.setdefault("tool_calls", []).append(_tool_call(item))
                called[item["call_id"]] = item["name"]
            case "function_call_output":
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
    """The assistant's message that the next item belongs to: the last one, unless it has something that comes later."""
    if not messages or messages[-1]["role"] != "assistant" or any(key in messages[-1] for key in before):
        messages.append({"role": "assistant"})
    return messages[-1]


def _tool_call(item: JsonObject) -> JsonObject:
    return {
        "id": item["call_id"],
        "type": "function",
        "function": {"name": item["name"], "arguments": item["arguments"]},
    }


def _tool_message(item: JsonObject, called: Mapping[str, str]) -> dict[str, Any]:
    call_id, output = item["call_id"], item["output"]
    if call_id not in called:
        raise InvalidParameterError(
            f"No tool call found for function call output with call_id {call_id}.", param="input"
        )
    text = output if isinstance(output, str) else "\n".join(part["text"] for part in output)
    return {"role": "tool", "tool_call_id": call_id, "name": called[call_id], "content": text}
