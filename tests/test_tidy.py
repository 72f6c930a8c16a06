"""Rules that a test can check: direction of imports, closed packages, sizes, no dead modules."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lockstep.cli.main import VERBS
from tools.mutations import MUTATIONS, place_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "lockstep"

# A package may import packages of a lower layer, and itself. Packages of one layer do not import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "owned_folders", "shown", "spelling", "vendored", "version"),
    ("option_fields", "yaml_reading"),
    ("core", "pocket", "report"),
    ("artifacts",),
    ("executors",),
    ("engine",),
    ("worker",),
    ("hosts",),
    ("cluster",),
    ("server", "replay"),
    ("release",),
    ("bench",),
    ("cli",),
    ("__main__",),
)
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}

# Rooms and modules that decide: values in, values out.
PURE = (
    "core",
    "cluster.budget",
    "cluster.dispatch",
    "cluster.manifest",
    "cluster.planner",
    "replay.cache_oracle",
    "replay.cost",
    "replay.progress",
    "replay.simulator",
    "replay.timeline",
    "replay.workload",
    "report.document",
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
# Beside other pure modules: exceptions are values, a field declares its range, and texts of sizes follow from numbers.
PURE_MAY_IMPORT_OF_US = {"errors", "option_fields", "shown"}

# Native or internal interfaces that only one place may touch.
CONFINED = {
    "duckdb": "release/store.py",
    "huggingface_hub": "artifacts/hub",
    "llguidance": "executors/grammar",
    "ray": "hosts/ray_connection.py",
}

# Parts whose time a simulation replaces: they call a clock that was passed to them, or the event loop's.
TIMED = ("cluster", "engine", "hosts", "server.batches", "worker")
CLOCKS = {"monotonic", "perf_counter", "time"}
READS_CLOCKS = {
    "engine.kv_transfer": "a session on disk is older than another one's by the calendar",
    "worker.flight.files": "the thread of its files is not simulated",
    "worker.flight.recorder": "the thread of its files is not simulated",
    "worker.replica": "how long a load took, for people",
}

# 150 to 400 lines is a good file; the rest is room for those that would otherwise be cut where no idea ends.
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
SOURCES = sorted(
    path for folder in ("src", "tests", "tools", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
)
MODULES = sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rules ask of a file."""

    num_lines: int
    imports: tuple[tuple[str, int], ...]
    """Every absolute module name that is imported, lazily or for types, too, with its line."""
    functions: tuple[tuple[str, int, int], ...]
    """Name, line, length in lines."""
    global_lines: tuple[int, ...]
    clock_lines: tuple[int, ...]
    """Lines that call a clock of the module `time`."""
    has_docstring: bool


@cache
def facts_of(path: Path) -> Facts:
    """Parsed once for all rules; the tree is not kept."""
    text = path.read_text()
    module = ast.parse(text)
    imports: list[tuple[str, int]] = []
    functions: list[tuple[str, int, int]] = []
    global_lines: list[int] = []
    clock_lines: list[int] = []
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            imports += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: relative import; write the full name"
            imports.append((node.module or "", node.lineno))
            imports += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1))
        elif isinstance(node, ast.Global):
            global_lines.append(node.lineno)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "time" and node.func.attr in CLOCKS:
                clock_lines.append(node.lineno)
    has_docstring = bool(ast.get_docstring(module))
    return Facts(
        text.count("\n"), tuple(imports), tuple(functions), tuple(global_lines), tuple(clock_lines), has_docstring
    )


def refuse(faults: Iterable[str]) -> None:
    """Fail over the first fault and tell them all, a line each."""
    told = "\n".join(faults)
    assert not told, told


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_imports_go_one_way() -> None:
    def faults(path: Path) -> Iterator[str]:
        own = package_of(module_name(path))
        if not own:
            return  # the package's own surface re-exports
        if own not in LAYER_OF:
            yield f"{relative(path)}: package {own!r} is in no layer; add it to LAYERS"
            return
        for name, line in facts_of(path).imports:
            other = package_of(name) if name.startswith("lockstep.") else ""
            if other in LAYER_OF and other != own and LAYER_OF[other] >= LAYER_OF[own]:
                yield f"{relative(path)}:{line}: {own} must not import {other}"

    refuse(fault for path in MODULES for fault in faults(path))


def test_executors_do_not_know_each_other() -> None:
    families = {"native", "stub"}
    for path in MODULES:
        parts = module_name(path).split(".")
        if len(parts) > 2 and parts[1] == "executors" and parts[2] in families:
            for name, line in facts_of(path).imports:
                named = name.split(".")
                other = named[2] if named[:2] == ["lockstep", "executors"] and len(named) > 2 else ""
                assert other not in families - {parts[2]}, f"{relative(path)}:{line}: executors are siblings"


def is_pure(module: str) -> bool:
    """Whether ``lockstep.<module>`` is, or lies in, what is closed."""
    return any(module == each or module.startswith(f"{each}.") for each in PURE)


def test_pure_modules_import_data_types_and_each_other_only() -> None:
    def faults(path: Path) -> Iterator[str]:
        for name, line in facts_of(path).imports:
            own = name.removeprefix("lockstep.")
            is_ours = own != name and (is_pure(own) or own.split(".")[0] in PURE_MAY_IMPORT_OF_US)
            is_data_type = name in PURE_MAY_IMPORT or name.rpartition(".")[0] in PURE_MAY_IMPORT
            if not (is_ours or is_data_type):
                yield f"{relative(path)}:{line}: this is closed; {name} is no data type"

    closed = [path for path in MODULES if is_pure(module_name(path).removeprefix("lockstep."))]
    refuse(fault for path in closed for fault in faults(path))


def test_everything_pure_exists() -> None:
    names = {module_name(path).removeprefix("lockstep.") for path in MODULES}
    assert set(PURE) <= names


def test_clocks_are_passed_in_where_time_is_simulated() -> None:
    def faults(path: Path) -> Iterator[str]:
        name = module_name(path).removeprefix("lockstep.")
        if any(name.startswith(f"{part}.") for part in TIMED) and name not in READS_CLOCKS:
            for line in facts_of(path).clock_lines:
                yield f"{relative(path)}:{line}: take the clock as a parameter, or use the event loop's"

    refuse(fault for path in MODULES for fault in faults(path))
    assert {name for name in READS_CLOCKS if facts_of(PACKAGE / f"{name.replace('.', '/')}.py").clock_lines} == {
        *READS_CLOCKS
    }, "an exception that nothing needs"


def test_internal_interfaces_are_confined() -> None:
    refuse(
        f"{relative(path)}:{line}: {guarded} belongs to {home}"
        for path in MODULES
        for name, line in facts_of(path).imports
        for guarded, home in CONFINED.items()
        if name == guarded or name.startswith(guarded + ".")
        if not path.relative_to(PACKAGE).as_posix().startswith(home)
    )


def test_sizes_and_annotations() -> None:
    def faults(path: Path) -> Iterator[str]:
        facts = facts_of(path)
        if facts.num_lines > MAX_FILE_LINES:
            yield f"{relative(path)}: over {MAX_FILE_LINES} lines; split it by idea"
        for name, line, length in facts.functions:
            if length > MAX_FUNCTION_LINES:
                yield f"{relative(path)}:{line}: {name} has {length} lines"
        for line in facts.global_lines:
            yield f"{relative(path)}:{line}: no module globals"

    refuse(fault for path in SOURCES for fault in faults(path))


def test_modules_say_what_they_are() -> None:
    silent = [path for path in MODULES if not facts_of(path).has_docstring]
    refuse(f"{relative(path)}: a module docstring says what it owns" for path in silent)


def test_no_dead_modules() -> None:
    imported = {name for path in MODULES for name, _ in facts_of(path).imports}
    entry_points = {
        "lockstep",
        "lockstep.cli.main",
        "lockstep.__main__",
        "lockstep.worker.child",
    }
    entry_points |= {home.partition(":")[0] for home, _ in VERBS.values()}
    for path in MODULES:
        name = module_name(path)
        if path.name != "__init__.py" and name not in entry_points:
            assert name in imported, f"{relative(path)}: nobody imports it"


def test_pure_list_holds_only_the_standard_library() -> None:
    assert all(name.split(".")[0] in sys.stdlib_module_names for name in PURE_MAY_IMPORT)


def test_every_mutation_stands_in_one_place() -> None:
    """`python -m tools.mutations` runs them; a pattern that code has outgrown would end that run."""
    for mutation in MUTATIONS:
        place_of(PACKAGE, mutation)
