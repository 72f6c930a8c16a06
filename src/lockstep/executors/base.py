"""The interface between the engine and its executors: one protocol, its inputs, and its own properties."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.core.step import StepPlan

Logits = npt.NDArray[np.float32]
Blocks = npt.NDArray[np.uint8]
"""Contents of KV blocks, all layers of one after the other: [number, bytes_per_block]."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shapes and bounds of a loaded model, as loading measured them."""

    block_size: int
    """Tokens per KV block."""
    bytes_per_block: int
    """Bytes of one block over all layers, keys and values."""
    num_layers: int
    max_model_len: int
    vocab_size: int
    weights_bytes: int | None = None
    """Memory that the weights take, mapped files included; None: they are a fiction."""
    mapped_bytes: int = 0
    """Of it, what is mapped from files: the system counts it as free, and other processes share it."""


class StepBatch(msgspec.Struct, frozen=True):
    """A plan with its token ids."""

    plan: StepPlan
    token_ids: npt.NDArray[np.int64]
    """[num_tokens], the chunks' tokens in plan order."""
    rows: npt.NDArray[np.int64]
    """Indices into ``token_ids`` whose logits are wanted: each sampling chunk's last row, in plan order."""
    hidden_rows: npt.NDArray[np.int64] | None = None
    """Indices into ``token_ids`` whose hidden states are wanted; None: none."""
    prompt_rows: npt.NDArray[np.int64] | None = None
    """Indices into ``token_ids`` whose logits are requested afterwards, by `Executor.prompt_logits`; None: none."""


class Executor(Protocol):
    """A loaded model with its KV pool. One thread uses it; it holds no sequence state but the blocks."""

    @property
    def geometry(self) -> Geometry: ...

    @property
    def environment(self) -> Mapping[str, str]:
        """Everything that the bits depend on: version of the library's bits, options, fingerprint."""
        ...

    @property
    def machine(self) -> Mapping[str, str]:
        """Instruction set and threads: speed depends on them, bits do not."""
        ...

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """Create the pool: blocks 1..num_blocks, plus the null block 0; host blocks 0..num_host_blocks-1."""
        ...

    def execute(self, batch: StepBatch) -> Logits:
        """Swap out, swap in, copy, forward: logits [len(rows), vocab], valid until the next call.

        They may hold NaN (from a damaged model): the sampler checks each row, so that a request fails alone.

        Raises:
            InvalidPlanError: the plan would touch memory outside the pool; nothing was done.
            ExecutorError: the forward pass failed.
        """
        ...

    def prompt_logits(self, first: int, last: int) -> Logits:
        """Logits [last - first, vocab] of ``prompt_rows[first:last]`` of the latest step, valid until the next call.

        Those of a long prompt together may be gigabytes, so a few are requested at a time.
        """
        ...

    def read_blocks(self, blocks: Sequence[int]) -> Blocks:
        """Copy device blocks: [len(blocks), bytes_per_block], bit for bit; between two calls of ``execute``."""
        ...

    def write_blocks(self, blocks: Sequence[int], content: Blocks) -> None:
        """Overwrite device blocks with what ``read_blocks`` gave; between two calls of ``execute``.

        Raises:
            InvalidPlanError: blocks or shape are not of this pool; nothing was written.
        """
        ...

    def close(self) -> None:
        """Release everything; calling it again does nothing."""
        ...


@runtime_checkable
class HiddenStates(Protocol):
    """Protocol of an executor whose model can embed text, beside `Executor`."""

    @property
    def hidden_states(self) -> npt.NDArray[np.float32]:
        """[len(hidden_rows), hidden_size] of the last step: what the LM head is given, valid until the next call."""
        ...


@runtime_checkable
class SequenceObserver(Protocol):
    """Protocol of an executor that needs whole requests and not only chunks (the stub does)."""

    def begin(self, seq_id: int, prompt_ids: Sequence[int], max_output_tokens: int) -> None:
        """A sequence was added; called once, before any of its chunks."""
        ...

    def end(self, seq_id: int) -> None:
        """It ended; none of its chunks follows."""
        ...


def environment_digest(environment: Mapping[str, str]) -> str:
    """Key of an environment, for recordings, stored KV and packed weights: 32 hex digits, in any order of entries."""
    state = hashlib.blake2b(digest_size=16)
    for key in sorted(environment):
        for part in (key, environment[key]):
            data = part.encode()
            state.update(len(data).to_bytes(4, "little") + data)
    return state.hexdigest()


def kv_environment(environment: Mapping[str, str], geometry: Geometry, fingerprint: str) -> bytes:
    """Key of everything that the bytes of a KV block depend on beside its tokens.

    Args:
        environment: of the executor.
        fingerprint: of the artifact's content.
    """
    layout = {"kv_layout": f"{geometry.num_layers} {geometry.block_size} {geometry.bytes_per_block}"}
    return bytes.fromhex(environment_digest({**environment, **layout, "artifact": fingerprint}))
