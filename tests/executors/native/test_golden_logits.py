"""The executor computes what transformers, llama.cpp and a float64 decoder compute.

tools/golden/ holds the scripts that asked them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.executors.native.golden_models import (
    GOLDEN,
    artifact_of_case,
    golden_prompt_logits,
    llama_cpp_logits,
    open_case,
    open_gguf_case,
    open_huggingface_case,
    relative_error,
    transformers_logits,
)
from tests.executors.native.loading import loaded
from tests.executors.native.support import SMALL_LLAMA, TINY_LLAMA, random_artifact, reference_logits, run
from tools.golden.architecture_cases import GGUF_CASES, HUGGINGFACE_CASES
from tools.golden.logit_cases import CASES, GGUF_ARCHITECTURES, token_ids
from tools.random_blocks import BLOCKS, has_long_blocks
from tools.random_models import Shape

IDS = np.random.default_rng(7).integers(0, 512, 70).tolist()
GELU_TABLE = 2e-3
"""Relative error beside F32 weights where llama.cpp looks its GELU up in a table of float16; 5e-4 was seen."""
MAX_DIFFERENCE = 1e-4
"""From the logits of transformers, with float32 weights; seen 4e-5."""
KV_BOUNDS = {"f16": 1e-2, "int8": 0.2}
"""Relative error of a row with keys and values in fewer bits; seen 5e-3 and 0.14 where attention is nearly a choice."""
# Relative error of a row beside llama.cpp, which rounds activations as well, F16 and BF16 weights beside activations of
# that type, and beside _K encodings in groups of 256. Seen: 1.9e-6, 1.1e-3, 7.3e-3, up to 3e-2, and up to 5.2e-2.
MAX_RELATIVE_ERROR = {
    "F32": 1e-5, "F16": 4e-3, "BF16": 1.5e-2,
    "Q8_0": 5e-2, "Q4_0": 5e-2, "Q4_1": 5e-2, "Q5_0": 5e-2, "Q5_1": 5e-2,
    "Q4_K": 7e-2, "Q5_K": 7e-2, "Q6_K": 7e-2, "Q4_K_M": 7e-2,
    "Q3_K": 7e-2, "IQ4_NL": 5e-2, "IQ4_XS": 7e-2,
}  # fmt: skip
# Relative error of a row beside a float64 decoder on the exact weights: that of rounding activations to int8 in groups
# of 32. Nothing is requantised, so all encodings have the same bound; seen up to 3.1e-2.
ROUNDED = 4e-2
QUANTIZED = {"int8": 9e-2, "int4": 0.5}
"""Gaussian weights without any structure are the worst case: seen 6e-2 and 0.38."""


def shape_for(encoding: str) -> Shape:
    return SMALL_LLAMA if has_long_blocks(encoding) else TINY_LLAMA


@pytest.mark.parametrize("name", CASES)
def test_float32_logits_equal_those_of_transformers(name: str) -> None:
    stored = np.load(GOLDEN / "logits_transformers.npz")
    golden = stored[name]
    assert np.array_equal(stored[f"{name}.token_ids"], token_ids(CASES[name].shape.vocab_size)), "the draw has changed"
    artifact = artifact_of_case(name, CASES[name])
    assert np.abs(golden_prompt_logits(artifact) - golden).max() <= MAX_DIFFERENCE
    for kv, bound in KV_BOUNDS.items():
        assert relative_error(golden_prompt_logits(artifact, kv), golden) <= bound


@pytest.mark.parametrize("name", HUGGINGFACE_CASES)
def test_logits_equal_those_of_transformers_in_every_architecture(name: str, tmp_path: Path) -> None:
    golden = transformers_logits(name)
    artifact = open_huggingface_case(name, tmp_path)
    assert np.abs(golden_prompt_logits(artifact) - golden).max() <= MAX_DIFFERENCE
    for kv, bound in KV_BOUNDS.items():
        assert relative_error(golden_prompt_logits(artifact, kv), golden) <= bound


@pytest.mark.parametrize("architecture", GGUF_ARCHITECTURES)
@pytest.mark.parametrize("encoding", MAX_RELATIVE_ERROR)
def test_logits_are_near_those_of_llama_cpp(architecture: str, encoding: str, tmp_path: Path) -> None:
    golden = np.load(GOLDEN / "logits_llama_cpp.npz")[f"{architecture}.{encoding}"]
    logits = golden_prompt_logits(open_case(tmp_path, architecture, encoding))
    assert relative_error(logits, golden) <= MAX_RELATIVE_ERROR[encoding]


@pytest.mark.parametrize(("name", "encoding"), [(n, e) for n, case in GGUF_CASES.items() for e in case.encodings])
def test_logits_equal_those_of_llama_cpp_in_every_architecture(name: str, encoding: str, tmp_path: Path) -> None:
    logits = golden_prompt_logits(open_gguf_case(name, encoding, tmp_path))
    bound = GELU_TABLE if name.startswith("gemma3") and encoding == "F32" else MAX_RELATIVE_ERROR[encoding]
    assert relative_error(logits, llama_cpp_logits(name, encoding)) <= bound


@pytest.mark.parametrize("encoding", ["F32", *BLOCKS, "Q4_K_M"])
def test_logits_are_those_of_the_exact_weights(encoding: str) -> None:
    artifact = random_artifact(shape_for(encoding), encoding)
    with loaded(artifact, 4, 0, kv_cache_precision="f32") as executor:
        logits = run(executor, (IDS, 0, (1, 2, 3)), all_rows=True)
    bound = 1e-5 if encoding == "F32" else ROUNDED
    assert relative_error(logits, reference_logits(artifact, IDS).astype(np.float32)) <= bound


@pytest.mark.parametrize("quantize", QUANTIZED)
@pytest.mark.parametrize("encoding", ["F32", "BF16"])
def test_quantising_at_load_costs_no_more_than_stated(encoding: str, quantize: str) -> None:
    artifact = random_artifact(shape_for(encoding), encoding)
    with loaded(artifact, 4, 0, quantize=quantize) as executor:
        logits = run(executor, (IDS, 0, (1, 2, 3)), all_rows=True)
    assert relative_error(logits, reference_logits(artifact, IDS).astype(np.float32)) <= QUANTIZED[quantize]
