"""Manifests as files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.cluster.manifest import Manifest


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file; it may refer to this process's environment.

    Raises:
        UsageError: the file cannot be read.
        ManifestError: it has faults.
    """
    from lockstep.cluster.manifest_file import parse

    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--manifest {path} cannot be read ({error}); a YAML file in UTF-8 is expected") from error
    return parse(text, str(path), environment=os.environ)
