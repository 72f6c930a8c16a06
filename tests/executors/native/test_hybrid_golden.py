"""Hybrids over 500 tokens: the cost of fewer bits of keys and values, the bits of long prompts in any division, and
facts of the conversion that would be seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.executors.base import Logits
from lockstep.executors.native.executor import NativeExecutor
from tests.executors.native.golden_models import relative_error
from tests.executors.native.loading import loaded
from tests.executors.native.support import run
from tests.golden_hybrids import (
    llama_cpp_hybrid_logits,
    open_gguf_hybrid,
    open_huggingface_hybrid,
    transformers_hybrid_logits,
)
from tools.golden.hybrid_cases import HYBRID_CASES, NUM_TOKENS, POSITIONS, hybrid_token_ids

TABLE = tuple(range(1, NUM_TOKENS // 32 + 2))
NUM_BLOCKS = 200
KV_BOUNDS = {"f16": 1e-3, "int8": 2e-2}
"""Relative error of a row, for each layer of attention. States are float32 in all precisions; 4.5e-4 and 1.5e-2 were
seen."""
CUTS: Sequence[Sequence[int]] = ((1, 1, 1, 1), (31, 1, 1, 100), (64, 64, 200), (3, 29, 250))
NUM_DECODED = 120


def in_chunks(executor: NativeExecutor, token_ids: Sequence[int], lengths: Sequence[int] = ()) -> Logits:
    """Logits of all tokens, computed in chunks; those that are left in one more."""
    rows, at = [], 0
    for length in (*lengths, len(token_ids)):
        part = token_ids[at : at + length]
        rows += [run(executor, (part, at, TABLE), all_rows=True)] if part else []
        at += length
    return np.concatenate(rows)


@pytest.mark.parametrize("kv", KV_BOUNDS)
@pytest.mark.parametrize("name", HYBRID_CASES)
def test_fewer_bits_of_keys_and_values_cost_no_more_than_stated(name: str, kv: str, tmp_path: Path) -> None:
    ids = hybrid_token_ids(HYBRID_CASES[name].shape).tolist()
    with loaded(open_huggingface_hybrid(name, tmp_path), NUM_BLOCKS, 0, kv_cache_precision=kv) as executor:
        logits = in_chunks(executor, ids)[list(POSITIONS)]
    bound = KV_BOUNDS[kv] * HYBRID_CASES[name].shape.mixers.count("attention")
    assert 0 < relative_error(logits, transformers_hybrid_logits(name)) <= bound


@pytest.mark.parametrize("name", ["qwen35", "qwen35-wide-values", "lfm2", "lfm2-long", "lfm3"])
@pytest.mark.parametrize("kv", ["f32", "f16", "int8"])
def test_long_prompts_have_the_same_bits_however_they_are_cut(name: str, kv: str, tmp_path: Path) -> None:
    ids = hybrid_token_ids(HYBRID_CASES[name].shape).tolist()
    with loaded(open_huggingface_hybrid(name, tmp_path), NUM_BLOCKS, 0, kv_cache_precision=kv) as executor:
        whole = in_chunks(executor, ids)
        for lengths in CUTS:
            assert np.array_equal(in_chunks(executor, ids, lengths), whole), lengths
        decoded = in_chunks(executor, ids[:NUM_DECODED], [1] * NUM_DECODED)
        assert np.array_equal(decoded, whole[:NUM_DECODED])


LFM3_TWINS: Mapping[str, Mapping[str, Any]] = {
    "the gates of heads": {"head_gates": False},
    "one token less in windows": {"windows": (0, 15, 0, 0, 15)},
    "which layer sees all": {"windows": (0, 16, 0, 16, 0)},
    "the part of heads that turns": {"rope_scaling": None},
    "the local base": {"local_rope_theta": None},
}


@pytest.mark.parametrize("what", LFM3_TWINS)
def test_omitting_a_feature_of_lfm3_changes_the_logits(what: str, tmp_path: Path) -> None:
    artifact = open_huggingface_hybrid("lfm3", tmp_path)
    wrong = replace(artifact, config=replace(artifact.config, **LFM3_TWINS[what]))
    ids = hybrid_token_ids(HYBRID_CASES["lfm3"].shape).tolist()
    with loaded(wrong, NUM_BLOCKS, 0, kv_cache_precision="f32") as executor:
        logits = in_chunks(executor, ids)[list(POSITIONS)]
    assert relative_error(logits, transformers_hybrid_logits("lfm3")) > 0.05


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
    for config in (artifact.config, *twins):
        with loaded(replace(artifact, config=config), NUM_BLOCKS, 0, kv_cache_precision="f32") as executor:
            error = relative_error(in_chunks(executor, ids)[list(POSITIONS)], golden)
        assert error <= 1e-5 if config is artifact.config else error > 0.05
