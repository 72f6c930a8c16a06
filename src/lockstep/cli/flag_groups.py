"""Flags as dataclasses: a command takes a few groups of them instead of sixty parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, TypeVar, get_type_hints

import typer

from lockstep.errors import UsageError

Answer = TypeVar("Answer")


def with_flags(command: Callable[..., Answer]) -> Callable[..., Answer]:
    """Make flags of the fields of every parameter that is a dataclass; the command is called with its values.

    Each field is an ``Annotated`` option with a default, as a parameter would be; they stand where the group stands.
    """
    own = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {
        parameter.name: parameter.annotation for parameter in own if is_dataclass(parameter.annotation)
    }

    @wraps(command)
    def called(**values: Any) -> Answer:
        made = {name: group(**{f.name: values.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        return command(**values, **made)

    parameters = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in own
        for each in (_flags(groups[parameter.name]) if parameter.name in groups else (parameter,))
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


def _flags(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for flag in fields(group):
        assert flag.default is not MISSING, f"{group.__name__}.{flag.name}: a flag has a default"
        yield inspect.Parameter(
            flag.name, inspect.Parameter.KEYWORD_ONLY, default=flag.default, annotation=hints[flag.name]
        )
