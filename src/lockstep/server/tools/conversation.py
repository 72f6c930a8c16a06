"""The conversation as a model's template can take it: functions, calls and results as text where it knows none.

That text is the hermes format's, so that the calls of a model that was told of it are read like those of a model that
was trained on it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.engine.chat_messages import checked_messages
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import ChatTemplateError
from lockstep.server.tools.definitions import Tool

SHORT_ID_CHARS = 9
_PROBE = "Be brief."

Message = Mapping[str, Any]


def tools_as_text(tools: Sequence[Tool]) -> str:
    """What a model is told whose template knows no tools."""
    functions = "\n".join(json.dumps(tool.shown["function"], ensure_ascii=False) for tool in tools)
    return (
        "You may call functions. These are given, one a line, with the JSON schemas of their parameters:\n"
        f"{functions}\n"
        "To call one, answer with its name and arguments as JSON between tags, each call between tags of its own:\n"
        '<tool_call>\n{"name": "<name of the function>", "arguments": {<its arguments>}}\n</tool_call>\n'
        "What a call returned comes back between <tool_response> and </tool_response>."
    )


def with_system_text(messages: Sequence[Message], text: str, *, takes_system: bool) -> list[Message]:
    """The conversation with a text for the model ahead: in its first message if that is a system message, else in a
    system message of its own, or in the first message where the template takes no system messages."""
    first = messages[0]
    if first["role"] in ("system", "developer") or not takes_system:
        content = f"{first['content']}\n\n{text}" if takes_system else f"{text}\n\n{first['content']}"
        return [{**first, "content": content}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Past calls and their results in what the assistant and the user say. Results in a row are one message."""
    told: list[Message] = []
    for message in checked_messages(messages, knows_developer=True):
        calls = message.pop("tool_calls", None)
        if calls:
            assert isinstance(calls, list), "checked messages have lists of calls"
            message["content"] = "\n".join(
                [*([str(message["content"])] if message["content"] else []), *map(_call, calls)]
            )
        if message["role"] != "tool":
            told.append(message)
            continue
        result = f"<tool_response>\n{message['content']}\n</tool_response>"
        if told and told[-1].get("tool_results"):
            told[-1] = {**told[-1], "content": f"{told[-1]['content']}\n{result}"}
        else:
            told.append({"role": "user", "content": result, "tool_results": True})
    return [{key: value for key, value in message.items() if key != "tool_results"} for message in told]


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """The messages with ids of calls of nine letters and digits; equal ids stay equal."""
    checked = checked_messages(messages, knows_developer=True)
    for message in checked:
        if "tool_call_id" in message:
            message["tool_call_id"] = short_id(str(message["tool_call_id"]))
        calls: Any = message.get("tool_calls")
        if calls:
            message["tool_calls"] = [{**call, "id": short_id(str(call.get("id")))} for call in calls]
    return list(checked)


def short_id(call_id: str) -> str:
    """An id of nine letters and digits; one that is such already stays."""
    if len(call_id) == SHORT_ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:SHORT_ID_CHARS]


def takes_system_messages(tokenizer: Tokenizer) -> bool:
    """Whether a template shows a system message, ahead of a user's."""
    probe = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "Hello"}]
    try:
        return _PROBE in tokenizer.render_chat(probe)
    except ChatTemplateError:
        return False


def _call(call: Any) -> str:
    function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
