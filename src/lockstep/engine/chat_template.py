"""Chat templates: Jinja in a sandbox, with what Hugging Face templates expect and nothing that could decide by itself.

Source of the expectations: "Chat templates" in the documentation of transformers. No clock and no randomness: a
template sees the date only when the caller passes one. What a template may cost is `template_budget`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep.engine.chat_messages import checked_messages
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
from lockstep.engine.template_reading import cut_words, literals, names
from lockstep.errors import ChatTemplateError, InvalidParameterError

if TYPE_CHECKING:
    from jinja2 import Environment
    from jinja2.nodes import Template

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
