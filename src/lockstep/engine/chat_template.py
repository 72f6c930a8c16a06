"""Chat templates: Jinja in a sandbox, with what Hugging Face templates expect and nothing that could decide by itself.

Source of the expectations: "Chat templates" in the documentation of transformers. No clock and no randomness: a
template sees the date only when the caller passes one. What a template may cost is `template_budget`'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep.engine.request import ROLES, checked_messages
from lockstep.engine.template_budget import (
    MAX_RENDERED_CHARS,
    MAX_SOURCE_CHARS,
    Budget,
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


class ChatTemplate:
    """One compiled template.

    Raises:
        ChatTemplateError: the source is not Jinja, or too long.
    """

    def __init__(self, source: str, bos_token: str | None, eos_token: str | None) -> None:
        from jinja2 import TemplateSyntaxError

        self.source = source
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._knows_developer = "developer" in source
        self._budget = Budget()
        self._environment = _environment(self._budget)
        if len(source) > MAX_SOURCE_CHARS:
            raise ChatTemplateError(
                f"the chat template has {len(source)} characters; at most {MAX_SOURCE_CHARS} are read"
            )
        try:
            with self._budget:
                self._template = self._environment.from_string(add_gates(self._environment.parse(source)))
            self._template.globals = dict(self._template.globals)  # each rendering copies them; a chain, slowly
        except (TemplateSyntaxError, RecursionError, TooMuchWork) as error:
            line = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
            raise ChatTemplateError(f"the model's chat template cannot be read: {error}{line}") from None

    @cached_property
    def cut_words(self) -> frozenset[str]:
        """Strings that the template looks for in values."""
        return cut_words(self._tree())

    @cached_property
    def literals(self) -> frozenset[str]:
        """Every piece of text that the template itself holds."""
        return literals(self._tree())

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template looks up, its own included."""
        return names(self._tree())

    def _tree(self) -> Template:
        return self._environment.parse(self.source)

    def context(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, object] | None,
    ) -> dict[str, object]:
        """The checked variables of one rendering; InvalidParameterError names what is wrong."""
        for name in template_kwargs or ():
            if name in RESERVED or not name.isidentifier():
                raise InvalidParameterError(
                    f"chat_template_kwargs cannot set {name!r}; names of its own that the template reads are right",
                    param="chat_template_kwargs",
                )
        return {
            **(template_kwargs or {}),
            "messages": checked_messages(messages, knows_developer=self._knows_developer),
            "add_generation_prompt": add_generation_prompt,
        }

    def render(self, context: Mapping[str, object], now: datetime | None) -> str:
        """The template's text.

        Raises:
            ChatTemplateError: the template refused the messages, failed, or wrote more than MAX_RENDERED_CHARS.
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
                f"the chat template was stopped: {error or 'out of memory'}; give another with --chat-template FILE"
            ) from None
        except _Refusal as refusal:
            raise ChatTemplateError(f"the chat template refused the messages: {refusal}", param="messages") from None
        except Exception as error:
            # Whatever a foreign template does wrong is this request's failure only.
            raise ChatTemplateError(
                f"the chat template failed on these messages: {type(error).__name__}: {error}", param="messages"
            ) from error
        if room < 0:
            raise ChatTemplateError(f"the chat template wrote more than {MAX_RENDERED_CHARS} characters")
        return "".join(pieces)


class _Refusal(Exception):  # noqa: N818 - raised by the template itself: a message, not an error of ours
    """What a template says with `raise_exception`."""


def _refuse(message: object) -> NoReturn:
    raise _Refusal(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a model to read: Jinja's own filter would escape what HTML reserves."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment(budget: Budget) -> Environment:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what a model wrote, for training; here it only stands around its body."""

        tags = {"generation"}  # noqa: RUF012 - the attribute's type is Jinja's

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Bounded(ImmutableSandboxedEnvironment):
        """The sandbox, with a budget of work."""

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
                return obj[attribute]  # as the sandbox would, once it had failed to find an attribute
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


_CUTTING_METHODS = frozenset(
    [
        "endswith",
        "find",
        "index",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rpartition",
        "rsplit",
        "split",
        "startswith",
    ]
)


def cut_words(tree: Template) -> frozenset[str]:
    """Strings that the template looks for in values, as in ``content.split('</think>')`` or ``'x' in content``."""
    from jinja2 import nodes

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


def names(tree: Template) -> frozenset[str]:
    """Names that the template looks up, its own included."""
    from jinja2 import nodes

    return frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")


def literals(tree: Template) -> frozenset[str]:
    """Every piece of text that the template itself holds.

    Where the role of a message stands between pieces, as in ``'<|' + message.role + '|>'``, the whole is a piece for
    each role that a message can have: no caller has a hand in it.
    """
    from jinja2 import nodes

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
                texts |= {"".join(role if part in roles else _text(part) or "" for part in run) for role in ROLES}
    alone = [_text(part) for part in tree.find_all((nodes.TemplateData, nodes.Const)) if part not in joined]
    return frozenset(texts.union(text for text in alone if text is not None))


def _parts(node: Node, seen: set[Node]) -> Iterator[Node]:
    """What is written one behind the other; ``seen`` is told of sums and the like that were taken apart for it."""
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
    """What of some parts stands together and is the template's own."""
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
    """Every ``message.role`` and ``message['role']`` within a loop over ``messages`` that alone gives the name."""
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
        assert isinstance(node, nodes.Getitem), "there are two ways to write it"
        is_role = isinstance(node.arg, nodes.Const) and node.arg.value == "role"
    return is_role and isinstance(node.node, nodes.Name) and node.node.name == name
