"""What the bits depend on: the environment key that goes with traces, stored KV and cached graphs."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from pathlib import Path

BUILDER_VERSION = "2"
"""Raised whenever the same artifact and options would build another graph."""
_FLAGS = ("avx2", "fma", "f16c", "avx_vnni", "avx512", "amx", "asimd", "fphp", "bf16", "i8mm", "sve")


def instruction_set(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Architecture and the vector extensions that kernels are chosen by, e.g. ``x86_64 avx2 avx512f ...``."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".strip()
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))), [])
    kept = sorted(flag for flag in set(flags) if flag.startswith(_FLAGS))
    return " ".join([platform.machine(), *kept])


def has_row_dependent_kernels(instructions: str) -> bool:
    """Whether the bits of a product of compressed weights can depend on its number of rows (products.py).

    So they do on x86-64 without AVX-512. With it the kernels were seen to keep the promise as they are.
    """
    machine, *flags = instructions.split()
    return machine.lower() in ("x86_64", "amd64") and not any(flag.startswith("avx512") for flag in flags)


def digest(environment: Mapping[str, str]) -> str:
    """32 hex digits over the mapping; the order of its entries does not matter."""
    state = hashlib.blake2b(digest_size=16)
    for key in sorted(environment):
        for part in (key, environment[key]):
            data = part.encode()
            state.update(len(data).to_bytes(4, "little") + data)
    return state.hexdigest()
