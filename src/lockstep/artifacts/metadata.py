"""Metadata of GGUF and JSON files: provides typed access to named values, with errors that name the file and the key.

JSON files are limited in size, and duplicate keys are rejected.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from lockstep.errors import ArtifactNotFoundError, CorruptArtifactError, UnsupportedArtifactError

_MAX_BYTES = 64 << 20
"""Maximum size of a JSON file. The largest tokenizer files have about 35 MB."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """Named values of a file. Each getter raises CorruptArtifactError, which names the file and the key."""

    path: Path
    values: Mapping[str, object] = field(repr=False)
    """Values by key. A callable in place of a value reads it on access, because vocabularies are long."""

    def corrupt(self, problem: str) -> CorruptArtifactError:
        """Create the error for an inconsistent file."""
        return CorruptArtifactError(problem, path=self.path)

    def unsupported(self, problem: str) -> UnsupportedArtifactError:
        """Create the error for an unsupported file."""
        return UnsupportedArtifactError(problem, path=self.path)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self._wrong(key, "an integer")
        if value.bit_length() > 64:
            raise self.corrupt(f"{key!r} has {value.bit_length()} bits; at most 64 are expected")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._wrong(key, "a number")
        if not abs(value) <= sys.float_info.max:
            raise self.corrupt(f"{key!r} is {value}; a finite number is expected")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self._wrong(key, "a boolean")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            self._wrong(key, "a string")
        return value

    def strings(self, key: str) -> list[str]:
        value = self.values.get(key)
        if callable(value):
            value = value()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._wrong(key, "a list of strings")
        return value

    def reals(self, key: str) -> tuple[float, ...]:
        """Return the finite numbers of a JSON list."""
        value = self.values.get(key)
        if not isinstance(value, list):
            self._wrong(key, "a list of numbers")
        items = Metadata(self.path, {f"{key}[{index}]": item for index, item in enumerate(value)})
        return tuple(items.real(name) for name in items.values)

    def numbers(self, key: str) -> npt.NDArray[np.generic]:
        value = self.values.get(key)
        if not isinstance(value, np.ndarray):
            self._wrong(key, "a list of numbers")
        return value

    def section(self, key: str) -> Metadata:
        """Return a nested object; an empty one if the key is missing."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            self._wrong(key, "an object")
        return Metadata(self.path, without_nulls(value))

    def _wrong(self, key: str, expected: str) -> NoReturn:
        if key not in self.values:
            raise self.corrupt(f"{key!r} is missing; {expected} is expected")
        found = type(self.values[key]).__name__
        raise self.corrupt(f"{key!r} is of type {found}; {expected} is expected")


def read_json(path: Path) -> Metadata:
    """Read the object in a file, without its nulls.

    Raises:
        ArtifactNotFoundError: the file cannot be read.
        CorruptArtifactError: the file is not JSON, not an object, or too large.
    """
    return Metadata(path, without_nulls(parse_object(read_bytes(path), path)))


def read_optional_json(path: Path) -> Metadata:
    """Like `read_json`; a missing file is an empty object."""
    return read_json(path) if path.exists() else Metadata(path, {})


def read_bytes(path: Path) -> bytes:
    """Read a whole small file."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ArtifactNotFoundError(f"cannot be read ({error.strerror})", path=path) from error
    if len(content) > _MAX_BYTES:
        raise CorruptArtifactError(f"larger than {_MAX_BYTES} bytes, the limit for files of this kind", path=path)
    return content


def parse_object(content: bytes, path: Path) -> dict[str, object]:
    """Parse a JSON object. Duplicate keys are rejected."""

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
        raise CorruptArtifactError(f"contains a JSON {type(value).__name__}; an object is expected", path=path)
    return value


def without_nulls(values: Mapping[str, object]) -> dict[str, object]:
    """Remove null values, which mean "not set" in JSON."""
    return {key: value for key, value in values.items() if value is not None}
