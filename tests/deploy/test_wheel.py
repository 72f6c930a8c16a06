"""Wheels of a clean checkout: they install where there is no compiler, and answer there.

Nothing is fetched but by one test: what the packages depend on comes from the environment of the tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.waiting import HANG_S

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore", "src")
LIBRARY = "lockstep/executors/native/liblockstep_native.so"
SYSTEM = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
"""Libraries that every manylinux machine has."""

pytestmark = [
    pytest.mark.slow,  # two minutes: library and core are compiled once more
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the compiled parts are built on Linux only"),
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of a package without what was built among them."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


class Installed:
    """A wheel, in an environment of its own that has no compiler."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.wheel = wheel
        subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True, timeout=HANG_S)
        self.bin = folder / "env" / "bin"
        place = subprocess.check_output(
            [self.bin / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        )
        # A directory named in a .pth file is searched, but its own .pth files are not read: editable sources stay out.
        (Path(place.strip()) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
        self.variables = {
            "PATH": str(self.bin),
            "HOME": str(folder),
            "CXX": "no-compiler-here",
            "LOCKSTEP_CACHE_DIR": str(folder / "cache"),
        }
        self.do("python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel))

    def do(self, program: str, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [self.bin / program, *words],
            env=self.variables,
            cwd=self.bin,  # the checkout is no place to import from
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        assert done.returncode == code, done.stderr
        return done

    def facts(self) -> dict[str, str]:
        """What it says of itself in `lockstep collect-env`."""
        section: dict[str, str] = json.loads(self.do("lockstep", "collect-env", "--json").stdout)["lockstep"]
        return section


def build(checkout: Path, folder: Path, **variables: str) -> tuple[Path, str]:
    """Build a wheel; where it is, and what was said."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=checkout,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=2 * HANG_S,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel, done.stdout + done.stderr


@pytest.fixture(scope="module")
def binary(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no C++ compiler to build a wheel with")
    wheel, _ = build(checkout, tmp_path_factory.mktemp("dist"))
    return Installed(wheel, tmp_path_factory.mktemp("binary"))


@pytest.fixture(scope="module")
def pure(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    wheel, said = build(checkout, tmp_path_factory.mktemp("dist"), LOCKSTEP_PURE="1")
    assert said.count("LOCKSTEP_PURE is set") == 2, "a line for each part"
    return Installed(wheel, tmp_path_factory.mktemp("pure"))


def test_a_binary_wheel_answers_without_a_compiler(binary: Installed) -> None:
    assert re.fullmatch(r"[\w, ]+; bits version \d+", binary.facts()["kernels"])
    done = binary.do("lockstep", "run", "pocket://", "-p", "Hello", "--max-tokens", "8", "--ignore-eos", "--json")
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 8


def test_a_pure_wheel_loads_stubs_and_names_what_models_lack(pure: Installed) -> None:
    assert pure.wheel.name.endswith("-py3-none-any.whl")
    assert pure.facts()["kernels"].startswith("none: the native library was not built")
    assert pure.do("lockstep", "run", "stub://a", "-p", "Hello").stdout
    done = pure.do("lockstep", "run", "pocket://", "-p", "Hello", code=2)
    assert "no model can be loaded: the native library was not built" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_empty_environment_gets_all_that_a_wheel_needs_and_shows_the_demo(binary: Installed, tmp_path: Path) -> None:
    """By `pip install` as a user types it, from the package index that is set up here."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True, timeout=HANG_S)
    programs = tmp_path / "env" / "bin"
    variables = {**os.environ, "PYTHONPATH": "", "HOME": str(tmp_path), "LOCKSTEP_CACHE_DIR": str(tmp_path / "cache")}
    for command in (
        ("python", "-m", "pip", "install", "--quiet", str(binary.wheel)),
        ("python", "-m", "pip", "check"),
        ("lockstep", "demo"),
    ):
        done = subprocess.run(
            [programs / command[0], *command[1:]],
            env=variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=2 * HANG_S,
        )
        assert done.returncode == 0, done.stderr
    assert "the gate: this server against itself\npromote: " in done.stdout


@pytest.mark.skipif(shutil.which("uvx") is None, reason="uv is not installed")
def test_the_first_command_of_the_readme_shows_the_demo(binary: Installed, tmp_path: Path) -> None:
    """As it stands there, with the wheel in the place of one that the index has."""
    [command] = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("uvx ")]
    variables = {**os.environ, "UV_FIND_LINKS": str(binary.wheel.parent), "LOCKSTEP_CACHE_DIR": str(tmp_path / "cache")}
    words = command.partition("#")[0].split()
    done = subprocess.run(
        [words[0], "--python", sys.executable, *words[1:]],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=2 * HANG_S,
    )
    assert done.returncode == 0, done.stderr
    assert "the gate: this server against itself\npromote: " in done.stdout


def test_sources_without_a_compiler_say_one_line_and_give_the_pure_wheel(checkout: Path, tmp_path: Path) -> None:
    wheel, said = build(checkout, tmp_path, CXX="no-compiler-here", CC="no-compiler-here")
    assert wheel.name.endswith("-py3-none-any.whl")
    native, core = [line for line in said.splitlines() if "no-compiler-here" in line]
    assert "there is no C++ compiler 'no-compiler-here'; on Debian: apt install g++, or pip install ziglang" in native
    assert "without which no model but a stub can be loaded" in native
    assert "the core is not compiled (there is no C compiler 'no-compiler-here'; on Debian: apt install gcc)" in core


@pytest.mark.parametrize("kind", ["binary", "pure"])
def test_a_wheel_has_the_files_of_the_package_and_no_sources_of_the_library(
    kind: str, request: pytest.FixtureRequest
) -> None:
    installed: Installed = request.getfixturevalue(kind)
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    expected = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and path.suffix not in {".so", ".pyc", ".cpp", ".hpp"}
    }
    assert expected <= names
    assert not any(name.endswith((".cpp", ".hpp", ".pyc", ".o")) for name in names)
    is_binary = kind == "binary"
    assert (LIBRARY in names) == is_binary
    assert any(re.fullmatch(r"lockstep/core/scheduler\..+\.so", name) for name in names) == is_binary


def test_compiled_and_interpreted_replays_have_the_same_bytes(binary: Installed, pure: Installed) -> None:
    assert binary.facts()["core"] == "compiled"
    assert pure.facts()["core"] == "interpreted"
    workload = str(ROOT / "examples" / "workload_pressure.json")
    reports = [each.do("lockstep", "replay", workload, "--json").stdout for each in (binary, pure)]
    assert reports[0] == reports[1]
    assert "fingerprint" in reports[0]


@pytest.mark.skipif(shutil.which("readelf") is None, reason="there is no readelf")
def test_the_library_needs_what_every_machine_has(binary: Installed, tmp_path: Path) -> None:
    library = zipfile.ZipFile(binary.wheel).extract(LIBRARY, tmp_path)
    shown = subprocess.check_output(["readelf", "-d", library], text=True, env={**os.environ, "LC_ALL": "C"})
    assert set(re.findall(r"\(NEEDED\).*\[(.+)\]", shown)) <= SYSTEM
    assert "RPATH" not in shown
    assert "RUNPATH" not in shown
