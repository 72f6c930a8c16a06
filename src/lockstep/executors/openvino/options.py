"""Options of the OpenVINO executor, and the precision of each matrix that follows from them and from the artifact.

Knows no OpenVINO, so that reading options stays cheap and `lockstep models info` can say what a load would do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from lockstep.artifacts.layout import EMBEDDING, LM_HEAD
from lockstep.artifacts.model import Encoding, Weights
from lockstep.artifacts.quantisation import GROUP_SIZE
from lockstep.errors import UsageError

DEVICES = ("auto", "cpu", "gpu")
QUANTIZE = ("int8", "int4")
"""What float weights can be made of at load."""
KV_CACHE_PRECISIONS = ("f16", "f32", "u8")
INFERENCE_PRECISIONS = ("f32",)
DYNAMIC_QUANTIZATION_GROUP_SIZES = (0, 32)
MAX_THREADS = 1024
"""More than any machine has cores for."""
DEFAULT_MAX_CACHE_BYTES = 32 << 30
_FLOATS = (Encoding.F32, Encoding.F16, Encoding.BF16)


@dataclass(frozen=True, slots=True)
class OpenVINOOptions:
    """Options of one loaded model; everything here but the cache's place and bound is part of the environment key."""

    device: str = "auto"
    """auto, cpu or gpu.

    ``auto`` takes the CPU: on a GPU nothing has been proven yet."""
    threads: int | None = None
    """Threads of a forward pass; by default the cores of the cgroup.

    Those that the process may use, its quota included."""
    kv_cache_precision: str = "f16"
    """f16, f32, or u8 (half the memory, but bytes then depend on the batch).

    ``f32`` takes twice the memory. With ``u8`` keys are requantised per partial block, which breaks the promise that a
    request's bytes do not depend on its batch."""
    inference_precision: str = "f32"
    """Activations. Only ``f32``: OpenVINO's own default is bf16 on newer CPUs."""
    dynamic_quantization_group_size: int = 32
    """Activations are quantised to int8 in groups of this many before int8 and int4 weights: 32, the group of the
    weights' own scales (OpenVINO silently quantises nothing in larger ones), or 0, not at all (about half as fast)."""
    quantize: str | None = None
    """int8 or int4: round float weights at load; None: weights as they are.

    ``int8`` has one scale per row, ``int4`` one per 32 values (embedding and head int8). Weights in block encodings
    stay what they are."""
    cache_dir: Path | None = None
    """Where built graphs are kept (in ``ir/``); None: every load builds its graph in memory."""
    max_cache_bytes: int = DEFAULT_MAX_CACHE_BYTES
    """Bound on ``cache_dir/ir``; the least recently used graphs go first."""

    def __post_init__(self) -> None:
        _one_of("device", self.device, DEVICES)
        _one_of("kv_cache_precision", self.kv_cache_precision, KV_CACHE_PRECISIONS)
        _one_of("inference_precision", self.inference_precision, INFERENCE_PRECISIONS)
        if self.quantize is not None:
            _one_of("quantize", self.quantize, QUANTIZE)
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise UsageError(f"threads is {self.threads}; it must be 1 to {MAX_THREADS}")
        if self.dynamic_quantization_group_size not in DYNAMIC_QUANTIZATION_GROUP_SIZES:
            raise UsageError(
                f"dynamic_quantization_group_size is {self.dynamic_quantization_group_size}; it must be 32 or 0 (off)"
            )
        if self.max_cache_bytes < 0:
            raise UsageError(f"max_cache_bytes is {self.max_cache_bytes}; it must not be negative")

    @property
    def is_batch_invariant(self) -> bool:
        """Whether these options can keep a request's bytes independent of its batch at all; the probe has the word."""
        return self.kv_cache_precision != "u8"


class Precision(Enum):
    """How the graph holds a matrix; the value is what the user reads."""

    F32 = "f32"
    INT8_CHANNELS = "int8 per channel"
    INT8_GROUPS = "int8 in groups of 32"
    INT4_GROUPS = "int4 in groups of 32"
    INT4_OFFSETS = "int4 in groups of 32 with offsets"


@dataclass(frozen=True, slots=True)
class PrecisionChoice:
    """A matrix's precision."""

    precision: Precision
    is_requantised: bool = False
    """Whether weights are rounded anew; else each is what the file says (a product of scales may be rounded to f16)."""


_BLOCKS: Mapping[Encoding, PrecisionChoice] = {
    Encoding.Q8_0: PrecisionChoice(Precision.INT8_GROUPS),
    Encoding.Q5_0: PrecisionChoice(Precision.INT8_GROUPS),
    Encoding.Q4_0: PrecisionChoice(Precision.INT4_GROUPS),
    Encoding.Q4_1: PrecisionChoice(Precision.INT4_OFFSETS),
    Encoding.Q4_K: PrecisionChoice(Precision.INT4_OFFSETS),
    Encoding.Q5_1: PrecisionChoice(Precision.INT8_GROUPS, is_requantised=True),
    Encoding.Q5_K: PrecisionChoice(Precision.INT8_GROUPS, is_requantised=True),
    Encoding.Q6_K: PrecisionChoice(Precision.INT8_GROUPS, is_requantised=True),
}


def precision_of(name: str, encoding: Encoding, num_columns: int, quantize: str | None) -> PrecisionChoice:
    """The precision of one matrix.

    Args:
        name: its canonical name: the embedding and the head are tables, which stay at 8 bits at least unless the file
            itself has them in Q4_0.
        num_columns: length of a row; one that is not whole groups is quantised per channel.
        quantize: ``int8``, ``int4`` or None; float weights only, blocks stay as they are.
    """
    is_table = name in (EMBEDDING, LM_HEAD)
    if encoding not in _FLOATS:
        choice = _BLOCKS[encoding]
        if is_table and choice.precision is Precision.INT4_OFFSETS:
            return PrecisionChoice(Precision.INT8_GROUPS, is_requantised=True)
        return choice
    if quantize is None:
        return PrecisionChoice(Precision.F32)
    if quantize == "int8" or is_table or num_columns % GROUP_SIZE:
        return PrecisionChoice(Precision.INT8_CHANNELS, is_requantised=True)
    return PrecisionChoice(Precision.INT4_GROUPS, is_requantised=True)


def precision_summary(weights: Weights, quantize: str | None) -> dict[str, int]:
    """What loading makes of the matrices: ``Q6_K -> int8 in groups of 32 (requantised)`` and how many."""
    count: Counter[str] = Counter()
    for name in weights.names():
        tensor = weights[name]
        if len(tensor.shape) == 2:
            choice = precision_of(name, tensor.encoding, tensor.shape[-1], quantize)
            note = " (requantised)" if choice.is_requantised else ""
            count[f"{tensor.encoding.value} -> {choice.precision.value}{note}"] += 1
    return dict(sorted(count.items()))


def has_floats(weights: Weights) -> bool:
    """Whether there is a matrix that `quantize` would change."""
    return any(len(weights[name].shape) == 2 and weights[name].encoding in _FLOATS for name in weights.names())


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{field} is {value!r}; it must be one of {', '.join(allowed)}")
