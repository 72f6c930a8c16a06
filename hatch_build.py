"""Build of the compiled part, the attention operator's library: where its sources are, or into a wheel.

    python hatch_build.py

builds in the source tree, as an editable installation does. Without a C++ compiler, or on another system than Linux,
it says so in one line and builds nothing: everything works without the library, on OpenVINO's own operator.
``LOCKSTEP_PURE=1`` in the environment asks for that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

OPS = Path("src/lockstep/executors/openvino/ops")
LIBRARY = "liblockstep_ops.so"
X86 = ("x86_64", "amd64")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wall")
"""No contraction and no fast arithmetic: each operation rounds as the source says, on every processor."""
AVX2 = ("-mavx2", "-mfma", "-mf16c")
KERNEL_FLAGS = {
    "kernel_avx2.cpp": AVX2,
    "kernel_avx512.cpp": (*AVX2, "-mavx512f", "-mprefer-vector-width=512", "-Wno-maybe-uninitialized"),
}
"""Only these sources are compiled for more than the least processor; the library chooses among them when it runs."""


class CustomBuildHook(BuildHookInterface[Any]):
    """Hatchling's hook: an editable installation gets the library among its sources, a wheel a copy and a platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if version == "editable":
            build(root, root / OPS / LIBRARY, self.app.display_warning)
            return
        target = Path(tempfile.mkdtemp()) / LIBRARY
        if build(root, target, self.app.display_warning):
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
            build_data["force_include"][str(target)] = str((OPS / LIBRARY).relative_to("src"))


def build(root: Path, target: Path, warn: Callable[[str], object]) -> bool:
    """Compile and link the library; whether it is there now.

    Raises:
        subprocess.CalledProcessError: a compiler that is there did not compile it.
    """
    target.unlink(missing_ok=True)  # an old one would stand for sources that it was not made of
    reason = _obstacle()
    if reason is not None:
        warn(f"the attention operator is not built ({reason}); OpenVINO's own will be used")
        return False
    package = openvino_package()
    libraries = [next((package / "libs").glob(pattern)) for pattern in ("libopenvino.so.*", "libtbb.so.*")]
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for source in sorted((root / OPS).glob("*.cpp")):
            place = Path(folder) / f"{source.stem}.o"
            flags = (*FLAGS, *_kernel_flags(source.name), "-isystem", str(package / "include"))
            jobs.append((place, subprocess.Popen([_compiler(), *flags, "-c", str(source), "-o", str(place)])))
        for _, job in jobs:
            if job.wait():
                raise subprocess.CalledProcessError(job.returncode, job.args)
        objects = [str(place) for place, _ in jobs]
        # Both libraries are in every process that has imported OpenVINO, so no path to them is written down.
        subprocess.run([_compiler(), "-shared", "-s", *objects, *map(str, libraries), "-o", str(target)], check=True)
    return True


def _obstacle() -> str | None:
    """Reason why nothing can be built here."""
    if os.environ.get("LOCKSTEP_PURE"):
        return "LOCKSTEP_PURE is set"
    if not sys.platform.startswith("linux"):
        return f"it is built on Linux only, not on {sys.platform}"
    if shutil.which(_compiler()) is None:
        return f"there is no C++ compiler {_compiler()!r}; on Debian: apt install g++"
    if find_spec("openvino") is None:
        return "the package openvino, whose headers it needs, is not installed"
    return None


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def openvino_package() -> Path:
    """Folder of the installed OpenVINO, with its headers and libraries; found without importing it."""
    spec = find_spec("openvino")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def _kernel_flags(name: str) -> tuple[str, ...]:
    return KERNEL_FLAGS.get(name, ()) if os.uname().machine.lower() in X86 else ()


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    build(here, here / OPS / LIBRARY, print)
