"""LoRA adapters in the executor: values, slots, memory, and the same bits in any batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from lockstep.errors import ExecutorError, InvalidPlanError
from lockstep.executors.base import AdapterHost, Logits
from tests.executors.native.adapter_models import merged, random_adapter, run_with
from tests.executors.native.loading import EACH_ISA, loaded
from tests.executors.native.support import TINY, TINY_LLAMA, batch_of, random_artifact, run
from tools.random_adapters import MODULES

TOKENS = np.random.default_rng(7).integers(0, 256, 70).tolist()
TABLE = (1, 2, 3)
F32: dict[str, Any] = {"kv_cache_precision": "f32"}


def relative_error(found: Logits, expected: Logits) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16"])
def test_adapter_has_the_effect_of_merged_weights(encoding: str) -> None:
    artifact, adapter = random_artifact(), random_adapter(TINY_LLAMA, 8, encoding)
    with loaded(artifact, **F32) as executor, loaded(merged(artifact, adapter), **F32) as other:
        slot = executor.load_adapter(adapter)
        found = run_with(executor, [slot], (TOKENS, 0, TABLE))
        expected, base = run(other, (TOKENS, 0, TABLE), all_rows=True), run(executor, (TOKENS, 0, TABLE), all_rows=True)
    assert relative_error(found, expected) < (1e-3 if encoding == "F32" else 1e-5)
    assert relative_error(base, expected) > 0.3


@pytest.mark.parametrize("name", TINY)
def test_every_architecture_takes_adapters(name: str) -> None:
    artifact, adapter = random_artifact(TINY[name]), random_adapter(TINY[name], 5)
    with loaded(artifact, **F32) as executor, loaded(merged(artifact, adapter), **F32) as other:
        found = run_with(executor, [executor.load_adapter(adapter)], (TOKENS, 0, TABLE))
        expected = run(other, (TOKENS, 0, TABLE), all_rows=True)
    assert relative_error(found, expected) < 2e-5


@pytest.mark.parametrize("module", MODULES)
def test_each_product_may_be_the_only_one(module: str) -> None:
    artifact, adapter = random_artifact(), random_adapter(TINY_LLAMA, 4, modules=(module,))
    with loaded(artifact, **F32) as executor, loaded(merged(artifact, adapter), **F32) as other:
        found = run_with(executor, [executor.load_adapter(adapter)], (TOKENS, 0, TABLE))
        expected = run(other, (TOKENS, 0, TABLE), all_rows=True)
    assert relative_error(found, expected) < 1e-5


def test_slots_are_filled_from_the_lowest_and_counted_in_bytes() -> None:
    with loaded(random_artifact()) as executor:
        assert isinstance(executor, AdapterHost)
        adapters = [random_adapter(TINY_LLAMA, 8, seed=seed) for seed in range(3)]
        assert [executor.load_adapter(each) for each in adapters] == [1, 2, 3]
        assert executor.adapter_bytes == 3 * adapters[0].num_bytes
        executor.unload_adapter(2)
        assert executor.adapter_bytes == 2 * adapters[0].num_bytes
        with pytest.raises(ExecutorError, match="slot 2"):
            executor.unload_adapter(2)
        with pytest.raises(ExecutorError, match="not loaded"):
            run_with(executor, [2], (TOKENS, 0, TABLE))
        assert executor.load_adapter(adapters[1]) == 2


def test_slots_of_another_number_of_tokens_are_refused() -> None:
    with loaded(random_artifact()) as executor:
        batch = batch_of((TOKENS, 0, TABLE))
        with pytest.raises(InvalidPlanError, match="adapters"):
            executor.execute(replace(batch, adapters=np.zeros(69, np.int32)))


@pytest.mark.parametrize("isa", EACH_ISA)
def test_a_token_without_an_adapter_has_the_bits_of_the_base(isa: str) -> None:
    with loaded(random_artifact(encoding="Q8_0"), isa=isa, threads=2) as executor:
        base = run(executor, (TOKENS, 0, TABLE), all_rows=True)
        slot = executor.load_adapter(random_adapter(TINY_LLAMA, 8))
        found = run_with(executor, [0, slot], (TOKENS, 0, TABLE), (TOKENS[:9], 0, (4,)))
        assert np.array_equal(found[:70], base)
        assert not np.array_equal(found[70:], base[:9])
