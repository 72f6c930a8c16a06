"""Models whose sizes fit nothing, weights of mixed types, faulty numbers, callers with other floating-point modes."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from lockstep.artifacts.layout import EMBEDDING
from lockstep.artifacts.model import Artifact, Encoding, Tensor
from lockstep.errors import CorruptArtifactError, UnsupportedArtifactError, UsageError
from lockstep.executors.base import Logits
from tests.executors.native.golden_models import relative_error
from tests.executors.native.loading import USABLE, loaded
from tests.executors.native.support import (
    SMALL_LLAMA,
    TINY,
    TINY_LLAMA,
    batch_of,
    random_artifact,
    reference_logits,
    run,
    with_tensor,
)
from tests.executors.native.test_elements_bits import float_environment
from tools.random_models import Shape, random_tensor

IDS = np.random.default_rng(7).integers(0, 512, 70).tolist()


def logits_of(artifact: Artifact, **options: object) -> Logits:
    with loaded(artifact, 4, 0, kv_cache_precision="f32", **options) as executor:
        return run(executor, (IDS, 0, (1, 2, 3)), all_rows=True)


def check(artifact: Artifact, bound: float) -> None:
    """Assert that logits are near the reference's and the same bits with every instruction set."""
    found = [logits_of(artifact, isa=isa) for isa in USABLE]
    assert relative_error(found[0], reference_logits(artifact, IDS).astype(np.float32)) <= bound
    assert all(np.array_equal(found[0], other) for other in found[1:])


def stored(artifact: Artifact, name: str, encoding: str) -> Artifact:
    """The artifact with one matrix in another encoding."""
    shape = artifact.weights[name].shape
    return with_tensor(artifact, Tensor(name, Encoding(encoding), shape, random_tensor(name, shape, encoding, 3)))


@pytest.mark.parametrize("encoding", ["F32", "Q8_0"])
def test_a_vocabulary_that_is_no_whole_number_of_panels(encoding: str) -> None:
    check(random_artifact(replace(TINY_LLAMA, vocab_size=49_155, num_layers=1), encoding), 5e-2)


def test_a_tied_table_of_six_bits_is_embedding_and_head() -> None:
    artifact = random_artifact(replace(SMALL_LLAMA, tied_embeddings=True), "Q4_K")
    check(stored(artifact, EMBEDDING, "Q6_K"), 5e-2)


@pytest.mark.parametrize("of_values", ["Q6_K", "Q8_0", "F32", "F16"])
def test_queries_keys_and_values_of_several_types(of_values: str) -> None:
    """So files of Q4_K_M are, and of a careful quantiser."""
    artifact = random_artifact(SMALL_LLAMA, "Q4_K")
    artifact = stored(artifact, "model.layers.0.self_attn.v_proj.weight", of_values)
    artifact = stored(artifact, "model.layers.1.self_attn.q_proj.weight", of_values)
    check(stored(artifact, "model.layers.0.mlp.down_proj.weight", of_values), 5e-2)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(10, 5, 8), (5, 1, 16), (2, 2, 40), (1, 1, 80)])
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_sizes_that_are_no_multiples_of_anything(
    heads: int, kv_heads: int, head_dim: int, quantize: str | None
) -> None:
    shape: Shape = replace(
        TINY_LLAMA, hidden_size=80, intermediate_size=210, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        vocab_size=517,
    )  # fmt: skip
    artifact = random_artifact(shape, "F32")
    found = [logits_of(artifact, isa=isa, quantize=quantize) for isa in USABLE]
    expected = reference_logits(artifact, IDS).astype(np.float32)
    assert relative_error(found[0], expected) <= {None: 1e-5, "int8": 9e-2, "int4": 0.5}[quantize]
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_heads_of_other_sizes_are_refused() -> None:
    with (
        pytest.raises(UnsupportedArtifactError, match="12 dimensions"),
        loaded(random_artifact(replace(TINY_LLAMA, head_dim=12))),
    ):
        pass


@pytest.mark.parametrize(("rounding", "flush"), [(1, 0), (2, 0), (3, 0x8040), (0, 0x8040)])
def test_modes_of_the_caller_change_no_bit_and_come_back(rounding: int, flush: int) -> None:
    """Directed rounding, and denormals flushed to zero, as other libraries leave them behind."""
    artifact = random_artifact(TINY["tiny-qwen3"], "Q8_0")
    expected = logits_of(artifact)
    with loaded(artifact, 4, 0, kv_cache_precision="f32") as executor:
        batch = batch_of((IDS, 0, (1, 2, 3)), all_rows=True)
        with float_environment(rounding, flush) as modes:
            before = modes()
            logits = executor.execute(batch)
            after = modes()
    assert before == after
    assert np.array_equal(logits, expected)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_faulty_row_stays_alone(value: float) -> None:
    """Token 5 has an embedding that is not finite; who does not read it keeps its bits."""
    artifact = random_artifact(TINY_LLAMA, "Q8_0")
    tokens = [token for token in IDS if token != 5]
    with loaded(artifact) as executor:
        expected = run(executor, (tokens[:40], 0, (1, 2)))
    table = np.array(np.random.default_rng(0).standard_normal((512, TINY_LLAMA.hidden_size)), np.float32)
    faulty = with_tensor(artifact, Tensor(EMBEDDING, Encoding.F32, table.shape, table))
    with loaded(faulty) as executor:
        sound = run(executor, (tokens[:40], 0, (1, 2)))
        assert sound.shape == expected.shape
        weights = executor._weights.matrices[EMBEDDING].data.view(np.float32).reshape(table.shape)
        weights[5, 3] = value
        logits = run(executor, ([1, 5, 2], 0, (3,)), (tokens[:40], 0, (1, 2)), ([5], 0, (4,)))
        assert np.isnan(logits[[0, 2]]).all()
        assert np.array_equal(logits[1], sound[0])
        executor.execute(batch_of(([7], 0, (3,))))
        assert np.array_equal(run(executor, (tokens[:40], 0, (1, 2))), sound), "nothing is left behind"


def test_one_core_by_affinity_takes_one_thread() -> None:
    artifact = random_artifact(TINY_LLAMA, "Q4_0")
    expected = logits_of(artifact, threads=3)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert np.array_equal(logits_of(artifact), expected)
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q6_K", "Q3_K", "IQ4_XS"])
def test_weights_that_are_not_finite_are_refused_by_name(encoding: str) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    artifact = random_artifact(SMALL_LLAMA, encoding)
    data = np.array(artifact.weights[name].data)
    halves = data.reshape(-1).view("<u2" if data.dtype != np.float32 else "<u4")
    at = {"Q6_K": 104, "Q3_K": 54, "Q4_1": 1}.get(encoding, 0)
    halves[at] = {"F32": 0x7F800000, "BF16": 0x7FC0}.get(encoding, 0x7C00)
    tensor = replace(artifact.weights[name], data=data)
    with pytest.raises(CorruptArtifactError, match=r"layers\.1\.mlp\.up_proj"), loaded(with_tensor(artifact, tensor)):
        pass


def test_nothing_to_quantise_is_an_error() -> None:
    with pytest.raises(UsageError, match="no float weights"), loaded(random_artifact(encoding="Q8_0"), quantize="int8"):
        pass
