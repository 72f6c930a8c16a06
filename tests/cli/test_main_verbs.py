"""The command line imports what the chosen verb needs, and its table of verbs says what the verbs themselves say."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from lockstep.cli.main import VERBS, command_of

HEAVY = {
    "fastapi",
    "huggingface_hub",
    "jinja2",
    "llguidance",
    "numpy",
    "rich",
    "tokenizers",
    "uvicorn",
    "yaml",
}
"""Libraries that take longer to import than a page of help takes to print."""
OPTIONS = {"cli", "core", "engine", "errors", "executors", "option_fields", "shown", "spelling", "version"}
"""Packages from which every verb's page may import: names, defaults and sentences of options."""
MORE = {"serve": {"server", "worker"}, "replay --serve": {"server", "worker"}, "bench": {"bench", "replay"}}
"""Further ones, for the same."""
RANGES = {"lockstep.artifacts", "lockstep.artifacts.generation_config", "lockstep.artifacts.task"}
"""Modules with the ranges of sampling parameters and the values of a flag."""
_PROGRAM = """
import contextlib, io, sys
from lockstep.cli.main import invoke
with contextlib.redirect_stdout(io.StringIO()):
    assert invoke(sys.argv[1:]) == 0
print(*sys.modules)
"""


def modules_of(*argv: str) -> set[str]:
    """Modules that a command line imports, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM, *argv], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("name", VERBS)
def test_the_line_of_a_verb_is_its_own_first_line(name: str) -> None:
    home, told = VERBS[name]
    command = command_of(name)
    said = inspect.getdoc(command.callback) or ""
    assert " ".join(said.split()) == told, home
    assert " ".join(command.help.split()) == told


def test_the_list_of_verbs_imports_none_of_them() -> None:
    modules = modules_of("--help")
    ours = {name for name in modules if name.startswith("lockstep.")}
    assert ours == {
        "lockstep.cli",
        "lockstep.cli.main",
        "lockstep.errors",
        "lockstep.version",
    }
    assert not modules & {*HEAVY, "pydantic", "msgspec"}


@pytest.mark.parametrize("name", VERBS)
def test_a_verbs_page_imports_only_its_own(name: str) -> None:
    modules = modules_of(name, "--help")
    rooms = {name.split(".")[1] for name in modules - RANGES if name.startswith("lockstep.")}
    assert rooms <= OPTIONS | MORE.get(name, set())
    assert not modules & HEAVY
    others = {home.partition(":")[0] for home, _ in VERBS.values()} - {VERBS[name][0].partition(":")[0]}
    shared = {"lockstep.cli.main", "lockstep.cli.manifests"}
    shared |= {"lockstep.cli.gate", "lockstep.cli.serve"}  # `gate serve` judges as `gate` does, `replay --serve` serves
    assert not modules & (others - shared), "no other verb's"
