"""Native executor: runs models with packed weights, a KV pool, and a forward pass with the same bits everywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.architectures import ARCHITECTURES
from lockstep.artifacts.model import Adapter, Artifact, ModelConfig
from lockstep.errors import ExecutorError, InvalidPlanError, UnsupportedArtifactError, UsageError
from lockstep.executors.base import Geometry, Logits, StepBatch
from lockstep.executors.kv_layout import BLOCK_TOKENS, KVLayout
from lockstep.executors.kv_pool import KVPool, PoolOwner
from lockstep.executors.machine import available_cores
from lockstep.executors.native.adapters import AdapterSlots, pack_adapter
from lockstep.executors.native.assembly import Frequencies
from lockstep.executors.native.encoder import EncoderExecutor
from lockstep.executors.native.forward import Forward
from lockstep.executors.native.library import NativeLibrary, native_library
from lockstep.executors.native.packs import ModelWeights, load_weights
from lockstep.executors.native.products import ThreadPool
from lockstep.executors.native.program import HEAD_DIM_UNIT, MAX_HEAD_DIM, build_program
from lockstep.executors.native.self_check import self_check
from lockstep.executors.options import ExecutorOptions
from lockstep.executors.quantise import vector
from lockstep.executors.rotary import inverse_frequencies, local_frequencies
from lockstep.executors.row_math import row_math
from lockstep.executors.step_inputs import NO_ROWS, Limits, TableRows, check_moves, checked_chunks

Report = Callable[[str, float], None]
MAX_POOL_THREADS = 256


_POOLS: dict[tuple[str, int], ThreadPool] = {}
"""Thread pools of this process, by instruction set and number of threads. Replicas share them, and they end with the
process."""


def load_executor(
    artifact: Artifact, options: ExecutorOptions, report: Report, separator_id: int | None = None
) -> NativeExecutor | EncoderExecutor:
    """Pack or map the weights, and pass the program to the library. ``allocate`` then creates the pool.

    Args:
        report: called with a stage (``pack``) and its completed fraction.
        separator_id: token that ends the first text of a pair, for encoders with token types.

    Raises:
        UsageError: the library is not available, or does not have the chosen instruction set.
        ArtifactError: the artifact is corrupt or of an unknown kind.
        ExecutorError: the library rejects the program.
    """
    library = _library(options.isa)
    _check_bits(library)
    config = artifact.config
    _check_config(artifact)
    weights = load_weights(artifact, library, options.quantize, options.cache_dir, options.max_cache_bytes, report)
    try:
        program = build_program(
            config, weights.matrices, lambda name, size: vector(artifact.weights[name], size),
            artifact.weights.__contains__, _frequencies(config), options.kv_cache_precision,
        )  # fmt: skip
        pool = _pool(library, available_cores() if options.threads is None else options.threads)
        forward = Forward(library, pool, program, config, options.kv_cache_precision)
    except BaseException:
        weights.close()
        raise
    environment = MappingProxyType(environment_of(artifact, options))
    machine = MappingProxyType({"isa": library.isa, "threads": str(pool.threads)})
    if config.bidirectional:
        block_bytes = program.layout.block_bytes
        return EncoderExecutor(artifact, weights, forward, environment, machine, block_bytes, separator_id)
    weights_of: dict[str, list[int]] = {}
    for index, name in enumerate(program.weight_names):
        weights_of.setdefault(name, []).append(index)
    return NativeExecutor(artifact, weights, forward, environment, machine, program.layout, weights_of)


def environment_of(artifact: Artifact, options: ExecutorOptions) -> dict[str, str]:
    """Everything that affects a model's bits. The processor and the number of threads do not."""
    return {
        "executor": "native",
        "bits": str(_library(options.isa).bits_version),
        "kv_cache_precision": options.kv_cache_precision,
        "quantize": options.quantize or "none",
        "artifact": artifact.fingerprint,
    }


def _library(isa: str | None) -> NativeLibrary:
    library = native_library(isa)
    if isinstance(library, str):
        raise UsageError(f"no model can be loaded: {library}")
    return library


@cache
def _check_bits(library: NativeLibrary) -> None:
    """Check that this processor computes the expected bits, once for each instruction set.

    Raises:
        UsageError: it does not.
    """
    wrong = self_check(library)
    if wrong is not None:
        raise UsageError(
            f"instruction set {library.isa!r} computes other bits here than the portable one in {wrong}; "
            "choose another one with --isa, and report this"
        )


def _pool(library: NativeLibrary, threads: int) -> ThreadPool:
    threads = min(threads, MAX_POOL_THREADS)
    if (library.isa, threads) not in _POOLS:
        _POOLS[library.isa, threads] = ThreadPool(library, threads)
    return _POOLS[library.isa, threads]


def _check_config(artifact: Artifact) -> None:
    config = artifact.config
    if config.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedArtifactError(
            f"the executor does not support the architecture {config.architecture!r}; it supports {known}",
            path=artifact.path,
        )
    for head_dim in (config.head_dim, config.full_head_dim or config.head_dim):
        if head_dim % HEAD_DIM_UNIT or head_dim > MAX_HEAD_DIM:
            raise UnsupportedArtifactError(
                f"heads have {head_dim} dimensions; this must be a multiple of {HEAD_DIM_UNIT} up to {MAX_HEAD_DIM}",
                path=artifact.path,
            )


def _frequencies(config: ModelConfig) -> Frequencies:
    factor = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor
    rotations = [(inverse_frequencies(config, _plain_frequencies, row_math().log), factor)]
    if config.local_rope_theta is not None:
        rotations.append((local_frequencies(config, _plain_frequencies), 1.0))
    return rotations


def _plain_frequencies(rotary_dim: int, theta: float) -> npt.NDArray[np.float32]:
    """theta ** -(2 i / rotary_dim); see `rotary.plain_frequencies`."""
    return row_math().power(theta, -np.arange(0, rotary_dim, 2) / rotary_dim).astype(np.float32)


class NativeExecutor(PoolOwner):
    """`Executor` that uses the native library."""

    def __init__(
        self,
        artifact: Artifact,
        weights: ModelWeights,
        forward: Forward,
        environment: Mapping[str, str],
        machine: Mapping[str, str],
        layout: KVLayout,
        weights_of: Mapping[str, Sequence[int]],
    ) -> None:
        config = artifact.config
        self.environment, self.machine = environment, machine
        self.geometry = Geometry(
            block_size=BLOCK_TOKENS,
            bytes_per_block=layout.block_bytes,
            groups=layout.groups,
            num_layers=config.num_layers,
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            weights_bytes=weights.num_bytes,
            mapped_bytes=weights.mapped_bytes,
        )
        self._weights, self._weights_of, self._adapters = weights, weights_of, AdapterSlots()
        self._forward: Forward | None = forward
        self._pool: KVPool | None = None
        self._limits: Limits | None = None
        self._table_rows = [TableRows() for _ in layout.groups]
        self._hidden_states = np.empty((0, config.hidden_size), np.float32)
        self._prompt_rows = NO_ROWS
        self._logits, self._prompt_logits = _LogitsMemory(config.vocab_size), _LogitsMemory(config.vocab_size)

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """Create the pool. An earlier one is dropped with its contents."""
        if self._forward is None:
            raise ExecutorError("the executor is closed")
        self._pool = None
        geometry = self.geometry
        self._pool = KVPool(geometry.bytes_per_block, num_blocks, num_host_blocks)
        self._limits = Limits(
            geometry.block_size,
            num_blocks,
            num_host_blocks,
            geometry.max_model_len,
            geometry.vocab_size,
            geometry.groups,
        )

    def execute(self, batch: StepBatch) -> Logits:
        """See the protocol. Any rows may be requested; an empty plan (only moves, or nothing) returns no rows."""
        pool, plan = self._allocated(), batch.plan
        assert self._limits is not None, "allocate sets it with the pool"
        assert self._forward is not None, "a closed executor has no pool"
        check_moves(plan, self._limits)
        self._weights.check_damage()
        chunks = None
        if plan.has_work:
            chunks = checked_chunks(batch, self._limits, self._table_rows)
        elif len(batch.rows) or len(batch.token_ids):
            raise InvalidPlanError(f"step {plan.step}: rows or token ids without a chunk")
        pool.move(plan)
        if chunks is None:
            return np.empty((0, self.geometry.vocab_size), np.float32)
        hidden_rows = NO_ROWS if batch.hidden_rows is None else np.ascontiguousarray(batch.hidden_rows, np.int64)
        token_ids = np.ascontiguousarray(batch.token_ids, np.int64)
        self._hidden_states = self._forward.step(
            token_ids, chunks.plan, pool.blocks, hidden_rows, windows=chunks.windows, states=chunks.states,
            adapters=None if batch.adapters is None else np.ascontiguousarray(batch.adapters, np.int32),
        )  # fmt: skip
        self._prompt_rows = NO_ROWS if batch.prompt_rows is None else batch.prompt_rows
        return self._logits.of(self._forward, batch.rows)

    def prompt_logits(self, first: int, last: int) -> Logits:
        """See the protocol."""
        assert self._forward is not None, "a step was executed"
        return self._prompt_logits.of(self._forward, self._prompt_rows[first:last])

    @property
    def hidden_states(self) -> npt.NDArray[np.float32]:
        """See ``base.HiddenStates``."""
        return self._hidden_states

    @property
    def adapter_bytes(self) -> int:
        """See ``base.AdapterHost``."""
        return self._adapters.num_bytes

    def load_adapter(self, adapter: Adapter) -> int:
        """See ``base.AdapterHost``."""
        if self._forward is None:
            raise ExecutorError("the executor is closed")
        if adapter.weights_file is not None and adapter.weights_file.is_changed:
            raise ExecutorError(
                f"adapter {adapter.name!r}: {adapter.weights_file.path} was overwritten after it was opened; load the "
                "adapter again, with load_inplace, and write new versions to other files"
            )
        slot = self._adapters.next_empty()
        packed = pack_adapter(adapter, self._weights_of)
        self._forward.load_adapter(slot, packed)
        self._adapters.fill(slot, packed)
        return slot

    def unload_adapter(self, slot: int) -> None:
        """See ``base.AdapterHost``."""
        if self._forward is None or slot not in self._adapters:
            raise ExecutorError(f"slot {slot} has no adapter")
        self._forward.unload_adapter(slot)
        self._adapters.empty(slot)

    def close(self) -> None:
        """Release weights and pool. Calling this again has no effect."""
        if self._forward is not None:
            self._forward.close()
            self._weights.close()
            self._adapters.clear()
        self._forward = self._pool = self._limits = None


class _LogitsMemory:
    """Memory for logits that is reused from step to step, since new pages would cost more than small products."""

    def __init__(self, vocab_size: int) -> None:
        self._rows: Logits = np.empty((0, vocab_size), np.float32)

    def of(self, forward: Forward, rows: npt.NDArray[np.int64]) -> Logits:
        """Logits of tokens of the latest step, valid until the next call."""
        if len(self._rows) < len(rows):
            self._rows = np.empty((len(rows), self._rows.shape[1]), np.float32)
        logits = self._rows[: len(rows)]
        forward.logits(np.ascontiguousarray(rows, np.int64), logits)
        return logits
