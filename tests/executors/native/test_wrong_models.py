"""A model read or computed wrongly is seen: each thing that an architecture adds, a scaling, the order of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.artifacts.model import QueryScaling, RopeScaling
from lockstep.executors.rotary import inverse_frequencies
from tests.executors.native.golden_models import (
    GOLDEN,
    StillInterleaved,
    artifact_of_case,
    golden_prompt_logits,
    llama_cpp_logits,
    open_case,
    open_gguf_case,
    open_huggingface_case,
    relative_error,
    transformers_logits,
)
from tools.golden.logit_cases import CASES


def test_explicit_rope_divisors_equal_the_scaling_they_were_computed_from() -> None:
    """GGUF files carry llama3 scaling as one divisor per frequency."""
    golden = np.load(GOLDEN / "logits_transformers.npz")["llama-llama3"]
    artifact = artifact_of_case("llama-llama3", CASES["llama-llama3"])
    bare = replace(artifact.config, rope_scaling=None)
    divisors = inverse_frequencies(bare) / inverse_frequencies(artifact.config)
    factors = RopeScaling("factors", 1.0, factors=tuple(divisors.tolist()))
    divided = replace(artifact, config=replace(bare, rope_scaling=factors))
    assert np.abs(golden_prompt_logits(divided) - golden).max() <= 1e-3


def test_a_forgotten_rope_scaling_would_be_seen() -> None:
    golden = np.load(GOLDEN / "logits_transformers.npz")
    for name in ("llama-linear", "llama-llama3"):
        artifact = artifact_of_case(name, CASES[name])
        unscaled = replace(artifact, config=replace(artifact.config, rope_scaling=None))
        assert np.abs(golden_prompt_logits(unscaled) - golden[name]).max() > 0.1


@pytest.mark.parametrize("encoding", ["F32", "Q4_0"])
def test_a_rope_permutation_that_was_not_undone_would_be_seen(encoding: str, tmp_path: Path) -> None:
    artifact = open_case(tmp_path, "llama", encoding)
    config = artifact.config
    wrong = replace(artifact, weights=StillInterleaved(artifact.weights, config.num_heads, config.num_kv_heads))
    golden = np.load(GOLDEN / "logits_llama_cpp.npz")[f"llama.{encoding}"]
    assert relative_error(golden_prompt_logits(wrong), golden) > 0.4


@pytest.mark.parametrize("name", ["granite", "smollm3", "qwen2"])
def test_the_other_order_of_rows_would_be_seen(name: str, tmp_path: Path) -> None:
    """Converters permute queries and keys for some architectures and not for others."""
    artifact = open_gguf_case(name, "F32", tmp_path)
    config = artifact.config
    wrong = replace(artifact, weights=StillInterleaved(artifact.weights, config.num_heads, config.num_kv_heads))
    assert relative_error(golden_prompt_logits(wrong), llama_cpp_logits(name, "F32")) > 0.1


FORGOTTEN: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2-window: the window": ("qwen2-window", {"windows": ()}),
    "qwen2-window: which layer has it": ("qwen2-window", {"windows": (16, 0)}),
    "qwen2-yarn: the scaling": ("qwen2-yarn", {"rope_scaling": None}),
    "mistral: the window": ("mistral", {"windows": ()}),
    "mistral: one token less": ("mistral", {"windows": (15, 15)}),
    "mistral: one token more": ("mistral", {"windows": (17, 17)}),
    "gemma3: the windows": ("gemma3", {"windows": ()}),
    "gemma3: which layer sees all": ("gemma3", {"windows": (16, 16, 16, 16, 0, 16)}),
    "gemma3: the local base": ("gemma3", {"local_rope_theta": 1e6}),
    "gemma3: that norms lack one": ("gemma3", {"norm_offset": 0.0}),
    "gemma3: the scale of scores": ("gemma3", {"attention_scale": None}),
    "gemma3: the scale of embeddings": ("gemma3", {"embedding_scale": 1.0}),
    "gemma3: the activation": ("gemma3", {"activation": "silu"}),
    "gemma3-linear: the scaling": ("gemma3-linear", {"rope_scaling": None}),
    "phi3: the window": ("phi3", {"windows": ()}),
    "phi3-longrope: the scaling": ("phi3-longrope", {"rope_scaling": None}),
    "granite: the scale of scores": ("granite", {"attention_scale": None}),
    "granite: the scale of embeddings": ("granite", {"embedding_scale": 1.0}),
    "granite: the scale of the residual": ("granite", {"residual_scale": 1.0}),
    "granite: the divisor of logits": ("granite", {"logits_divisor": 1.0}),
    "granite_swa: the windows": ("granite_swa", {"windows": ()}),
    "granite_swa: the layer without rope": ("granite_swa", {"unrotated_layers": ()}),
    "granite_swa: the sinks": ("granite_swa", {"sinks": False}),
    "granite_swa: the local base": ("granite_swa-two-bases", {"local_rope_theta": None}),
    "mistral3: the scaling of queries": ("mistral3-beyond", {"query_scaling": None}),
    "mistral3: its period": ("mistral3-beyond", {"query_scaling": QueryScaling(0.5, 33)}),
    "olmo3: the windows": ("olmo3", {"windows": ()}),
    "olmo3: that local layers are not scaled": ("olmo3", {"local_rope_theta": None}),
    "smollm3: layers without rope": ("smollm3", {"unrotated_layers": ()}),
    "smollm3: which layers": ("smollm3-other-layers", {"unrotated_layers": (3,)}),
}


BY_DEFAULT = ("mistral: one token more", "gemma3: which layer sees all", "olmo3: that local layers are not scaled")
"""By how much a window may be wrong, in which layer, and with which base: a kind of mistake each."""


@pytest.mark.parametrize(
    "what", [what if what in BY_DEFAULT else pytest.param(what, marks=pytest.mark.slow) for what in FORGOTTEN]
)
def test_omitting_a_feature_of_an_architecture_changes_the_logits(what: str, tmp_path: Path) -> None:
    name, changes = FORGOTTEN[what]
    artifact = open_huggingface_case(name, tmp_path)
    wrong = replace(artifact, config=replace(artifact.config, **changes))
    assert np.abs(golden_prompt_logits(wrong) - transformers_logits(name)).max() > 0.5
