"""Sizes of KV pools: a scheduler's configuration from options and what loading measured; readings of memory."""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.core.policy import SchedulerConfig
from lockstep.engine.options import DEFAULTS, KV_SHARE, EngineOptions, check_model_len, gigabytes
from lockstep.errors import ConfigError
from lockstep.executors.base import Geometry

HOST_SHARE = 0.5
"""Host swap space in parts of the device pool when nothing else is said."""


def plan_config(options: EngineOptions, geometry: Geometry, available_bytes: int) -> SchedulerConfig:
    """Blocks from bytes, limits from the model, policy from the user.

    Raises:
        ConfigError: an impossible limit, or not even one sequence would fit.
    """
    max_model_len = geometry.max_model_len if options.max_model_len is None else options.max_model_len
    check_model_len(max_model_len, geometry.max_model_len)
    if options.block_size not in (None, geometry.block_size):
        raise ConfigError(
            f"block_size is {options.block_size}; this executor has blocks of {geometry.block_size} tokens"
        )
    max_num_seqs = DEFAULTS["max_num_seqs"] if options.max_num_seqs is None else options.max_num_seqs
    blocks_per_seq = -(-max_model_len // geometry.block_size)
    wanted = blocks_per_seq * max_num_seqs
    num_blocks = options.num_blocks
    if num_blocks is None:
        budget = options.kv_cache_memory_bytes
        budget = int(available_bytes * KV_SHARE) if budget is None else budget
        num_blocks = min(wanted, budget // geometry.bytes_per_block)
    if num_blocks < 1:
        raise ConfigError(
            f"the KV pool would hold no block: one takes {geometry.bytes_per_block} bytes; "
            "raise kv_cache_memory_bytes or num_blocks"
        )
    if options.num_host_blocks is not None:
        num_host_blocks = options.num_host_blocks
    elif options.host_kv_memory_bytes is None:
        num_host_blocks = int(num_blocks * HOST_SHARE)
    else:
        num_host_blocks = options.host_kv_memory_bytes // geometry.bytes_per_block
    pool_bytes = (num_blocks + num_host_blocks) * geometry.bytes_per_block
    if pool_bytes > available_bytes:
        raise ConfigError(
            f"the KV pool would take {gigabytes(pool_bytes)} ({num_blocks} blocks on the device and {num_host_blocks} "
            f"on the host), and {gigabytes(available_bytes)} of memory are free once the model is loaded; lower "
            "kv_cache_memory_bytes, num_blocks, host_kv_memory_bytes or num_host_blocks, or leave them out"
        )
    return SchedulerConfig(
        block_size=geometry.block_size,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_model_len=max_model_len,
        **options.scheduler,
    )


def machine_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """All memory that this process could ever have: the machine's, cut by the cgroup's limit (v2)."""
    import psutil

    total = psutil.virtual_memory().total
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        return total if limit == "max" else min(total, int(limit))
    except (OSError, ValueError):
        return total


def available_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process may still take: what the machine has, cut by the cgroup's limit (v2), which counts
    files that were read once and may be forgotten as used."""
    import psutil

    available = psutil.virtual_memory().available
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    try:
        idle = re.search(r"^inactive_file (\d+)$", (cgroup / "memory.stat").read_text(), re.MULTILINE)
    except OSError:
        idle = None
    used -= 0 if idle is None else min(used, int(idle[1]))
    return available if limit == "max" else max(0, min(available, int(limit) - used))


def anonymous_memory_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """Memory of this process that is in no file: `RssAnon`, see proc(5). None: this system does not tell."""
    try:
        found = re.search(r"^RssAnon:\s*(\d+) kB$", status.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024
