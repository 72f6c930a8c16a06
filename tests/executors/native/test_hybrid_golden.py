"""Hybrids compute what transformers and llama.cpp compute, over answers of 500 tokens, however a prompt is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.artifacts.model import Artifact
from lockstep.executors.base import Logits
from tests.executors.native.golden_models import relative_error
from tests.executors.native.hybrid_steps import HybridSequence, in_chunks
from tests.executors.native.loading import loaded
from tests.golden_hybrids import (
    llama_cpp_hybrid_logits,
    open_gguf_hybrid,
    open_huggingface_hybrid,
    transformers_hybrid_logits,
)
from tools.golden.hybrid_cases import HYBRID_CASES, HYBRID_GGUF_CASES, NUM_TOKENS, POSITIONS, hybrid_token_ids

MAX_DIFFERENCE = 1e-4
"""From the logits of transformers, with float32 weights and keys and values."""
KV_BOUNDS = {"f16": 2e-2, "int8": 0.2}
"""Relative error of a row with keys and values in fewer bits. States are float32 in all of them."""
MAX_RELATIVE_ERROR = {"F32": 1e-5, "Q8_0": 0.12}
"""Relative error of a row beside llama.cpp, which rounds the activations beside Q8_0 by other groups."""
CUTS: Sequence[Sequence[int]] = ((1, 1, 1, 1), (31, 1, 1, 100), (64, 64, 200), (3, 29, 250))
NUM_DECODED = 120


def logits_of(artifact: Artifact, token_ids: Sequence[int], lengths: Sequence[int] = (), **options: object) -> Logits:
    """Logits of all tokens by one sequence."""
    with loaded(artifact, 400, 0, **{"kv_cache_precision": "f32", **options}) as executor:
        sequence = HybridSequence(executor, len(token_ids))
        assert sequence.num_blocks <= 400
        return in_chunks(sequence, token_ids, lengths)


@pytest.mark.parametrize("name", HYBRID_CASES)
def test_float32_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    golden, ids = transformers_hybrid_logits(name), hybrid_token_ids(HYBRID_CASES[name].shape).tolist()
    artifact = open_huggingface_hybrid(name, tmp_path)
    assert np.abs(logits_of(artifact, ids)[list(POSITIONS)] - golden).max() <= MAX_DIFFERENCE
    for kv, bound in KV_BOUNDS.items():
        logits = logits_of(artifact, ids, kv_cache_precision=kv)[list(POSITIONS)]
        assert relative_error(logits, golden) <= bound, kv


@pytest.mark.parametrize(
    ("name", "encoding"), [(n, e) for n, case in HYBRID_GGUF_CASES.items() for e in case.encodings]
)
def test_logits_are_near_those_of_llama_cpp(name: str, encoding: str, tmp_path: Path) -> None:
    ids = hybrid_token_ids(HYBRID_GGUF_CASES[name].shape).tolist()
    logits = logits_of(open_gguf_hybrid(name, encoding, tmp_path), ids)[list(POSITIONS)]
    assert relative_error(logits, llama_cpp_hybrid_logits(name, encoding)) <= MAX_RELATIVE_ERROR[encoding]


@pytest.mark.parametrize("name", ["qwen35", "qwen35-wide-values", "lfm2", "lfm2-long"])
@pytest.mark.parametrize("kv", ["f32", "f16", "int8"])
def test_cut_prompts_give_the_bits_of_the_whole(name: str, kv: str, tmp_path: Path) -> None:
    ids = hybrid_token_ids(HYBRID_CASES[name].shape).tolist()
    artifact = open_huggingface_hybrid(name, tmp_path)
    with loaded(artifact, 400, 0, kv_cache_precision=kv) as executor:
        whole = HybridSequence(executor, NUM_TOKENS).compute(ids)
        for lengths in CUTS:
            for in_place in (False, True):
                sequence = HybridSequence(executor, NUM_TOKENS, updates_in_place=in_place)
                assert np.array_equal(in_chunks(sequence, ids, lengths), whole), (lengths, in_place)
        decoded = in_chunks(HybridSequence(executor, NUM_TOKENS), ids[:NUM_DECODED], [1] * NUM_DECODED)
        assert np.array_equal(decoded, whole[:NUM_DECODED])


def test_each_fact_of_the_conversion_changes_the_logits(tmp_path: Path) -> None:
    """Negative twins of the comparison with llama.cpp."""
    artifact = open_gguf_hybrid("qwen35", "F32", tmp_path)
    ids, golden = hybrid_token_ids(HYBRID_CASES["qwen35"].shape).tolist(), llama_cpp_hybrid_logits("qwen35", "F32")
    net = artifact.config.delta_net
    assert net is not None
    twins = (
        replace(artifact.config, delta_net=replace(net, is_tiled=False)),
        replace(artifact.config, norm_offset=1.0),
        replace(artifact.config, rotary_dim=None),
    )
    for config in twins:
        logits = logits_of(replace(artifact, config=config), ids)[list(POSITIONS)]
        assert relative_error(logits, golden) > 0.05
