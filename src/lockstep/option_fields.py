"""Option fields: one declaration of a field's type, range, default and help, for all readers of the field.

A field of a dataclass or ``msgspec.Struct`` is annotated with its type, and with a `Range` where it is a number:

    max_num_seqs: Annotated[int, Range(1)] = 64

Flags, manifests, ``--set``, ``stub://`` URLs, policies of the gate and sampling parameters are all read by these types,
so a value has one range and one description, independent of its source.
"""

from __future__ import annotations

import ast
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from lockstep.errors import ConfigError, LockstepError

MOST = 1 << 40
"""Upper bound of counts that have no smaller one. Help and messages do not show it."""
_BOOLEANS = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}
_NAMES: Mapping[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
_NUMBERS = (int, float)


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers of ``low`` to ``high``, both included; None: no bound."""

    low: float | None = None
    high: float | None = None
    above_low: bool = False
    """True if ``low`` itself is excluded."""

    def __contains__(self, value: float) -> bool:
        if isinstance(value, float) and not math.isfinite(value):
            return False
        if self.low is not None and not (value > self.low if self.above_low else value >= self.low):
            return False
        return self.high is None or value <= self.high

    def text(self, is_whole: bool = False) -> str:
        """For example ``, at least 1``, ``, 0 to 1`` or `` above 0``; empty without bounds.

        Args:
            is_whole: includes the bound `MOST`, which is otherwise left out.
        """
        high = None if self.high == MOST and not is_whole else self.high
        most = "" if high is None else f", at most {_digits(high)}"
        if self.low is None:
            return most
        low = _digits(self.low)
        if self.above_low:
            return f" above {low}{most}"
        return f", at least {low}" if high is None else f", {low} to {_digits(high)}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """Allowed words of a field of type ``str`` whose type is not a ``Literal``."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OptionType:
    """Valid values of a field."""

    kind: Any
    """Class of the values: bool, int, float, str, or another class, whose values are checked elsewhere."""
    range: Range = Range()
    words: tuple[str, ...] = ()
    """Allowed words; empty: the values are not words of a fixed set."""
    is_optional: bool = False
    """True if None is a valid value, too."""

    def fits(self, value: object) -> bool:
        """True if the value is valid."""
        if value is None:
            return self.is_optional
        if self.words:
            return isinstance(value, str) and value in self.words
        if self.kind in _NUMBERS:
            numbers = (int,) if self.kind is int else _NUMBERS
            is_number = isinstance(value, numbers) and not isinstance(value, bool)
            return is_number and value in self.range  # type: ignore[operator]  # it is a number
        return self.kind not in _NAMES or isinstance(value, self.kind)

    def right(self, value: object = None) -> str:
        """The valid values in words, to follow "it must be".

        Args:
            value: the given value, which is invalid.
        """
        if self.words:
            from lockstep.spelling import listed

            return listed(self.words, "or")
        is_beyond = isinstance(value, int) and value > MOST
        return f"{_NAMES.get(self.kind, self.kind)}{self.range.text(is_beyond)}"

    def parse(self, text: str) -> Any:
        """Convert a text to a value of this kind, without a check of its range. ``none`` and ``null`` are None.

        Raises:
            ValueError: the text is not a value of this kind.
        """
        text = text.strip()
        if self.is_optional and text.lower() in ("none", "null"):
            return None
        value: Any = text
        if self.kind is bool:
            value = _BOOLEANS.get(text.lower())
        elif self.kind in _NUMBERS:
            value = self.kind(text.replace(",", "").replace("_", ""))
        if value is None or (self.words and value not in self.words):
            raise ValueError(text)
        return value


def type_of(hint: Any) -> OptionType:
    """Option type that an annotation declares."""
    metadata: Sequence[Any] = ()
    if get_origin(hint) is Annotated:
        hint, metadata = hint.__origin__, hint.__metadata__
    is_optional = get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint)
    if is_optional:
        others = [each for each in get_args(hint) if each is not NoneType]
        hint = others[0] if len(others) == 1 else object
    words = get_args(hint) if get_origin(hint) is Literal else ()
    words = next((each.words for each in metadata if isinstance(each, OneOf)), words)
    range_ = next((each for each in metadata if isinstance(each, Range)), Range())
    return OptionType(str if words else get_origin(hint) or hint, range_, words, is_optional)


def option_types(owner: type) -> Mapping[str, OptionType]:
    """Option types of a class, by field."""
    return _option_types(owner)


@cache
def _option_types(owner: Any) -> Mapping[str, OptionType]:
    return {name: type_of(hint) for name, hint in get_type_hints(owner, include_extras=True).items()}


def check_options(options: object, refused: Callable[[str], LockstepError] = ConfigError) -> None:
    """Check every field against its type.

    Args:
        refused: makes the error from a message.

    Raises:
        ConfigError: a field has an invalid value; the message names the first such field, its value and the valid ones.
    """
    for name, type_ in option_types(type(options)).items():
        value = getattr(options, name)
        if not type_.fits(value):
            raise refused(f"{name} is {value!r}; it must be {type_.right(value)}")


def field_docs(owner: type) -> Mapping[str, str]:
    """First paragraph of the text under each field of a class and its bases, by field; empty without source code."""
    docs: dict[str, str] = {}
    for base in reversed(owner.__mro__[:-1]):
        for field, below in pairwise(_classes_of(base.__module__).get(base.__name__, ())):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = " ".join(inspect.cleandoc(text).partition("\n\n")[0].split()).replace("``", "")
    return docs


@cache
def _classes_of(module: str) -> Mapping[str, Sequence[ast.stmt]]:
    """Bodies of a module's classes, by class name; empty without source code."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return {}
    return {found.name: found.body for found in ast.parse(source).body if isinstance(found, ast.ClassDef)}


def _digits(number: float) -> str:
    return f"{number:,.0f}" if float(number).is_integer() else f"{number:g}"
