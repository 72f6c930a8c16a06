"""Output processing of a step: samples tokens for a plan, and converts tokens to text and metrics."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import compress

import numpy as np
import numpy.typing as npt

from lockstep.core.request import FinishReason
from lockstep.core.step import StepPlan, StepResult
from lockstep.engine.adapters import EngineAdapters
from lockstep.engine.drafter import Drafts
from lockstep.engine.generation import Generation
from lockstep.engine.loading import LoadedModel
from lockstep.engine.metrics import EngineMetrics
from lockstep.engine.output_rules import Pooler
from lockstep.engine.outputs import Started
from lockstep.errors import NumericsError
from lockstep.executors.base import HiddenStates, Logits, StepBatch, VectorHead
from lockstep.executors.grammar import TokenBits
from lockstep.executors.sampling import Samples, likeliest, sample

log = logging.getLogger(__name__)
Rows = npt.NDArray[np.int64]
MAX_PROMPT_ROWS = 32
"""Maximum rows of prompt logits in memory at once. With a vocabulary of 262,144 tokens they take 34 MB."""


class OutputProcessor:
    """Computes the steps of an engine. Engine thread only.

    Args:
        generations: the unfinished sequences by id.
        adapters: the adapters of the engine.
    """

    def __init__(
        self,
        model: LoadedModel,
        metrics: EngineMetrics,
        generations: Mapping[int, Generation],
        adapters: EngineAdapters,
    ) -> None:
        self._executor = model.executor
        self._model = model
        self._metrics = metrics
        self._generations = generations
        self._adapters = adapters
        self._pooled: list[tuple[Pooler, int, range]] = []
        """Poolers that need hidden states of the step: the pooler, the start position, and the offsets in the chunk."""
        self._with_prompt_logprobs: list[tuple[Generation, int]] = []
        """Sequences that need prompt log-probabilities, and the number of the step's prompt rows for each."""
        self._sampling: list[Generation] = []
        """Sequences that sample in the current step, in plan order."""
        self.drafts: Drafts = {}
        """Drafts that were proposed for the next step, by sequence."""
        self._verified: list[tuple[Sequence[int], range]] = []
        """By sampling sequence, its drafts in the current step, and the rows of their logits; empty: there are none."""
        self._logits: Logits = np.empty((0, 0), np.float32)
        self.started: list[Started] = []
        """Requests whose computation has begun since the last `Engine.take`."""

    def batch(self, plan: StepPlan, now_s: float) -> StepBatch:
        """Build the executor's batch: the plan with its token ids."""
        generations = self._generations
        ids: list[int] = []
        rows: list[int] = []
        sampling: list[Generation] = []
        for seq_id, start, length, samples in zip(plan.seq_ids, plan.starts, plan.lengths, plan.samples, strict=True):
            generation = generations[seq_id]
            if length == 1:
                ids.append(generation.tokens[start])
            else:
                ids += generation.tokens[start : start + length]
            if samples:
                sampling.append(generation)
                rows.append(len(ids) - 1)
                if plan.drafts:
                    ids += self.drafts.get(seq_id, ())[: start + length - len(generation.tokens)]
        self._sampling = sampling
        if plan.drafts:
            rows += self._draft_rows(plan, rows)
        self._pooled, self._with_prompt_logprobs = [], []
        hidden, logprob_rows = self._collect_prompt_rows(plan, now_s) if plan.num_prompt_tokens else (None, None)
        slots = self._slots(plan, len(ids)) if self._adapters.num_open else None
        return StepBatch(plan, np.array(ids, np.int64), np.array(rows, np.int64), hidden, logprob_rows, slots)

    def _slots(self, plan: StepPlan, num_tokens: int) -> npt.NDArray[np.int32] | None:
        """Slot of each token's adapter, see `StepBatch.adapters`; None: no token of the step has one."""
        slots = np.zeros(num_tokens, np.int32)
        at, has_any = 0, False
        for seq_id, start, length in zip(plan.seq_ids, plan.starts, plan.lengths, strict=True):
            live = self._generations[seq_id].live
            at += length
            if live.adapter_start is not None and live.adapter_start.position < start + length:
                num_before = max(0, live.adapter_start.position - start)
                slots[at - length + num_before : at] = live.adapter_slot
                has_any = True
        return slots if has_any else None

    def _draft_rows(self, plan: StepPlan, rows: list[int]) -> list[int]:
        """Record the drafts of the step. Returns the rows of their logits.

        Args:
            rows: row of each sampling sequence's last known token.
        """
        further: list[int] = []
        self._verified = []
        for generation, row, count in zip(self._sampling, rows, compress(plan.drafts, plan.samples), strict=True):
            begin = len(rows) + len(further)
            drafts = self.drafts.get(generation.seq_id, ())[:count]
            self._verified.append((drafts, range(begin, begin + len(drafts))))
            further += range(row + 1, row + 1 + len(drafts))
        return further

    def _collect_prompt_rows(self, plan: StepPlan, now_s: float) -> tuple[Rows | None, Rows | None]:
        """Record the prompts of the step. Returns the rows whose hidden states are needed, and those whose logits
        are."""
        hidden_rows: list[int] = []
        rows: list[int] = []
        at = 0
        for seq_id, start, length in zip(plan.seq_ids, plan.starts, plan.lengths, strict=True):
            generation = self._generations[seq_id]
            if start < generation.prompt_len:
                live = generation.live
                if live.first_scheduled_s is None:
                    self.started.append(Started(live.request_id, seq_id, plan.step, now_s - live.arrival_s))
                generation.start_chunk(start, now_s)
                if generation.pooler is not None:
                    offsets = generation.pooler.rows_of(start, length)
                    self._pooled.append((generation.pooler, start, offsets))
                    hidden_rows.extend(at + offset for offset in offsets)
                if generation.prompt_logprobs is not None:
                    offsets = generation.prompt_logprobs.rows_of(start, length)
                    self._with_prompt_logprobs.append((generation, len(offsets)))
                    rows.extend(at + offset for offset in offsets)
            at += length
        return (
            np.array(hidden_rows, np.int64) if hidden_rows else None,
            np.array(rows, np.int64) if rows else None,
        )

    def compute(self, plan: StepPlan, now_s: float) -> Samples:
        """Execute the step and sample. Raises the executor's errors."""
        logits = self._executor.execute(self.batch(plan, now_s))
        if plan.drafts:
            self._logits, logits = logits, logits[: len(self._sampling)]
        if self._pooled:
            self._pool()
        if self._with_prompt_logprobs:
            self._add_prompt_logits()
        sampling = self._sampling
        if plan.num_prompt_tokens:
            for generation, row in zip(sampling, logits, strict=True):
                if generation.live.request.logit_ids:
                    generation.vector = row[list(generation.live.request.logit_ids)]  # a copy
        return sampled(logits, sampling)

    def accept(self, plan: StepPlan, samples: Samples, now_s: float) -> tuple[StepResult, list[Generation]]:
        """Append the sampled tokens. Returns the result for the scheduler and the sequences that were changed."""
        touched = self._sampling
        counts: list[int] = []
        accepted: list[int] = []
        finishes: list[FinishReason | None] = []
        num_after: dict[float, int] = {}
        """Number of tokens by the time of the previous token, which is mostly the same for a whole batch."""
        num_tokens = 0
        for index, (generation, token, logprobs, finite) in enumerate(
            zip(touched, samples.token_ids, samples.logprobs, samples.finite, strict=True)
        ):
            if not finite or generation.fault is not None or generation.live.request.gives_vector:
                counts.append(1)
                accepted.append(0)
                finishes.append(self._end_without_token(generation, finite, now_s))
                continue
            got, num_accepted = generation.accept(token, logprobs), 0
            if plan.drafts and self._verified[index][0]:
                got, num_accepted = self._verify(generation, got, *self._verified[index], now_s)
            accepted.append(num_accepted)
            counts.append(got)
            finishes.append(generation.finish_reason)
            num_tokens += got
            if generation.first_token_s is None:
                self._first_token(generation, now_s)
            else:
                last_s = generation.last_token_s
                num_after[last_s] = num_after.get(last_s, 0) + 1
            if got > 1:
                num_after[now_s] = num_after.get(now_s, 0) + got - 1  # jump-forward tokens come with the sampled one
            generation.last_token_s = now_s
        metrics = self._metrics
        for last_s, count in num_after.items():
            metrics.observe_itl_s(now_s - last_s, count)
        metrics.num_steps += 1
        metrics.generation_tokens += num_tokens
        metrics.observe_step_tokens(num_tokens + plan.num_prompt_tokens // self._executor.geometry.num_stages)
        return StepResult(tuple(counts), tuple(finishes), tuple(accepted) if plan.drafts else ()), touched

    def _verify(
        self, generation: Generation, num_tokens: int, drafts: Sequence[int], rows: range, now_s: float
    ) -> tuple[int, int]:
        """Give a sequence its further tokens as long as its tokens in this step are the drafts, so that the logits
        after them are known. Each comes with the code of a step of its own.

        Args:
            num_tokens: number of tokens that it has got in the step, without any draft.
            rows: rows of the logits after each draft.

        Returns:
            The number of tokens that it got, and the number of accepted drafts among them.
        """
        first = len(generation.tokens) - num_tokens
        equal = 0
        while True:
            known = generation.tokens[first:]
            while equal < min(len(known), len(drafts)) and known[equal] == drafts[equal]:
                equal += 1
            if generation.finish_reason is not None or generation.is_full or equal < len(known):
                break
            generation.early_outputs.append(generation.take_output(now_s))
            row = rows[equal - 1]
            [token], [logprobs], [finite] = sampled(self._logits[row : row + 1], [generation])
            if not finite or generation.fault is not None:
                self._end_without_token(generation, finite, now_s)
                num_tokens += 1  # counts as a token, as in a step of its own
                break
            num_tokens += generation.accept(token, logprobs)
        num_accepted = min(equal, num_tokens - 1)
        self._metrics.observe_drafts(len(drafts), num_accepted)
        return num_tokens, num_accepted

    def _end_without_token(self, generation: Generation, finite: bool, now_s: float) -> FinishReason:
        """End a sequence that has invalid logits, a failed grammar, or a complete embedding. Returns the reason."""
        if generation.pooler is not None:
            generation.vector = self._projected(generation.pooler.vector())
            finite = bool(np.isfinite(generation.vector).all())
        if finite and generation.fault is None:
            generation.end(FinishReason.STOP)
            self._first_token(generation, now_s)
            return FinishReason.STOP
        self._metrics.corrupted_requests += not finite or isinstance(generation.fault, NumericsError)
        generation.live.error = generation.fault or self._not_finite(
            len(generation.tokens) // generation.live.num_stages
        )
        generation.end(FinishReason.ERROR)
        return FinishReason.ERROR

    def _projected(self, vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Apply the model's layers for pooled vectors, if it has any."""
        executor = self._executor
        if isinstance(executor, VectorHead) and executor.head_size is not None:
            vector = executor.project(vector[np.newaxis])[0]
        return vector

    def undo_finishes(self, plan: StepPlan) -> list[int]:
        """Undo the ends of sequences after a step that failed before its commit. Returns the ids of the plan's
        requests."""
        generations = [self._generations[seq_id] for seq_id in plan.seq_ids]
        for generation in generations:
            generation.finish_reason = generation.stop_reason = None
        return list(dict.fromkeys(generation.live.request_id for generation in generations))

    def _pool(self) -> None:
        executor = self._executor
        assert isinstance(executor, HiddenStates), "input processing rejects embedding requests for other executors"
        states, at = executor.hidden_states, 0
        for pooler, start, offsets in self._pooled:
            pooler.add(start, offsets, states[at : at + len(offsets)])
            at += len(offsets)

    def _add_prompt_logits(self) -> None:
        """Add prompt logits to each sequence's log-probabilities, a few rows at a time."""
        begin = 0
        for generation, count in self._with_prompt_logprobs:
            assert generation.prompt_logprobs is not None, "only a request with prompt_logprobs has such rows"
            for first in range(begin, begin + count, MAX_PROMPT_ROWS):
                logits = self._executor.prompt_logits(first, min(first + MAX_PROMPT_ROWS, begin + count))
                position = generation.prompt_logprobs.add(logits)
                if position is not None:
                    generation.fault = self._not_finite(position + 1)
                    break
            begin += count

    def _not_finite(self, position: int) -> NumericsError:
        return NumericsError(
            f"model {self._model.name!r} produced NaN or infinity at position {position}; "
            "check its weights and precision"
        )

    def _first_token(self, generation: Generation, now_s: float) -> None:
        live = generation.live
        generation.first_token_s = now_s
        self._metrics.prompt_tokens += len(live.prompt_ids)
        self._metrics.cached_prompt_tokens += generation.num_cached_tokens or 0
        self._metrics.observe_ttft_s(now_s - live.arrival_s)
        if live.first_token_s is None:
            live.first_token_s = now_s


def sampled(logits: Logits, generations: Sequence[Generation]) -> Samples:
    """Choose the next token of each sequence.

    Args:
        logits: [len(generations), vocab].
    """
    if all(generation.takes_likeliest for generation in generations):
        return likeliest(logits)
    states = [generation.sampler for generation in generations]
    positions = [len(generation.tokens) for generation in generations]
    suppressed = [generation.suppressed_ids() for generation in generations]
    allowed: dict[int, TokenBits] = {}
    for row, generation in enumerate(generations):
        if generation.grammar is not None and (bits := generation.allowed()) is not None:
            allowed[row] = bits
    return sample(logits, states, positions, suppressed if any(suppressed) else None, allowed or None)
