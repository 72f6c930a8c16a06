"""Options of an engine and of loading a model: what a user may intend, its checks, and the config that follows from it.

Depends on no executor, so that reading options stays cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.policy import Admission, DecodeOrder, Order, Preemption, PrefillShare, SchedulerConfig
from lockstep.errors import ConfigError
from lockstep.executors.options import ExecutorOptions
from lockstep.shown import size

if TYPE_CHECKING:
    from lockstep.executors.base import Geometry

KV_SHARE = 0.3
"""Part of the memory available at load that the KV pool may take when nothing else is sizes."""
DECIDED_AT_LOAD = ("block_size", "num_blocks", "num_host_blocks", "max_model_len")
"""Fields of SchedulerConfig that follow from the model and the memory; EngineOptions says what of them is intended."""
DEFAULTS: Mapping[str, Any] = {f.name: f.default for f in fields(SchedulerConfig) if f.name not in DECIDED_AT_LOAD}
"""Of the fields of SchedulerConfig that a user may set, by name."""
SCHEDULER_FIELDS = tuple(DEFAULTS)
HOST_SHARE = 0.5
"""Host swap space in parts of the device pool when no number is set."""
_TYPICAL_BLOCK_TOKENS = 32
MAX_LIMITS: Mapping[str, int] = {"max_num_seqs": 1 << 16, "max_num_batched_tokens": 1 << 20}
"""More than any machine computes at once."""
MAX_LIMIT = 1 << 40
"""Of all else that is counted."""
Progress = Callable[[str, float], None]
"""Called with a stage of loading and how much of it is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Intentions of a user for one engine; None: decided at load, or as SchedulerConfig says.

    The flags of `lockstep serve` and the ``engine:`` of a manifest are these fields, and the first paragraphs under
    them the help; those of the scheduler's fields are SchedulerConfig's.
    """

    max_model_len: int | None = None
    """Prompt + output in tokens; by default what the model declares."""
    block_size: int | None = None
    """Tokens per KV block; None: what the executor has.

    It cannot be chosen: another one than the executor's is refused."""
    num_blocks: int | None = None
    """KV blocks, instead of what follows from memory."""
    num_host_blocks: int | None = None
    """Blocks for the KV of preempted sequences, instead of what is below."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV pool in bytes.

    By default what `max_num_seqs` full contexts need, within 30 % of the available memory."""
    host_kv_memory_bytes: int | None = None
    """Memory for the KV of preempted sequences; None: half of the KV pool.

    0 turns swapping into recomputing."""
    max_num_seqs: int | None = None
    max_num_step_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_prefill_tokens: int | None = None
    max_chunk_tokens: int | None = None
    max_num_decode_seqs: int | None = None
    max_forced_tokens: int | None = None
    chunking: bool | None = None
    admission: Admission | None = None
    order: Order | None = None
    decode_order: DecodeOrder | None = None
    prefill_share: PrefillShare | None = None
    preemption: Preemption | None = None
    max_skips: int | None = None
    priority_aging_steps: int | None = None
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_finished: int | None = None
    max_num_tenants: int | None = None
    enable_prefix_caching: bool | None = None

    @property
    def scheduler(self) -> dict[str, Any]:
        """The fields of SchedulerConfig that are set here, by name; those decided at load are not among them."""
        return {name: value for name in SCHEDULER_FIELDS if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of loading a model."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    executor: ExecutorOptions = field(default_factory=ExecutorOptions)
    cache_dir: Path | None = None
    """Where fingerprints and packed weights are kept; the user's cache directory by default."""
    chat_template: str | None = None
    """Jinja source in the place of the artifact's chat template."""


def check_limits(options: EngineOptions, declared_max_model_len: int | None = None) -> None:
    """Refuse limits that cannot work, as far as that is known before anything is loaded.

    Args:
        declared_max_model_len: what the model allows; None: not known yet.

    Raises:
        ConfigError: an impossible limit.
    """
    for name in (*SCHEDULER_FIELDS, "max_model_len", "num_blocks", "num_host_blocks"):
        value, most = getattr(options, name), MAX_LIMITS.get(name, MAX_LIMIT)
        if isinstance(value, int) and value > most:
            raise ConfigError(f"{name} is {value}; at most {most} can be meant")
    max_model_len = options.max_model_len
    if max_model_len is not None and declared_max_model_len is not None:
        check_model_len(max_model_len, declared_max_model_len)
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
    sizes = {called.get(name, name): value for name, value in given.items() if value is not None}
    for name, value in sizes.items():
        if value < 0:
            raise ConfigError(f"{name} is {value}; a size is never negative")
    if sum(sizes.values()) > memory_bytes:
        parts = " and ".join(f"{name} is {size(value)}" for name, value in sizes.items() if value)
        raise ConfigError(
            f"{parts}, and this machine has {size(memory_bytes)} of memory for everything, weights included; "
            f"give less, or leave it out ({KV_SHARE:.0%} of what is free is taken then)"
        )


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
    blocks_of_all = blocks_per_seq * max_num_seqs
    num_blocks = options.num_blocks
    if num_blocks is None:
        budget = options.kv_cache_memory_bytes
        budget = int(available_bytes * KV_SHARE) if budget is None else budget
        num_blocks = min(blocks_of_all, budget // geometry.bytes_per_block)
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
            f"the KV pool would take {size(pool_bytes)} ({num_blocks} blocks on the device and {num_host_blocks} "
            f"on the host), and {size(available_bytes)} of memory are free once the model is loaded; lower "
            "kv_cache_memory_bytes, num_blocks, host_kv_memory_bytes or num_host_blocks, or leave them out"
        )
    return SchedulerConfig(
        block_size=geometry.block_size,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_model_len=max_model_len,
        **options.scheduler,
    )


def check_model_len(given: int, declared: int) -> None:
    """Refuse a context that the model does not allow."""
    if not 2 <= given <= declared:
        raise ConfigError(f"max_model_len is {given}; the model allows 2 to {declared}")
