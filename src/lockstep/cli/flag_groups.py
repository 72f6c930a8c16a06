"""Flags as fields of dataclasses: a command takes a few values instead of sixty parameters.

A flag has its type, its default and its help from its field. The help is the first paragraph under the field;
``; None: X.`` in it is the default that the help shows, where X is a text or the name of another field.
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
"""Of the flags of `lockstep serve`: ``--max-model-len`` is also ``LOCKSTEP_MAX_MODEL_LEN``."""
Answer = TypeVar("Answer")
Options = TypeVar("Options")


def with_flags(command: Callable[..., Answer]) -> Callable[..., Answer]:
    """Make flags of every parameter that is a group of them; the command is called with the groups' values.

    A group is annotated as a dataclass, each of whose fields is a flag with a default, or a group; or as
    ``Annotated[Options, OptionFlags(...)]``. Flags stand where their group stands. A verb has one group.
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
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # both are what typer reads
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


@dataclass(frozen=True, slots=True)
class Flag:
    """The command line's settings of a field, beyond its name, type, default and sentence.

    In a group it is part of the field's annotation, ``Annotated[int, Flag(metavar="N"), Range(1)]``; so may be what
    typer has for a parameter.
    """

    name: str = ""
    """Of the parameter; empty: the field's."""
    also: tuple[str, ...] = ()
    """Further names of the flag, without dashes."""
    shown: str = ""
    """The default in words, where the field's sentence has none."""
    metavar: str | None = None
    """Its value in the help; None: the type's name."""
    is_switch: bool = False
    """A switch without a ``--no-`` form."""
    is_hidden: bool = False
    """Left out of the help: few users need it. docs/native.md has it."""
    call: Callable[..., Any] | None = None
    """Converts the given value."""


SWITCH = Flag(is_switch=True)


class OptionFlags(Generic[Options]):
    """Flags for fields of options, which are a dataclass of a lower layer.

    Args:
        owner: the dataclass.
        flags: by field, in the order of the help. Other fields keep their defaults.
    """

    def __init__(self, owner: type[Options], flags: Mapping[str, Flag]) -> None:
        self._owner = owner
        self._flags = flags

    def parameters(self) -> Iterator[inspect.Parameter]:
        """The flags, as a command takes them."""
        assert is_dataclass(self._owner)
        hints, docs = get_type_hints(self._owner, include_extras=True), field_docs(self._owner)
        defaults = {field.name: field.default for field in fields(self._owner)}
        for field, flag in self._flags.items():
            name = flag.name or field
            yield _parameter(name, hints[field], defaults[field], docs[field], flag, has_variables=True)

    def value(self, **given: Any) -> Options:
        """The options, of the flags' values by parameter."""
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
    type_ = get_args(bare)[0] if get_origin(bare) in (Union, UnionType) else bare  # without its None
    option = typer.Option(
        *(f"{each}/--no-{each[2:]}" if type_ is bool and not flag.is_switch else each for each in names),
        help=words if words.endswith(".") or not words else f"{words}.",
        min=declared.range.low,
        max=None if declared.range.high == MOST else declared.range.high,
        metavar=flag.metavar,
        hidden=flag.is_hidden,
        callback=flag.call,
        show_default=shown or True,
        envvar=_Variables(*names) if has_variables and len(names) > 1 else None,  # else it is found by the flag's name
    )
    if declared.words:
        type_ = Literal[declared.words]
    type_ = type_ | None if default is None else type_
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=Annotated[type_, option])


class _Variables(list[str]):
    """The environment variables of a flag that has several names; messages show them as a text."""

    def __init__(self, *flags: str) -> None:
        super().__init__(f"{ENVIRONMENT_PREFIX}_{flag.lstrip('-').replace('-', '_').upper()}" for flag in flags)

    def __str__(self) -> str:
        return "' or '".join(self)


@dataclass(frozen=True, slots=True)
class _OwnFlags:
    """A dataclass of flags: each field is a flag, or a group of flags."""

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
        """The dataclass, of the flags' values by parameter."""
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
            flag = max(parameter.opts, key=len) if parameter.opts[0].startswith("-") else parameter.metavar or name
            raise UsageError(f"{flag} {why}")


def show_help_without_command(context: typer.Context) -> None:
    """Print a group's help where it is called without a command."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
