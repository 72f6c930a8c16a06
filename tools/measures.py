"""Measures of the codebase: counts lines, files, imports, import cycles, test shares and words, and sets ratchets.

`python -m tools.measures` prints the table (a few seconds; `make lint` runs it). ``--verbs`` adds the imports of each
verb; ``--trace`` adds the path of one streamed chat request (`tools.request_path`); ``--root`` measures another tree.
``--tighten`` lowers the ratchets of `tests/test_ratchets.py` to the current values; ``--map`` writes the map of files
into ARCHITECTURE.md.

Code lines exclude blank lines, comments and docstrings. Imports count at any position, also in functions and for type
checking.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tools.request_path import trace_request_path
from tools.shape import totals
from tools.words import denied_words

ROOT = Path(__file__).resolve().parent.parent
RATCHETS = Path("tests") / "ratchets.json"
SMALL_LINES = 60
INDIRECT = frozenset(["What", "Who", "Whom", "Whose", "Of", "How", "Where", "Whether", "When", "Why", "Which"])
"""First words of docstrings that depend on a neighbour, because they begin a clause and not a noun phrase or a
command."""
MAP_PAGE = "ARCHITECTURE.md"
MAP_BEGIN, MAP_END = "<!-- map: `make map` writes it -->", "<!-- end of the map -->"
_LEADING_COMMENT = re.compile(r"(?://[^\n]*\n)+")


@dataclass(frozen=True, slots=True)
class Module:
    """A Python file with the data read from it."""

    name: str
    path: Path
    num_lines: int
    num_code_lines: int
    imports: frozenset[tuple[str, str]]
    """Module and name of each import; the name "" is the module itself."""
    purpose: str
    """First sentence of the docstring."""
    indirect_docstrings: tuple[tuple[int, str], ...]
    """Line and first word of docstrings that depend on a neighbour."""

    @property
    def package(self) -> str:
        """Folder of the module in the package; for a module outside of folders, its file."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else "__init__"

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def is_small(self) -> bool:
        return not self.is_package and self.num_lines < SMALL_LINES


def read_module(name: str, path: Path) -> Module:
    """Parse a file once for all measures; the tree is not stored."""
    text = path.read_text()
    tree = ast.parse(text)
    lines = {
        number
        for number, line in enumerate(text.split("\n"), 1)
        if (stripped := line.strip()) and not stripped.startswith("#")
    }
    docstrings: set[int] = set()
    imports: set[tuple[str, str]] = set()
    indirect: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr):
            if node.end_lineno != node.lineno:
                lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, ast.Expr):
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                docstrings.update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, ast.Import):
            imports.update((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imports.update((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            word = (ast.get_docstring(node, clean=False) or "").split(maxsplit=1)[:1]
            if word and word[0] in INDIRECT:
                indirect.append((getattr(node, "lineno", 1), word[0]))
    first = (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")
    purpose = re.split(r"(?<=\.)\s", first)[0].rstrip(".")
    num_code_lines = len(lines - docstrings)
    return Module(name, path, text.count("\n"), num_code_lines, frozenset(imports), purpose, tuple(indirect))


@dataclass(frozen=True)
class Codebase:
    """The package and its tests in one tree."""

    root: Path

    @cached_property
    def modules(self) -> Mapping[str, Module]:
        """Modules by dotted name, sorted."""
        return _modules(self.root / "src", self.root / "src" / "lockstep")

    @cached_property
    def tests(self) -> Mapping[str, Module]:
        return _modules(self.root, self.root / "tests")

    @cached_property
    def imports(self) -> Mapping[str, frozenset[str]]:
        """Modules of the package that each module imports, without itself."""
        return {name: frozenset(_imported(module, self.modules)) - {name} for name, module in self.modules.items()}

    @cached_property
    def importers(self) -> Mapping[str, Sequence[str]]:
        found: dict[str, list[str]] = {name: [] for name in self.modules}
        for name, imported in self.imports.items():
            for each in imported:
                found[each].append(name)
        return found

    @cached_property
    def single_importer(self) -> list[str]:
        """Modules with exactly one importer, except `__init__` modules and entry points."""
        return [
            name
            for name, importers in self.importers.items()
            if len(importers) == 1 and not self.modules[name].is_package
        ]

    @property
    def repeated_names(self) -> list[str]:
        """File names in several packages."""
        packages: dict[str, set[str]] = {}
        for module in self.modules.values():
            if not module.is_package:
                packages.setdefault(module.path.name, set()).add(module.package)
        return sorted(name for name, having in packages.items() if len(having) > 1)

    @cached_property
    def packages(self) -> Sequence[str]:
        """Packages with code."""
        fronts = (module for module in self.modules.values() if module.is_package and module.name.count(".") == 1)
        return [module.package for module in fronts if self.num_code_lines(module.package) > SMALL_LINES]

    def of_package(self, package: str) -> list[Module]:
        return [module for module in self.modules.values() if module.package == package]

    def num_code_lines(self, package: str) -> int:
        return sum(module.num_code_lines for module in self.of_package(package))

    def num_test_lines(self, package: str) -> int:
        return sum(module.num_code_lines for module in self.tests.values() if module.package == package)

    @cached_property
    def circles(self) -> list[list[str]]:
        """Groups of modules that import one another: strongly connected components of the graph (Tarjan 1972)."""
        index: dict[str, int] = {}
        low: dict[str, int] = {}
        stack: list[str] = []
        found: list[list[str]] = []

        def visit(name: str) -> None:
            index[name] = low[name] = len(index)
            stack.append(name)
            for other in sorted(self.imports[name]):
                if other not in index:
                    visit(other)
                if other in stack:
                    low[name] = min(low[name], low[other])
            if low[name] == index[name]:
                part = stack[stack.index(name) :]
                del stack[stack.index(name) :]
                if len(part) > 1:
                    found.append(sorted(part))

        for name in self.modules:
            if name not in index:
                visit(name)
        return found

    @cached_property
    def indirect_docstrings(self) -> list[str]:
        return [
            f"{module.path.relative_to(self.root)}:{line}: {word} ..."
            for module in self.modules.values()
            for line, word in module.indirect_docstrings
        ]


def _modules(base: Path, folder: Path) -> dict[str, Module]:
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(base).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = read_module(name, path)
    return found


def _imported(module: Module, known: Mapping[str, Module]) -> Iterator[str]:
    """Imported modules of the package: the named one, or the module that contains the name."""
    for source, name in module.imports:
        inner = f"{source}.{name}"
        if inner in known or source in known:
            yield inner if inner in known else source


Values = dict[str, float]


def ratchets_of(codebase: Codebase) -> Values:
    """Measures that may only decrease; for a share of tests, the amount that is missing to the goal."""
    values: Values = {
        "code lines": sum(module.num_code_lines for module in codebase.modules.values()),
        "files": len(codebase.modules),
        f"files under {SMALL_LINES} lines": sum(module.is_small for module in codebase.modules.values()),
        "modules with one importer": len(codebase.single_importer),
        "file names in several packages": len(codebase.repeated_names),
        "circles": len(codebase.circles),
        "docstrings that depend on a neighbour": len(codebase.indirect_docstrings),
    }
    for package in codebase.packages:
        values[f"code lines of {package}"] = codebase.num_code_lines(package)
        values[f"test share of {package}"] = round(
            codebase.num_test_lines(package) / codebase.num_code_lines(package), 2
        )
    values |= totals(codebase.root)
    for place, words in denied_words(codebase.root).items():
        values[f"denied words of {place}"] = sum(words.values())
    return values


GROWS = "test share"
"""Prefix of ratchets that may only increase."""


def table(codebase: Codebase) -> Iterator[str]:
    """Measures of the codebase and of its packages, one line each."""
    header = ("package", "code", "files", f"<{SMALL_LINES}", "one importer", "tests", "tests:code")
    rows: list[tuple[object, ...]] = []
    for package in codebase.packages:
        own = codebase.of_package(package)
        tests, lines = codebase.num_test_lines(package), codebase.num_code_lines(package)
        small = sum(module.is_small for module in own)
        single = sum(codebase.modules[name].package == package for name in codebase.single_importer)
        rows.append((package, lines, len(own), small, single, tests, f"{tests / lines:.2f}"))
    values = ratchets_of(codebase)
    code, tests = int(values["code lines"]), sum(module.num_code_lines for module in codebase.tests.values())
    counts = [int(value) for name, value in values.items() if " of " not in name]
    rows.append(("all", code, *counts[1:4], tests, f"{tests / code:.2f}"))
    yield from _aligned([header, *rows])
    yield ""
    yield from (f"{name}: {int(values[name])}" for name in list(values)[4:7])
    yield from (f"  circle: {' '.join(circle)}" for circle in codebase.circles)


def _aligned(rows: Sequence[Sequence[object]]) -> Iterator[str]:
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = (str(cell).rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join((str(first).ljust(widths[0]), *cells))


COUNT_IMPORTS = """
import sys, time
began = time.perf_counter()
try:
    exec(sys.argv[1])
except SystemExit:
    pass
took_ms = 1000 * (time.perf_counter() - began)
print(sum(name.split('.')[0] == 'lockstep' for name in sys.modules), len(sys.modules), round(took_ms), file=sys.stderr)
"""
HELP = "import lockstep.cli.main; sys.argv[1:] = {words!r}; lockstep.cli.main.main()"
BEGINNINGS = {"import lockstep": "import lockstep", "lockstep --help": HELP.format(words=["--help"])}
"""Imports that every user waits for."""
Beginning = tuple[int, int, int]
"""Lockstep modules, all modules, and milliseconds."""


def imports_of(root: Path, with_verbs: bool = False) -> dict[str, Beginning]:
    """Imports of the commands that users start with, each measured in a separate process."""
    commands = dict(BEGINNINGS)
    if with_verbs:
        listed = _run(root, "import lockstep.cli.main as m, typer; print(*typer.main.get_command(m.app).commands)")
        commands |= {f"lockstep {verb} --help": HELP.format(words=[verb, "--help"]) for verb in listed.stdout.split()}
    found: dict[str, Beginning] = {}
    for name, code in commands.items():
        ours, modules, ms = map(int, _run(root, COUNT_IMPORTS, code).stderr.split()[-3:])
        found[name] = (ours, modules, ms)
    return found


def import_ratchets_of(root: Path) -> Values:
    return {f"Lockstep modules by {name}": ours for name, (ours, _, _) in imports_of(root).items()}


def _run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root / "src"), str(root)))}
    return subprocess.run(
        [sys.executable, "-c", *arguments], capture_output=True, text=True, check=True, env=environment
    )


def tighten(root: Path, values: Values) -> None:
    """Set ratchets to the current values, but never to a worse value."""
    path = root / RATCHETS
    held: Values = json.loads(path.read_text()) if path.exists() else {}
    for name, value in values.items():
        held[name] = better(name, value, held.get(name, value))
    path.write_text(json.dumps(held, indent=2) + "\n")


def better(name: str, value: float, other: float) -> float:
    return max(value, other) if name.startswith(GROWS) else min(value, other)


def map_lines(codebase: Codebase) -> Iterator[str]:
    """One line per file: its path and its purpose."""
    folder = None
    for module in sorted(codebase.modules.values(), key=lambda module: (module.path.parent, not module.is_package)):
        path = module.path.relative_to(codebase.root / "src" / "lockstep")
        if path.parent != folder:
            folder = path.parent
            title = "lockstep" if folder == Path() else folder.as_posix()
            yield f"\n**{title}/** {module.purpose if module.is_package else ''}".rstrip() + "\n"
        if not module.is_package:
            yield f"- `{path.name}`: {module.purpose}"
    yield from _native_lines(codebase.root)


def _native_lines(root: Path) -> Iterator[str]:
    """One line per C++ file that begins with a comment; the other files instantiate a header for a processor."""
    folder = root / "src" / "lockstep" / "executors" / "native" / "cpp"
    yield f"\n**{folder.relative_to(root / 'src' / 'lockstep').as_posix()}/** The forward pass in C++\n"
    for path in sorted(folder.glob("*.[ch]pp")):
        comment = _LEADING_COMMENT.match(path.read_text())
        if comment is not None:
            text = " ".join(comment[0].replace("//", " ").split())
            yield f"- `{path.name}`: {text.partition('. ')[0].rstrip('.')}"


def with_map(text: str, lines: Iterable[str]) -> str:
    """Document with the given map between its markers."""
    before, _, rest = text.partition(MAP_BEGIN)
    _, _, after = rest.partition(MAP_END)
    return f"{before}{MAP_BEGIN}\n" + "\n".join(lines) + f"\n\n{MAP_END}{after}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="tree to measure")
    parser.add_argument("--verbs", action="store_true", help="also print the imports of each verb")
    parser.add_argument("--trace", action="store_true", help="also print the path of one streamed chat request")
    parser.add_argument("--tighten", action="store_true", help="lower the ratchets to the current values")
    parser.add_argument("--map", action="store_true", help="write the map of files")
    parser.add_argument("--lists", action="store_true", help="also list the counted modules, docstrings and words")
    options = parser.parse_args(arguments)
    codebase = Codebase(options.root.resolve())
    if options.map:
        page = codebase.root / MAP_PAGE
        page.write_text(with_map(page.read_text(), map_lines(codebase)))
        return
    request_path = trace_request_path(codebase.root) if options.trace else None
    if options.tighten:
        tighten(
            codebase.root,
            ratchets_of(codebase)
            | import_ratchets_of(codebase.root)
            | ({} if request_path is None else request_path.figures),
        )
        return
    print("\n".join(table(codebase)))
    print(
        "\n".join(
            _aligned([("", "Lockstep modules", "modules", "ms"), *_rows(imports_of(codebase.root, options.verbs))])
        )
    )
    if options.lists:
        single = (f"{name}  (only {codebase.importers[name][0]})" for name in codebase.single_importer)
        small = (name for name, module in codebase.modules.items() if module.is_small)
        words = (
            f"{place}: " + ", ".join(f"{word} {count}" for word, count in found.most_common())
            for place, found in denied_words(codebase.root).items()
        )
        lists = (single, small, codebase.repeated_names, codebase.indirect_docstrings, words)
        print(*("\n".join(("", *each)) for each in lists), sep="\n")
    if request_path is not None:
        print("\n".join(request_path.lines()))


def _rows(imports: Mapping[str, Beginning]) -> Iterator[tuple[object, ...]]:
    return ((name, *counts) for name, counts in imports.items())


if __name__ == "__main__":
    main()
