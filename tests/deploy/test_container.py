"""The Dockerfile and the systemd unit name things that exist. Building an image needs a daemon; this does not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.waiting import HANG_S

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
UNIT = (DEPLOY / "lockstep.service").read_text()
COMPILER = "g++"
NOT_FLAGS = {"LOCKSTEP_MODEL"}
"""Read by the unit itself."""


def variables(text: str) -> set[str]:
    return set(re.findall(r"^\s*(?:ENV |Environment=)?(LOCKSTEP_[A-Z_]+)=", text, re.MULTILINE)) | set(
        re.findall(r"[= ](LOCKSTEP_[A-Z_]+)=", text)
    )


def copied() -> list[str]:
    """Sources of the COPY lines that read the build context."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
    return [source.rstrip("/") for line in lines for source in line.split()[:-1]]


def test_what_is_copied_exists_and_passes_the_ignore_file() -> None:
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert copied()
    for source in copied():
        assert (ROOT / source).exists(), source
        assert {f"!{source}", f"!{source}/"} & set(ignore), f"{source} is ignored"


@pytest.mark.parametrize("is_pure", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_package_builds_from_what_is_copied_alone(is_pure: bool, tmp_path: Path) -> None:
    """Its Python in a moment; its compiled parts, as the image has them, take minutes."""
    if not is_pure and shutil.which(COMPILER) is None:
        pytest.skip("there is no C++ compiler")
    source = tmp_path / "source"
    source.mkdir()
    for name in copied():
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(path, source / name)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    environment = {**os.environ, "LOCKSTEP_PURE": "1" if is_pure else ""}
    subprocess.run(build, cwd=source, env=environment, check=True, capture_output=True, timeout=3 * HANG_S)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"lockstep/cli/main.py", "lockstep/py.typed"} <= names
    assert any(name.startswith("lockstep/pocket/") and not name.endswith(".py") for name in names)
    libraries = sum(name.endswith(".so") for name in names)
    assert (libraries == 0) == is_pure == wheel.name.endswith("-none-any.whl")


def test_the_image_compiles_what_a_wheel_has_and_leaves_the_compiler_behind() -> None:
    """Without one the build would quietly give the wheel of Python alone, which the recipe refuses."""
    build, final = re.split(r"\n(?=FROM )", DOCKERFILE)[1:]
    installs = re.search(r"apt-get install [^\n]*", build)
    assert installs is not None
    assert COMPILER in installs[0].split(), "of Debian's packages this one brings gcc as well"
    assert build.index(installs[0]) < build.index("pip wheel")
    assert build.index("pip wheel") < build.index("test -z \"$(find /wheels -name '*-none-any.whl')\"")
    assert "LOCKSTEP_PURE" not in DOCKERFILE
    assert "apt-get" not in final
    assert "--from=build /opt/lockstep" in final


def test_every_package_of_the_image_has_a_hash() -> None:
    for name in re.findall(r"-r (requirements/\S+)", DOCKERFILE):
        assert "--hash=sha256:" in (ROOT / name).read_text()
    installs = re.findall(r"pip install (.+)$", DOCKERFILE, re.MULTILINE)
    assert installs
    assert all("--require-hashes" in line or "--no-index" in line for line in installs)


@pytest.mark.parametrize("name", ["Dockerfile", "lockstep.service", "lockstep.env.example"])
def test_every_variable_is_a_flag_of_serve(name: str, flag_variables: set[str]) -> None:
    named = variables((DEPLOY / name).read_text())
    assert named
    assert named - NOT_FLAGS <= flag_variables


def test_the_image_runs_unprivileged_and_checks_readiness() -> None:
    final = DOCKERFILE[DOCKERFILE.rindex("\nFROM") :]
    assert "\nUSER lockstep" in final
    assert final.index("\nUSER lockstep") < final.index("\nENTRYPOINT")
    assert "/health/ready" in final
    assert 'ENTRYPOINT ["lockstep", "serve"]' in final
    healthcheck = re.search(r'CMD \["python", "-c", "(.+)"\]$', final, re.MULTILINE)
    assert healthcheck is not None
    compile(healthcheck.group(1).replace('\\"', '"'), "healthcheck", "exec")


def test_the_service_gives_the_server_time_to_drain() -> None:
    stop_s = re.search(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    drain_s = re.search(
        r"^LOCKSTEP_SHUTDOWN_TIMEOUT=(\d+)$", (DEPLOY / "lockstep.env.example").read_text(), re.MULTILINE
    )
    assert stop_s is not None
    assert drain_s is not None
    assert int(stop_s.group(1)) > int(drain_s.group(1))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here to read its unit")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    """With a program that exists in the place of ours, which is not installed where the unit looks for it."""
    unit = tmp_path / "lockstep.service"
    unit.write_text(UNIT.replace("/opt/lockstep/bin/lockstep", "/bin/true"))
    command = ["systemd-analyze", "verify", str(unit)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (result.returncode, result.stderr) == (0, "")
