"""Encoder executor: computes texts stage by stage with the native library, and their hidden states.

Rows of a stage are independent of each other, and keys and values of two layers are stored at a time: a stage reads one
and writes the next. So no bit depends on how rows are divided among steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.model import Artifact
from lockstep.errors import ExecutorError, InvalidPlanError
from lockstep.executors.base import Geometry, Logits, StepBatch
from lockstep.executors.kv_pool import KVPool, PoolOwner
from lockstep.executors.native.encoder_steps import Text, checked_stages, rows_of_parts, step_positions
from lockstep.executors.native.forward import BLOCK_TOKENS, Forward
from lockstep.executors.native.packs import ModelWeights
from lockstep.executors.step_inputs import NO_ROWS, Limits, check_moves

Floats = npt.NDArray[np.float32]


class EncoderExecutor(PoolOwner):
    """`Executor`, `HiddenStates`, `VectorHead` and `SequenceObserver` of a model whose tokens see later ones.

    Args:
        separator_id: token that ends the first text of a pair: the tokens after it have type 1; None: all have type 0.
    """

    def __init__(
        self,
        artifact: Artifact,
        weights: ModelWeights,
        forward: Forward,
        environment: Mapping[str, str],
        machine: Mapping[str, str],
        bytes_per_block: int,
        separator_id: int | None,
    ) -> None:
        config = artifact.config
        num_stages = config.num_layers + 1
        self.environment, self.machine = environment, machine
        self.geometry = Geometry(
            block_size=BLOCK_TOKENS * num_stages,
            bytes_per_block=bytes_per_block,
            num_layers=config.num_layers,
            max_model_len=config.max_model_len * num_stages + 1,  # one more for an output, which there never is
            vocab_size=config.vocab_size,
            weights_bytes=weights.num_bytes,
            num_stages=num_stages,
            mapped_bytes=weights.mapped_bytes,
            step_positions=step_positions(config),
        )
        self.head_size = config.head[-1].size if config.head else None
        self._config = config
        self._weights = weights
        self._forward: Forward | None = forward
        self._pool: KVPool | None = None
        self._separator_id = separator_id if config.num_token_types > 1 else None
        self._texts: dict[int, Text] = {}
        self._hidden_states = np.empty((0, config.hidden_size), np.float32)

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """Create the pool. An earlier one is dropped with its contents."""
        if self._forward is None:
            raise ExecutorError("the executor is closed")
        self._pool = None
        self._pool = KVPool(self.geometry.bytes_per_block, num_blocks, num_host_blocks)
        self._limits = Limits(
            self.geometry.block_size, num_blocks, num_host_blocks, self.geometry.max_model_len, self._config.vocab_size
        )

    def begin(self, seq_id: int, prompt_ids: Sequence[int], max_output_tokens: int) -> None:
        """See the protocol. ``prompt_ids`` are the tokens of the text, each once.

        Raises:
            InvalidPlanError: the text is empty or too long, or a token is not in the vocabulary.
        """
        config, ids = self._config, np.array(prompt_ids, np.int64)
        if not 1 <= len(ids) <= config.max_model_len:
            raise InvalidPlanError(
                f"sequence {seq_id}: a text of {len(ids)} tokens; 1 to {config.max_model_len} are expected"
            )
        if ids.min() < 0 or ids.max() >= config.vocab_size:
            raise InvalidPlanError(f"sequence {seq_id}: a token is not in the vocabulary of {config.vocab_size}")
        types = np.zeros(len(ids), np.int32)
        if self._separator_id is not None:
            ends = np.flatnonzero(ids == self._separator_id)
            types[ends[0] + 1 if len(ends) else len(ids) :] = 1
        self._texts[seq_id] = Text(ids, types)

    def end(self, seq_id: int) -> None:
        """See the protocol."""
        self._texts.pop(seq_id, None)

    def execute(self, batch: StepBatch) -> Logits:
        """Compute the plan's positions, stage by stage. An encoder has no logits: the result is a zero for each row,
        since a request ends with its last position, and what is sampled there is dropped."""
        pool, plan = self._allocated(), batch.plan
        assert self._forward is not None, "a closed executor has no pool"
        check_moves(plan, self._limits)
        self._weights.check_damage()
        stages = checked_stages(plan, self._texts, self.geometry.num_stages, pool.num_blocks)
        last = self.geometry.num_stages - 1
        hidden_rows = rows_of_parts(batch, stages, last)
        pool.move(plan)
        self._hidden_states = self._hidden_states[:0]
        for each in stages:
            rows = hidden_rows if each.stage == last else NO_ROWS
            self._hidden_states = self._forward.step(
                each.token_ids, each.plan, pool.blocks, rows, each.totals, each.stage, each.types
            )
        return np.zeros((len(batch.rows), 1), np.float32)

    def prompt_logits(self, first: int, last: int) -> Logits:
        """See the protocol. An encoder has none."""
        raise ExecutorError("an encoder has no logits, so that log-probabilities of prompts cannot be computed")

    @property
    def hidden_states(self) -> Floats:
        """See ``base.HiddenStates``. They are those of the last stage."""
        return self._hidden_states

    def project(self, vectors: Floats) -> Floats:
        """See ``base.VectorHead``."""
        if self._forward is None or self.head_size is None:
            raise ExecutorError("the executor is closed, or its model has no dense layers for vectors")
        if vectors.ndim != 2 or vectors.shape[1] != self._config.hidden_size:
            raise ExecutorError(f"vectors of shape {list(vectors.shape)}; [n, {self._config.hidden_size}] is expected")
        return self._forward.project(np.ascontiguousarray(vectors, np.float32), self.head_size)

    def close(self) -> None:
        """Release weights and pool. Calling this again has no effect."""
        if self._forward is not None:
            self._forward.close()
            self._weights.close()
        self._forward = self._pool = None
        self._texts = {}
