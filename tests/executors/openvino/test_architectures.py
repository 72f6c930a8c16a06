"""Every architecture, read from files as people have them, computes what transformers and llama.cpp compute.

tools/golden/ holds the scripts that asked them, and the tiny random models that both sides read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.artifacts.model import Artifact
from lockstep.artifacts.source import open_artifact
from lockstep.errors import ExecutorError
from lockstep.executors.base import Logits
from lockstep.executors.openvino.graph import build_decoder
from lockstep.executors.openvino.paged import to_paged
from tests.executors.openvino.test_golden_logits import (
    EXACT,
    GOLDEN,
    KV_BOUNDS,
    KV_PRECISIONS,
    MAX_RELATIVE_ERROR,
    SERVED,
    StillInterleaved,
    golden_prompt_logits,
    relative_error,
    served_bound,
)
from tools.golden.architecture_cases import GGUF_CASES, HUGGINGFACE_CASES
from tools.golden.logit_cases import SEED, sharpened
from tools.random_models import write_gguf, write_safetensors

GELU_TABLE = 2e-3
"""Relative error beside F32 weights where llama.cpp looks its GELU up in a table of float16; 5e-4 was seen."""


def open_huggingface_case(name: str, directory: Path) -> Artifact:
    case = HUGGINGFACE_CASES[name]
    (directory / "config.json").write_text(json.dumps(case.config()))
    write_safetensors(directory / "model.safetensors", sharpened(case.shape))
    return open_artifact(str(directory), cache_dir=directory / "cache")


def transformers_logits(name: str) -> Logits:
    logits: Logits = np.load(GOLDEN / "logits_architectures.npz")[name]
    return logits


@pytest.mark.parametrize("name", HUGGINGFACE_CASES)
def test_float32_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    logits = golden_prompt_logits(open_huggingface_case(name, tmp_path), EXACT)
    assert np.abs(logits - transformers_logits(name)).max() <= 1e-3


@pytest.mark.parametrize("kv_cache_precision", KV_PRECISIONS)
@pytest.mark.parametrize("name", HUGGINGFACE_CASES)
def test_keys_and_values_in_fewer_bits_cost_no_more_than_stated(
    name: str, kv_cache_precision: str, tmp_path: Path
) -> None:
    options = replace(EXACT, kv_cache_precision=kv_cache_precision)
    logits = golden_prompt_logits(open_huggingface_case(name, tmp_path), options)
    assert relative_error(logits, transformers_logits(name)) <= KV_BOUNDS[kv_cache_precision]


def open_gguf_case(name: str, encoding: str, directory: Path) -> Artifact:
    case = GGUF_CASES[name]
    path = write_gguf(directory / "m.gguf", case.shape, encoding, seed=SEED, extra=case.extra)
    return open_artifact(str(path), cache_dir=directory / "cache")


def llama_cpp_logits(name: str, encoding: str) -> Logits:
    logits: Logits = np.load(GOLDEN / "logits_architectures_llama_cpp.npz")[f"{name}.{encoding}"]
    return logits


@pytest.mark.parametrize(("name", "encoding"), [(n, e) for n, case in GGUF_CASES.items() for e in case.encodings])
def test_logits_are_near_those_of_llama_cpp(name: str, encoding: str, tmp_path: Path) -> None:
    logits = golden_prompt_logits(open_gguf_case(name, encoding, tmp_path), EXACT)
    bound = GELU_TABLE if name.startswith("gemma3") and encoding == "F32" else MAX_RELATIVE_ERROR[encoding]
    assert relative_error(logits, llama_cpp_logits(name, encoding)) <= bound


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_precision", KV_PRECISIONS)
@pytest.mark.parametrize(("name", "encoding"), [(n, e) for n, case in GGUF_CASES.items() for e in case.encodings])
def test_so_are_the_logits_as_served(name: str, encoding: str, kv_cache_precision: str, tmp_path: Path) -> None:
    options = replace(SERVED, kv_cache_precision=kv_cache_precision)
    logits = golden_prompt_logits(open_gguf_case(name, encoding, tmp_path), options)
    assert relative_error(logits, llama_cpp_logits(name, encoding)) <= served_bound(encoding, kv_cache_precision)


@pytest.mark.parametrize("name", ["granite", "smollm3", "qwen2"])
def test_the_other_order_of_rows_would_be_seen(name: str, tmp_path: Path) -> None:
    """Converters permute queries and keys for some architectures and not for others."""
    artifact = open_gguf_case(name, "F32", tmp_path)
    config = artifact.config
    wrong = replace(artifact, weights=StillInterleaved(artifact.weights, config.num_heads, config.num_kv_heads))
    assert relative_error(golden_prompt_logits(wrong, EXACT), llama_cpp_logits(name, "F32")) > 0.1


def test_windows_are_there_when_the_graph_comes_from_the_cache(tmp_path: Path) -> None:
    """What is cached is the graph before its windows are written."""
    artifact = open_huggingface_case("gemma3", tmp_path)
    options = replace(EXACT, cache_dir=tmp_path / "graphs")
    for _ in ("built", "read"):
        logits = golden_prompt_logits(artifact, options)
        assert np.abs(logits - transformers_logits("gemma3")).max() <= 1e-3


def test_a_model_of_a_declared_window_and_another_number_of_layers_is_an_error(tmp_path: Path) -> None:
    artifact = open_huggingface_case("mistral", tmp_path)
    for windows, message in (((16,), "is not a window"), ((16,) * 3, "left no PagedAttentionExtension")):
        wrong = replace(artifact, config=replace(artifact.config, windows=windows + (0,) * (2 - len(windows))))
        model = build_decoder(wrong.config, wrong.weights)
        with pytest.raises(ExecutorError, match=message):
            to_paged(model, windows)


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
def test_what_an_architecture_adds_would_be_missed(what: str, tmp_path: Path) -> None:
    name, changes = FORGOTTEN[what]
    artifact = open_huggingface_case(name, tmp_path)
    wrong = replace(artifact, config=replace(artifact.config, **changes))
    assert np.abs(golden_prompt_logits(wrong, EXACT) - transformers_logits(name)).max() > 0.5
