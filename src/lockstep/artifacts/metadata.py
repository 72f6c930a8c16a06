"""Named values from a file, GGUF or JSON, with getters that say which one is not of the kind asked for, and where."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from lockstep.errors import CorruptArtifactError


@dataclass(frozen=True, slots=True)
class Metadata:
    """Each getter raises CorruptArtifactError, naming the file and the key."""

    path: Path
    values: Mapping[str, object] = field(repr=False)
    """A function in the place of a value reads it when it is asked for: vocabularies are long."""

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self._wrong(key, "an integer")
        if value.bit_length() > 64:
            raise CorruptArtifactError(
                f"{key!r} has {value.bit_length()} bits; at most 64 are expected", path=self.path
            )
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._wrong(key, "a number")
        if not abs(value) <= sys.float_info.max:
            raise CorruptArtifactError(f"{key!r} is {value}; a finite number is expected", path=self.path)
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
        """Finite numbers of a list in JSON."""
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
        """A nested object; an absent one is empty."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            self._wrong(key, "an object")
        return Metadata(self.path, without_nulls(value))

    def _wrong(self, key: str, expected: str) -> NoReturn:
        if key not in self.values:
            raise CorruptArtifactError(f"{key!r} is missing; {expected} is expected", path=self.path)
        found = type(self.values[key]).__name__
        raise CorruptArtifactError(f"{key!r} is of type {found}; {expected} is expected", path=self.path)


def without_nulls(values: Mapping[str, object]) -> dict[str, object]:
    """JSON writes null for what is not set."""
    return {key: value for key, value in values.items() if value is not None}
