"""Counts of code that is hard to read or simulate: long signatures, repeated names, `Any`, broad excepts, clocks.

python -m tools.shape [ROOT]   a table by package, of this tree or another one
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

MAX_PARAMETERS = 6
SOURCE_COUNTS = (
    *("functions with over six parameters", "repeated class names", "Any", "broad excepts", "ignores"),
    *("clock reads", "threads"),
)
TEST_COUNTS = ("monkeypatch.setattr", "private attributes", "sleeps")
_IGNORES = re.compile(r"#\s*(type: ignore|noqa)")
_CLASSES = re.compile(r"^ *class (\w+)", re.MULTILINE)
_BROAD = {"Exception", "BaseException"}
_OF_NAMED_TUPLES = {"_replace", "_fields", "_asdict", "_make"}
"""Public methods and attributes of named tuples, which begin with an underscore only to differ from fields."""
_CLOCKS = {"monotonic", "time", "time_ns", "monotonic_ns"}


def counts_of(source: str) -> Counter[str]:
    """Counts of one module of the package; class names are counted over all modules (`counts`)."""
    found: Counter[str] = Counter({"ignores": len(_IGNORES.findall(source))})
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found["functions with over six parameters"] += _num_parameters(node) > MAX_PARAMETERS
            case ast.Name(id="Any"):
                found["Any"] += 1
            case ast.ExceptHandler(type=None):
                found["broad excepts"] += 1
            case ast.ExceptHandler(type=ast.Name(id=name)) if name in _BROAD:
                found["broad excepts"] += 1
            case ast.Attribute(value=ast.Name(id="time"), attr=name) if name in _CLOCKS:
                found["clock reads"] += 1
            case ast.Attribute(value=ast.Name(id="threading"), attr="Thread"):
                found["threads"] += 1
    return found


def _num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len(every) - (bool(every) and every[0].arg in ("self", "cls"))


def counts_of_test(source: str) -> Counter[str]:
    """Counts of one test module: dependencies on internals of the code or on the speed of the machine."""
    found: Counter[str] = Counter()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="monkeypatch"), attr="setattr"):
                found["monkeypatch.setattr"] += 1
            case ast.Call(func=ast.Attribute(value=ast.Name(id="time" | "asyncio"), attr="sleep"), args=[duration]):
                found["sleeps"] += not (
                    isinstance(duration, ast.Constant) and duration.value == 0
                )  # 0 only yields to the event loop
            case ast.Attribute(attr=name) if name in _OF_NAMED_TUPLES:
                pass
            case ast.Attribute(value=owner, attr=name) if name.startswith("_") and not name.startswith("__"):
                found["private attributes"] += not (isinstance(owner, ast.Name) and owner.id in ("self", "cls"))
    return found


def counts(root: Path) -> dict[str, Counter[str]]:
    """Counts by package, with ``tests``."""
    package = root / "src" / "lockstep"
    found: dict[str, Counter[str]] = {}
    classes: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        part = path.relative_to(package).with_suffix("").parts[0]
        source = path.read_text()
        found.setdefault(part, Counter()).update(counts_of(source))
        for name in _CLASSES.findall(source):
            classes.setdefault(name, []).append(part)
    for parts in classes.values():
        if len(parts) > 1:
            found[parts[0]]["repeated class names"] += 1
    tests = found.setdefault("tests", Counter())
    for path in sorted((root / "tests").rglob("*.py")):
        tests.update(counts_of_test(path.read_text()))
    return found


def totals(root: Path) -> Mapping[str, int]:
    """Counts of the whole package, and of the tests."""
    found = counts(root)
    tests = found.pop("tests")
    values = {name: sum(each[name] for each in found.values()) for name in SOURCE_COUNTS}
    return values | {f"{name} in tests": tests[name] for name in TEST_COUNTS}


def _table(root: Path) -> Iterator[str]:
    found = counts(root)
    tests = found.pop("tests")
    yield f"| package | {' | '.join(SOURCE_COUNTS)} |"
    yield f"|---|{'---:|' * len(SOURCE_COUNTS)}"
    for part, values in found.items():
        if sum(values.values()):
            yield f"| {part} | {' | '.join(str(values[name]) for name in SOURCE_COUNTS)} |"
    every = totals(root)
    yield f"| all | {' | '.join(str(every[name]) for name in SOURCE_COUNTS)} |"
    yield ""
    yield ", ".join(f"{name} in tests: {tests[name]}" for name in TEST_COUNTS)


if __name__ == "__main__":
    print("\n".join(_table(Path(sys.argv[1] if len(sys.argv) > 1 else "."))))
