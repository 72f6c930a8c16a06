"""The attention operator of our own: whether its library is here and fits, and how its KV blocks look.

The library is built of the C++ sources beside this file by ``hatch_build.py``. It is made for one release of OpenVINO,
whose libraries it finds in the process: import runtime.py before asking. Where it is not there, or has nothing for this
processor, a sentence says why, and OpenVINO's own operator is used with its rules.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lockstep.artifacts.model import ModelConfig
from lockstep.executors.machine import InstructionSet

LIBRARY = Path(__file__).with_name("liblockstep_ops.so")
OPERATOR = "LockstepAttention"
VERSION = 2
"""The library's version that the graph is made for, as attention.hpp has it."""
BLOCK_TOKENS = 32
MAX_HEAD_DIM = 256
_LANES = 16
_BUILD = "on Linux with a C++ compiler, `python hatch_build.py` builds it"
STORAGES = ("f32", "f16", "int8")
"""Names of the precisions of keys and values, by their numbers in attention.hpp."""


@dataclass(frozen=True, slots=True)
class OwnAttention:
    """The operator for one model: what its nodes are made with."""

    heads: int
    kv_heads: int
    head_dim: int
    storage: str
    kernel: str
    """Of the library's kernels, which all give the same bits: ``avx512``, ``avx2`` or ``portable``."""
    block_bytes: int
    """Bytes of one block of one layer, keys and values."""
    version: int
    """Raised whenever the bits or the layout change."""


def own_attention(
    config: ModelConfig, storage: str, isa: InstructionSet, library: Path = LIBRARY
) -> OwnAttention | str:
    """The operator for a model, or why it cannot be had, as a clause."""
    if config.head_dim % _LANES or config.head_dim > MAX_HEAD_DIM:
        return f"it takes heads of a multiple of {_LANES} up to {MAX_HEAD_DIM}, and these have {config.head_dim}"
    if storage not in STORAGES:
        return f"it has no {storage} KV cache, only {', '.join(STORAGES)}"
    loaded = own_library(library)
    if isinstance(loaded, str):
        return loaded
    version = loaded.lockstep_version()
    if version != VERSION:
        return f"its library was built of other sources (version {version}, not {VERSION}): {_BUILD}"
    kernel = kernel_for(isa)
    if not loaded.lockstep_has_kernel(kernel.encode()):
        return f"its kernel {kernel!r} does not run on this processor"
    number = STORAGES.index(storage)
    return OwnAttention(
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        storage=storage,
        kernel=kernel,
        block_bytes=loaded.lockstep_block_bytes(config.num_kv_heads, config.head_dim, number),
        version=version,
    )


def kernel_for(isa: InstructionSet) -> str:
    """The kernel for a processor, less what the environment withholds from OpenVINO's own code."""
    if "avx512f" in isa.others:
        return "avx512"
    return "avx2" if {"avx2", "fma", "f16c"} <= set(isa.others) else "portable"


@cache
def own_library(library: Path = LIBRARY) -> ctypes.CDLL | str:
    """The library, or why it cannot be loaded."""
    if not library.exists():
        return f"its library was not built: {_BUILD}"
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        return f"its library does not load: {error}"
    loaded.lockstep_block_bytes.restype = ctypes.c_size_t
    loaded.lockstep_attention.restype = ctypes.c_char_p
    return loaded
