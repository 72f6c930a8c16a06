"""Chat templates: renders Hugging Face chat templates in a Jinja sandbox.

The features follow "Chat templates" in the documentation of transformers. Templates have no access to a clock or to
random numbers: a template gets the date only when the caller passes one. `template_budget` limits the work that a
template may do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep.engine.template_budget import (
    MAX_RENDERED_CHARS,
    MAX_SOURCE_CHARS,
    RenderBudget,
    TooMuchWork,
    add_gates,
    check_format,
    check_operation,
    checked_arguments,
    limit_environment,
)
from lockstep.errors import ChatTemplateError, InvalidParameterError

if TYPE_CHECKING:
    from jinja2 import Environment
    from jinja2.nodes import Node, Template


RESERVED = ("messages", "add_generation_prompt", "bos_token", "eos_token", "raise_exception", "strftime_now")

_OF_EVERY_DICT = frozenset(dir(dict))
ROLES = ("system", "developer", "user", "assistant", "tool")
PAIR_ROLES = ("query", "document")
"""Roles of the two texts in the template of a reranker."""
MAX_MESSAGES = 16_384
MAX_CONTENT_PARTS = 4_096
_CUTTING_METHODS = frozenset((
    "endswith", "find", "index", "partition", "removeprefix", "removesuffix", "replace", "rpartition", "rsplit",
    "split", "startswith",
))  # fmt: skip
"""String methods that search a string for their argument."""
_SYSTEM = {"role": "system", "content": "Answer briefly."}
_USER = {"role": "user", "content": "Hello"}
_TURN = (_USER, {"role": "assistant", "content": "Hello."}, _USER)
_TRIED_MESSAGES: Sequence[Sequence[Mapping[str, object]]] = ((_USER,), (_SYSTEM, _USER), _TURN, (_SYSTEM, *_TURN))
"""Conversations that `ChatTemplate.check` tries, since some templates require a system message or an earlier answer."""
_TRIED_PAIR = tuple({"role": role, "content": "Hello"} for role in PAIR_ROLES)
_TRIED_TOOL = {
    "type": "function",
    "function": {
        "name": "now",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    },
}
_TRIED_DOCUMENT = {"title": "A title", "text": "A text."}


class ChatTemplate:
    """One compiled template.

    Raises:
        ChatTemplateError: the source is not valid Jinja, or is too long.
    """

    def __init__(self, source: str, bos_token: str | None, eos_token: str | None) -> None:
        from jinja2 import TemplateSyntaxError

        self.source = source
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._supports_developer = "developer" in source
        self.takes_pairs = all(f"'{role}'" in source or f'"{role}"' in source for role in PAIR_ROLES)
        """True if the template writes a query and a document, each in a message with its own role."""
        self._roles = (*ROLES, *PAIR_ROLES) if self.takes_pairs else ROLES
        self._budget = RenderBudget()
        self._environment = _environment(self._budget)
        if len(source) > MAX_SOURCE_CHARS:
            raise ChatTemplateError(f"the chat template has {len(source)} characters; the limit is {MAX_SOURCE_CHARS}")
        try:
            with self._budget:
                self._template = self._environment.from_string(add_gates(self._environment.parse(source)))
            self._template.globals = dict(self._template.globals)  # each rendering copies them: a ChainMap is slow
        except (TemplateSyntaxError, RecursionError, TooMuchWork) as error:
            line = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
            raise ChatTemplateError(f"the model's chat template cannot be read: {error}{line}") from None

    @cached_property
    def cut_words(self) -> frozenset[str]:
        """Strings that the template looks for in values, as in ``content.split('</think>')`` or ``'x' in content``."""
        from jinja2 import nodes

        tree = self._tree()
        words: set[object] = set()
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Getattr) and call.node.attr in _CUTTING_METHODS:
                words |= {arg.value for arg in call.args if isinstance(arg, nodes.Const)}
        for filtered in tree.find_all(nodes.Filter):
            words |= {arg.value for arg in filtered.args if isinstance(arg, nodes.Const)}
        for compare in tree.find_all(nodes.Compare):
            if isinstance(compare.expr, nodes.Const) and any(op.op in ("in", "notin") for op in compare.ops):
                words.add(compare.expr.value)
        return frozenset(word for word in words if isinstance(word, str))

    @cached_property
    def literals(self) -> frozenset[str]:
        """All text that the template itself contains.

        If a message's role stands between pieces of text, as in ``'<|' + message.role + '|>'``, the result has the
        joined text for each possible role. Callers cannot influence this text.
        """
        from jinja2 import nodes

        tree = self._tree()
        roles = _roles(tree)
        texts: set[str] = set()
        joined: set[Node] = set()
        for written in tree.find_all((nodes.Output, nodes.Add, nodes.Concat)):
            if written in joined:
                continue
            parts = list(_parts(written, joined))
            for run in _runs(parts, roles):
                if not roles.isdisjoint(run):
                    joined.update(run)
                    texts |= {
                        "".join(role if part in roles else _text(part) or "" for part in run) for role in self._roles
                    }
        alone = [_text(part) for part in tree.find_all((nodes.TemplateData, nodes.Const)) if part not in joined]
        return frozenset(texts.union(text for text in alone if text is not None))

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads, including its own variables."""
        from jinja2 import nodes

        return frozenset(name.name for name in self._tree().find_all(nodes.Name) if name.ctx == "load")

    @cached_property
    def none_variables(self) -> Mapping[str, None]:
        """Variables that are None when a request does not set them, as in transformers: those that the template
        compares with None. Other variables stay undefined, since templates also test whether a variable is defined."""
        from jinja2 import nodes

        tested = [test.node for test in self._tree().find_all(nodes.Test) if test.name == "none"]
        names = {node.name for node in tested if isinstance(node, nodes.Name)}
        return {name: None for name in ("tools", "documents") if name in names}

    def _tree(self) -> Template:
        return self._environment.parse(self.source)

    def check(self) -> None:
        """Render the conversations of `_TRIED_MESSAGES`: without variables, with tools and documents, and with the
        template's own variables set. One success is enough.

        Raises:
            ChatTemplateError: all of them fail. The message states the reason for a single user message.
        """
        reason = ""
        for variables in self._tried_variables():
            for messages in (*_TRIED_MESSAGES, _TRIED_PAIR) if self.takes_pairs else _TRIED_MESSAGES:
                try:
                    self.render(self.context(messages, True, variables), None)
                except ChatTemplateError as error:
                    if error.param is None:  # it exceeded the budget, and the next one would too
                        raise
                    reason = reason or str(error)
                else:
                    return
        raise ChatTemplateError(f"no conversation can be rendered: with a single user message, {reason}")

    def _tried_variables(self) -> Iterator[dict[str, object]]:
        """Sets of variables for `check`: none; tools and documents; all that ``chat_template_kwargs`` may set as
        well."""
        from jinja2.meta import find_undeclared_variables

        yield {}
        tools: dict[str, object] = {"tools": [_TRIED_TOOL], "documents": [_TRIED_DOCUMENT]}
        yield tools
        names = find_undeclared_variables(self._tree()) - set(RESERVED) - self._environment.globals.keys()
        yield dict.fromkeys(sorted(names), True) | tools

    def context(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, object] | None,
    ) -> dict[str, object]:
        """Check the input and return the variables of one rendering.

        Raises:
            InvalidParameterError: `param` names the invalid field.
        """
        for name in template_kwargs or ():
            if name in RESERVED or not name.isidentifier():
                raise InvalidParameterError(
                    f"chat_template_kwargs cannot set {name!r}; only the template's own variables can be set",
                    param="chat_template_kwargs",
                )
        return {
            **self.none_variables,
            **(template_kwargs or {}),
            "messages": checked_messages(messages, supports_developer=self._supports_developer, roles=self._roles),
            "add_generation_prompt": add_generation_prompt,
        }

    def render(self, context: Mapping[str, object], now: datetime | None) -> str:
        """Render the template and return the text.

        Raises:
            ChatTemplateError: the template rejected the messages, failed, or produced more than MAX_RENDERED_CHARS.
        """
        variables = {**context, **self._tokens}
        if now is not None:
            variables["strftime_now"] = now.strftime
        pieces: list[str] = []
        room = MAX_RENDERED_CHARS
        try:
            with self._budget:
                for piece in self._template.generate(variables):
                    room -= len(piece)
                    if room < 0:
                        break
                    pieces.append(piece)
        except (TooMuchWork, MemoryError) as error:
            raise ChatTemplateError(
                f"the chat template was stopped: {error or 'out of memory'}; use --chat-template FILE to replace it"
            ) from None
        except _Refusal as refusal:
            raise ChatTemplateError(f"the chat template rejected the messages: {refusal}", param="messages") from None
        except Exception as error:
            # A fault in a third-party template fails only this request.
            raise ChatTemplateError(
                f"the chat template failed on these messages: {type(error).__name__}: {error}", param="messages"
            ) from error
        if room < 0:
            raise ChatTemplateError(f"the chat template produced more than {MAX_RENDERED_CHARS} characters")
        return "".join(pieces)


def checked_messages(
    messages: object, *, supports_developer: bool, roles: Sequence[str] = ROLES
) -> list[dict[str, object]]:
    """Copy the messages into the form that templates expect.

    Content becomes one string. Text parts are joined with newlines, as in vLLM, and missing content becomes an empty
    string. Arguments of tool calls become objects. The role `developer` becomes `system` unless the template reads it.

    Raises:
        InvalidParameterError: `param` is the path of the invalid field, e.g. ``messages[2].content``.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, (list, Sequence)):
        raise InvalidParameterError.of("messages", messages, "a list of messages")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidParameterError(
            f"messages has {len(messages)} entries; it must have 1..{MAX_MESSAGES}", param="messages"
        )
    return [
        _checked(message, f"messages[{index}]", supports_developer, roles) for index, message in enumerate(messages)
    ]


def _checked(message: object, where: str, supports_developer: bool, roles: Sequence[str]) -> dict[str, object]:
    if not isinstance(message, (dict, Mapping)):
        raise InvalidParameterError.of(where, message, "an object with role and content")
    role = message.get("role")
    if role not in roles:
        raise InvalidParameterError.of(f"{where}.role", role, f"one of {', '.join(roles)}")
    checked: dict[str, object] = {str(key): value for key, value in message.items()}
    checked["role"] = "system" if role == "developer" and not supports_developer else role
    calls = message.get("tool_calls")
    if calls is not None:
        checked["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    may_be_absent = role == "assistant" and (bool(calls) or bool(message.get("reasoning_content")))
    checked["content"] = _content(message.get("content"), f"{where}.content", may_be_absent)
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str) and not (calls and checked["content"]):
        # Templates of LFM2.5 and gpt-oss call it so; the latter's reject it beside both content and calls.
        checked.setdefault("thinking", reasoning)
    return checked


def _content(content: object, where: str, may_be_absent: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_absent:
        return ""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidParameterError.of(where, content, "a string or a list of text parts")
    if len(content) > MAX_CONTENT_PARTS:
        raise InvalidParameterError(
            f"{where} has {len(content)} parts; it must have at most {MAX_CONTENT_PARTS}", param=where
        )
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(text := part.get("text"), str):
        return text
    raise InvalidParameterError.of(
        where, part, 'a text part, {"type": "text", "text": "..."}; other types are not supported'
    )


def _tool_calls(calls: object, where: str) -> list[object]:
    if isinstance(calls, (str, bytes)) or not isinstance(calls, Sequence):
        raise InvalidParameterError.of(where, calls, "a list of tool calls")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> dict[str, object]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidParameterError.of(where, call, "an object with function.name and function.arguments")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):  # not JSON, or nested too deeply for the parser
            arguments = None
    if not isinstance(arguments, Mapping):
        raise InvalidParameterError.of(f"{where}.function.arguments", function.get("arguments"), "a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}


class _Refusal(Exception):  # noqa: N818 - raised by the template itself: its message is the template's
    """The template rejected the messages with `raise_exception`."""


def _refuse(message: object) -> NoReturn:
    raise _Refusal(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON for a model. Jinja's own filter would also escape the characters that HTML reserves."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment(budget: RenderBudget) -> Environment:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks the model's text for training. Here its body is rendered without change."""

        tags = {"generation"}  # noqa: RUF012 - the attribute's type is Jinja's

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Bounded(ImmutableSandboxedEnvironment):
        """The sandbox with a work budget."""

        intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            check_operation(operator, left, right, budget)
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - Jinja's
            return super().call(__context, __obj, *checked_arguments(__obj, args, kwargs, budget), **kwargs)

        def wrap_str_format(self, value: Any) -> Any:
            wrapped = super().wrap_str_format(value)
            if wrapped is None:
                return None

            def checked(*args: Any, **kwargs: Any) -> str:
                check_format(value.__self__, args, kwargs)
                return wrapped(*args, **kwargs)

            return checked

        def getattr(self, obj: Any, attribute: str) -> Any:
            if type(obj) is dict and attribute in obj and attribute not in _OF_EVERY_DICT:
                return obj[attribute]  # what the sandbox returns after a failed attribute lookup
            return super().getattr(obj, attribute)

        def getitem(self, obj: Any, argument: Any) -> Any:
            if type(argument) not in (int, str):
                budget.charge(argument, obj if isinstance(argument, slice) else None)
            return super().getitem(obj, argument)

    environment = Bounded(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation], finalize=budget.materialise
    )
    environment.filters["tojson"] = _tojson
    limit_environment(environment, budget)
    environment.globals["raise_exception"] = _refuse
    return environment


def _parts(node: Node, seen: set[Node]) -> Iterator[Node]:
    """Yield the nodes that are written one after the other. Sums and concatenations that were split are added to
    ``seen``."""
    from jinja2 import nodes

    if isinstance(node, nodes.Add):
        seen.add(node)
        yield from _parts(node.left, seen)
        yield from _parts(node.right, seen)
    elif isinstance(node, (nodes.Output, nodes.Concat)):
        seen.add(node)
        for child in node.nodes:
            yield from _parts(child, seen)
    else:
        yield node


def _runs(parts: Sequence[Node], roles: Set[Node]) -> Iterator[list[Node]]:
    """Yield runs of adjacent parts that are text of the template or a role."""
    run: list[Node] = []
    for part in parts:
        if part in roles or _text(part) is not None:
            run.append(part)
        else:
            yield run
            run = []
    yield run


def _text(node: Node) -> str | None:
    from jinja2 import nodes

    if isinstance(node, nodes.TemplateData):
        return node.data
    return node.value if isinstance(node, nodes.Const) and isinstance(node.value, str) else None


def _roles(tree: Template) -> Set[Node]:
    """Every ``message.role`` and ``message['role']`` in a loop over ``messages``, if no other statement binds the
    loop's name."""
    from jinja2 import nodes

    bound = [name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"]
    loops = [
        (loop, loop.target.name)
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.iter, nodes.Name) and loop.iter.name == "messages" and isinstance(loop.target, nodes.Name)
    ]
    names_of_loops = [name for _, name in loops]
    return {
        node
        for loop, name in loops
        if "messages" not in bound and not loop.recursive and bound.count(name) == names_of_loops.count(name)
        for statement in loop.body
        for node in statement.find_all((nodes.Getattr, nodes.Getitem))
        if _is_role_of(name, node)
    }


def _is_role_of(name: str, node: Node) -> bool:
    from jinja2 import nodes

    if isinstance(node, nodes.Getattr):
        is_role = node.attr == "role"
    else:
        assert isinstance(node, nodes.Getitem), "a role is read as an attribute or as an item"
        is_role = isinstance(node.arg, nodes.Const) and node.arg.value == "role"
    return is_role and isinstance(node.node, nodes.Name) and node.node.name == name
