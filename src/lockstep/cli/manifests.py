"""Manifests as files and on standard input, with this process's environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.cluster.manifest import Manifest

STANDARD_INPUT = "standard input"
"""What it is called in errors."""


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
