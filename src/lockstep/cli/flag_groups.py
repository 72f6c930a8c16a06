"""Flags as dataclasses: a command takes a few groups of them instead of sixty parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Make flags of the fields of every parameter that is a dataclass; the command is called with its values.

    Each field is an ``Annotated`` option with a default, as a parameter would be.
    """
    own = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {
        parameter.name: parameter.annotation for parameter in own if is_dataclass(parameter.annotation)
    }

    @wraps(command)
    def called(**values: Any) -> None:
        made = {name: group(**{f.name: values.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        command(**values, **made)

    plain = [parameter for parameter in own if parameter.name not in groups]
    flags = [flag for group in groups.values() for flag in _flags(group)]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*plain, *flags)]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # both are what typer reads
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _flags(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for flag in fields(group):
        assert flag.default is not MISSING, f"{group.__name__}.{flag.name}: a flag has a default"
        yield inspect.Parameter(
            flag.name, inspect.Parameter.KEYWORD_ONLY, default=flag.default, annotation=hints[flag.name]
        )
