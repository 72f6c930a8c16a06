"""Rules that a test can check: direction of imports, closed packages, sizes, no dead modules."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from lockstep.cli.main import VERBS
from tools.mutations import MUTATIONS, place_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "lockstep"

# A package may import packages of a lower layer, and itself. Packages of one layer do not import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "owned_folders", "shown", "spelling", "system", "vendored", "version"),
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
    "artifacts.task",
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

# Parts that a simulation runs: a `System` gives them time, threads, processes and files to write.
SIMULATED = ("cluster", "engine", "hosts", "server.batches", "server.database", "worker")
OF_THE_SYSTEM = {
    **{f"time.{clock}{unit}": "now_s" for clock in ("monotonic", "perf_counter", "time") for unit in ("", "_ns")},
    **dict.fromkeys(("asyncio.sleep", "time.sleep"), "sleep or pause"),
    **dict.fromkeys(("_thread.start_new_thread", "threading.Thread", "threading.Timer"), "start_thread"),
    **dict.fromkeys(("asyncio.to_thread", "concurrent.futures.ThreadPoolExecutor"), "run_in_thread or pool"),
    **dict.fromkeys(("asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"), "start_process"),
    **dict.fromkeys(("multiprocessing", "os.fork", "os.posix_spawn", "os.system", "subprocess"), "start_process"),
    **dict.fromkeys(("os.fdatasync", "os.fsync"), "sync"),
    **dict.fromkeys(("os.pwrite", "os.write", "os.writev", "shutil.copyfile", "tempfile.mkstemp"), "open"),
    **dict.fromkeys(("os.link", "os.rename", "os.replace"), "replace"),
}
"""What the module `lockstep.system` alone may use, or part of, and the methods of a `System` that do it."""
METHODS_OF_THE_SYSTEM = {"rename": "replace", "touch": "open", "write_bytes": "write_file", "write_text": "write_file"}
"""Methods of paths."""
WRITING = {"O_APPEND", "O_CREAT", "O_RDWR", "O_WRONLY"}
USES_THE_SYSTEM = {
    "engine.llm": "the Python API, which runs in no server",
    "hosts.ray_connection": "Ray is not simulated",
    "hosts.ray_runtime": "Ray is not simulated",
    "worker.child": "the program of a process, whose system is the real one",
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
    system_calls: tuple[tuple[str, int], ...]
    """Uses of what belongs to a `System`: the methods that are to be used instead, and the line."""
    has_docstring: bool


@cache
def facts_of(path: Path) -> Facts:
    """Parsed once for all rules; the tree is not kept."""
    text = path.read_text()
    module = ast.parse(text)
    imports: list[tuple[str, int]] = []
    functions: list[tuple[str, int, int]] = []
    global_lines: list[int] = []
    system_calls: list[tuple[str, int]] = []
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
        elif isinstance(node, ast.Call | ast.Attribute):
            method = method_instead_of_call(node) if isinstance(node, ast.Call) else method_instead(dotted(node))
            system_calls += [(method, node.lineno)] if method else []
    has_docstring = bool(ast.get_docstring(module))
    return Facts(
        text.count("\n"), tuple(imports), tuple(functions), tuple(global_lines), tuple(system_calls), has_docstring
    )


def dotted(node: ast.AST) -> str:
    """A name such as ``os.path.join``; empty for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    owner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{owner}.{node.attr}" if isinstance(node, ast.Attribute) and owner else ""


def method_instead(name: str) -> str:
    """Methods of a `System` that are to be used instead of this name; empty: it is no `System`'s."""
    root = name.partition(".")[0]
    return OF_THE_SYSTEM.get(name) or OF_THE_SYSTEM.get(root, "")


def method_instead_of_call(call: ast.Call) -> str:
    """Methods of a `System` that are to be called instead, where the name alone does not decide that."""
    name = dotted(call.func)
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    texts = [each.value if isinstance(each, ast.Constant) else "" for each in call.args]
    modes = [each.value.value for each in call.keywords if each.arg == "mode" and isinstance(each.value, ast.Constant)]
    if name.startswith("SYSTEM."):
        return "a parameter"
    if name == "os.open":
        text = ast.unparse(call)
        return "" if "O_RDONLY" in text and not any(flag in text for flag in WRITING) else "open"
    if name.endswith("FileIO") or name == "open" or method == "open":  # a `System`'s own has the path before the mode
        modes += texts[:1] if method == "open" else texts[1:2]
        return "open" if any(re.fullmatch("[rbt]*[wxa+][rbt+]*", str(mode)) for mode in modes) else ""
    if method == "run_in_executor":  # another pool is a `System`'s
        return "run_in_thread" if texts[:1] == [None] else ""
    if method == "replace" and len(texts) == 1 and not call.keywords and name != "msgspec.structs.replace":
        return "replace"  # of a path: texts have two arguments
    return METHODS_OF_THE_SYSTEM.get(method, "")


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


def is_simulated(module: str) -> bool:
    """Whether ``lockstep.<module>`` gets a `System`."""
    return any(module == each or module.startswith(f"{each}.") for each in SIMULATED)


def test_everything_pure_exists() -> None:
    names = {module_name(path).removeprefix("lockstep.") for path in MODULES}
    assert set(PURE) <= names


def test_time_threads_processes_and_written_files_come_from_a_system() -> None:
    def faults(path: Path) -> Iterator[str]:
        facts = facts_of(path)
        yield from (f"{relative(path)}:{line}: use {method} of a `System`" for method, line in facts.system_calls)
        for name, line in facts.imports:
            if method := method_instead(name):
                yield f"{relative(path)}:{line}: use {method} of a `System`"

    found = {name: [*faults(path)] for path in MODULES if is_simulated(name := module_name(path)[len("lockstep.") :])}
    refuse(fault for name, each in found.items() if name not in USES_THE_SYSTEM for fault in each)
    assert all(found[name] for name in USES_THE_SYSTEM), "an exception that nothing needs"


@pytest.mark.parametrize(
    ("code", "is_refused"),
    [
        ("open(path, 'w')", True),
        ("open(path, mode='r+')", True),
        ("FileIO(path, 'xb')", True),
        ("path.open('ab')", True),
        ("path.open('rb')", False),
        ("system.open(path, 'xb')", False),
        ("os.open(path, flags)", True),
        ("os.open(path, os.O_RDONLY)", False),
        ("partial.replace(path)", True),
        ("text.replace('a', 'b')", False),
        ("loop.run_in_executor(None, work)", True),
        ("loop.run_in_executor(pool, work)", False),
        ("SYSTEM.sleep(1.0)", True),
        ("Mailbox(clock=time.monotonic)", True),
        ("subprocess.run(command)", True),
    ],
)
def test_calls_that_go_around_a_system_are_found(code: str, is_refused: bool) -> None:
    nodes = [*ast.walk(ast.parse(code))]
    found = [method_instead_of_call(each) for each in nodes if isinstance(each, ast.Call)]
    found += [method_instead(dotted(each)) for each in nodes if isinstance(each, ast.Attribute)]
    assert any(found) == is_refused


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
