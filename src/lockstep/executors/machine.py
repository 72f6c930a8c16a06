"""Machine of this process: measures usable cores and memory, and names the processor and its instruction set.

It imports no executor, so that it is cheap to use.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
CGROUP = Path("/sys/fs/cgroup")
_FLAGS = ("avx2", "fma", "f16c", "avx_", "avx512", "amx", "asimd", "fphp", "bf16", "i8mm", "sve")


def available_cores(cgroup: Path = CGROUP) -> int:
    """Whole cores that this process may use: the affinity mask, limited by the cgroup's CPU quota (v2, then v1)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(cgroup)
    return max(1, cores if quota is None else min(cores, int(quota)))


def machine_memory_bytes(cgroup: Path = CGROUP) -> int:
    """Total memory that this process could ever use: the machine's, limited by the cgroup's limit (v2)."""
    import psutil

    total, limit = psutil.virtual_memory().total, _number(cgroup / "memory.max")
    return total if limit is None else min(total, limit)


def available_memory_bytes(cgroup: Path = CGROUP) -> int:
    """Memory that this process may still allocate: the machine's available memory, limited by the cgroup's limit (v2).
    The cgroup counts cached files as used, although the system may drop them; inactive ones are subtracted here."""
    import psutil

    available = psutil.virtual_memory().available
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None:
        return available
    idle = re.search(r"^inactive_file (\d+)$", _text(cgroup / "memory.stat") or "", re.MULTILINE)
    used -= 0 if idle is None else min(used, int(idle[1]))
    return max(0, min(available, limit - used))


def processor_name(cpuinfo: Path = CPUINFO) -> str | None:
    """The vendor's name of the processor; None: it is not available on this machine."""
    text = _text(cpuinfo)
    return platform.processor() or None if text is None else _field(text, "model name", "Model")


def machine_name(cpuinfo: Path = CPUINFO) -> str:
    """Description of the machine for measurements: processor and cores."""
    usable, all_cores = available_cores(), os.cpu_count() or 1
    cores = f"{usable} of {all_cores}" if usable < all_cores else f"{all_cores}"
    return f"{processor_name(cpuinfo) or 'unknown processor'}, {cores} logical cores"


def instruction_set(cpuinfo: Path = CPUINFO) -> str:
    """The architecture and the vector extensions that affect the choice of kernels, e.g. ``x86_64 avx2 f16c fma``."""
    flags = (_field(_text(cpuinfo) or "", "flags", "Features") or "").split()
    return " ".join((platform.machine(), *sorted(flag for flag in set(flags) if flag.startswith(_FLAGS))))


def _cgroup_quota(cgroup: Path) -> float | None:
    """Cores allowed by the quota; None: there is no quota."""
    both = (_text(cgroup / "cpu.max") or "").split()
    if len(both) != 2:
        both = [(_text(cgroup / "cpu" / f"cpu.cfs_{name}_us") or "").strip() for name in ("quota", "period")]
    limit, period = both
    return int(limit) / int(period) if limit.isdecimal() and period.isdecimal() and int(period) else None


def _field(cpuinfo: str, *names: str) -> str | None:
    """Value of the first line that begins with one of the names."""
    lines = cpuinfo.splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(names)), None)


def _text(path: Path) -> str | None:
    """Content of one of the system's small files; None: it does not exist."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return None


def _number(path: Path) -> int | None:
    """The number in one of the cgroup's files; None: there is no file, or its content is ``max``."""
    text = (_text(path) or "").strip()
    return int(text) if text.isdecimal() else None
