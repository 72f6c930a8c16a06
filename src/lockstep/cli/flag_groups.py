"""Flags as fields of dataclasses: a command takes a few values instead of sixty parameters.

A flag takes its type, its default and its help from its field. The help is the first paragraph under the field. If it
ends in ``; None: X.``, the help shows X as the default; X is a text or the name of another field.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from types import UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from typer.models import ParameterInfo

from lockstep.errors import UsageError
from lockstep.option_fields import MOST, field_docs, type_of

ENVIRONMENT_PREFIX = "LOCKSTEP"
"""Prefix of the environment variables of `lockstep serve`: ``LOCKSTEP_MAX_MODEL_LEN`` sets ``--max-model-len``."""
Answer = TypeVar("Answer")
Options = TypeVar("Options")


def with_flags(command: Callable[..., Answer]) -> Callable[..., Answer]:
    """Replace each parameter that is a group of flags by its flags; the command is called with the groups' values.

    A group is annotated as a dataclass whose fields are flags with defaults, or groups; or as
    ``Annotated[Options, OptionFlags(...)]``. Flags take the position of their group. A verb has one group.
    """
    own = inspect.signature(command, eval_str=True).parameters.values()
    groups = {each.name: group for each in own if (group := _group_of(each.annotation)) is not None}
    flags_of = {name: tuple(group.parameters()) for name, group in groups.items()}

    @wraps(command)
    def called(**values: Any) -> Answer:
        made = {
            name: group.value(**{flag.name: values.pop(flag.name) for flag in flags_of[name]})
            for name, group in groups.items()
        }
        return command(**values, **made)

    parameters = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in own
        for each in flags_of.get(parameter.name, (parameter,))
    ]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads both attributes
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


@dataclass(frozen=True, slots=True)
class Flag:
    """Settings of a flag that its field's name, type, default and docstring do not give.

    In a group it is part of the field's annotation, ``Annotated[int, Flag(metavar="N"), Range(1)]``. The annotation may
    instead contain typer's own description of a parameter.
    """

    name: str = ""
    """Name of the parameter; empty: the field's name."""
    also: tuple[str, ...] = ()
    """Further names of the flag, without dashes."""
    shown: str = ""
    """Default in words, if the field's docstring does not give it."""
    metavar: str | None = None
    """Name of the value in the help; None: the type's name."""
    is_switch: bool = False
    """True for a switch without a ``--no-`` form."""
    is_hidden: bool = False
    """True if the help leaves the flag out because few users need it. docs/native.md describes such flags."""
    call: Callable[..., Any] | None = None
    """Function that converts the given value; None: no conversion."""


SWITCH = Flag(is_switch=True)


class OptionFlags(Generic[Options]):
    """Flags for fields of a dataclass of a lower layer.

    Args:
        owner: the dataclass.
        flags: flags by field, in the order of the help. Other fields keep their defaults.
    """

    def __init__(self, owner: type[Options], flags: Mapping[str, Flag]) -> None:
        self._owner = owner
        self._flags = flags

    def parameters(self) -> Iterator[inspect.Parameter]:
        """The flags as parameters of a command."""
        assert is_dataclass(self._owner)
        hints, docs = get_type_hints(self._owner, include_extras=True), field_docs(self._owner)
        defaults = {field.name: field.default for field in fields(self._owner)}
        for field, flag in self._flags.items():
            name = flag.name or field
            yield _parameter(name, hints[field], defaults[field], docs[field], flag, has_variables=True)

    def value(self, **given: Any) -> Options:
        """The options with the given values, which are named by parameter."""
        return self._owner(**{field: given[flag.name or field] for field, flag in self._flags.items()})


def _parameter(
    name: str, hint: Any, default: Any, doc: str, flag: Flag, *, has_variables: bool = False
) -> inspect.Parameter:
    words, _, instead = doc.partition("; None: ")
    instead = instead.rstrip(".").replace("_", "-")
    shown = flag.shown or (f"as {instead}" if instead and " " not in instead else instead)
    names = [f"--{each}" for each in (name.replace("_", "-"), *flag.also)]
    declared = type_of(hint)
    bare = hint.__origin__ if get_origin(hint) is Annotated else hint
    type_ = get_args(bare)[0] if get_origin(bare) in (Union, UnionType) else bare  # without None
    option = typer.Option(
        *(f"{each}/--no-{each[2:]}" if type_ is bool and not flag.is_switch else each for each in names),
        help=words if words.endswith(".") or not words else f"{words}.",
        min=declared.range.low,
        max=None if declared.range.high == MOST else declared.range.high,
        metavar=flag.metavar,
        hidden=flag.is_hidden,
        callback=flag.call,
        show_default=shown or True,
        envvar=_Variables(*names) if has_variables and len(names) > 1 else None,  # None: typer derives a single name
    )
    if declared.words:
        type_ = Literal[declared.words]
    type_ = type_ | None if default is None else type_
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=Annotated[type_, option])


class _Variables(list[str]):
    """Environment variables of a flag with several names. As a text, in messages, they are joined by "or"."""

    def __init__(self, *flags: str) -> None:
        super().__init__(f"{ENVIRONMENT_PREFIX}_{flag.lstrip('-').replace('-', '_').upper()}" for flag in flags)

    def __str__(self) -> str:
        return "' or '".join(self)


@dataclass(frozen=True, slots=True)
class _OwnFlags:
    """Group of flags that is a dataclass: each field is a flag or a group."""

    owner: Any

    def parameters(self) -> Iterator[inspect.Parameter]:
        hints, docs = get_type_hints(self.owner, include_extras=True), field_docs(self.owner)
        for field in fields(self.owner):
            name, hint = field.name, hints[field.name]
            if (group := _group_of(hint)) is not None:
                yield from group.parameters()
                continue
            metadata = getattr(hint, "__metadata__", ())
            if any(isinstance(each, ParameterInfo) for each in metadata):
                kind = inspect.Parameter.KEYWORD_ONLY
                default = inspect.Parameter.empty if field.default is MISSING else field.default
                yield inspect.Parameter(name, kind, default=default, annotation=hint)
                continue
            assert field.default is not MISSING, f"{self.owner.__name__}.{name}: a flag has a default"
            flag = next((each for each in metadata if isinstance(each, Flag)), Flag())
            yield _parameter(flag.name or name, hint, field.default, docs.get(name, ""), flag)

    def value(self, **given: Any) -> Any:
        """The dataclass with the given values, which are named by parameter."""
        values: dict[str, Any] = {}
        for name, hint in get_type_hints(self.owner, include_extras=True).items():
            group = _group_of(hint)
            values[name] = (
                given[name]
                if group is None
                else group.value(**{each.name: given[each.name] for each in group.parameters()})
            )
        return self.owner(**values)


def _group_of(annotation: Any) -> OptionFlags[Any] | _OwnFlags | None:
    for each in getattr(annotation, "__metadata__", ()):
        if isinstance(each, OptionFlags):
            return each
    return _OwnFlags(annotation) if is_dataclass(annotation) and isinstance(annotation, type) else None


def reject_other_options(context: typer.Context, used: Collection[str], why: str) -> None:
    """Reject options and arguments that do not apply to the current mode of a command.

    Args:
        used: names of the parameters that apply.
        why: end of the error's sentence, which begins with the option.

    Raises:
        UsageError: another option or argument was given.
    """
    for parameter in context.command.params:
        name = parameter.name
        source = None if name is None else context.get_parameter_source(name)
        if name not in used and source is not None and source.name == "COMMANDLINE":
            flag = max(parameter.opts, key=len) if parameter.opts[0].startswith("-") else parameter.metavar or name
            raise UsageError(f"{flag} {why}")


def show_help_without_command(context: typer.Context) -> None:
    """Print the help of a group that is called without a command."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
