"""The tensors of one artifact under canonical names, with llama.cpp's rope permutation undone on access."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.architectures import ARCHITECTURES
from lockstep.artifacts.model import ModelConfig, Tensor
from lockstep.errors import CorruptArtifactError

_NO_HEADS: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class MappedWeights:
    """Views into mapped files. A permuted tensor is copied on each access, everything else is never copied."""

    path: Path
    tensors: Mapping[str, Tensor] = field(repr=False)
    interleaved: Mapping[str, int] = field(default_factory=lambda: _NO_HEADS, repr=False)
    """Tensors whose rows are stored for interleaved rope, with their number of heads."""

    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            close = difflib.get_close_matches(name, self.tensors, n=1)
            hint = f"; the nearest name is {close[0]!r}" if close else ""
            raise CorruptArtifactError(f"has no tensor {name!r}{hint}", path=self.path)
        num_heads = self.interleaved.get(name)
        return tensor if num_heads is None else replace(tensor, data=rotate_half_rows(tensor.data, num_heads))


def rotate_half_rows(rows: npt.NDArray[np.generic], num_heads: int) -> npt.NDArray[np.generic]:
    """Reorder rows ``[num_heads * head_dim, ...]`` from interleaved pairs (0, 1), (2, 3) … to halves (0, d/2), …

    Whole rows move, so it holds for rows of quantised blocks too. The inverse of `LlamaModel.permute` in llama.cpp's
    `convert_hf_to_gguf.py`.
    """
    half = len(rows) // num_heads // 2
    return rows.reshape(num_heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def split_fused(config: ModelConfig, tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Name the parts of fused projections as if each were a tensor of its own, in views; whole rows, so any encoding.

    Raises:
        CorruptArtifactError: a fused tensor has another number of rows than its parts.
    """
    if not ARCHITECTURES[config.architecture].fused:
        return dict(tensors)
    queries, keys, inner = config.num_heads, config.num_kv_heads, config.intermediate_size
    parts = {
        "qkv_proj": {name: heads * config.head_dim for name, heads in zip("qkv", (queries, keys, keys), strict=True)},
        "gate_up_proj": {"gate": inner, "up": inner},
    }
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        prefix, _, last = module.rpartition(".")
        if last not in parts or kind != "weight" or len(tensor.shape) != 2:
            split[name] = tensor
            continue
        begin, rows = 0, sum(parts[last].values())
        if tensor.shape[0] != rows:
            raise CorruptArtifactError(f"tensor {name!r} has {tensor.shape[0]} rows; {rows} are expected", path=path)
        for part, size in parts[last].items():
            own = f"{prefix}.{part}_proj.weight"
            data = tensor.data[begin : begin + size]
            split[own] = replace(tensor, name=own, shape=(size, tensor.shape[1]), data=data)
            begin += size
    return split
