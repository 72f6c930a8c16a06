"""The house rules that a machine can check: direction of imports, closed rooms, sizes, no dead modules."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "lockstep"

# A room may import rooms of a strictly lower floor, and itself. Rooms on one floor do not know each other.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "vendored", "version"),
    ("core", "pocket"),
    ("artifacts",),
    ("executors",),
    ("engine",),
    ("worker",),
    ("cluster",),
    ("server", "replay"),
    ("release",),
    ("bench",),
    ("cli",),
    ("__main__",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# Rooms and modules that decide: values in, values out.
PURE = (
    "core",
    "cluster.budget",
    "cluster.dispatch",
    "cluster.ledger",
    "cluster.manifest",
    "cluster.plan",
    "cluster.planner",
    "replay.contents",
    "replay.cost",
    "replay.progress",
    "replay.simulator",
    "replay.timeline",
    "replay.totals",
    "replay.workload",
)
PURE_MAY_IMPORT = {
    "__future__",
    "bisect",
    "collections",
    "collections.abc",
    "dataclasses",
    "enum",
    "hashlib",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "re",
    "struct",
    "typing",
}
# Beside other pure modules: exceptions are values.
PURE_MAY_IMPORT_OF_US = {"errors"}

# Native or internal interfaces that only one place may touch.
CONFINED = {
    "huggingface_hub": "artifacts/hub",
    "llguidance": "executors/grammar",
    "openvino": "executors/openvino",
    "openvino._offline_transformations": "executors/openvino/paged.py",
}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
SOURCES = sorted(
    path for folder in ("src", "tests", "tools", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
)
MODULES = sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Every absolute module name that a file imports, lazy and type-only imports included, with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: relative import; write the full name"
            yield node.module or "", node.lineno
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_go_one_way(path: Path) -> None:
    own = room_of(module_name(path))
    if not own:
        return  # the package's own surface re-exports
    assert own in FLOOR_OF, f"{relative(path)}: room {own!r} stands on no floor; add it to FLOORS"
    for name, line in imports_of(path):
        other = room_of(name) if name.startswith("lockstep.") else ""
        if other in FLOOR_OF and other != own:
            assert FLOOR_OF[other] < FLOOR_OF[own], f"{relative(path)}:{line}: {own} must not import {other}"


def test_executors_do_not_know_each_other() -> None:
    families = {"openvino", "stub"}
    for path in MODULES:
        parts = module_name(path).split(".")
        if len(parts) > 2 and parts[1] == "executors" and parts[2] in families:
            for name, line in imports_of(path):
                named = name.split(".")
                other = named[2] if named[:2] == ["lockstep", "executors"] and len(named) > 2 else ""
                assert other not in families - {parts[2]}, f"{relative(path)}:{line}: executors are siblings"


def is_pure(module: str) -> bool:
    """Whether ``lockstep.<module>`` is, or lies in, what is closed."""
    return any(module == each or module.startswith(f"{each}.") for each in PURE)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_pure_modules_import_data_types_and_each_other_only(path: Path) -> None:
    if not is_pure(module_name(path).removeprefix("lockstep.")):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            own = name.removeprefix("lockstep.")
            is_ours = own != name and (is_pure(own) or own in PURE_MAY_IMPORT_OF_US)
            assert is_ours or name in PURE_MAY_IMPORT, f"{relative(path)}: this is closed; {name} is no data type"


def test_everything_pure_exists() -> None:
    names = {module_name(path).removeprefix("lockstep.") for path in MODULES}
    assert set(PURE) <= names


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_internal_interfaces_are_confined(path: Path) -> None:
    for name, line in imports_of(path):
        for guarded, home in CONFINED.items():
            if name == guarded or name.startswith(guarded + "."):
                place = path.relative_to(PACKAGE).as_posix()
                assert place.startswith(home), f"{relative(path)}:{line}: {guarded} belongs to {home}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_sizes_and_annotations(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES, f"{relative(path)}: over {MAX_FILE_LINES} lines; split it by idea"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{relative(path)}:{node.lineno}: {node.name} has {length} lines"
        assert not isinstance(node, ast.Global), f"{relative(path)}:{node.lineno}: no module globals"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_modules_say_what_they_are(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{relative(path)}: a module docstring says what it owns"


def test_no_dead_modules() -> None:
    imported = {name for path in MODULES for name, _ in imports_of(path)}
    entry_points = {"lockstep", "lockstep.cli.main", "lockstep.__main__"}
    entry_points |= {"lockstep.worker.child", "lockstep.worker.trial_child"}
    for path in MODULES:
        name = module_name(path)
        if path.name != "__init__.py" and name not in entry_points:
            assert name in imported, f"{relative(path)}: nobody imports it"


def test_pure_list_holds_only_the_standard_library() -> None:
    assert all(name.split(".")[0] in sys.stdlib_module_names for name in PURE_MAY_IMPORT)
