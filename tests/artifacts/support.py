"""Tiny models on disk, and the bytes of GGUF files put together by hand so that every field can be wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from lockstep.artifacts.model import Artifact
from lockstep.artifacts.source import open_artifact

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, FLOAT64 = 4, 5, 6, 7, 8, 9, 10, 12
F32, Q8_0 = 0, 8


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def u32(value: int) -> bytes:
    return struct.pack("<II", UINT32, value)


def f32(value: float) -> bytes:
    return struct.pack("<If", FLOAT32, value)


def text(value: str) -> bytes:
    return struct.pack("<I", STRING) + string(value)


def boolean(value: bool) -> bytes:
    return struct.pack("<IB", BOOL, value)


def strings(values: list[str]) -> bytes:
    return struct.pack("<IIQ", ARRAY, STRING, len(values)) + b"".join(map(string, values))


def floats(values: list[float]) -> bytes:
    return struct.pack("<IIQ", ARRAY, FLOAT32, len(values)) + struct.pack(f"<{len(values)}f", *values)


@dataclass(slots=True)
class HandMadeGguf:
    """A llama of one layer, hidden size 32, one head, 40 tokens, by default correct; set what shall be wrong."""

    values: dict[str, bytes] = field(default_factory=lambda: dict(LLAMA))
    tensors: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=lambda: dict(LLAMA_TENSORS))
    """Name: shape (row-major) and ggml type; data are F32 random numbers."""
    arrays: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    offsets: Mapping[str, int] = field(default_factory=dict)
    magic: bytes = b"GGUF"
    version: int = 3
    num_values: int | None = None
    num_tensors: int | None = None
    alignment: int = 32

    def content(self) -> bytes:
        rng = np.random.default_rng(0)
        infos, data = b"", b""
        for name, (shape, kind) in self.tensors.items():
            values = self.arrays.get(name, rng.standard_normal(shape, np.float32))
            offset = self.offsets.get(name, len(data))
            lengths = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
            infos += string(name) + lengths + struct.pack("<IQ", kind, offset)
            data += values.tobytes() + b"\0" * (-values.nbytes % self.alignment)
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_values = len(self.values) if self.num_values is None else self.num_values
        header = self.magic + struct.pack("<IQQ", self.version, num_tensors, num_values)
        header += b"".join(string(key) + value for key, value in self.values.items()) + infos
        return header + b"\0" * (-len(header) % self.alignment) + data

    def write(self, folder: Path) -> Path:
        path = folder / "made.gguf"
        path.write_bytes(self.content())
        return path

    def open(self, folder: Path) -> Artifact:
        return open_artifact(str(self.write(folder)), cache_dir=folder / "cache")


LLAMA: Mapping[str, bytes] = {
    "general.architecture": text("llama"),
    "llama.context_length": u32(128),
    "llama.embedding_length": u32(32),
    "llama.block_count": u32(1),
    "llama.feed_forward_length": u32(48),
    "llama.attention.head_count": u32(2),
    "llama.attention.head_count_kv": u32(1),
    "llama.attention.layer_norm_rms_epsilon": f32(1e-5),
}
LLAMA_TENSORS: Mapping[str, tuple[tuple[int, ...], int]] = {
    "token_embd.weight": ((40, 32), F32),
    "blk.0.attn_norm.weight": ((32,), F32),
    "blk.0.attn_q.weight": ((32, 32), F32),
    "blk.0.attn_k.weight": ((16, 32), F32),
    "blk.0.attn_v.weight": ((16, 32), F32),
    "blk.0.attn_output.weight": ((32, 32), F32),
    "blk.0.ffn_norm.weight": ((32,), F32),
    "blk.0.ffn_gate.weight": ((48, 32), F32),
    "blk.0.ffn_up.weight": ((48, 32), F32),
    "blk.0.ffn_down.weight": ((32, 48), F32),
    "output_norm.weight": ((32,), F32),
}


def approximately(fields: Mapping[str, object]) -> dict[str, object]:
    """To compare with: floats, which GGUF stores in 32 bits, nearly; everything else exactly."""
    return {key: pytest.approx(value) if isinstance(value, float) else value for key, value in fields.items()}


def edit_json(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Apply a change to the object in a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
