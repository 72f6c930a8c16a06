"""The help of every verb is what users know, and every manifest's fault has the text that they know."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

import lockstep
from lockstep.cli.main import VERBS, app, command_of
from lockstep.cluster.manifest_file import parse
from lockstep.errors import ManifestError
from tests.cluster.faulty_forms import BASE, SHAPE, VALUES
from tests.cluster.faulty_names import NAMES, REMOTE
from tests.surface.held import hold

WIDTH = 100


def test_every_verb_has_the_help_that_users_know(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LOCKSTEP_")]:
        if not name.startswith("LOCKSTEP_WRITE"):
            monkeypatch.delenv(name)
    told: list[str] = []
    for verb in _verbs():
        result = CliRunner().invoke(app, [*verb, "--help"], prog_name="lockstep", terminal_width=WIDTH, color=False)
        assert result.exit_code == 0, result.output
        told += [f"==== {' '.join(('lockstep', *verb))}", *map(str.rstrip, result.output.splitlines())]
    hold("help.txt", told)


def test_faults_of_manifests_have_the_texts_that_users_know() -> None:
    told: list[str] = []
    for name, (old, new, *_) in {**SHAPE, **VALUES, **NAMES, **REMOTE}.items():
        with pytest.raises(ManifestError) as caught:
            parse(BASE.replace(old, new))
        told += [name, *(f"  {problem}" for problem in caught.value.problems)]
    hold("manifest_faults.txt", told)


def test_the_package_has_the_names_that_users_import() -> None:
    hold("names.txt", lockstep.__all__)


def _verbs() -> Iterator[tuple[str, ...]]:
    """Every command of the tree by its words, the root's first."""
    yield ()
    for name in VERBS:
        yield (name,)
        for inner in getattr(command_of(name), "commands", {}):
            yield name, inner
