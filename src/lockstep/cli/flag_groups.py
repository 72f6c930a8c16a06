"""Flags in groups: a command takes a few of them instead of sixty parameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, TypeVar, get_type_hints

import typer

from lockstep.errors import UsageError

Answer = TypeVar("Answer")


def with_flags(command: Callable[..., Answer]) -> Callable[..., Answer]:
    """Make flags of every parameter that is a group of them; the command is called with the groups' values.

    A group is a dataclass, each of whose fields is an ``Annotated`` option with a default, as a parameter would be; or
    a class with a static method ``flags`` that gives such parameters, and takes their values by name. Flags stand where
    their group stands.
    """
    own = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {each.name: each.annotation for each in own if _is_group(each.annotation)}
    flags_of = {name: tuple(_flags(group)) for name, group in groups.items()}

    @wraps(command)
    def called(**values: Any) -> Answer:
        made = {
            name: group(**{flag.name: values.pop(flag.name) for flag in flags_of[name]})
            for name, group in groups.items()
        }
        return command(**values, **made)

    parameters = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in own
        for each in flags_of.get(parameter.name, (parameter,))
    ]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # both are what typer reads
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def refuse_others(context: typer.Context, used: Collection[str], why: str) -> None:
    """UsageError for an option or argument that was given and that this way of calling a command has no use for.

    Args:
        used: names of the parameters that it has a use for.
        why: ends the sentence that begins with the option.
    """
    for parameter in context.command.params:
        name = parameter.name
        source = None if name is None else context.get_parameter_source(name)
        if name not in used and source is not None and source.name == "COMMANDLINE":
            said = max(parameter.opts, key=len) if parameter.opts[0].startswith("-") else parameter.metavar or name
            raise UsageError(f"{said} {why}")


def field_docs(owner: type) -> Mapping[str, str]:
    """The sentences under each field of a dataclass, by field, as its source has them; none without a source."""
    module = inspect.getmodule(owner)
    try:
        source = "" if module is None else inspect.getsource(module)
    except OSError:
        return {}
    _, _, body = source.partition(f"\nclass {owner.__name__}")
    found = re.findall(r'^    (\w+): [^\n]+\n    """(.+?)"""', body, re.MULTILINE | re.DOTALL)
    docs = {name: " ".join(text.split()).replace("``", "") for name, text in reversed(found)}  # the first of each name
    return {field.name: docs[field.name] for field in fields(owner) if field.name in docs}


def _is_group(annotation: Any) -> bool:
    return is_dataclass(annotation) or hasattr(annotation, "flags")


def _flags(group: Any) -> Iterator[inspect.Parameter]:
    if hasattr(group, "flags"):
        yield from group.flags()
        return
    hints = get_type_hints(group, include_extras=True)
    for flag in fields(group):
        assert flag.default is not MISSING, f"{group.__name__}.{flag.name}: a flag has a default"
        yield inspect.Parameter(
            flag.name, inspect.Parameter.KEYWORD_ONLY, default=flag.default, annotation=hints[flag.name]
        )
