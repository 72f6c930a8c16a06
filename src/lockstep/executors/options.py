"""Options of executors: what a user may choose. Imports no executor, so that reading options stays cheap."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UsageError

EXECUTORS = ("openvino", "native")
ISAS = ("avx512", "avx2", "portable")
"""Instruction sets of the native library, the fastest first. ``avx512`` needs VNNI."""
DEVICES = ("auto", "cpu", "gpu")
QUANTIZE = ("int8", "int4")
"""What float weights can be made of at load."""
KV_CACHE_PRECISIONS = ("f16", "f32", "int8", "u8")
ATTENTIONS = ("auto", "lockstep", "openvino")
INFERENCE_PRECISIONS = ("f32",)
DYNAMIC_QUANTIZATION_GROUP_SIZES = (0, 32)
MAX_THREADS = 1024
"""More than any machine has cores for."""
DEFAULT_MAX_CACHE_BYTES = 32 << 30


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """Options of one loaded model."""

    name: str = "openvino"
    """openvino or native, a forward pass of our own whose bits are the same on every x86-64 processor."""
    isa: str | None = None
    """Instruction set of the native executor; None: the fastest one here.

    ``avx512``, ``avx2`` or ``portable``. All give the same bits."""
    device: str = "auto"
    """auto, cpu or gpu.

    ``auto`` takes the CPU: on a GPU nothing has been proven yet."""
    threads: int | None = None
    """Threads of a forward pass; by default the cores of the cgroup.

    Those that the process may use, its quota included."""
    kv_cache_precision: str = "f16"
    """f16, f32, int8 (half the memory), or u8 (the same, but bytes then depend on the batch).

    ``f32`` takes twice the memory. ``int8`` has a scale for each token and head, written once; it needs the attention
    operator of our own. With ``u8``, which is OpenVINO's, keys are requantised per partial block, which breaks the
    promise that a request's bytes do not depend on its batch."""
    attention: str = "auto"
    """Attention operator: ``lockstep``, ``openvino``, or ``auto``, ours where it can be had.

    With ours a token computed alone gets the bits that it gets among others."""
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
    """Where graphs and packed weights are kept; None: every load makes them in memory."""
    max_cache_bytes: int = DEFAULT_MAX_CACHE_BYTES
    """Bound on what is kept there; the least recently used goes first."""

    def __post_init__(self) -> None:
        _one_of("executor", self.name, EXECUTORS)
        _one_of("device", self.device, DEVICES)
        _one_of("kv_cache_precision", self.kv_cache_precision, KV_CACHE_PRECISIONS)
        _one_of("attention", self.attention, ATTENTIONS)
        if self.kv_cache_precision == "int8" and self.attention == "openvino":
            raise UsageError("kv_cache_precision is 'int8', which OpenVINO's attention has not; f16, f32 and u8 it has")
        if self.kv_cache_precision == "u8" and self.attention == "lockstep":
            raise UsageError("kv_cache_precision is 'u8', which only OpenVINO's attention has; ours has int8, f16, f32")
        _one_of("inference_precision", self.inference_precision, INFERENCE_PRECISIONS)
        if self.quantize is not None:
            _one_of("quantize", self.quantize, QUANTIZE)
        if self.isa is not None:
            _one_of("isa", self.isa, ISAS)
        _check_executor(self)
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise UsageError(f"threads is {self.threads}; it must be 1 to {MAX_THREADS}")
        if self.dynamic_quantization_group_size not in DYNAMIC_QUANTIZATION_GROUP_SIZES:
            raise UsageError(
                f"dynamic_quantization_group_size is {self.dynamic_quantization_group_size}; it must be 32 or 0 (off)"
            )
        if self.max_cache_bytes < 0:
            raise UsageError(f"max_cache_bytes is {self.max_cache_bytes}; it must not be negative")

    @property
    def is_native(self) -> bool:
        return self.name == "native"

    @property
    def is_batch_invariant(self) -> bool:
        """True if these options can keep a request's bytes independent of its batch at all; the probe has the word."""
        return self.kv_cache_precision != "u8"


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{field} is {value!r}; it must be one of {', '.join(allowed)}")


def _check_executor(options: ExecutorOptions) -> None:
    """Refuse what the chosen executor does not have."""
    if not options.is_native:
        if options.isa is not None:
            raise UsageError(
                f"isa is {options.isa!r}, which the native executor has; choose it too (--executor native)"
            )
        return
    for field, value, allowed in (
        ("device", options.device, ("auto", "cpu")),
        ("attention", options.attention, ("auto", "lockstep")),
        ("kv_cache_precision", options.kv_cache_precision, ("f16", "f32", "int8")),
        ("dynamic_quantization_group_size", options.dynamic_quantization_group_size, (32,)),
    ):
        if value not in allowed:
            raise UsageError(
                f"{field} is {value!r}, which the native executor has not; it has {' and '.join(map(str, allowed))}"
            )
