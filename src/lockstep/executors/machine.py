"""The machine that computes: its processor, and how much of it this process may use. Knows no executor."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def available_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Whole cores that this process may use: the affinity mask, cut by the cgroup's CPU quota (v2, then v1)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(cgroup)
    return max(1, cores if quota is None else min(cores, int(quota)))


def processor_name(cpuinfo: Path = CPUINFO) -> str | None:
    """As its maker calls it; None: this machine does not tell."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(("model name", "Model"))), None)


def machine_name(cpuinfo: Path = CPUINFO) -> str:
    """What a measurement was made on, in words: processor and cores."""
    usable, all_cores = available_cores(), os.cpu_count() or 1
    cores = f"{usable} of {all_cores}" if usable < all_cores else f"{all_cores}"
    return f"{processor_name(cpuinfo) or 'unknown processor'}, {cores} logical cores"


def _cgroup_quota(cgroup: Path) -> float | None:
    """Cores allowed by the quota, or None without one."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if limit in ("max", "-1"):
        return None
    try:
        return int(limit) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
