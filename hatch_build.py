"""Build of the compiled parts: the native executor's library, and the modules of the core that mypyc compiles.

    python hatch_build.py               the library, in the source tree, as an editable installation has it
    python hatch_build.py build/compiled    a copy of the package there, with the library and the compiled modules

A wheel has both. Modules are never compiled beside their sources, where an old one would stand for an edited file.
Without a compiler one line says so for each part that is not built. Without the library no model can be loaded but
stubs; the core is interpreted then. ``LOCKSTEP_PURE=1`` in the environment asks for neither part.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from contextlib import chdir
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

X86 = ("x86_64", "amd64")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wall")
"""No contraction and no fast arithmetic: each operation rounds as the source says, on every processor."""
AVX2 = ("-mavx2", "-mfma", "-mf16c")
NATIVE = Path("src/lockstep/executors/native")
NATIVE_LIBRARY = "liblockstep_native.so"
ZIGLANG = "ziglang>=0.15"
ZIG = (sys.executable, "-m", "ziglang", "c++", "-target", "x86_64-linux-gnu.2.28", "-mcpu=x86_64")
"""The compiler of PyPI's `ziglang`, for the least processor: by itself it compiles for the one that it runs on."""
NATIVE_FLAGS = (*FLAGS, "-fno-trapping-math", "-pthread")
"""Results never depend on floating-point exceptions, which nothing enables: compilers may vectorise comparisons."""
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni", "-mprefer-vector-width=512")
_QUIET = ("-Wno-maybe-uninitialized", "-Wno-unknown-warning-option")  # of g++'s own headers; clang has no such warning
ISA_FLAGS = {"avx2": AVX2, "avx512": (*AVX2, *_AVX512, *_QUIET)}
"""By the end of a native source's name; all others are compiled for the least processor."""

PACKAGE = Path("src/lockstep")
MODULES = (
    *("core/blocks", "core/decode_run", "core/decode_shares", "core/fingerprint", "core/kv", "core/planner"),
    *("core/prefix", "core/queue", "core/scheduler", "core/sequence", "core/step_builder"),
    *("replay/cache_oracle", "replay/cost", "replay/progress", "replay/simulator"),
)
"""Modules that mypyc compiles: what decides. Modules of values stay as they are: mypyc's dataclasses refuse `Final`
fields, build instances no faster, and have no ``__slots__`` to ask for."""
TYPES_FROM = ("core", "errors.py", "replay/__init__.py", "replay/timeline.py", "replay/workload.py")
"""Sources that those are checked against: less than the package, which takes mypy a minute."""
MYPY_OPTIONS = ("--config-file=", "--python-version=3.11")
GROUP = "lockstep"
"""The module ``lockstep__mypyc`` has all code; each compiled module beside its source only leads there."""


class CustomBuildHook(BuildHookInterface[Any]):
    """Hatchling's hook: an editable installation gets the library among its sources, a wheel a copy of all parts."""

    def dependencies(self) -> list[str]:
        """A compiler, where the machine has none."""
        return [] if os.environ.get("LOCKSTEP_PURE") or shutil.which(cpp_compiler()[0]) else [ZIGLANG]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if version == "editable":
            build_native(root, root / NATIVE / NATIVE_LIBRARY, self.app.display_warning)
            return
        folder, warn = Path(tempfile.mkdtemp()), self.app.display_warning
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        place = NATIVE / NATIVE_LIBRARY
        if build_native(root, folder / place.name, warn):
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
            build_data["force_include"][str(folder / place.name)] = str(place.relative_to("src"))
        compiled = build_core(root, folder / "core", warn)
        if compiled:
            python = f"cp{sys.version_info.major}{sys.version_info.minor}"
            build_data["pure_python"] = False
            build_data["tag"] = f"{python}-{python}-{platform}"
            build_data["force_include"].update({str(folder / "core" / name): name for name in compiled})


def build_native(root: Path, target: Path, warn: Callable[[str], object]) -> bool:
    """Compile and link the native executor's kernels; whether the library is there now.

    Raises:
        subprocess.CalledProcessError: a compiler that is there did not compile it.
    """
    target.unlink(missing_ok=True)
    reason = _obstacle_to_compiling()
    if reason is not None:
        warn(f"the native library is not built ({reason}), without which no model but a stub can be loaded")
        return False
    with tempfile.TemporaryDirectory() as folder:
        commands = {}
        for source in sorted((root / NATIVE / "cpp").glob("*.cpp")):
            place = str(Path(folder) / f"{source.stem}.o")
            commands[place] = [*cpp_compiler(), *native_flags(source), "-c", str(source), "-o", place]
        objects = _run_all(commands)
        strip = ("-s",) if sys.platform.startswith("linux") else ()
        subprocess.run([*cpp_compiler(), "-shared", *strip, "-pthread", *objects, "-o", str(target)], check=True)
    return True


def native_flags(source: Path) -> tuple[str, ...]:
    """Flags of one native source."""
    is_x86 = os.uname().machine.lower() in X86
    return (*NATIVE_FLAGS, *(ISA_FLAGS.get(source.stem.rpartition("_")[2], ()) if is_x86 else ()))


def build_core(root: Path, target: Path, warn: Callable[[str], object]) -> list[str]:
    """Compile the modules into a folder; their paths in it, none where nothing can be built here.

    Raises:
        subprocess.CalledProcessError: a compiler that is there did not compile it.
    """
    reason = _obstacle_to_core()
    if reason is not None:
        warn(f"the core is not compiled ({reason}); it will be interpreted")
        return []
    from mypyc.build import mypycify

    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    with tempfile.TemporaryDirectory() as folder, chdir(folder):  # mypyc names modules by their paths from here
        _copy_sources(root / PACKAGE, Path("lockstep"))
        sources = [f"lockstep/{name}.py" for name in MODULES]
        commands = {}
        for extension in mypycify([*MYPY_OPTIONS, *sources], group_name=GROUP, target_dir="build"):
            name = extension.name.replace(".", "/") + suffix
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            includes = [f"-I{path}" for path in (sysconfig.get_path("include"), *extension.include_dirs)]
            flags = ("-shared", "-fPIC", "-O2", "-fwrapv", "-DNDEBUG", "-s", *includes)
            commands[name] = [_c_compiler(), *flags, *extension.sources, "-o", str(place)]
        return _run_all(commands)


def build_copy(root: Path, target: Path) -> bool:
    """Copy the package to a folder and compile all parts there; whether the core is compiled."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(root / PACKAGE, target / "lockstep", ignore=shutil.ignore_patterns("__pycache__"))
    if not (root / NATIVE / NATIVE_LIBRARY).exists():
        build_native(root, target / NATIVE.relative_to("src") / NATIVE_LIBRARY, print)
    return bool(build_core(root, target, print))


def _copy_sources(package: Path, target: Path) -> None:
    """Copy the modules and their types, in a package of their own: the real one's ``__init__`` leads to all others."""
    for name in (*TYPES_FROM, *(f"{name}.py" for name in MODULES)):
        place = target / name
        if (package / name).is_dir():
            shutil.copytree(package / name, place)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(package / name, place)
    (target / "__init__.py").touch()


def _run_all(commands: Mapping[str, list[str]]) -> list[str]:
    """Run commands at the same time; the names of what they make."""
    jobs = [subprocess.Popen(command) for command in commands.values()]
    for job in jobs:
        if job.wait():
            raise subprocess.CalledProcessError(job.returncode, job.args)
    return list(commands)


def _obstacle_to_core() -> str | None:
    if os.environ.get("LOCKSTEP_PURE"):
        return "LOCKSTEP_PURE is set"
    if not sys.platform.startswith("linux"):
        return f"it is compiled on Linux only, not on {sys.platform}"
    if shutil.which(_c_compiler()) is None:
        return f"there is no C compiler {_c_compiler()!r}; on Debian: apt install gcc"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "the headers of Python are missing; on Debian: apt install python3-dev"
    for name in ("mypyc", "setuptools"):
        if find_spec(name) is None:
            return f"{name} is not installed"
    return None


def _obstacle_to_compiling() -> str | None:
    if os.environ.get("LOCKSTEP_PURE"):
        return "LOCKSTEP_PURE is set"
    if shutil.which(cpp_compiler()[0]) is None:
        return f"there is no C++ compiler {cpp_compiler()[0]!r}; on Debian: apt install g++, or pip install ziglang"
    return None


def cpp_compiler() -> tuple[str, ...]:
    """The C++ compiler and its first arguments: that of ``CXX``, else the first of the usual ones, else Zig's."""
    if given := os.environ.get("CXX"):
        return (given,)
    found = next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), None)
    if found is None and find_spec("ziglang") is not None:
        return ZIG
    return (found or "g++",)


def _c_compiler() -> str:
    return os.environ.get("CC", "gcc")


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    if len(sys.argv) > 1:
        sys.exit(not build_copy(here, Path(sys.argv[1]).resolve()))
    build_native(here, here / NATIVE / NATIVE_LIBRARY, print)
