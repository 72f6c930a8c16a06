"""Manifests as files and on standard input, with this process's environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from lockstep.cluster.backend import Backend, OneModel
    from lockstep.cluster.manifest import Manifest

STANDARD_INPUT = "standard input"
"""What it is called in errors."""
BackendName = Annotated[
    str | None,
    typer.Option(
        metavar="auto|stub|pocket|SOURCE",
        help="Of a manifest's models: their own sources; stubs without files; the embedded model; or one model behind "
        "every name (a path, hf://, pocket://, stub://).",
        show_default="auto",
    ),
]


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file; it may refer to this process's environment.

    Raises:
        UsageError: the file cannot be read.
        ManifestError: it has faults.
    """
    from lockstep.cluster.manifest_disk import read_text
    from lockstep.cluster.manifest_file import parse

    return parse(read_text(path), str(path), environment=os.environ)


def read_standard_input() -> Manifest:
    """As `read_manifest`, from a pipe."""
    from lockstep.cluster.manifest_disk import text_of
    from lockstep.cluster.manifest_file import parse
    from lockstep.cluster.manifest_nodes import MAX_MANIFEST_BYTES

    text = text_of(sys.stdin.buffer.read(MAX_MANIFEST_BYTES + 1), STANDARD_INPUT)
    return parse(text, STANDARD_INPUT, environment=os.environ)


def backend_of(name: str | None) -> Backend | OneModel:
    """What --backend means; UsageError says what it could be."""
    from lockstep.cluster.backend import POCKET, Backend, OneModel
    from lockstep.cluster.manifest_keys import check_source
    from lockstep.cluster.manifest_nodes import did_you_mean

    names = [each.value for each in Backend]
    if name is None or name in names:
        return Backend(name or "auto")
    if name == POCKET:
        return Backend.POCKET
    try:
        check_source(name)
    except ConfigError as error:
        raise UsageError(f"--backend {error}") from None
    is_path = os.path.dirname(name) or name.endswith(".gguf") or Path(name).expanduser().exists()
    if "://" not in name and not is_path:
        known = (
            f"it must be {', '.join(names)} or the source of one model (a path, hf://org/name, pocket://, stub://NAME)"
        )
        raise UsageError(f"--backend is {name!r}; {'; '.join(filter(None, (known, did_you_mean(name, names))))}")
    return OneModel(name)
