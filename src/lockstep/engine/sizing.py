"""From what the user intends and what loading measured to the scheduler's configuration. Pure, but for the readings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lockstep.core.policy import SchedulerConfig
from lockstep.errors import ConfigError
from lockstep.executors.base import Geometry

KV_SHARE = 0.3
"""Part of the memory available at load that the KV pool may take when nothing else is said."""
HOST_SHARE = 0.5
"""Host swap space in parts of the device pool when nothing else is said."""
_DEFAULTS = {f.name: f.default for f in fields(SchedulerConfig)}
DECIDED_AT_LOAD = ("block_size", "num_blocks", "num_host_blocks", "max_model_len")
"""Fields of SchedulerConfig that follow from the model and the memory; EngineOptions says what of them is intended."""
_TYPICAL_BLOCK_TOKENS = 32
MAX_LIMITS: Mapping[str, int] = {"max_num_seqs": 1 << 16, "max_num_batched_tokens": 1 << 20}
"""More than any machine computes at once."""
MAX_LIMIT = 1 << 40
"""Of all else that is counted."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a user may intend for one engine; None: decided at load."""

    max_model_len: int | None = None
    """Prompt + output in tokens; at most, and by default, what the model declares."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV pool. By default what `max_num_seqs` full contexts need, within 30 % of the available memory."""
    host_kv_memory_bytes: int | None = None
    """Swap space for preempted sequences; half of the KV pool by default, 0 turns swapping into recomputing."""
    num_blocks: int | None = None
    """Overrides the number of blocks that follows from memory."""
    num_host_blocks: int | None = None
    """The same for the swap space."""
    block_size: int | None = None
    """Tokens per block that the executor is expected to have; another one is refused, as it cannot be chosen."""
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    """Any other field of SchedulerConfig, by name."""


def check_limits(options: EngineOptions, declared_max_model_len: int | None = None) -> None:
    """Refuse limits that cannot work, as far as that is known before anything is loaded.

    Args:
        declared_max_model_len: what the model allows; None: not known yet.

    Raises:
        ConfigError: an unknown or impossible limit.
    """
    _check_names(options.scheduler)
    own = {name: getattr(options, name) for name in ("max_model_len", "num_blocks", "num_host_blocks")}
    counts = {**options.scheduler, **own}
    for name, value in counts.items():
        most = MAX_LIMITS.get(name, MAX_LIMIT)
        if isinstance(value, int) and value > most:
            raise ConfigError(f"{name} is {value}; at most {most} can be meant")
    max_model_len = options.max_model_len
    if max_model_len is not None and declared_max_model_len is not None:
        _check_model_len(max_model_len, declared_max_model_len)
    SchedulerConfig(
        block_size=_TYPICAL_BLOCK_TOKENS if options.block_size is None else options.block_size,
        num_blocks=1 if options.num_blocks is None else options.num_blocks,
        num_host_blocks=options.num_host_blocks or 0,
        max_model_len=2 if max_model_len is None else max_model_len,
        **options.scheduler,
    )


def check_sizes(options: EngineOptions, memory_bytes: int, called: Mapping[str, str] = {}) -> None:
    """Refuse pools that the machine could never hold, whatever is free now.

    Args:
        memory_bytes: all that it has.
        called: what the sizes are called in the message, where they have other names.

    Raises:
        ConfigError: it has less.
    """
    given = {
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
        "host_kv_memory_bytes": options.host_kv_memory_bytes,
    }
    said = {called.get(name, name): value for name, value in given.items() if value is not None}
    for name, value in said.items():
        if value < 0:
            raise ConfigError(f"{name} is {value}; a size is never negative")
    if sum(said.values()) > memory_bytes:
        told = " and ".join(f"{name} is {_gigabytes(value)}" for name, value in said.items() if value)
        raise ConfigError(
            f"{told}, and this machine has {_gigabytes(memory_bytes)} of memory for everything, weights included; "
            f"give less, or leave it out ({KV_SHARE:.0%} of what is free is taken then)"
        )


def _check_model_len(given: int, declared: int) -> None:
    if not 2 <= given <= declared:
        raise ConfigError(f"max_model_len is {given}; the model allows 2 to {declared}")


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 100_000_000 else f"{num_bytes / 1e6:,.1f} MB"


def plan_config(options: EngineOptions, geometry: Geometry, available_bytes: int) -> SchedulerConfig:
    """Blocks from bytes, limits from the model, policy from the user.

    Raises:
        ConfigError: an unknown or impossible limit, or not even one sequence would fit.
    """
    _check_names(options.scheduler)
    max_model_len = geometry.max_model_len if options.max_model_len is None else options.max_model_len
    _check_model_len(max_model_len, geometry.max_model_len)
    if options.block_size not in (None, geometry.block_size):
        raise ConfigError(
            f"block_size is {options.block_size}; this executor has blocks of {geometry.block_size} tokens"
        )
    max_num_seqs = options.scheduler.get("max_num_seqs", _DEFAULTS["max_num_seqs"])
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
            f"the KV pool would take {_gigabytes(pool_bytes)} ({num_blocks} blocks on the device and {num_host_blocks} "
            f"on the host), and {_gigabytes(available_bytes)} of memory are free once the model is loaded; lower "
            "kv_cache_memory_bytes, num_blocks, host_kv_memory_bytes or num_host_blocks, or leave them out"
        )
    return SchedulerConfig(
        block_size=geometry.block_size,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_model_len=max_model_len,
        **options.scheduler,
    )


def _check_names(given: Mapping[str, Any]) -> None:
    known = [f.name for f in fields(SchedulerConfig) if f.name not in DECIDED_AT_LOAD]
    for name in given:
        if name not in known:
            raise ConfigError(f"unknown scheduler option {name!r}; known: {', '.join(known)}")


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
    """What this process may still take: the machine's available memory, cut by the cgroup's limit (v2), which counts
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
    """What this process holds in memory that is in no file: `RssAnon`, see proc(5). None: this system does not tell."""
    try:
        found = re.search(r"^RssAnon:\s*(\d+) kB$", status.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024
