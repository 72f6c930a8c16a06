"""Dense modules of sentence-transformers: the layers that a repository applies to pooled vectors, each in a folder.

``modules.json`` lists the modules of such a repository. A module that is not supported is refused by name, because
vectors without it would be others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.artifacts.layout import HEAD
from lockstep.artifacts.metadata import Metadata, read_bytes, read_json
from lockstep.artifacts.model import HeadLayer
from lockstep.errors import CorruptArtifactError, UnsupportedArtifactError

MODULES = "modules.json"
_DENSE = "Dense"
_KNOWN = ("Transformer", "Pooling", "Normalize", _DENSE)
_ACTIVATIONS: Mapping[str, str] = {"Identity": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu_erf", "SiLU": "silu"}
"""Classes of torch, and the names of `HeadLayer`."""
_MAX_MODULES = 16


@dataclass(frozen=True, slots=True)
class DenseModule:
    """One dense layer of a repository."""

    folder: str
    layer: HeadLayer

    def names(self, index: int) -> dict[str, str]:
        """Canonical names of its tensors as the layer ``index`` of a head, by their names in its file."""
        kinds = ("weight", "bias") if self.layer.bias else ("weight",)
        return {f"linear.{kind}": f"{HEAD}{index}.{kind}" for kind in kinds}


def dense_modules(path: Path) -> list[DenseModule]:
    """Read the dense modules of a repository, in order; none if it has no ``modules.json``.

    Raises:
        CorruptArtifactError: the list of modules, or the configuration of one, is invalid.
        UnsupportedArtifactError: the repository has a module of an unknown type; the error names it.
    """
    listed = path / MODULES
    if not listed.is_file():
        return []
    found = []
    for entry in _entries(listed):
        kind = entry.text("type").rpartition(".")[2]
        if kind not in _KNOWN:
            raise UnsupportedArtifactError(f"a module of type {kind!r}; supported: {', '.join(_KNOWN)}", path=listed)
        if kind == _DENSE:
            folder = entry.text("path")
            if not folder or Path(folder).name != folder:
                raise CorruptArtifactError(f"has a module in {folder!r}; a plain folder name is expected", path=listed)
            found.append(DenseModule(folder, _layer(read_json(path / folder / "config.json"))))
    return found


def _entries(path: Path) -> list[Metadata]:
    try:
        entries = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise CorruptArtifactError(f"is not valid JSON ({error})", path=path) from error
    if not isinstance(entries, list) or len(entries) > _MAX_MODULES or not all(isinstance(e, dict) for e in entries):
        raise CorruptArtifactError(f"is not a list of at most {_MAX_MODULES} modules", path=path)
    return [Metadata(path, entry) for entry in entries]


def _layer(declared: Metadata) -> HeadLayer:
    activation = declared.text("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise declared.unsupported(f"activation {activation!r}; supported: {', '.join(_ACTIVATIONS)}")
    size = declared.integer("out_features")
    if size < 1:
        raise declared.corrupt(f"out_features is {size}; at least 1 is expected")
    return HeadLayer(size, _ACTIVATIONS[activation], declared.flag("bias", True))
