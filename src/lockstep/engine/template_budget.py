"""Budget of work for a foreign chat template: counted per rendering, and not timed.

Jinja's sandbox keeps a template from touching anything, not from running for ever. A clock would refuse on a busy
machine what it allows on an idle one, and cannot interrupt one long operation. So every operation whose cost depends on
its operands is made to pass a gate first: loops, calls, filters, tests, comparisons, concatenations, arithmetic, slices
and output. A gate charges the size of the operand *as a tree* (a list that holds the same list twice counts it twice,
as printing it would), and what can make much of little (padding, replacing, joining, repeating, powers) is refused
beyond bounds before it starts. What is left is linear in what was charged.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from jinja2.nodes import Template

MAX_WORK = 1_000_000
"""Units per rendering; a unit is about a microsecond: an operation, an element, or CHARS_PER_UNIT characters."""
CHARS_PER_UNIT = 256
MAX_RENDERED_CHARS = 16_000_000
"""Bound of the prompt and of any text on the way; no context is as long."""
MAX_REPEATED = 100_000
"""The largest factor of ``*``, exponent of ``**`` and padding, as Jinja's own bound of ``range``."""
MAX_INTEGER_BITS = 4_096
MAX_SOURCE_CHARS = 1_000_000
"""Bound of a template; the longest known ones are a fiftieth of it."""

GATE, LOOP, CONCAT = "lockstep gate", "lockstep loop", "lockstep concat"
"""Names that no template can write."""
_CALL_UNITS, _MACRO_UNITS = 1, 3
"""Price of a call beside its arguments and the unit of the gate."""
_CONSTANT_TIME = (
    "attr", "boolean", "callable", "count", "d", "default", "defined", "false", "first", "float", "integer",
    "iterable", "last", "length", "mapping", "none", "number", "sameas", "sequence", "string", "true",
    "undefined",
)  # fmt: skip
"""Filters and tests that look at no more than one element; as a filter, ``string`` looks at all."""
_NEVER_NEEDED_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
_REFUSED_METHODS = frozenset(["expandtabs", "format_map", "maketrans", "translate"])
_PADDING = frozenset(["center", "ljust", "rjust", "zfill", "batch", "slice", "indent", "tojson"])
_INDENTED_FACTOR = 64
"""JSON with line breaks is charged so many times: its lines begin with as many blanks as it is deep."""
_MAX_INDENT = 16
_NEVER_LAZY = frozenset([str, int, bool, type(None), list, tuple, dict])
_WIDTH = re.compile(r"[0-9]{6}|\*")


class TooMuchWork(Exception):  # noqa: N818 - a message for the one place that catches it
    """The template wants more than a prompt can need."""


class _Local(threading.local):
    left: int | None = None
    """None: no rendering is under way."""


class Budget:
    """The work that renderings have left, one per thread. It is open within its ``with`` block."""

    def __init__(self) -> None:
        self._local = _Local()

    def __enter__(self) -> None:
        self._local.left = MAX_WORK

    def __exit__(self, *exc: object) -> None:
        self._local.left = None

    def charge(self, *values: object, units: int = 1) -> None:
        """Pay for an operation on these values; TooMuchWork where the budget, or the bound of one text, is exceeded."""
        open_left = self._local.left
        left = (MAX_WORK if open_left is None else open_left) - units  # constants are folded before any rendering
        for value in values:
            kind = type(value)
            if isinstance(value, str):
                left -= _units(value)
            elif kind is not int and kind is not bool and value is not None:
                left -= _weight(value, left)
            if left < 0:
                break
        if left < 0:
            raise TooMuchWork("it does more work than a prompt can need (an endless loop or recursion?)")
        if open_left is not None:
            self._local.left = left

    def materialise(self, value: Any) -> Any:
        """Charge a value; a lazy sequence becomes a list first, so that its length is known."""
        value = _known_length(value)
        self.charge(value)
        return value


def _known_length(value: Any) -> Any:
    """A lazy sequence as a list; Jinja's own objects stay what they are."""
    kind = type(value)
    if kind not in _NEVER_LAZY and isinstance(value, Iterator) and not kind.__module__.startswith("jinja2"):
        return list(islice(value, MAX_WORK))
    return value


def _units(text: str) -> int:
    if len(text) > MAX_RENDERED_CHARS:
        raise TooMuchWork(f"it makes a text of more than {MAX_RENDERED_CHARS} characters")
    return len(text) // CHARS_PER_UNIT


def _weight(value: object, limit: int) -> int:
    """Elements and text of a container as a tree; more than `limit` is not counted out."""
    weight = 0
    open_values = [value]
    while open_values and weight <= limit:
        item = open_values.pop()
        weight += 1
        if isinstance(item, str):
            weight += _units(item)
        elif isinstance(item, Mapping):
            weight += len(item)
            if weight <= limit:
                open_values.extend(item.keys())
                open_values.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)):
            weight += len(item)
            if weight <= limit:
                open_values.extend(item)
        elif isinstance(item, range):
            weight += len(item)
    return weight


def limit_environment(environment: Environment, budget: Budget) -> None:
    """Put gates around the filters and tests of an environment and take away what no prompt needs."""
    from jinja2 import pass_context

    for name in _NEVER_NEEDED_FILTERS:
        environment.filters.pop(name, None)
    environment.globals.pop("lipsum", None)
    filters: dict[str, Any] = environment.filters
    tests: dict[str, Any] = environment.tests
    filters |= {
        name: _gated(name, filters[name], budget) for name in filters if name not in _CONSTANT_TIME or name == "string"
    }
    tests |= {name: _gated(name, tests[name], budget) for name in tests if name not in _CONSTANT_TIME}

    @pass_context  # whatever needs a context is not folded at compile time
    def gate(context: object, value: Any) -> Any:
        return budget.materialise(value)

    @pass_context
    def concat(context: object, values: list[Any]) -> str:
        budget.charge(values)
        _bounded(sum(len(value) for value in values if isinstance(value, str)))
        return "".join(map(str, values))

    @pass_context
    def loop(context: object, value: Any) -> Any:
        value = _known_length(value)
        budget.charge(units=1 + (len(value) if hasattr(value, "__len__") else 0))
        return value

    filters |= {GATE: gate, LOOP: loop, CONCAT: concat}


def checked_arguments(
    function: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], budget: Budget
) -> tuple[Any, ...]:
    """The positional arguments of a call that was charged; refuses one that makes much of little."""
    args = tuple(map(_known_length, args))
    receiver = getattr(function, "__self__", None)
    receiver = receiver if isinstance(receiver, (str, list, tuple, dict)) else None
    if type(function).__name__ == "Macro":  # which copies nothing; what its body does is charged there
        budget.charge(units=1 + _MACRO_UNITS + len(args))
        return args
    budget.charge(receiver, *args, *kwargs.values(), units=1 + _CALL_UNITS)
    name = getattr(function, "__name__", "")
    if isinstance(receiver, str):
        if name in _REFUSED_METHODS:
            raise TooMuchWork(f"it calls {name}, which no prompt needs")
        _check_growth(name, (receiver, *args), kwargs)
    return args


def check_format(text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse `str.format` and `%` where they make much of little."""
    _check_growth("format", (text, *args), kwargs)


def check_operation(operator: str, left: Any, right: Any, budget: Budget) -> None:
    """Charge arithmetic, and refuse results that are out of bounds."""
    budget.charge(left, right)
    if any(isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS for value in (left, right)):
        raise TooMuchWork(f"it calculates with a number of more than {MAX_INTEGER_BITS} bits")
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length() if operator == "*" else 0
        bits = left.bit_length() * abs(right) if operator == "**" else bits
        if bits > MAX_INTEGER_BITS:
            raise TooMuchWork(f"{operator} makes a number of more than {MAX_INTEGER_BITS} bits")
    elif operator == "*":
        for sequence, factor in ((left, right), (right, left)):
            if isinstance(sequence, (str, list, tuple)) and isinstance(factor, int):
                if factor > MAX_REPEATED:
                    raise TooMuchWork(f"* by more than {MAX_REPEATED}")
                _bounded(len(sequence) * factor)
    elif operator == "+" and isinstance(left, str) and isinstance(right, str):
        _bounded(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        check_format(left, right if isinstance(right, tuple) else (right,), {})


def add_gates(tree: Template) -> Template:
    """The template with gates before whatever Jinja compiles to plain Python: loops, comparisons, `~` and long text."""
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    environment = tree.environment
    assert environment is not None, "a parsed template has its environment"

    def gated(node: Any, name: str = GATE) -> nodes.Filter:
        gate = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        gate.set_environment(environment)
        return gate

    class Gates(NodeTransformer):
        def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
            super().generic_visit(node, *args, **kwargs)
            match node:
                case nodes.For():
                    node.iter = gated(node.iter, LOOP)
                case nodes.Compare():
                    node.expr = gated(node.expr)
                    for operand in node.ops:
                        operand.expr = gated(operand.expr)
                case nodes.Concat():
                    return gated(nodes.List(node.nodes, lineno=node.lineno), CONCAT)
                case nodes.Getitem(arg=nodes.Slice()):
                    node.node = gated(node.node)
                case nodes.Pair():
                    node.key = gated(node.key)
                case nodes.TemplateData() if len(node.data) >= CHARS_PER_UNIT:
                    return gated(nodes.Const(node.data, lineno=node.lineno))
            return node

    gates: Any = Gates()
    whole: Template = gates.visit(tree)
    return whole


def _gated(name: str, function: Callable[..., Any], budget: Budget) -> Callable[..., Any]:
    """A filter or test that pays for its arguments first; `wraps` keeps Jinja's marks on it."""
    passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def pay(*args: Any, **kwargs: Any) -> Any:
        values = tuple(map(_known_length, args[passed:]))
        budget.charge(*values, *kwargs.values())
        _check_growth(name, values, kwargs)
        if name == "tojson" and len(values) + len(kwargs) > 1:
            budget.charge([values[0]] * _INDENTED_FACTOR)
        return function(*args[:passed], *values, **kwargs)

    return pay


def _check_growth(name: str, values: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse what makes a long result of short arguments."""
    text, rest = (values[0] if values else ""), (*values[1:], *kwargs.values())
    if name in _PADDING or name == "format":
        if any(isinstance(value, int) and value > MAX_REPEATED for value in rest):
            raise TooMuchWork(f"it pads by more than {MAX_REPEATED}")
        if name == "indent" and isinstance(text, str):
            widths = [
                value if isinstance(value, int) else len(value) for value in rest if isinstance(value, (int, str))
            ]
            _bounded(len(text) + (text.count("\n") + 1) * max(widths, default=4))
        if name == "tojson" and any(
            (isinstance(value, int) and value > _MAX_INDENT) or (isinstance(value, str) and len(value) > _MAX_INDENT)
            for value in rest
        ):
            raise TooMuchWork(f"it indents JSON by more than {_MAX_INDENT}")
        if name == "format" and isinstance(text, str):
            if _WIDTH.search(text):
                raise TooMuchWork("it formats with a width that no prompt needs")
            longest = max((_weight(value, MAX_WORK) for value in rest), default=0)
            _bounded(len(text) + max(text.count("{"), text.count("%")) * longest * CHARS_PER_UNIT)
    elif name == "sum" and any(isinstance(value, (list, tuple)) for value in rest):
        raise TooMuchWork("it adds up lists with sum")
    elif name == "replace" and len(rest) >= 2 and isinstance(text, str):
        old, new = str(rest[0]), str(rest[1])
        if len(new) > len(old):
            _bounded(len(text) + text.count(old) * (len(new) - len(old)))
    elif name == "join" and rest:
        separator, items = (
            (text, rest[0]) if isinstance(text, str) and not isinstance(rest[0], str) else (rest[0], text)
        )
        if isinstance(separator, str) and hasattr(items, "__len__"):
            _bounded(len(separator) * len(items))


def _bounded(num_chars: int) -> None:
    if num_chars > MAX_RENDERED_CHARS:
        raise TooMuchWork(f"it makes a text of more than {MAX_RENDERED_CHARS} characters")
