"""Tool use of one request: determines what the template is shown, how the answer is constrained, how calls are parsed.

If a template does not support tools, functions, calls and results become text in the hermes format. A model that gets
these instructions writes calls in the same format as a model that was trained on it, so both are parsed alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.engine.chat_template import checked_messages
from lockstep.engine.output_rules import Reasoning, tags_of_template
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import ChatTemplateError, InvalidParameterError
from lockstep.executors.constraint import Constraint
from lockstep.server.tools.call_formats import CallFormat
from lockstep.server.tools.definitions import (
    CallableTool,
    CheckedChoice,
    ChoiceMode,
    Function,
    ToolChoice,
    checked_choice,
    checked_tools,
)
from lockstep.server.tools.enforcement import enforced_tools
from lockstep.server.tools.grammar import MAX_FORCED_CALLS, AnswerShape, answer_grammar
from lockstep.server.tools.parser import ToolParser
from lockstep.server.tools.template_tools import CheckedMessage, TemplateTools, template_tools_of

_HELLO = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions of a request as the template receives them, with the answer's constraint and parser settings."""

    call_format: CallFormat
    choice: CheckedChoice
    names: tuple[str, ...]
    """Names of the functions that can be called. Empty: there are no calls, only content."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template."""
    system_text: str | None = None
    """Instructions about the functions, if the template does not support tools; otherwise None."""
    constraint: Constraint | None = None
    """Constraint of the answer."""
    shown_specials: tuple[str, ...] = ()
    """Special tokens that are part of calls."""
    warnings: tuple[str, ...] = ()
    """Warnings about parts of the functions' schemas that are not enforced although calls are constrained."""
    template_tools: TemplateTools = field(default_factory=TemplateTools)
    """How the template receives functions, past calls and results."""
    shown: Sequence[Mapping[str, Any]] = ()
    """The functions in the form for the template."""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Schemas of the arguments, by name of the functions that can be called."""
    stop_ids: tuple[int, ...] = ()
    """Special tokens that end an answer with calls."""
    takes_system: bool = True

    def messages(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Prepare the conversation for the template. Functions, past calls and results become text if the template does
        not support tools. Call ids are shortened if the template requires it.

        Raises:
            InvalidParameterError: a message is invalid; ``param`` names it.
        """
        if not self._rewrites(messages):
            return messages
        checked = checked_messages(messages, supports_developer=True)
        if self.supports_tools:
            checked = [with_short_ids(message) for message in checked] if self.call_format.has_short_ids else checked
            return self.template_tools.rewritten(checked, self.shown)
        rewritten = calls_as_text(checked)
        return (
            rewritten
            if self.system_text is None
            else with_system_text(rewritten, self.system_text, takes_system=self.takes_system)
        )

    def _rewrites(self, messages: object) -> bool:
        """True if a conversation needs changes. The engine checks it in any case; only a conversation to be changed is
        checked before."""
        listed = messages if isinstance(messages, Sequence) else ()
        roles = {message.get("role") for message in listed if isinstance(message, Mapping)}
        if self.supports_tools:
            return self.call_format.has_short_ids or self.template_tools.rewrites(roles, self.shown)
        return self.system_text is not None or not roles.isdisjoint(("assistant", "tool"))

    def parser(self, new_id: Callable[[], str]) -> ToolParser:
        """Create a parser for one answer. ``new_id`` generates call ids."""
        is_forced = self.choice.mode in (ChoiceMode.REQUIRED, ChoiceMode.NAMED)
        return ToolParser(self.call_format, self.names, new_id, self.schemas, is_forced=is_forced)

    @property
    def supports_tools(self) -> bool:
        """True if the template supports tools."""
        return self.template_tools.supports_tools

    @property
    def calls_end(self) -> bool:
        """True if an answer with a complete call ends with ``tool_calls`` instead of ``stop``.

        False if the request named the function: OpenAI and vLLM return ``stop`` then, because the model had no choice.
        """
        return self.choice.mode is not ChoiceMode.NAMED


def resolve_tools(
    tokenizer: Tokenizer,
    functions: Sequence[Function],
    choice: ToolChoice | None,
    parallel: bool,
    template_kwargs: Mapping[str, Any] | None = None,
    json_constraint: Constraint | None = None,
) -> ToolUse:
    """Prepare the tools of one request.

    ``required``, a named function, a ``strict`` function and a limit of one call are guarantees and enforced by a
    constraint: all calls in the answer can be parsed and obey the schemas. Otherwise the model's output is not
    constrained.

    Args:
        functions: without any, the result is the same as for the choice ``none``.
        parallel: whether the answer can have several calls.
        template_kwargs: other template variables. They may determine whether the prompt opens reasoning.
        json_constraint: constraint of an answer without calls, if it must be JSON. Not used for forced calls.

    Raises:
        InvalidParameterError: the functions or the choice are invalid, or the model's answers cannot be constrained.
        ChatTemplateError: the model has no template.
    """
    checked = checked_tools(functions)
    chosen = checked_choice(choice, checked)
    template = template_tools_of(tokenizer, template_kwargs)
    form = template.call_format
    if chosen.mode is ChoiceMode.NONE:
        return ToolUse(form, chosen, (), template_kwargs=template.template_kwargs(()), template_tools=template)
    callable_ = [tool for tool in checked if chosen.allows(tool.name)]
    shown = [tool.shown for tool in checked]
    bare_kwargs = {**(template_kwargs or {}), **template.template_kwargs(())}
    constraint, warnings = _constraint(tokenizer, form, chosen, callable_, parallel, bare_kwargs, json_constraint)
    return ToolUse(
        form,
        chosen,
        tuple(tool.name for tool in callable_),
        template_kwargs=template.template_kwargs(shown),
        system_text=None if template.supports_tools else tools_as_text(checked),
        constraint=constraint,
        warnings=warnings,
        shown_specials=tuple(text for text in form.markers if tokenizer.special_ids([text])),
        template_tools=template,
        shown=shown,
        schemas={tool.name: tool.parameters for tool in callable_},
        stop_ids=tuple(sorted(tokenizer.special_ids([form.stop]))),
        takes_system=template.supports_tools or takes_system_messages(tokenizer),
    )


def _constraint(
    tokenizer: Tokenizer,
    form: CallFormat,
    choice: CheckedChoice,
    tools: Sequence[CallableTool],
    parallel: bool,
    template_kwargs: Mapping[str, Any] | None,
    json_constraint: Constraint | None,
) -> tuple[Constraint | None, tuple[str, ...]]:
    """Return the constraint of an answer, and warnings about the parts of the schemas that it does not enforce."""
    allows_text = choice.mode is ChoiceMode.AUTO
    # A remote server receives the tools and the JSON constraint separately and may support the combination.
    json_constraint = json_constraint if tokenizer.takes_grammars else None
    if allows_text and parallel and json_constraint is None and not any(tool.strict for tool in tools):
        return None, ()
    if not tokenizer.takes_grammars:
        raise InvalidParameterError(
            "this model's answers cannot be constrained, so calls can be neither forced nor limited; "
            "use tool_choice auto, without strict functions and with parallel_tool_calls",
            param="tool_choice",
        )
    at_most = MAX_FORCED_CALLS if parallel and choice.mode is not ChoiceMode.NAMED else 1
    held = [replace(tool, parameters={}) if allows_text and not tool.strict else tool for tool in tools]
    enforced, warnings = enforced_tools(held)
    shape = AnswerShape(form, enforced, at_most, allows_text, json_constraint, _reasoning(tokenizer, template_kwargs))
    constraint = Constraint.lark(answer_grammar(shape, tokenizer.marker_id))
    try:
        constraint.validate()
    except InvalidParameterError as error:
        raise InvalidParameterError(f"the tools' schemas cannot be enforced: {error}", param="tools") from None
    return constraint, warnings


def _reasoning(tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None) -> Reasoning | None:
    """Reasoning that a model's answers start with."""
    if tokenizer.chat_template is None or tags_of_template(tokenizer.chat_template) is None:
        return None
    return tokenizer.reasoning_after(tokenizer.encode_chat(_HELLO, template_kwargs=template_kwargs))


SHORT_ID_CHARS = 9
_PROBE = "Be brief."

Message = Mapping[str, Any]


def tools_as_text(tools: Sequence[CallableTool]) -> str:
    """Instructions for a model whose template does not support tools."""
    functions = "\n".join(json.dumps(tool.shown["function"], ensure_ascii=False) for tool in tools)
    return (
        "You may call functions. These are given, one a line, with the JSON schemas of their parameters:\n"
        f"{functions}\n"
        "To call one, answer with its name and arguments as JSON between tags, each call between tags of its own:\n"
        '<tool_call>\n{"name": "<name of the function>", "arguments": {<its arguments>}}\n</tool_call>\n'
        "What a call returned comes back between <tool_response> and </tool_response>."
    )


def with_system_text(messages: Sequence[Message], text: str, *, takes_system: bool) -> list[Message]:
    """Prepend instructions to the conversation: in its system message, in a new one, or in the first message if the
    template does not support system messages."""
    first = messages[0]
    if first["role"] in ("system", "developer") or not takes_system:
        content = f"{first['content']}\n\n{text}" if takes_system else f"{text}\n\n{first['content']}"
        return [{**first, "content": content}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def calls_as_text(messages: Sequence[CheckedMessage]) -> list[Message]:
    """Convert past calls and results to text of assistant and user messages. Consecutive results become one message."""
    rewritten: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if rewritten and rewritten[-1].get("tool_results"):
                rewritten[-1] = {**rewritten[-1], "content": f"{rewritten[-1]['content']}\n{result}"}
            else:
                rewritten.append({"role": "user", "content": result, "tool_results": True})
            continue
        calls: Any = message.get("tool_calls")
        others = {key: value for key, value in message.items() if key != "tool_calls"}
        if calls:
            said = [str(message["content"])] if message["content"] else []
            others["content"] = "\n".join([*said, *map(_call, calls)])
        rewritten.append(others)
    return [{key: value for key, value in message.items() if key != "tool_results"} for message in rewritten]


def with_short_ids(message: CheckedMessage) -> CheckedMessage:
    """Return a message with call ids of nine letters and digits. Equal ids stay equal."""
    changed: CheckedMessage = {}
    if "tool_call_id" in message:
        changed["tool_call_id"] = short_id(str(message["tool_call_id"]))
    calls: Any = message.get("tool_calls")
    if calls:
        changed["tool_calls"] = [{**call, "id": short_id(str(call.get("id")))} for call in calls]
    return {**message, **changed}


def short_id(call_id: str) -> str:
    """Convert an id to nine letters and digits. An id of this form is unchanged."""
    if len(call_id) == SHORT_ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:SHORT_ID_CHARS]


def takes_system_messages(tokenizer: Tokenizer) -> bool:
    """True if the template renders a system message before a user message."""
    probe = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "Hello"}]
    try:
        return _PROBE in tokenizer.render_chat(probe)
    except ChatTemplateError:
        return False


def _call(call: Any) -> str:
    function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
