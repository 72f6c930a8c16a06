"""Manifests as files: their bytes as text, bounded before they are read."""

from __future__ import annotations

from pathlib import Path

from lockstep.cluster.manifest_nodes import MAX_MANIFEST_BYTES
from lockstep.errors import UsageError

_RIGHT = "a YAML file in UTF-8 is expected"


def read_text(path: Path) -> str:
    """The text of a file; of one that is larger than any manifest, as much as shows that it is.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        with path.expanduser().open("rb") as file:
            return text_of(file.read(MAX_MANIFEST_BYTES + 1), str(path))
    except OSError as error:
        raise UsageError(f"the manifest {path} cannot be read ({error}); {_RIGHT}") from error


def text_of(data: bytes, name: str) -> str:
    """The text in what was read from ``name``; UsageError where it is none."""
    errors = "replace" if len(data) > MAX_MANIFEST_BYTES else "strict"  # cut anywhere, and refused for its size
    try:
        return data.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise UsageError(f"the manifest {name} cannot be read ({error}); {_RIGHT}") from error
