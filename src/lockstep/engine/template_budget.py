"""Work budget for third-party chat templates: counts and limits the work of each rendering.

Jinja's sandbox restricts what a template can access, but not how long it runs. A time limit would depend on the load of
the machine, and could not interrupt a single long operation. So every operation whose cost depends on its operands
passes through a gate first: loops, calls, filters, tests, comparisons, concatenations, arithmetic, slices and output. A
gate charges the size of the operand *as a tree*: a list that contains the same list twice counts it twice, as printing
it would. Operations that can make a large result from small operands (padding, replacing, joining, repeating,
exponents) are rejected beyond limits before they start. The remaining work is linear in what was charged.
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
"""Units per rendering. A unit takes about a microsecond: an operation, an element, or CHARS_PER_UNIT characters."""
CHARS_PER_UNIT = 256
MAX_RENDERED_CHARS = 16_000_000
"""Maximum length of the prompt and of any intermediate text. No context is as long."""
MAX_REPEATED = 100_000
"""The largest factor of ``*``, exponent of ``**`` and padding; the same as Jinja's own limit of ``range``."""
MAX_INTEGER_BITS = 4_096
MAX_SOURCE_CHARS = 1_000_000
"""Maximum length of a template. The longest known ones have a fiftieth of it."""

GATE, LOOP, CONCAT = "lockstep gate", "lockstep loop", "lockstep concat"
"""Names that a template cannot contain."""
_CALL_UNITS, _MACRO_UNITS = 1, 3
"""Price of a call, in addition to its arguments and the unit of the gate."""
_CONSTANT_TIME = (
    "attr", "boolean", "callable", "count", "d", "default", "defined", "false", "first", "float", "integer",
    "iterable", "last", "length", "mapping", "none", "number", "sameas", "sequence", "string", "true",
    "undefined",
)  # fmt: skip
"""Filters and tests that read at most one element. As a filter, ``string`` reads all."""
_NEVER_NEEDED_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
_REFUSED_METHODS = frozenset(["expandtabs", "format_map", "maketrans", "translate"])
_PADDING = frozenset(["center", "ljust", "rjust", "zfill", "batch", "slice", "indent", "tojson"])
_INDENTED_FACTOR = 64
"""Factor for JSON with line breaks, since each line begins with as many blanks as its depth."""
_MAX_INDENT = 16
_NEVER_LAZY = frozenset([str, int, bool, type(None), list, tuple, dict])
_WIDTH = re.compile(r"[0-9]{6}|\*")


class TooMuchWork(Exception):  # noqa: N818 - it is caught in one place, which reports the message
    """The template exceeds its budget."""


class _Local(threading.local):
    left: int | None = None
    """Remaining units of the current rendering; None: no rendering is in progress."""


class RenderBudget:
    """Remaining work of renderings, one per thread. It is active within its ``with`` block."""

    def __init__(self) -> None:
        self._local = _Local()

    def __enter__(self) -> None:
        self._local.left = MAX_WORK

    def __exit__(self, *exc: object) -> None:
        self._local.left = None

    def charge(self, *values: object, units: int = 1) -> None:
        """Charge for an operation on these values.

        Raises:
            TooMuchWork: the budget, or the limit of one text, is exceeded.
        """
        open_left = self._local.left
        left = (MAX_WORK if open_left is None else open_left) - units  # Jinja folds constants outside of renderings
        for value in values:
            kind = type(value)
            if isinstance(value, str):
                left -= _units(value)
            elif kind is not int and kind is not bool and value is not None:
                left -= _weight(value, left)
            if left < 0:
                break
        if left < 0:
            raise TooMuchWork("it exceeds the work limit (an endless loop or recursion?)")
        if open_left is not None:
            self._local.left = left

    def materialise(self, value: Any) -> Any:
        """Charge a value. A lazy sequence is first converted to a list, so that its length is known."""
        value = _known_length(value)
        self.charge(value)
        return value


def _known_length(value: Any) -> Any:
    """Convert a lazy sequence to a list. Jinja's own objects are left unchanged."""
    kind = type(value)
    if kind not in _NEVER_LAZY and isinstance(value, Iterator) and not kind.__module__.startswith("jinja2"):
        return list(islice(value, MAX_WORK))
    return value


def _units(text: str) -> int:
    if len(text) > MAX_RENDERED_CHARS:
        raise TooMuchWork(f"it creates a text of more than {MAX_RENDERED_CHARS} characters")
    return len(text) // CHARS_PER_UNIT


def _weight(value: object, limit: int) -> int:
    """Number of elements and text units of a container as a tree. Counting stops above `limit`."""
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


def limit_environment(environment: Environment, budget: RenderBudget) -> None:
    """Put gates around the filters and tests of an environment, and remove those that prompts do not need."""
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

    @pass_context  # a filter that needs a context is not folded at compile time
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
    function: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], budget: RenderBudget
) -> tuple[Any, ...]:
    """Charge a call and return its positional arguments. Calls that make a large result from small arguments are
    rejected."""
    args = tuple(map(_known_length, args))
    receiver = getattr(function, "__self__", None)
    receiver = receiver if isinstance(receiver, (str, list, tuple, dict)) else None
    if type(function).__name__ == "Macro":  # it copies nothing, and its body is charged separately
        budget.charge(units=1 + _MACRO_UNITS + len(args))
        return args
    budget.charge(receiver, *args, *kwargs.values(), units=1 + _CALL_UNITS)
    name = getattr(function, "__name__", "")
    if isinstance(receiver, str):
        if name in _REFUSED_METHODS:
            raise TooMuchWork(f"it calls {name}, which is not allowed")
        _check_growth(name, (receiver, *args), kwargs)
    return args


def check_format(text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Reject `str.format` and `%` if they make a large result from small arguments."""
    _check_growth("format", (text, *args), kwargs)


def check_operation(operator: str, left: Any, right: Any, budget: RenderBudget) -> None:
    """Charge an arithmetic operation, and reject results beyond the limits."""
    budget.charge(left, right)
    if any(isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS for value in (left, right)):
        raise TooMuchWork(f"it uses a number of more than {MAX_INTEGER_BITS} bits")
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
    """Add gates where Jinja compiles to plain Python: loops, comparisons, `~` and long text."""
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


def _gated(name: str, function: Callable[..., Any], budget: RenderBudget) -> Callable[..., Any]:
    """Wrap a filter or test so that it charges its arguments first. `wraps` keeps Jinja's attributes."""
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
    """Reject operations that make a long result from short arguments."""
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
                raise TooMuchWork("it formats with too large a width")
            longest = max((_weight(value, MAX_WORK) for value in rest), default=0)
            _bounded(len(text) + max(text.count("{"), text.count("%")) * longest * CHARS_PER_UNIT)
    elif name == "sum" and any(isinstance(value, (list, tuple)) for value in rest):
        raise TooMuchWork("it concatenates lists with sum")
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
        raise TooMuchWork(f"it creates a text of more than {MAX_RENDERED_CHARS} characters")
