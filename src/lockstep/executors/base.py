"""Interface between the engine and its executors: defines the protocol, its inputs, and the properties of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.core.groups import ONE_GROUP, KVGroup
from lockstep.core.step import StepPlan

if TYPE_CHECKING:
    from lockstep.artifacts.model import Adapter

Logits = npt.NDArray[np.float32]
Blocks = npt.NDArray[np.uint8]
"""Contents of KV blocks, with all layers of a block one after the other: [number, bytes_per_block]."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shapes and limits of a loaded model, as measured by loading."""

    block_size: int
    """Positions per KV block: tokens, times the stages."""
    bytes_per_block: int
    """Bytes of one block. In a model with one KV group, it has the keys and values of all layers, and what an encoder
    keeps of each token."""
    num_layers: int
    max_model_len: int
    vocab_size: int
    weights_bytes: int | None = None
    """Memory of the weights, including mapped files; None: a stub, which has no weights."""
    mapped_bytes: int = 0
    """Part of the weights that is mapped from files. The system counts it as free, and other processes share it."""
    num_stages: int = 1
    """Number of parts into which the work on each prompt token is divided. 1: a decoder. An encoder has more: every
    token passes a stage before any token passes the next one. A sequence of T tokens then has T positions per stage,
    position p is token p % T in stage p // T, and the sizes above are in such positions."""
    groups: tuple[KVGroup, ...] = ONE_GROUP
    """The KV groups of the model, in the order of a plan's tables."""
    step_positions: int | None = None
    """Number of positions of a step that takes about as long as a chunk of a prompt of a small decoder; None: steps are
    not limited by their duration."""

    def text_limit(self, num_positions: int) -> int:
        """Number of tokens, including one of output, for which this many positions have room."""
        return (num_positions - 1) // self.num_stages + 1


class StepBatch(msgspec.Struct, frozen=True):
    """A plan with its token ids."""

    plan: StepPlan
    token_ids: npt.NDArray[np.int64]
    """[num_tokens], the chunks' tokens in plan order."""
    rows: npt.NDArray[np.int64]
    """Indices into ``token_ids`` whose logits are needed: the row of each sampling chunk's last token that is no draft,
    in plan order, and then the rows of all drafts, in plan order."""
    hidden_rows: npt.NDArray[np.int64] | None = None
    """Indices into ``token_ids`` whose hidden states are needed; None: none."""
    prompt_rows: npt.NDArray[np.int64] | None = None
    """Indices into ``token_ids`` whose logits are requested afterwards, by `Executor.prompt_logits`; None: none."""
    adapters: npt.NDArray[np.int32] | None = None
    """[num_tokens], the slot of each token's adapter (`AdapterHost`), 0: none. None: no token has an adapter."""


class Executor(Protocol):
    """A loaded model with its KV pool. Only one thread uses it. The blocks are its only sequence state."""

    @property
    def geometry(self) -> Geometry: ...

    @property
    def environment(self) -> Mapping[str, str]:
        """Everything that affects the bits: version of the library's bits, options, fingerprint."""
        ...

    @property
    def machine(self) -> Mapping[str, str]:
        """Instruction set and threads. They affect speed but not bits."""
        ...

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """Create the pool: blocks 1..num_blocks, plus the null block 0; host blocks 0..num_host_blocks-1."""
        ...

    def execute(self, batch: StepBatch) -> Logits:
        """Swap out, swap in, copy, and run the forward pass: logits [len(rows), vocab], valid until the next call.

        The logits may contain NaN (from a damaged model). The sampler checks each row, so that only that request fails.

        Raises:
            InvalidPlanError: the plan would access memory outside the pool; nothing was done.
            ExecutorError: the forward pass failed.
        """
        ...

    def prompt_logits(self, first: int, last: int) -> Logits:
        """Logits [last - first, vocab] of ``prompt_rows[first:last]`` of the latest step, valid until the next call.

        All logits of a long prompt may take gigabytes, so callers request a few rows at a time.
        """
        ...

    def read_blocks(self, blocks: Sequence[int]) -> Blocks:
        """Copy device blocks: [len(blocks), bytes_per_block], bit for bit. Call this between two calls of
        ``execute``."""
        ...

    def write_blocks(self, blocks: Sequence[int], content: Blocks) -> None:
        """Overwrite device blocks with the result of ``read_blocks``. Call this between two calls of ``execute``.

        Raises:
            InvalidPlanError: blocks or shape do not fit this pool; nothing was written.
        """
        ...

    def close(self) -> None:
        """Release everything. Calling this again has no effect."""
        ...


@runtime_checkable
class HiddenStates(Protocol):
    """Additional protocol of an `Executor` whose model can embed text."""

    @property
    def hidden_states(self) -> npt.NDArray[np.float32]:
        """[len(hidden_rows), hidden_size] of the last step: the input of the LM head, valid until the next call."""
        ...


@runtime_checkable
class VectorHead(Protocol):
    """Additional protocol of an `Executor` whose model may have dense layers that apply to a pooled vector."""

    @property
    def head_size(self) -> int | None:
        """Size of the vectors, or number of the scores, that `project` returns; None: the model has no such layers."""
        ...

    def project(self, vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Apply the layers to vectors [n, hidden_size]: [n, head_size]. Call this between two calls of ``execute``.

        Raises:
            ExecutorError: the model has no such layers, or the vectors have another size.
        """
        ...


@runtime_checkable
class AdapterHost(Protocol):
    """Additional protocol of an `Executor` that computes tokens with LoRA adapters. Adapters are loaded and unloaded
    between two calls of ``execute``, without a change of the base model's memory or bits."""

    @property
    def adapter_bytes(self) -> int:
        """Memory of the loaded adapters."""
        ...

    def load_adapter(self, adapter: Adapter) -> int:
        """Load an adapter that was opened for this model: its slot, from 1 on.

        Raises:
            ExecutorError: the adapter does not fit the model, its file was overwritten since it was opened, all slots
                are filled, or there is not enough memory.
        """
        ...

    def unload_adapter(self, slot: int) -> None:
        """Empty a slot. The caller ensures that no later step uses it.

        Raises:
            ExecutorError: the slot is empty.
        """
        ...


@runtime_checkable
class SequenceObserver(Protocol):
    """Additional protocol of an executor that needs whole requests and not only chunks, like the stub."""

    def begin(self, seq_id: int, prompt_ids: Sequence[int], max_output_tokens: int) -> None:
        """Called once when a sequence was added, before any of its chunks."""
        ...

    def end(self, seq_id: int) -> None:
        """Called when a sequence has ended and no more of its chunks follow."""
        ...


def environment_digest(environment: Mapping[str, str]) -> str:
    """Key of an environment, for recordings, stored KV and packed weights: 32 hex digits, independent of the order of
    entries."""
    state = hashlib.blake2b(digest_size=16)
    for key in sorted(environment):
        for part in (key, environment[key]):
            data = part.encode()
            state.update(len(data).to_bytes(4, "little") + data)
    return state.hexdigest()


def kv_environment(environment: Mapping[str, str], geometry: Geometry, fingerprint: str) -> bytes:
    """Key of everything that affects the bytes of a KV block, except its tokens.

    Args:
        environment: environment of the executor.
        fingerprint: fingerprint of the artifact's content.
    """
    layout = {"kv_layout": f"{geometry.num_layers} {geometry.block_size} {geometry.bytes_per_block}"}
    if len(geometry.groups) > 1:
        layout["kv_groups"] = " ".join([f"{group.num_parts}/{group.window}" for group in geometry.groups])
    return bytes.fromhex(environment_digest({**environment, **layout, "artifact": fingerprint}))
