"""Encoders compute what transformers and llama.cpp compute, and both file formats hold the same model.

tools/golden/encoders_transformers.py and encoders_llama_cpp.py are the scripts that asked them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.executors.native.encoder_models import Floats, loaded_encoder, open_encoder, open_encoder_gguf, states_of
from tools.golden.encoder_cases import LENGTHS, pooled, text
from tools.random_encoders import ENCODERS

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "encoders_transformers.npz"
LLAMA_CPP = GOLDEN.with_name("encoders_llama_cpp.npz")
GELU_TABLE = 3e-3
"""Relative error where llama.cpp looks GELU by tanh up in a table of float16; 1.2e-3 was seen."""
MAX_RELATIVE_ERROR = 1e-4
"""Of a hidden state, with weights, keys and values in float32; seen 2e-6."""
MAX_DISTANCE = 1e-6
"""Cosine distance of mean-pooled vectors; seen 1e-12."""
LOWER_PRECISION = {"f16": 3e-3, "int8": 6e-2}
TEXTS = [text(length) for length in LENGTHS]
FROM_GGUF = [name for name, encoder in ENCODERS.items() if encoder.gguf]


def relative_error(found: Floats, expected: Floats) -> float:
    return float((np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)).max())


def distance(a: Floats, b: Floats) -> float:
    x, y = a.astype(np.float64), b.astype(np.float64)
    return float((1 - (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)).max())


@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_and_vectors_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    golden, encoder = np.load(GOLDEN), ENCODERS[name]
    expected = np.split(golden[name], np.cumsum(LENGTHS)[:-1])
    artifact = open_encoder(tmp_path, name)
    for storage, bound in {"f32": MAX_RELATIVE_ERROR, **LOWER_PRECISION}.items():
        with loaded_encoder(artifact, kv_cache_precision=storage) as executor:
            states = states_of(executor, TEXTS)
            assert relative_error(np.concatenate(states), golden[name]) <= bound, storage
            if storage == "f32":
                vectors = pooled(encoder, states)
                assert distance(vectors, pooled(encoder, expected)) <= MAX_DISTANCE
                if executor.head_size is not None:
                    head = golden[f"{name}.head"]
                    assert head.shape[1] == executor.head_size
                    assert np.abs(executor.project(vectors) - head).max() <= 1e-4


@pytest.mark.parametrize("name", FROM_GGUF)
def test_a_gguf_file_gives_the_bits_of_the_same_safetensors(name: str, tmp_path: Path) -> None:
    states, heads = [], []
    for artifact in (open_encoder(tmp_path, name), open_encoder_gguf(tmp_path, name)):
        with loaded_encoder(artifact) as executor:
            states.append(np.concatenate(states_of(executor, TEXTS)))
            heads.append(executor.project(states[-1][:3]).tobytes() if executor.head_size else b"")
    assert np.array_equal(states[0], states[1])
    assert heads[0] == heads[1]


@pytest.mark.parametrize("name", FROM_GGUF)
def test_gguf_files_compute_what_llama_cpp_computes(name: str, tmp_path: Path) -> None:
    golden = np.load(LLAMA_CPP)[name]
    with loaded_encoder(open_encoder_gguf(tmp_path, name), kv_cache_precision="f32") as executor:
        states = np.concatenate(states_of(executor, TEXTS))
    assert relative_error(states, golden) <= (1e-5 if name == "nomic-bert" else GELU_TABLE)


@pytest.mark.parametrize("encoding", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("name", ["bert", "modern-bert"])
def test_every_kind_of_weights_loads_from_gguf(name: str, encoding: str, tmp_path: Path) -> None:
    with loaded_encoder(open_encoder_gguf(tmp_path, name, encoding)) as executor:
        assert np.isfinite(np.concatenate(states_of(executor, TEXTS))).all()


@pytest.mark.parametrize(("quantize", "bound"), [("int8", 0.1), ("int4", 0.7)])
def test_quantising_at_load_costs_no_more_than_stated(quantize: str, bound: float, tmp_path: Path) -> None:
    golden = np.load(GOLDEN)["bert"]
    with loaded_encoder(open_encoder(tmp_path, "bert"), quantize=quantize) as executor:
        assert relative_error(np.concatenate(states_of(executor, TEXTS)), golden) <= bound
