"""Executor options: defines the values that a user may choose. Imports no executor, so that reading options stays
cheap.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lockstep.errors import UsageError
from lockstep.option_fields import OneOf, Range, check_options

ISAS = ("avx512", "avx2", "portable")
"""Instruction sets of the native library, fastest first. ``avx512`` requires VNNI."""
QUANTIZE = ("int8", "int4")
"""Types to which float weights can be rounded at load."""
KV_CACHE_PRECISIONS = ("f16", "f32", "int8")
MAX_THREADS = 1024
"""More than the number of cores of any machine."""
DEFAULT_MAX_CACHE_BYTES = 32 << 30


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """Options of one loaded model."""

    isa: Annotated[str | None, OneOf(ISAS)] = None
    """Instruction set of the native library; None: the fastest one here.

    ``avx512``, ``avx2`` or ``portable``. All give the same bits."""
    threads: Annotated[int | None, Range(1, MAX_THREADS)] = None
    """Threads of a forward pass; by default the cores of the cgroup.

    Those that the process may use, its quota included. Any number gives the same bits."""
    kv_cache_precision: Annotated[str, OneOf(KV_CACHE_PRECISIONS)] = "f16"
    """f16, f32, or int8 (half the memory).

    ``f32`` takes twice the memory. ``int8`` has a scale for each token and head, written once."""
    quantize: Annotated[str | None, OneOf(QUANTIZE)] = None
    """int8 or int4: round float weights at load; None: weights as they are.

    ``int8`` has one scale per row, ``int4`` one per 32 values (embedding and head int8). Weights in block encodings
    stay what they are."""
    cache_dir: Path | None = None
    """Folder for packed weights; None: every load packs them in memory."""
    max_cache_bytes: Annotated[int, Range(0)] = DEFAULT_MAX_CACHE_BYTES
    """Maximum size of that folder. The least recently used entries are removed first."""

    def __post_init__(self) -> None:
        check_options(self, UsageError)
