"""The public surface: explicit, sorted, importable, cheap to import."""

from __future__ import annotations

import subprocess
import sys

import lockstep

HEAVY = ("numpy", "llguidance", "tokenizers", "jinja2", "gguf", "typer", "rich", "pydantic")


def test_every_public_name_can_be_imported() -> None:
    assert all(getattr(lockstep, name) is not None for name in lockstep.__all__)


def test_the_surface_is_sorted_and_agrees_with_dir() -> None:
    assert sorted(lockstep.__all__) == dir(lockstep)
    assert len(set(lockstep.__all__)) == len(lockstep.__all__)


def test_importing_the_package_imports_nothing_heavy() -> None:
    """The wall time (< 150 ms) follows from what is not imported; a time would be a flaky test."""
    code = "import sys, lockstep; print(' '.join(m for m in sys.modules if '.' not in m))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not set(HEAVY) & set(loaded)


def test_public_things_are_documented() -> None:
    undocumented = [name for name in lockstep.__all__ if name[0] != "_" and not getattr(lockstep, name).__doc__]
    assert undocumented == []
