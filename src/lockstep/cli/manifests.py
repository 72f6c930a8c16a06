"""Manifests as files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.cluster.manifest import Manifest

_RIGHT = "a YAML file in UTF-8 is expected"


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file; it may refer to this process's environment.

    Raises:
        UsageError: the file cannot be read.
        ManifestError: it has faults.
    """
    from lockstep.cluster.manifest_nodes import MAX_MANIFEST_BYTES

    try:
        with path.expanduser().open("rb") as file:
            return manifest_of(file.read(MAX_MANIFEST_BYTES + 1), str(path))
    except OSError as error:
        raise UsageError(f"the manifest {path} cannot be read ({error}); {_RIGHT}") from error


def manifest_of(data: bytes, name: str) -> Manifest:
    """The manifest in what was read from ``name``; otherwise as `read_manifest`."""
    from lockstep.cluster.manifest_file import parse
    from lockstep.cluster.manifest_nodes import MAX_MANIFEST_BYTES

    errors = "replace" if len(data) > MAX_MANIFEST_BYTES else "strict"  # cut anywhere, and refused for its size
    try:
        text = data.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise UsageError(f"the manifest {name} cannot be read ({error}); {_RIGHT}") from error
    return parse(text, name, environment=os.environ)
