"""Options of an engine and of loading a model: checks them and derives the scheduler's configuration.

This module depends on no executor, so that reading options stays cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lockstep.artifacts.task import Task
from lockstep.core.policy import Order, SchedulerConfig, SchedulerLimits, least_batched_tokens
from lockstep.engine.speculative_config import SpeculativeConfig
from lockstep.errors import ConfigError
from lockstep.executors.options import ExecutorOptions
from lockstep.option_fields import MOST, Range, check_options
from lockstep.shown import size

if TYPE_CHECKING:
    from lockstep.executors.base import Geometry

KV_SHARE = 0.3
"""Default share of the memory available at load that the KV pool may take."""
LIMIT_NAMES = tuple(each.name for each in fields(SchedulerLimits))
TOKEN_LIMITS = ("max_num_prefill_tokens", "max_chunk_tokens", "max_num_queued_tokens")
"""Those limits that are numbers of prompt tokens."""
DEFAULT_BATCHED_TOKENS = 512
"""Default tokens of a step, if the number of sequences does not require more."""
HOST_SHARE = 0.5
"""Default size of the host swap space, as a share of the device pool."""
NUM_LONGEST_TEXTS, NUM_TYPICAL_TEXTS, TYPICAL_TEXT_TOKENS = 2, 64, 256
"""Texts for which the pool of an encoder has room by default: longest ones, and others of a typical length."""
_TYPICAL_BLOCK_TOKENS = 32
Bytes = Annotated[int | None, Range(0)]
Progress = Callable[[str, float], None]
"""Called with the stage of loading and its completed fraction, 0 to 1."""


@dataclass(frozen=True, slots=True)
class EngineOptions(SchedulerLimits):
    """Options of one engine: the limits of its scheduler, and its sizes; None: decided at load.

    These fields are the flags of `lockstep serve` and the ``engine:`` section of a manifest. The first paragraphs of
    their docstrings are the help texts.
    """

    max_model_len: Annotated[int | None, Range(2, MOST)] = None
    """Maximum tokens of prompt and output together; by default the model's maximum."""
    max_num_batched_tokens: Annotated[int | None, Range(1, 1 << 20)] = None
    """Maximum tokens per step; None: 512, or what max-num-seqs needs; an encoder takes fewer if its texts are long."""
    order: Order | None = None
    """Admission by arrival; by priority, then arrival; or by least served tenant, then arrival; None: fcfs; with
    --manifest by the models' priority."""
    block_size: Annotated[int | None, Range(1, MOST)] = None
    """Tokens per KV block; None: what the executor has.

    Only the executor's block size is accepted."""
    num_blocks: Annotated[int | None, Range(1, MOST)] = None
    """Number of KV blocks, instead of a number derived from memory."""
    num_host_blocks: Annotated[int | None, Range(0, MOST)] = None
    """Number of host blocks for the KV of preempted sequences; overrides host-kv-memory-bytes."""
    kv_cache_memory_bytes: Bytes = None
    """Size of the KV pool in bytes.

    By default what `max_num_seqs` full contexts need, within 30 % of the available memory; for an encoder, what two of
    its longest texts and 64 of 256 tokens need."""
    host_kv_memory_bytes: Bytes = None
    """Memory for the KV of preempted sequences; None: half of the KV pool.

    With 0, preempted sequences are recomputed."""
    enable_lora: bool = False
    """Accept LoRA adapters, and reserve memory for max-loras of them."""
    max_loras: Annotated[int, Range(1, 1024)] = 8
    """Maximum number of adapters that are loaded at once.

    Any number may be named. The least recently used one is unloaded, and requests wait while all are in use."""
    max_lora_rank: Annotated[int, Range(1, 512)] = 16
    """Maximum rank of an adapter, for which memory is reserved."""

    speculative_config: str | None = None
    """Speculative decoding without a second model, as JSON: {"method": "suffix" or "ngram",
    "num_speculative_tokens": 16, "prompt_lookup_max": 4}; changes no answer; None: no drafts."""

    def __post_init__(self) -> None:
        check_options(self)
        if self.speculative_config is not None:
            SpeculativeConfig.parse(self.speculative_config)

    @property
    def batched_tokens(self) -> int:
        """Maximum tokens of a step: the configured number, or enough for all decoding sequences and a chunk."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(DEFAULT_BATCHED_TOKENS, self._least_batched_tokens)

    @property
    def _least_batched_tokens(self) -> int:
        """Tokens that a step needs so that all sequences can decode in it."""
        return least_batched_tokens(self.max_num_decode_seqs or self.max_num_seqs, self.max_forced_tokens)

    def config(
        self,
        *,
        block_size: int,
        num_blocks: int,
        num_host_blocks: int,
        max_model_len: int,
        num_stages: int = 1,
        step_positions: int | None = None,
    ) -> SchedulerConfig:
        """The scheduler's configuration with the sizes chosen at load.

        Args:
            num_stages: positions per token, see `Geometry`. The limits of this object are in tokens; the other sizes,
                and the result, in positions.
            step_positions: default maximum of positions of a step, see `Geometry`. A text gets at most half of them,
                as a prompt gets half of a decoder's step by default, so that another one can begin.

        Raises:
            ConfigError: the limits conflict.
        """
        limits = {name: getattr(self, name) for name in LIMIT_NAMES}
        if num_stages > 1:
            for name in TOKEN_LIMITS:
                limits[name] = None if limits[name] is None else min(limits[name] * num_stages, MOST)
            limits["enable_prefix_caching"] = False
        batched = self.batched_tokens * num_stages
        if step_positions is not None and self.max_num_batched_tokens is None:
            batched = max(min(batched, step_positions), self._least_batched_tokens)
            limits["max_chunk_tokens"] = min(limits["max_chunk_tokens"], max(batched // 2, 1))
        return SchedulerConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            max_model_len=max_model_len,
            max_num_batched_tokens=min(batched, MOST),
            order=self.order or "fcfs",
            **limits,
        )


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter on disk, and the name by which requests use it."""

    name: str
    path: str
    fingerprint: str = ""
    """Digest of the expected content; empty: any content."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of loading a model."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    executor: ExecutorOptions = field(default_factory=ExecutorOptions)
    cache_dir: Path | None = None
    """Folder for fingerprints and packed weights; by default the user's cache directory."""
    chat_template: str | None = None
    """Jinja source that replaces the artifact's chat template."""
    task: Task | None = None
    """Task of the model; None: the one of its artifact."""
    adapters: tuple[AdapterSource, ...] = ()
    """Adapters that requests can name from the start. With any, `EngineOptions.enable_lora` counts as set."""

    @property
    def has_adapters(self) -> bool:
        """True if the model is loaded with room for adapters."""
        return self.engine.enable_lora or bool(self.adapters)


def check_limits(options: EngineOptions, declared_max_model_len: int | None = None) -> None:
    """Check the limits as far as possible before a model is loaded.

    Args:
        declared_max_model_len: maximum of the model; None: not known yet.

    Raises:
        ConfigError: a limit is impossible.
    """
    max_model_len = options.max_model_len
    if max_model_len is not None and declared_max_model_len is not None:
        check_model_len(max_model_len, declared_max_model_len)
    options.config(
        block_size=options.block_size or _TYPICAL_BLOCK_TOKENS,
        num_blocks=options.num_blocks or 1,
        num_host_blocks=options.num_host_blocks or 0,
        max_model_len=max_model_len or 2,
    )


def check_sizes(options: EngineOptions, memory_bytes: int, called: Mapping[str, str] = {}) -> None:
    """Check that the configured pools fit the machine's total memory.

    Args:
        memory_bytes: total memory of the machine.
        called: names of the sizes in the message, if they differ from the field names.

    Raises:
        ConfigError: they do not fit.
    """
    given = {
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
        "host_kv_memory_bytes": options.host_kv_memory_bytes,
    }
    sizes = {called.get(name, name): value for name, value in given.items() if value is not None}
    if sum(sizes.values()) > memory_bytes:
        parts = " and ".join(f"{name} is {size(value)}" for name, value in sizes.items() if value)
        raise ConfigError(
            f"{parts}, but this machine has {size(memory_bytes)} of memory in total, including the weights; "
            f"lower it, or omit it to use {KV_SHARE:.0%} of the free memory"
        )


def plan_config(options: EngineOptions, geometry: Geometry, available_bytes: int) -> SchedulerConfig:
    """Derive the configuration: blocks from memory, limits from the model, policy from the options.

    Raises:
        ConfigError: a limit is impossible, or not even one sequence would fit.
    """
    max_model_len = geometry.max_model_len
    if options.max_model_len is not None:
        check_model_len(options.max_model_len, geometry.text_limit(max_model_len))
        max_model_len = (options.max_model_len - 1) * geometry.num_stages + 1
    block_tokens = geometry.block_size // geometry.num_stages
    if options.block_size not in (None, block_tokens):
        raise ConfigError(f"block_size is {options.block_size}; this executor has blocks of {block_tokens} tokens")
    blocks_of_longest = _most_blocks(geometry, max_model_len)
    blocks_of_all = blocks_of_longest * options.max_num_seqs
    if geometry.num_stages > 1:
        blocks_of_typical = NUM_TYPICAL_TEXTS * -(-TYPICAL_TEXT_TOKENS // block_tokens)
        blocks_of_all = min(blocks_of_all, NUM_LONGEST_TEXTS * blocks_of_longest + blocks_of_typical)
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
    if geometry.num_stages > 1:
        num_host_blocks = 0  # nothing is ever preempted
    elif options.num_host_blocks is not None:
        num_host_blocks = options.num_host_blocks
    elif options.host_kv_memory_bytes is None:
        num_host_blocks = int(num_blocks * HOST_SHARE)
    else:
        num_host_blocks = options.host_kv_memory_bytes // geometry.bytes_per_block
    pool_bytes = (num_blocks + num_host_blocks) * geometry.bytes_per_block
    if pool_bytes > available_bytes:
        raise ConfigError(
            f"the KV pool would take {size(pool_bytes)} ({num_blocks} blocks on the device and {num_host_blocks} "
            f"on the host), but only {size(available_bytes)} of memory are free once the model is loaded; lower "
            "kv_cache_memory_bytes, num_blocks, host_kv_memory_bytes or num_host_blocks, or omit them"
        )
    config = options.config(
        block_size=geometry.block_size,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_model_len=max_model_len,
        num_stages=geometry.num_stages,
        step_positions=geometry.step_positions,
    )
    config = replace(config, groups=geometry.groups)
    if config.most_positions() < 1:
        raise ConfigError(
            f"the KV pool would hold {num_blocks} blocks of {geometry.bytes_per_block} bytes; one sequence needs "
            f"{1 + config.other_blocks(1)} for its first token; raise kv_cache_memory_bytes or num_blocks"
        )
    return config


def _most_blocks(geometry: Geometry, num_positions: int) -> int:
    """Maximum number of blocks that one sequence can use, including snapshots of its states."""
    num_blocks = 0
    for group in geometry.groups:
        columns = -(-num_positions // geometry.block_size)
        if group.is_state:
            columns = 2 + num_positions // group.snapshot_interval
        num_blocks += columns * group.num_parts
    return num_blocks


def check_model_len(given: int, declared: int) -> None:
    """Check a context length against the model's maximum."""
    if not 2 <= given <= declared:
        raise ConfigError(f"max_model_len is {given}; the model allows 2 to {declared}")
