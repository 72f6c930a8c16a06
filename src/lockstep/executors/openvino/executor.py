"""The OpenVINO executor: a compiled paged graph, its KV pool, and the forward pass of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.model import Artifact
from lockstep.errors import ExecutorError, InvalidPlanError
from lockstep.executors.base import Blocks, Geometry, Logits, StepBatch
from lockstep.executors.kv_pool import KVPool
from lockstep.executors.openvino import paged
from lockstep.executors.openvino.inputs import ForwardInputs, build_inputs, split_inputs
from lockstep.executors.openvino.loading import Compiled, compile_artifact
from lockstep.executors.openvino.ops import BLOCK_TOKENS
from lockstep.executors.openvino.runtime import CompiledModel, ElementType, InferRequest, Port, ov
from lockstep.executors.options import ExecutorOptions
from lockstep.executors.step_inputs import Limits, TableRows, check_moves

Progress = Callable[[str, float], None]
_FEEDS: Mapping[str, Callable[[ForwardInputs], npt.NDArray[Any]]] = {
    paged.TOKEN_IDS: attrgetter("token_ids"),
    paged.POSITIONS: attrgetter("positions"),
    paged.PAST_LENS: attrgetter("past_lens"),
    paged.SUBSEQUENCE_BEGINS: attrgetter("subsequence_begins"),
    paged.BLOCK_INDICES: attrgetter("block_indices"),
    paged.BLOCK_INDICES_BEGINS: attrgetter("block_indices_begins"),
    paged.MAX_CONTEXT_LEN: attrgetter("max_context_len"),
    paged.PLAN: attrgetter("plan"),
    paged.SAMPLED_ROWS: attrgetter("rows"),
    paged.HIDDEN_ROWS: attrgetter("hidden_rows"),
}
"""The array of each input that a graph may have."""


def load_executor(
    artifact: Artifact, options: ExecutorOptions | None = None, progress: Progress | None = None
) -> OpenVINOExecutor:
    """Build or read the graph, compile it, and measure its geometry; ``allocate`` then makes the pool.

    Args:
        progress: called with a stage (``build``, ``save``, ``read``, ``compile``) and its fraction done.

    Raises:
        UsageError: a device that is not there; the message lists what is.
        ArtifactError: the artifact is corrupt or of an unknown kind.
        ExecutorError: OpenVINO refused the graph.
    """
    options = ExecutorOptions() if options is None else options
    report = progress or (lambda stage, fraction: None)
    return OpenVINOExecutor(artifact, compile_artifact(artifact, options, report))


class OpenVINOExecutor:
    """Executor protocol; ``environment`` includes ``kv_cache_precision`` and everything else the bits depend on.

    A step is one forward pass, or several where a pass must not have more than ``max_pass_tokens``.
    """

    def __init__(self, artifact: Artifact, compiled: Compiled) -> None:
        self.environment: Mapping[str, str] = MappingProxyType(dict(compiled.environment))
        self._compiled: CompiledModel = compiled.model
        self._max_pass_tokens = compiled.max_pass_tokens
        own = compiled.attention
        self._cache_names = paged.cache_inputs(artifact.config.num_layers, own)
        self._block_shapes = [_block_shape(compiled.model.input(name)) for name in self._cache_names]
        self.geometry = Geometry(
            block_size=self._block_shapes[1][1][1] if own is None else BLOCK_TOKENS,
            bytes_per_block=sum(int(kind.size) * int(np.prod(shape)) for kind, shape in self._block_shapes),
            num_layers=artifact.config.num_layers,
            max_model_len=artifact.config.max_model_len,
            vocab_size=artifact.config.vocab_size,
            decode_equals_prefill=own is not None,
        )
        self._limits: Limits | None = None
        self._pool: KVPool | None = None
        self._request: InferRequest = None
        taken = {port.get_any_name() for port in compiled.model.inputs}
        self._feeds = {name: array_of for name, array_of in _FEEDS.items() if name in taken}
        self._inputs: dict[str, npt.NDArray[Any]] = {}
        self._table_rows = TableRows()
        self._hidden_states: npt.NDArray[np.float32] | None = None
        self._prompt_logits: Logits = np.empty((0, self.geometry.vocab_size), np.float32)

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """Create the pool; an earlier one is dropped with its contents."""
        if self._compiled is None:
            raise ExecutorError("the executor is closed")
        self._request = self._pool = None
        self._pool = KVPool(
            [int(kind.size) * int(np.prod(shape)) for kind, shape in self._block_shapes], num_blocks, num_host_blocks
        )
        self._request = self._compiled.create_infer_request()
        for name, (kind, shape), cache in zip(self._cache_names, self._block_shapes, self._pool.caches, strict=True):
            blocks = cache.view(kind.to_dtype()).reshape(num_blocks + 1, *shape)
            self._request.set_tensor(name, ov.Tensor(blocks, shared_memory=True))
        geometry = self.geometry
        self._limits = Limits(
            geometry.block_size, num_blocks, num_host_blocks, geometry.max_model_len, geometry.vocab_size
        )

    def execute(self, batch: StepBatch) -> Logits:
        """See the protocol. Any rows may be asked for; an empty plan (only moves, or nothing) gives no rows."""
        pool, plan = self._allocated(), batch.plan
        assert self._limits is not None, "it is set with the pool"
        check_moves(plan, self._limits)
        inputs = None
        if plan.has_work:
            inputs = build_inputs(batch, self._limits, self._table_rows)
        elif len(batch.rows) or len(batch.token_ids):
            raise InvalidPlanError(f"step {plan.step}: rows or token ids without a chunk")
        pool.move(plan)
        if inputs is None:
            return np.empty((0, self.geometry.vocab_size), np.float32)
        logits = self._forward_all(inputs)
        num_rows, num_prompt_rows = len(batch.rows), 0 if batch.prompt_rows is None else len(batch.prompt_rows)
        self._prompt_logits = logits[num_rows : num_rows + num_prompt_rows]
        return logits[:num_rows]

    def prompt_logits(self, first: int, last: int) -> Logits:
        """See the protocol; they were computed with the others."""
        return self._prompt_logits[first:last]

    def read_blocks(self, blocks: Sequence[int]) -> Blocks:
        """See the protocol."""
        return self._allocated().read(blocks)

    def write_blocks(self, blocks: Sequence[int], content: Blocks) -> None:
        """See the protocol."""
        self._allocated().write(blocks, content)

    def _allocated(self) -> KVPool:
        if self._pool is None:
            raise ExecutorError("the executor has no pool: it is closed, or allocate() was not called")
        return self._pool

    def _forward_all(self, inputs: ForwardInputs) -> Logits:
        """Every pass that the step takes; what several of them say is put together in the order that was asked for."""
        self._hidden_states = None
        limit = self._max_pass_tokens
        if limit is None or len(inputs.token_ids) <= limit:
            return self._forward(inputs)
        logits = np.empty((len(inputs.rows), self.geometry.vocab_size), np.float32)
        for piece in split_inputs(inputs, limit, self.geometry.block_size):
            logits[piece.row_places] = self._forward(piece.inputs)[: len(piece.row_places)]
            states = self._states()
            if self._hidden_states is None:
                self._hidden_states = np.empty((len(inputs.hidden_rows), states.shape[-1]), np.float32)
            self._hidden_states[piece.hidden_places] = states
        return logits

    def _forward(self, inputs: ForwardInputs) -> Logits:
        request = self._request
        # The request shares these arrays' memory until the next step sets its own.
        self._inputs = {name: array_of(inputs) for name, array_of in self._feeds.items()}
        try:
            for name, array in self._inputs.items():
                request.set_tensor(name, ov.Tensor(array, shared_memory=True))
            request.infer()
            logits: Logits = request.get_tensor(paged.LOGITS).data.reshape(-1, self.geometry.vocab_size)
        except RuntimeError as error:
            raise ExecutorError(f"the forward pass failed: {error}") from error
        return logits

    @property
    def hidden_states(self) -> npt.NDArray[np.float32]:
        """See ``base.HiddenStates``."""
        return self._states() if self._hidden_states is None else self._hidden_states

    def _states(self) -> npt.NDArray[np.float32]:
        """Hidden states of the latest pass."""
        states: npt.NDArray[np.float32] = self._request.get_tensor(paged.HIDDEN).data
        return states.reshape(len(states), states.shape[-1])

    def close(self) -> None:
        """Release graph and pool; calling it again does nothing."""
        self._hidden_states = None
        self._inputs = {}
        self._request = self._pool = self._limits = self._compiled = None


def _block_shape(port: Port) -> tuple[ElementType, tuple[int, ...]]:
    """Element type and shape of one block of a cache input; the first axis, the number of blocks, is open."""
    dimensions = list(port.get_partial_shape())[1:]
    return port.get_element_type(), tuple(int(dimension.get_length()) for dimension in dimensions)
