"""Use of a request's functions by one model: what its template is shown, what its answer must be, how calls are read.

Where a template knows no tools, functions, calls and results become text, in the hermes format: the calls of a model
that was told of it are read like those of a model that was trained on it.
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
from lockstep.server.tools.template_tools import TemplateTools, template_tools_of

_HELLO = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One request's functions as its model is shown them, and as its answer is constrained and read."""

    call_format: CallFormat
    choice: CheckedChoice
    names: tuple[str, ...]
    """Of the functions that may be called; none: there are no calls, only content."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template."""
    system_text: str | None = None
    """Not None: the template depends on no tools, and this tells the model of them."""
    constraint: Constraint | None = None
    """What the answer must be."""
    shown_specials: tuple[str, ...] = ()
    """Special tokens that calls are written with."""
    warnings: tuple[str, ...] = ()
    """Parts of the functions' schemas that calls are not held to although they are constrained."""
    template_tools: TemplateTools = field(default_factory=TemplateTools)
    """How the template takes functions, past calls and results."""
    shown: Sequence[Mapping[str, Any]] = ()
    """The functions as the template shows them."""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Schemas of the arguments, by the names of the functions that may be called."""
    stop_ids: tuple[int, ...] = ()
    """Special tokens with which an answer that has calls ends."""
    takes_system: bool = True

    def messages(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The conversation for the template: with the functions, past calls and their results as text where it knows
        none, with ids that it takes where it is particular.

        Raises:
            InvalidParameterError: a message is not what it should be; ``param`` names it.
        """
        if self.knows_tools:
            messages = with_short_ids(messages) if self.call_format.has_short_ids else messages
            return self.template_tools.messages(messages, self.shown)
        rewritten = calls_as_text(messages)
        return (
            rewritten
            if self.system_text is None
            else with_system_text(rewritten, self.system_text, takes_system=self.takes_system)
        )

    def parser(self, new_id: Callable[[], str]) -> ToolParser:
        """A parser of one answer; ``new_id`` gives a call its id."""
        is_forced = self.choice.mode in (ChoiceMode.REQUIRED, ChoiceMode.NAMED)
        return ToolParser(self.call_format, self.names, new_id, self.schemas, is_forced=is_forced)

    @property
    def knows_tools(self) -> bool:
        """True if the template has a place for functions."""
        return self.template_tools.is_known

    @property
    def calls_end(self) -> bool:
        """True if an answer with a whole call ends with ``tool_calls`` in place of ``stop``.

        Not where the request named its function: OpenAI and vLLM say ``stop`` then, since the model chose nothing.
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
    """Plan one request.

    ``required``, a named function, a ``strict`` one and at most one call are promises, and kept by a constraint: what
    the answer holds of calls parses and obeys the schemas. Otherwise the model writes what it wants.

    Args:
        functions: none is as good as the choice ``none``.
        parallel: whether there may be several calls.
        told: what an answer without calls must be, if it must be JSON; a forced call needs none.
        template_kwargs: what else the template will be given, which may decide whether the prompt opens thoughts.

    Raises:
        InvalidParameterError: the functions or the choice are wrong, or the model's answers cannot be constrained.
        ChatTemplateError: the model has no template.
    """
    checked = checked_tools(functions)
    chosen = checked_choice(choice, checked)
    template = template_tools_of(tokenizer, template_kwargs)
    form = template.call_format
    if chosen.mode is ChoiceMode.NONE:
        return ToolUse(form, chosen, (), template_kwargs=template.template_kwargs(()), template_tools=template)
    callable_ = [tool for tool in checked if chosen.takes(tool.name)]
    shown = [tool.shown for tool in checked]
    bare_kwargs = {**(template_kwargs or {}), **template.template_kwargs(())}
    constraint, warnings = _constraint(tokenizer, form, chosen, callable_, parallel, bare_kwargs, json_constraint)
    return ToolUse(
        form,
        chosen,
        tuple(tool.name for tool in callable_),
        template_kwargs=template.template_kwargs(shown),
        system_text=None if template.is_known else tools_as_text(checked),
        constraint=constraint,
        warnings=warnings,
        shown_specials=tuple(text for text in form.markers if tokenizer.special_ids([text])),
        template_tools=template,
        shown=shown,
        schemas={tool.name: tool.parameters for tool in callable_},
        stop_ids=tuple(sorted(tokenizer.special_ids([form.stop]))),
        takes_system=template.is_known or takes_system_messages(tokenizer),
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
    """The constraint of an answer, and warnings of what the functions' schemas ask for beyond it."""
    may_talk = choice.mode is ChoiceMode.AUTO
    json_constraint = (
        json_constraint if tokenizer.takes_grammars else None
    )  # else a model that is given both may know how
    if may_talk and parallel and json_constraint is None and not any(tool.strict for tool in tools):
        return None, ()
    if not tokenizer.takes_grammars:
        raise InvalidParameterError(
            "this model's answers cannot be constrained, so that calls can be neither forced nor limited; "
            "use tool_choice auto, without strict functions and with parallel_tool_calls",
            param="tool_choice",
        )
    at_most = MAX_FORCED_CALLS if parallel and choice.mode is not ChoiceMode.NAMED else 1
    held = [replace(tool, parameters={}) if may_talk and not tool.strict else tool for tool in tools]
    enforced, warnings = enforced_tools(held)
    shape = AnswerShape(form, enforced, at_most, may_talk, json_constraint, _reasoning(tokenizer, template_kwargs))
    constraint = Constraint.lark(answer_grammar(shape, tokenizer.marker_id))
    try:
        constraint.validate()
    except InvalidParameterError as error:
        raise InvalidParameterError(f"the tools' schemas cannot be enforced: {error}", param="tools") from None
    return constraint, warnings


def _reasoning(tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None) -> Reasoning | None:
    """The thoughts that a model's answers begin with."""
    if tokenizer.chat_template is None or tags_of_template(tokenizer.chat_template) is None:
        return None
    return tokenizer.reasoning_after(tokenizer.encode_chat(_HELLO, template_kwargs=template_kwargs))


SHORT_ID_CHARS = 9
_PROBE = "Be brief."

Message = Mapping[str, Any]


def tools_as_text(tools: Sequence[CallableTool]) -> str:
    """Instructions for a model whose template depends on no tools."""
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
    rewritten: list[Message] = []
    for message in checked_messages(messages, supports_developer=True):
        calls = message.pop("tool_calls", None)
        if calls:
            assert isinstance(calls, list), "checked messages have lists of calls"
            message["content"] = "\n".join(
                [*([str(message["content"])] if message["content"] else []), *map(_call, calls)]
            )
        if message["role"] != "tool":
            rewritten.append(message)
            continue
        result = f"<tool_response>\n{message['content']}\n</tool_response>"
        if rewritten and rewritten[-1].get("tool_results"):
            rewritten[-1] = {**rewritten[-1], "content": f"{rewritten[-1]['content']}\n{result}"}
        else:
            rewritten.append({"role": "user", "content": result, "tool_results": True})
    return [{key: value for key, value in message.items() if key != "tool_results"} for message in rewritten]


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """The messages with ids of calls of nine letters and digits; equal ids stay equal."""
    checked = checked_messages(messages, supports_developer=True)
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
    """True if a template shows a system message, ahead of a user's."""
    probe = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "Hello"}]
    try:
        return _PROBE in tokenizer.render_chat(probe)
    except ChatTemplateError:
        return False


def _call(call: Any) -> str:
    function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
