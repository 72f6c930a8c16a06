"""Random encoders on disk, opened as people have them, and their texts computed by any division of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.model import Artifact
from lockstep.artifacts.source import open_artifact
from lockstep.core.step import StepPlan
from lockstep.executors.base import StepBatch
from lockstep.executors.native.encoder import EncoderExecutor
from lockstep.executors.native.executor import load_executor
from lockstep.executors.options import ExecutorOptions
from tools.golden.encoder_cases import SEED
from tools.random_encoders import ENCODERS, Encoder, write_encoder, write_encoder_gguf

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]
BLOCK_TOKENS = 32


def open_encoder(folder: Path, name: str, encoding: str = "F32", encoder: Encoder | None = None) -> Artifact:
    path = write_encoder(folder / f"{name}-{encoding}", encoder or ENCODERS[name], encoding, seed=SEED)
    return open_artifact(str(path), cache_dir=folder / "cache")


def open_encoder_gguf(folder: Path, name: str, encoding: str = "F32") -> Artifact:
    path = write_encoder_gguf(folder / f"{name}-{encoding}.gguf", ENCODERS[name], encoding, seed=SEED)
    return open_artifact(str(path), cache_dir=folder / "cache")


@contextmanager
def loaded_encoder(artifact: Artifact, num_blocks: int = 40, **options: Any) -> Iterator[EncoderExecutor]:
    executor = load_executor(artifact, ExecutorOptions(**options), lambda stage, share: None)
    assert isinstance(executor, EncoderExecutor)
    executor.allocate(num_blocks, 0)
    yield executor
    executor.close()


@dataclass(frozen=True)
class Chunk:
    """Positions of one text in one step."""

    seq_id: int
    start: int
    length: int


def step_of(chunks: Sequence[Chunk], tables: dict[int, tuple[int, ...]], hidden_rows: Sequence[int] = ()) -> StepBatch:
    plan = StepPlan(
        step=0,
        evicted=(),
        swap_out=(),
        swap_in=(),
        copies=(),
        seq_ids=tuple(chunk.seq_id for chunk in chunks),
        starts=tuple(chunk.start for chunk in chunks),
        lengths=tuple(chunk.length for chunk in chunks),
        tables=tuple(tables[chunk.seq_id] for chunk in chunks),
        samples=tuple(False for _ in chunks),
    )
    num_positions = sum(chunk.length for chunk in chunks)
    none = np.zeros(0, np.int64)
    return StepBatch(plan, np.zeros(num_positions, np.int64), none, np.array(hidden_rows, np.int64))


def states_of(
    executor: EncoderExecutor, texts: Sequence[Longs], steps: Sequence[Sequence[Chunk]] | None = None
) -> list[Floats]:
    """Hidden states of all tokens of each text, computed in these steps; None: all in one."""
    num_stages = executor.geometry.num_stages
    if steps is None:
        steps = [[Chunk(index, 0, len(text) * num_stages) for index, text in enumerate(texts)]]
    tables, first = {}, 1
    for index, ids in enumerate(texts):
        executor.begin(index, ids.tolist(), 0)
        num_blocks = -(-len(ids) // BLOCK_TOKENS)
        tables[index] = tuple(range(first, first + num_blocks))[::-1]
        first += num_blocks
    found: list[list[Floats]] = [[] for _ in texts]
    for chunks in steps:
        rows: list[int] = []
        owners: list[int] = []
        at = 0
        for chunk in chunks:
            last = len(texts[chunk.seq_id]) * (num_stages - 1)
            begin = max(last - chunk.start, 0)
            rows += range(at + begin, at + chunk.length)
            owners += [chunk.seq_id] * max(chunk.length - begin, 0)
            at += chunk.length
        executor.execute(step_of(chunks, tables, rows))
        for owner, state in zip(owners, executor.hidden_states.copy(), strict=True):
            found[owner].append(state)
    for index in range(len(texts)):
        executor.end(index)
    return [np.stack(each) for each in found]
