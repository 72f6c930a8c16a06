"""The determinism probe sees what differs, says what it tried, and claims nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from lockstep.errors import ConfigError, ExecutorError
from lockstep.executors.base import Blocks, Executor, Geometry, Logits, StepBatch
from lockstep.executors.probe import Scenario, play, quick_probe, split_prompt, thorough_probe

VOCAB = 64
Fault = Callable[[StepBatch, int], float]
"""What is added to the logits of the chunk with that index."""


class HonestExecutor:
    """Keeps (token, position) per slot, reads through the tables, answers with a hash of all it reads; plus a fault."""

    def __init__(self, fault: Fault = lambda batch, index: 0.0, block_size: int = 8) -> None:
        self.fault = fault
        self.block_size = block_size
        self.num_closed = 0

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.block_size, 8 * self.block_size, 1, 4096, VOCAB)

    @property
    def environment(self) -> Mapping[str, str]:
        return {}

    @property
    def machine(self) -> Mapping[str, str]:
        return {}

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        self.blocks = np.full((num_blocks + 1, self.block_size), -1, np.int64)
        self.host = np.full((num_host_blocks, self.block_size), -1, np.int64)

    def prompt_logits(self, first: int, last: int) -> Logits:
        raise NotImplementedError

    def execute(self, batch: StepBatch) -> Logits:
        plan = batch.plan
        for device, host in plan.swap_out:
            self.host[host] = self.blocks[device]
        for host, device in plan.swap_in:
            self.blocks[device] = self.host[host]
        for source, destination in plan.copies:
            self.blocks[destination] = self.blocks[source]
        rows, begin, wanted = [], 0, set(batch.rows.tolist())
        for index, chunk in enumerate(plan.chunks()):
            for offset in range(chunk.length):
                block, slot = divmod(chunk.start + offset, self.block_size)
                self.blocks[chunk.table[block], slot] = batch.token_ids[begin + offset]
                if begin + offset in wanted:
                    context = self.blocks[list(chunk.table)].reshape(-1)[: chunk.start + offset + 1]
                    seed = int(np.dot(context + 2, np.arange(1, len(context) + 1) ** 2 + 7) % (1 << 31))
                    row = np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)
                    rows.append(row + np.float32(self.fault(batch, index)))
            begin += chunk.length
        return np.stack(rows) if rows else np.zeros((0, VOCAB), np.float32)

    def read_blocks(self, blocks: Sequence[int]) -> Blocks:
        return self.blocks[list(blocks)].view(np.uint8)

    def write_blocks(self, blocks: Sequence[int], content: Blocks) -> None:
        self.blocks[list(blocks)] = content.view(np.int64)

    def close(self) -> None:
        self.num_closed += 1


def loaded(fault: Fault = lambda batch, index: 0.0, num_blocks: int = 400, num_host_blocks: int = 20) -> HonestExecutor:
    executor = HonestExecutor(fault)
    executor.allocate(num_blocks, num_host_blocks)
    return executor


def test_an_executor_that_computes_each_sequence_alone_passes_every_case() -> None:
    executor: Executor = loaded()
    assert quick_probe(executor, 400).deterministic
    other = loaded()
    report = thorough_probe(executor, 400, 20, lambda: other)
    assert report.deterministic, [case for case in report.cases if not case.passed]
    names = {case.name for case in report.cases}
    assert {f"batched with {count}" for count in range(1, 32)} <= names
    assert {"swapped out and in", "copied to other blocks", "loaded again", "600 tokens in chunks of 256"} <= names
    assert other.num_closed == 1


SMALL = 1e-6
STEPS = iter(range(1_000_000))
BATCH_FAULTS: Mapping[str, Fault] = {
    "number of sequences": lambda batch, index: SMALL * len(batch.plan.seq_ids),
    "one token or more in a step": lambda batch, index: SMALL * (batch.plan.num_tokens > 1),
    "place in the batch": lambda batch, index: SMALL * index,
    "length of the chunk": lambda batch, index: SMALL * batch.plan.lengths[index],
    "number of steps": lambda batch, index: SMALL * next(STEPS),
}


@pytest.mark.parametrize("what", BATCH_FAULTS)
def test_an_executor_whose_output_depends_on_its_batch_is_always_caught(what: str) -> None:
    executor = loaded(BATCH_FAULTS[what])
    assert not quick_probe(executor, 400).deterministic
    assert not thorough_probe(executor, 400, 20).deterministic


THOROUGH_FAULTS: Mapping[str, Fault] = {
    "block numbers": lambda batch, index: SMALL * batch.plan.tables[index][0],
    "exactly 23 others": lambda batch, index: SMALL * (len(batch.plan.seq_ids) == 24),
    "chunks of 31": lambda batch, index: SMALL * (batch.plan.lengths[index] == 31),
    "rows asked for": lambda batch, index: SMALL * (len(batch.rows) > 40),
    "prefills beside": lambda batch, index: (
        SMALL * (29 in batch.plan.lengths[:index] + batch.plan.lengths[index + 1 :])
    ),
}


@pytest.mark.parametrize("what", THOROUGH_FAULTS)
def test_rarer_dependences_are_caught_by_the_thorough_probe(what: str) -> None:
    report = thorough_probe(loaded(THOROUGH_FAULTS[what]), 400, 20)
    assert not report.deterministic
    assert any("rows differ" in case.detail for case in report.cases if not case.passed)


def test_a_swap_that_loses_a_bit_is_caught() -> None:
    executor = loaded()
    honest = executor.execute

    def execute(batch: StepBatch) -> Logits:
        logits = honest(batch)
        for _, device in batch.plan.swap_in[:1]:
            executor.blocks[device, 3] ^= 1
        return logits

    executor.execute = execute  # type: ignore[method-assign]  # the fault of this test
    failed = [case.name for case in thorough_probe(executor, 400, 20).cases if not case.passed]
    assert failed == ["swapped out and in"]


def test_cases_that_do_not_fit_the_pool_are_left_out() -> None:
    names = {case.name for case in thorough_probe(loaded(num_blocks=12), 12, 0).cases}
    assert "alone again" in names
    assert not any(name.startswith(("swapped", "copied", "600", "batched with 9")) for name in names)
    nothing = quick_probe(loaded(num_blocks=0), 0)
    assert not nothing.deterministic
    assert "too small" in nothing.cases[0].detail
    with pytest.raises(ConfigError, match="too small"):
        play(loaded(num_blocks=3), 3, Scenario((45,)))


def test_a_failing_step_and_a_nan_are_reported_and_never_called_deterministic() -> None:
    executor = loaded(lambda batch, index: float("nan"))
    report = quick_probe(executor, 400)
    assert not report.deterministic
    assert report.cases[0].detail == "NaN or infinity in a row"

    def fail(batch: StepBatch) -> Logits:
        raise ExecutorError("out of luck")

    executor.execute = fail  # type: ignore[method-assign]  # the fault of this test
    report = quick_probe(executor, 400)
    assert not report.deterministic
    assert report.cases[0].detail == "out of luck"


def test_prompts_are_split_into_chunks_of_a_size_and_a_rest() -> None:
    assert split_prompt(75, 19) == (19, 19, 19, 18)
    assert split_prompt(45, 22) == (22, 22, 1)
    assert split_prompt(3, 1) == (1, 1, 1)
    assert split_prompt(76, 19) == (19,) * 4
