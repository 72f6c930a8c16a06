"""Tool conventions of chat templates: pass functions, past calls and results to templates in the form that each
expects.

Sources: the chat templates of SmolLM3 (`xml_tools`, `python_tools`) and phi-4-mini (`tools` as text in the system
message), and those of Granite 3.3, LFM2, phi-4-mini and SmolLM3, which do not render calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from lockstep.engine.tokenizer import Tokenizer
from lockstep.server.tools.call_formats import (
    HERMES,
    SMOLLM3_CODE,
    CallFormat,
    CallKind,
    LiteralSyntax,
    format_of,
)

CheckedMessage = dict[str, object]
"""One message, as `lockstep.engine.chat_template.checked_messages` returns it."""
Shown = Mapping[str, Any]
"""One function, in the form of OpenAI's `tools`."""
_CODE = "python_tools"
_READS_MESSAGE_TOOLS = re.compile(r"""message(?:\[['"]tools['"]\]|\.tools\b)""")
_SYSTEM = "You are a helpful assistant with some tools."
"""Default system message if the functions are part of the system message; from phi-4-mini's model card."""

_WHOLE_MESSAGES = "{{ messages }}"
"""Part of a template that passes the conversation on, as that of a remote model does."""
_PYTHON_WORDS: Mapping[str, str] = {"true": "True", "false": "False", "null": "None"}


@dataclass(frozen=True, slots=True)
class TemplateTools:
    """Conventions of one request's template for tools."""

    call_format: CallFormat = HERMES
    variable: str = ""
    """The template variable that receives the functions."""
    is_in_message: bool = False
    """True if the system message has the functions, as text in a separate member."""
    writes_calls: bool = True
    """False: the template renders the content of an assistant message but not its calls."""
    passes_messages: bool = False
    """True: the messages go to another server, in the form of OpenAI's API in which they came."""

    @property
    def supports_tools(self) -> bool:
        """True if the template supports functions."""
        return bool(self.variable) or self.is_in_message

    def template_kwargs(self, tools: Sequence[Shown]) -> dict[str, Any]:
        """Template variables for the given functions; empty if there are none."""
        if self.variable == _CODE:  # replaces the request's own value
            return {_CODE: [tool["function"] for tool in tools]}
        if not tools or not self.variable:
            return {}
        return {self.variable: list(tools) if self.variable == "tools" else [tool["function"] for tool in tools]}

    def rewrites(self, roles: Set[object], tools: Sequence[Shown]) -> bool:
        """True if `rewritten` changes a conversation with these roles."""
        if self.passes_messages:
            return False
        names_results, moves_calls = "tool" in roles, "assistant" in roles and not self.writes_calls
        return names_results or moves_calls or (self.is_in_message and bool(tools))

    def rewritten(self, messages: list[CheckedMessage], tools: Sequence[Shown]) -> list[CheckedMessage]:
        """Return a checked conversation with function names in results. Calls become content if the template does not
        render them, and functions are added to the system message if the template expects them there."""
        messages = with_result_names(messages)
        if not self.writes_calls:
            messages = [with_calls_in_content(message, self.call_format) for message in messages]
        return with_tools_in_system(messages, tools) if self.is_in_message and tools else messages


def template_tools_of(tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None) -> TemplateTools:
    """Detect how a model's template receives functions.

    Args:
        template_kwargs: template variables of the request. ``python_tools: true`` requests calls as Python code from
            SmolLM3.

    Raises:
        ChatTemplateError: the template cannot be parsed.
    """
    variables, source = tokenizer.template_variables, tokenizer.chat_template or ""
    writes_calls = "tool_calls" in source
    if _CODE in variables and (template_kwargs or {}).get(_CODE) is True:
        return TemplateTools(SMOLLM3_CODE, _CODE, writes_calls=writes_calls)
    variable = next((name for name in ("tools", "xml_tools") if name in variables), "")
    is_in_message = not variable and _READS_MESSAGE_TOOLS.search(source) is not None
    form = format_of(source, bool(variable) or is_in_message)
    return TemplateTools(form, variable, is_in_message, writes_calls, _WHOLE_MESSAGES in source)


def with_result_names(messages: Sequence[CheckedMessage]) -> list[CheckedMessage]:
    """Return the messages with the function's name in each result as ``name``. Clients only send the call id."""
    names: dict[object, str] = {}
    named: list[CheckedMessage] = []
    for message in messages:
        calls: Any = message.get("tool_calls")
        names |= {call.get("id"): call["function"]["name"] for call in calls or ()}
        is_unnamed = message["role"] == "tool" and not message.get("name")
        name = names.get(message.get("tool_call_id")) if is_unnamed else None
        named.append(message if name is None else {**message, "name": name})
    return named


def with_calls_in_content(message: CheckedMessage, call_format: CallFormat) -> CheckedMessage:
    """Return a message with its calls as text, in the model's own format."""
    calls: Any = message.get("tool_calls")
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    if calls:
        functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        others["content"] = f"{message['content']}{calls_text(call_format, functions)}"
    return others


def with_tools_in_system(messages: Sequence[CheckedMessage], tools: Sequence[Shown]) -> list[CheckedMessage]:
    """Return the messages, starting with a system message that has the functions as JSON text."""
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    named: list[CheckedMessage] = [
        {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
    ]
    if named[0]["role"] != "system":
        named.insert(0, {"role": "system", "content": _SYSTEM})
    return [{**named[0], "tools": text}, *named[1:]]


def calls_text(call_format: CallFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Format calls as a model of the format writes them."""
    form = call_format
    texts = [_call(form, name, arguments) for name, arguments in calls]
    if form.each:
        return form.layout.join(f"{form.begin}{form.layout}{text}{form.layout}{form.close}" for text in texts)
    written = form.separator.join(texts)
    return f"{form.begin}{form.open}{form.layout}{written}{form.layout}{form.close}{form.end}"


def _call(form: CallFormat, name: str, arguments: Mapping[str, Any]) -> str:
    if form.kind is CallKind.NAMED:
        return f"{name}{form.arguments_marker}{_json(arguments)}"
    if form.kind is CallKind.TAGGED:
        values = {key: value if isinstance(value, str) else _json(value) for key, value in arguments.items()}
        pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        return f"<function={name}>\n{pairs}</function>"
    if form.syntax is None:
        return _json({"name": name, form.key: arguments})
    syntax = form.syntax
    written = syntax.separator.join(
        f"{key}{syntax.assign}{_literal(value, syntax)}" for key, value in arguments.items()
    )
    return f"{syntax.prefix}{name}{syntax.open}{written}{syntax.close}"


def _literal(value: object, syntax: LiteralSyntax) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{syntax.separator.join(_literal(item, syntax) for item in value)}]"
    if isinstance(value, Mapping):
        assign = ":" if syntax.has_bare_keys else ": "
        keys = {key: key if syntax.has_bare_keys else _json(key) for key in value}
        pairs = (f"{keys[key]}{assign}{_literal(item, syntax)}" for key, item in value.items())
        return f"{{{syntax.separator.join(pairs)}}}"
    if isinstance(value, str) and not syntax.has_escapes:
        return f"{syntax.quotes[0]}{value}{syntax.quotes[0]}"
    text = _json(value)
    return text if syntax.has_bare_keys else _PYTHON_WORDS.get(text, text)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
