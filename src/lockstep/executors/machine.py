"""The machine that computes: usable cores and memory, processor, instruction set, and whether OpenVINO runs on it.

Imports no executor, so that asking is cheap.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

CPUINFO = Path("/proc/cpuinfo")
CGROUP = Path("/sys/fs/cgroup")
ONEDNN_CAP = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Variables that bound what oneDNN makes of a processor: the first that is not empty counts."""
OPENVINO_CAP = ("OV_CPU_MAX_ISA",)
"""The same for OpenVINO's own code, which asks the processor by itself. Neither library tells the other."""
_FLAGS = ("avx2", "fma", "f16c", "avx_", "avx512", "amx", "asimd", "fphp", "bf16", "i8mm", "sve")
_X86 = ("x86_64", "amd64")
_STEPS: Mapping[str, tuple[str | None, tuple[str, ...]]] = MappingProxyType(
    {
        "SSE41": (None, ()),
        "AVX": ("SSE41", ()),
        "AVX2": ("AVX", ("avx2", "fma", "f16c")),
        "AVX2_VNNI": ("AVX2", ("avx_vnni",)),
        "AVX2_VNNI_2": ("AVX2_VNNI", ("avx_",)),
        "AVX512_CORE": ("AVX2", ("avx512",)),
        "AVX512_CORE_VNNI": ("AVX512_CORE", ("avx512_vnni",)),
        "AVX512_CORE_BF16": ("AVX512_CORE_VNNI", ("avx512_bf16",)),
        "AVX512_CORE_FP16": ("AVX512_CORE_BF16", ("avx512_fp16",)),
        "AVX512_CORE_AMX": ("AVX512_CORE_FP16", ("amx_tile", "amx_int8", "amx_bf16")),
        "AVX512_CORE_AMX_FP16": ("AVX512_CORE_AMX", ("amx_",)),
    }
)
"""Values of the variables: the step below each, and the beginnings of the flags that it adds (the longest counts). What
is no value of theirs bounds nothing, in either library."""


def available_cores(cgroup: Path = CGROUP) -> int:
    """Whole cores that this process may use: the affinity mask, cut by the cgroup's CPU quota (v2, then v1)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(cgroup)
    return max(1, cores if quota is None else min(cores, int(quota)))


def machine_memory_bytes(cgroup: Path = CGROUP) -> int:
    """All memory that this process could ever have: the machine's, cut by the cgroup's limit (v2)."""
    import psutil

    total, limit = psutil.virtual_memory().total, _number(cgroup / "memory.max")
    return total if limit is None else min(total, limit)


def available_memory_bytes(cgroup: Path = CGROUP) -> int:
    """Memory that this process may still take: what the machine has, cut by the cgroup's limit (v2), which counts
    files that were read once and may be forgotten as used."""
    import psutil

    available = psutil.virtual_memory().available
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None:
        return available
    idle = re.search(r"^inactive_file (\d+)$", _text(cgroup / "memory.stat") or "", re.MULTILINE)
    used -= 0 if idle is None else min(used, int(idle[1]))
    return max(0, min(available, limit - used))


def anonymous_memory_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """Memory of this process that is in no file: `RssAnon`, see proc(5). None: this system does not tell."""
    found = re.search(r"^RssAnon:\s*(\d+) kB$", _text(status) or "", re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def processor_name(cpuinfo: Path = CPUINFO) -> str | None:
    """The processor as its maker calls it; None: this machine does not tell."""
    text = _text(cpuinfo)
    return platform.processor() or None if text is None else _field(text, "model name", "Model")


def machine_name(cpuinfo: Path = CPUINFO) -> str:
    """Name of the machine that a measurement was made on: processor and cores."""
    usable, all_cores = available_cores(), os.cpu_count() or 1
    cores = f"{usable} of {all_cores}" if usable < all_cores else f"{all_cores}"
    return f"{processor_name(cpuinfo) or 'unknown processor'}, {cores} logical cores"


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """The vector extensions that kernels are chosen by: what the processor has, less what the environment withholds."""

    machine: str
    """The architecture, e.g. ``x86_64``."""
    products: tuple[str, ...]
    """For oneDNN, which computes the products."""
    others: tuple[str, ...]
    """For OpenVINO itself, which chooses what oneDNN is to compute."""

    def __str__(self) -> str:
        """E.g. ``x86_64 avx2 f16c fma``; both halves where they differ."""
        name = " ".join((self.machine, *self.products))
        return name if self.products == self.others else f"{name}; beside products {' '.join(self.others) or 'none'}"

    @property
    def has_row_dependent_kernels(self) -> bool:
        """True if the bits of a product of compressed weights can depend on its number of rows (products.py).

        So they do on x86-64 without AVX-512. With it the kernels were seen to keep the promise as they are.
        """
        return self.machine.lower() in _X86 and not _has(self.products, "avx512")


def instruction_set(
    cpuinfo: Path = CPUINFO, environ: Mapping[str, str] = os.environ, machine: str = ""
) -> InstructionSet:
    """The effective instruction set of this process.

    Args:
        environ: the variables that OpenVINO and oneDNN read when they compute for the first time.
        machine: empty for this one's architecture.
    """
    machine, flags = machine or platform.machine(), _flags(cpuinfo)
    is_x86 = machine.lower() in _X86
    caps = (_cap(environ, ONEDNN_CAP), _cap(environ, OPENVINO_CAP) if is_x86 else "")
    if is_x86 and flags:
        return InstructionSet(machine, *(_within(flags, cap) for cap in caps))
    # Which of these a cap withholds is not known, so the key says what the cap is.
    flags = flags or tuple(platform.processor().split())
    return InstructionSet(machine, *(flags + ((f"max={cap}",) if cap else ()) for cap in caps))


def unsupported_reason(cpuinfo: Path = CPUINFO, environ: Mapping[str, str] = os.environ, machine: str = "") -> str:
    """Explain in one sentence why OpenVINO would crash here, and what would be right; empty: it would not.

    Without AVX2 for products its attention is a segmentation fault. Where it finds VNNI itself, it asks for products
    with activations in int8, for which oneDNN has no kernel if it is kept to AVX2.
    """
    flags = _flags(cpuinfo)
    if (machine or platform.machine()).lower() not in _X86 or not flags:
        return ""  # nothing is known
    if not _has(flags, "avx2"):
        return "this processor has no AVX2, without which OpenVINO's attention crashes"
    found = instruction_set(cpuinfo, environ, machine)
    name = next((name for name in ONEDNN_CAP if environ.get(name)), ONEDNN_CAP[0])
    if not _has(found.products, "avx2"):
        return (
            f"{name}={environ[name]} withholds AVX2, without which OpenVINO's attention crashes; the least that {name} "
            f"and {OPENVINO_CAP[0]} may be is AVX2"
        )
    if _has(found.others, "avx_vnni", "avx512_vnni") and not _has(found.products, "avx_vnni", "avx512"):
        return (
            f"{name}={environ[name]} withholds from oneDNN what OpenVINO goes on using, and no product of quantised "
            f"weights could be computed; set {OPENVINO_CAP[0]}={environ[name]} as well"
        )
    return ""


def _cgroup_quota(cgroup: Path) -> float | None:
    """Cores allowed by the quota, or None without one."""
    both = (_text(cgroup / "cpu.max") or "").split()
    if len(both) != 2:
        both = [(_text(cgroup / "cpu" / f"cpu.cfs_{name}_us") or "").strip() for name in ("quota", "period")]
    limit, period = both
    return int(limit) / int(period) if limit.isdecimal() and period.isdecimal() and int(period) else None


def _flags(cpuinfo: Path) -> tuple[str, ...]:
    """Flags of the first processor; none where this machine does not tell."""
    flags = (_field(_text(cpuinfo) or "", "flags", "Features") or "").split()
    return tuple(sorted(flag for flag in set(flags) if flag.startswith(_FLAGS)))


def _field(cpuinfo: str, *names: str) -> str | None:
    """Value of the first line that begins with one of the names."""
    lines = cpuinfo.splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(names)), None)


def _text(path: Path) -> str | None:
    """Content of one of the system's small files; None: it is not there."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return None


def _number(path: Path) -> int | None:
    """The number in one of the cgroup's files; None: there is none, or it is ``max``."""
    text = (_text(path) or "").strip()
    return int(text) if text.isdecimal() else None


def _cap(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Cap of a library's instruction set, in capitals; empty: none."""
    value = next((environ[name] for name in names if environ.get(name)), "").upper()
    return "SSE41" if value == "SSE42" and names == OPENVINO_CAP else value


def _within(flags: tuple[str, ...], cap: str) -> tuple[str, ...]:
    if cap not in _STEPS:
        return flags
    allowed: list[str] = []
    step: str | None = cap
    while step is not None:
        allowed.append(step)
        step = _STEPS[step][0]
    return tuple(flag for flag in flags if _step_of(flag) in allowed)


def _step_of(flag: str) -> str:
    """The lowest value of a cap that allows it."""
    found = [(len(start), step) for step, (_, starts) in _STEPS.items() for start in starts if flag.startswith(start)]
    return max(found, default=(0, "SSE41"))[1]


def _has(flags: tuple[str, ...], *starts: str) -> bool:
    return any(flag.startswith(starts) for flag in flags)
