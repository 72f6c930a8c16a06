"""Compiles what decides with mypyc: the build hook behind `LOCKSTEP_COMPILE=1 pip install` (docs/compiled.md).

The modules stay as they are and lie beside their machine code in the wheel; Python takes the latter. What they import of
us is compiled too, or is in `INTERPRETED`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SWITCH = "LOCKSTEP_COMPILE"
"""Of the environment; 1: compile."""
COMPILER = ("mypy[mypyc]>=2.4,<3", "setuptools>=77")
PACKAGE = Path("src") / "lockstep"
COMPILED = (
    "core/*.py",
    "replay/contents.py",
    "replay/cost.py",
    "replay/progress.py",
    "replay/simulator.py",
    "replay/timeline.py",
    "replay/totals.py",
    "replay/workload.py",
)
INTERPRETED = ("errors.py", "core/checkpoint.py")
"""Seen by the compiler for their types, but left as they are: exceptions, and what looks into objects by name."""
SUBCLASSED = ("core/scheduler.py", "class Scheduler:")
"""Interpreted classes extend it, which a compiled class has to allow."""


def stage(root: Path, folder: Path) -> list[str]:
    """Copy what is compiled and what that imports; returns the files to compile, relative to the folder."""
    package = root / PACKAGE
    files = sorted(path for pattern in COMPILED for path in package.glob(pattern))
    for path in (*files, *(package / name for name in INTERPRETED)):
        copy = folder / "lockstep" / path.relative_to(package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    for room in ("", "core", "replay"):
        (folder / "lockstep" / room / "__init__.py").write_text("")
    name, line = SUBCLASSED
    opened = folder / "lockstep" / name
    before, after = opened.read_text().split(f"\n{line}\n")
    opened.write_text(
        f"{before}\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from mypy_extensions import mypyc_attr\n"
        f"@mypyc_attr(allow_interpreted_subclasses=True)\n{line}\n{after}"
    )
    plan = folder / "lockstep/core/step.py"
    import re

    plan.write_text(re.sub(r"Final\[(.*)\]( = .*)?$", r"\1\2", plan.read_text(), flags=re.M))
    skipped = {package / name for name in INTERPRETED}
    names = [path.relative_to(package) for path in files if path not in skipped and path.name != "__init__.py"]
    return [str(Path("lockstep") / name) for name in names]


def compile_into(root: Path, folder: Path) -> list[Path]:
    """Compile into an empty folder; returns the libraries, which lie where the wheel has them."""
    files = stage(root, folder)
    subprocess.run([sys.executable, "-m", "mypyc", "--config-file=", *files], cwd=folder, check=True)
    shutil.rmtree(folder / "build")
    return sorted(path for path in folder.rglob("*") if path.suffix in (".so", ".pyd"))


class CompilingHook(BuildHookInterface):
    """Adds the libraries to a wheel where the switch is set; an editable installation is never compiled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._folder: Path | None = None

    @property
    def _is_wanted(self) -> bool:
        return self.target_name == "wheel" and os.environ.get(SWITCH) == "1"

    def dependencies(self) -> list[str]:
        """What the build needs beside hatchling."""
        return list(COMPILER) if self._is_wanted else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is packed."""
        if not self._is_wanted or version == "editable":
            return
        self._folder = Path(tempfile.mkdtemp(prefix="lockstep-compile-"))
        libraries = compile_into(Path(self.root), self._folder)
        build_data["force_include"].update({str(path): str(path.relative_to(self._folder)) for path in libraries})
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The wheel is packed."""
        if self._folder is not None:
            shutil.rmtree(self._folder)
