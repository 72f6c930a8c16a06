"""Gemma 4 computes what transformers and llama.cpp compute, over texts many times longer than its windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.artifacts.gemma4 import PER_LAYER_EMBEDDING
from lockstep.artifacts.model import Artifact, Encoding, Tensor
from lockstep.artifacts.tensors import BLOCKS, FLOAT_TYPES, bfloat16_to_float32, dequantise
from lockstep.core.groups import KVGroup
from lockstep.executors.base import Logits
from lockstep.executors.kv_layout import kv_bytes, kv_layout
from lockstep.executors.probe import quick_probe, thorough_probe
from tests.executors.native.golden_models import relative_error
from tests.executors.native.loading import EACH_ISA, USABLE, loaded
from tests.executors.native.support import TINY, config_of, random_artifact, run, with_tensor
from tests.executors.native.test_groups import spoil_before
from tests.golden_gemma4 import golden_gemma4, open_gguf_gemma4, open_huggingface_gemma4
from tools.golden.gemma4_cases import (
    GEMMA4_CASES,
    GEMMA4_GGUF_CASES,
    NUM_PROMPT_TOKENS,
    NUM_TOKENS,
    POSITIONS,
    gemma4_token_ids,
)
from tools.random_blocks import random_blocks
from tools.random_models import SHAPES

SHAPE = SHAPES["tiny-gemma4"]
TABLE = (3, 1, 4, 2, 5, 16, 9, 12, 6, 15, 8, 7, 11, 10, 14, 13)
MAX_DIFFERENCE = 1e-4
"""From the logits of transformers, with float32 weights."""
KV_BOUNDS = {"f16": 1e-2, "int8": 0.2}
"""Relative error of a row with keys and values in fewer bits."""
LLAMA_CPP_BOUNDS = {"F32": 2e-3, "Q8_0": 6e-2, "Q4_0": 6e-2}
"""Relative error beside llama.cpp, whose GELU is a table of float16, and which rounds activations as well."""


def text_logits(artifact: Artifact, kv: str = "f32") -> Logits:
    """[len(POSITIONS), vocab]"""
    with loaded(artifact, 17, 0, kv_cache_precision=kv) as executor:
        ids = gemma4_token_ids(SHAPE).tolist()
        return run(executor, (ids, 0, TABLE), all_rows=True)[list(POSITIONS)]


@pytest.mark.parametrize("name", GEMMA4_CASES)
def test_logits_of_a_long_text_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    artifact, golden = open_huggingface_gemma4(name, tmp_path), golden_gemma4(name)
    assert np.abs(text_logits(artifact) - golden).max() <= MAX_DIFFERENCE
    for kv, bound in KV_BOUNDS.items():
        assert relative_error(text_logits(artifact, kv), golden) <= bound


@pytest.mark.parametrize("name", ["gemma4", "gemma4-plain"])
def test_a_long_answer_equals_that_of_transformers(name: str, tmp_path: Path) -> None:
    """Decoded token by token, while the blocks behind the windows are filled with what is not a number."""
    golden, rows = golden_gemma4(f"{name}.answer"), []
    with loaded(open_huggingface_gemma4(name, tmp_path), 17, 0, kv_cache_precision="f32") as executor:
        ids = gemma4_token_ids(SHAPE)[:NUM_PROMPT_TOKENS].tolist()
        for position in range(NUM_TOKENS):
            spoil_before(executor, TABLE, position)
            rows.append(run(executor, ([ids[position]], position, TABLE))[0])
            if len(ids) == position + 1:
                ids.append(int(rows[-1].argmax()))
    assert ids[:NUM_TOKENS] == golden_gemma4(f"{name}.answer_ids").tolist()
    assert np.abs(np.stack(rows)[list(POSITIONS)] - golden).max() <= MAX_DIFFERENCE


@pytest.mark.parametrize(
    ("name", "encoding"), [(name, each) for name, case in GEMMA4_GGUF_CASES.items() for each in case.encodings]
)
def test_logits_are_near_those_of_llama_cpp(name: str, encoding: str, tmp_path: Path) -> None:
    golden = golden_gemma4(f"llama.cpp.{name}.{encoding}")
    assert relative_error(text_logits(open_gguf_gemma4(name, encoding, tmp_path)), golden) <= LLAMA_CPP_BOUNDS[encoding]


FORGOTTEN: Mapping[str, Mapping[str, Any]] = {
    "the cap of logits": {"logits_cap": 0.0},
    "another cap": {"logits_cap": 20.0},
    "the norm of values": {"value_norm": False},
    "the windows' size": {"windows": (15, 15, 0, 15, 15, 0)},
    "the first layer's keys and values in the place of the last one's": {"kv_owners": (0, 1, 2, 0, 0, 2)},
    "the rotation of a part": {"rope_scaling": None},
    "the local base": {"local_rope_theta": 1e6},
    "the scale of scores": {"attention_scale": None},
    "the factors of layers": {"layer_scalars": False},
    "the embeddings of layers": {"per_layer_size": 0},
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_omitting_a_feature_changes_the_logits(what: str, tmp_path: Path) -> None:
    artifact = open_huggingface_gemma4("gemma4", tmp_path)
    wrong = replace(artifact, config=replace(artifact.config, **FORGOTTEN[what]))
    assert np.abs(text_logits(wrong) - golden_gemma4("gemma4")).max() > 100 * MAX_DIFFERENCE


def test_layers_that_share_store_nothing() -> None:
    config = config_of(SHAPE)
    layout = kv_layout(config, "f16")
    assert layout.groups == (KVGroup(), KVGroup(1, 16))
    assert [place is not None for place in layout.layers] == [True, True, True, False, False, False]
    assert layout.block_bytes == kv_bytes(2, 64, "f16") == 2 * kv_bytes(2, 32, "f16")


@pytest.mark.parametrize("isa", EACH_ISA)
def test_no_circumstance_changes_a_bit(isa: str) -> None:
    with loaded(random_artifact(SHAPE, "Q8_0"), 120, isa=isa) as executor:
        probe = thorough_probe if isa == USABLE[0] else quick_probe
        report = probe(executor, executor.num_blocks)
    assert report.deterministic, [case for case in report.cases if not case.passed]


def test_instruction_sets_and_threads_change_no_bit() -> None:
    artifact, seen = random_artifact(SHAPE, "Q4_0"), set()
    for isa in USABLE:
        for threads in (1, 3):
            with loaded(artifact, 17, isa=isa, threads=threads) as executor:
                ids = gemma4_token_ids(SHAPE)[:150].tolist()
                seen.add(run(executor, (ids, 0, TABLE), all_rows=True).tobytes())
    assert len(seen) == 1


@pytest.mark.parametrize("encoding", [*BLOCKS, Encoding.F16, Encoding.BF16])
def test_rows_of_the_table_are_read_exactly_as_the_file_has_them(encoding: Encoding) -> None:
    """The model with the same numbers in float32 gives the same bits."""
    size = 256 // SHAPE.num_layers * SHAPE.num_layers
    shape = replace(TINY["tiny-gemma4"], num_layers=2, windows=(16, 0), kv_owners=(), intermediate_sizes=())
    shape = replace(shape, per_layer_size=128)
    assert size < 256 == shape.per_layer_size * shape.num_layers, "whole blocks"
    artifact, rng = random_artifact(shape), np.random.default_rng(3)
    numbers = (shape.vocab_size, 256)
    if encoding in FLOAT_TYPES:
        floats = rng.standard_normal(numbers, np.float32)
        data: Any = floats.astype(np.float16)
        if encoding is Encoding.BF16:
            data = (floats.view(np.uint32) >> 16).astype(np.uint16)
            assert bfloat16_to_float32(data).shape == numbers
    else:
        data = random_blocks(rng, numbers, encoding.value, 0.1)
    stored = Tensor(PER_LAYER_EMBEDDING, encoding, numbers, data)
    plain = Tensor(PER_LAYER_EMBEDDING, Encoding.F32, numbers, dequantise(stored))
    answers = []
    for tensor in (stored, plain):
        with loaded(with_tensor(artifact, tensor), 4) as executor:
            answers.append(run(executor, (list(range(0, 300, 7)), 0, (1, 2)), all_rows=True))
    assert np.isfinite(answers[0]).all()
    assert np.array_equal(answers[0], answers[1])


def test_the_table_is_neither_copied_nor_packed(tmp_path: Path) -> None:
    artifact = open_huggingface_gemma4("gemma4", tmp_path)
    table = artifact.weights[PER_LAYER_EMBEDDING]
    with loaded(artifact, 4, quantize="int8") as executor:
        [held] = [each for name, each in executor._weights.matrices.items() if name == PER_LAYER_EMBEDDING]
        assert held.data.ctypes.data == table.data.ctypes.data
        assert held.data.nbytes == table.data.nbytes
        assert executor.geometry.mapped_bytes >= table.data.nbytes
