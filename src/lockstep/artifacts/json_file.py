"""A JSON object on disk: bounded in size, every failure named with its file."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.artifacts.metadata import Metadata, without_nulls
from lockstep.errors import ArtifactNotFoundError, CorruptArtifactError

_MAX_BYTES = 64 << 20
"""The largest tokenizer files are some 35 MB."""


def read_json(path: Path) -> Metadata:
    """The object in a file, without its nulls.

    Raises:
        ArtifactNotFoundError: the file cannot be read.
        CorruptArtifactError: not JSON, not an object, or too large.
    """
    return Metadata(path, without_nulls(parse_object(read_bytes(path), path)))


def read_optional_json(path: Path) -> Metadata:
    """As `read_json`; an absent file is an empty object."""
    return read_json(path) if path.exists() else Metadata(path, {})


def read_bytes(path: Path) -> bytes:
    """A whole small file."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ArtifactNotFoundError(f"cannot be read ({error.strerror})", path=path) from error
    if len(content) > _MAX_BYTES:
        raise CorruptArtifactError(f"over {_MAX_BYTES} bytes; not what a file of this kind holds", path=path)
    return content


def parse_object(content: bytes, path: Path) -> dict[str, object]:
    """Parse a JSON object in which no key appears twice."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key appears twice")
        return found

    try:
        value = json.loads(content, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CorruptArtifactError(f"is not valid JSON ({error})", path=path) from error
    if not isinstance(value, dict):
        raise CorruptArtifactError(f"holds a JSON {type(value).__name__}; an object is expected", path=path)
    return value
