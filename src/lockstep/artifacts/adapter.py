"""Adapters: open LoRA adapters, and check them against the artifact of their base model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.artifacts.model import Artifact
from lockstep.errors import UnsupportedArtifactError


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter on disk."""

    name: str
    path: Path
    fingerprint: str
    rank: int
    scale: float
    targets: Mapping[str, tuple[Any, Any]]
    num_bytes: int
    invocation_ids: tuple[int, ...] = ()


def open_adapter(path: Path, base: Artifact) -> Adapter:
    """Placeholder."""
    raise UnsupportedArtifactError("adapters are not supported yet", path=path)
