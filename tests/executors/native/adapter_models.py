"""Adapters in memory for the executor's tests, and their computation from the definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace as struct_with

from lockstep.artifacts.layout import split_fused
from lockstep.artifacts.model import Adapter, AdapterTarget, Artifact, Encoding, Tensor
from lockstep.artifacts.tensors import dequantise
from lockstep.executors.base import Logits
from lockstep.executors.native.executor import NativeExecutor
from tests.executors.native.support import Item, batch_of, config_of, regions_of, with_tensor
from tools.random_adapters import adapter_matrices
from tools.random_models import Shape

SCALE = 2.0


def random_adapter(
    shape: Shape, rank: int = 8, encoding: str = "F16", *, seed: int = 0, modules: tuple[str, ...] | None = None
) -> Adapter:
    """An opened adapter whose numbers are in memory."""
    config, targets = config_of(shape), {}
    for stored, (a, b) in adapter_matrices(shape, rank, encoding, seed=seed, modules=modules).items():
        whole = Tensor(stored, Encoding(encoding), b.shape, b)
        for name, part in split_fused(config, {stored: whole}, Path("memory")).items():
            targets[name] = AdapterTarget(Tensor(name, Encoding(encoding), a.shape, a), part, SCALE)
    num_bytes = sum(2 * (each.a.data.size + each.b.data.size) for each in targets.values())
    return Adapter(f"adapter {seed}", Path("memory"), f"{seed:032x}", rank, SCALE, targets, num_bytes)


def merged(artifact: Artifact, adapter: Adapter) -> Artifact:
    """The base with the adapter's products added to its weights, which become F32."""
    for name, (a, b, scale) in adapter.targets.items():
        weights = dequantise(artifact.weights[name]).astype(np.float64)
        changed = weights + scale * dequantise(b).astype(np.float64) @ dequantise(a).astype(np.float64)
        tensor = Tensor(name, Encoding.F32, weights.shape, changed.astype(np.float32))
        artifact = with_tensor(artifact, tensor)
    return replace(artifact, fingerprint=f"{artifact.fingerprint} {adapter.fingerprint}")


def run_with(
    executor: NativeExecutor, slots: Sequence[int] | Mapping[int, int], *items: Item, all_rows: bool = True
) -> Logits:
    """Logits of a step whose chunks have these slots, as a copy."""
    batch = batch_of(*items, regions=regions_of(executor), all_rows=all_rows)
    of_tokens: npt.NDArray[np.int32] = np.repeat(
        np.array([slots[index] for index in range(len(items))], np.int32), [len(tokens) for tokens, _, _ in items]
    )
    return executor.execute(struct_with(batch, adapters=of_tokens)).copy()
