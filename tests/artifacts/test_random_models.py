"""The writer of random models: quick, reproducible, in real shapes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.artifacts.model import Encoding, Tensor
from lockstep.artifacts.source import open_artifact
from lockstep.artifacts.tensors import dequantise
from tools.random_models import SHAPES, Shape, random_tensor, tensor_shapes, write_gguf


def test_one_seed_gives_the_same_bytes_and_another_other_ones(tmp_path: Path) -> None:
    contents = [
        write_gguf(tmp_path / f"{index}.gguf", "tiny-llama", "Q4_0", seed=seed).read_bytes()
        for index, seed in enumerate((1, 1, 2))
    ]
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize("encoding", list(Encoding))
def test_numbers_have_the_variance_of_a_trained_matrix(encoding: Encoding) -> None:
    data = random_tensor("m", (256, 512), encoding.value, seed=0)
    values = dequantise(Tensor("m", encoding, (256, 512), data))
    assert abs(float(values.mean())) < 0.01
    assert float(values.std()) == pytest.approx(512**-0.5, rel=0.1)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("smollm2-135m", 134.5),
        ("qwen3-0.6b", 596.0),
        ("tinyllama-1.1b", 1100.0),
        ("qwen3.5-0.8b", 752.4),
        ("lfm2.5-350m", 354.5),
        ("lfm3-1.7b", 1728.8),
    ],
)
def test_named_shapes_have_the_parameters_of_their_models(name: str, millions: float) -> None:
    count = sum(int(np.prod(size)) for size in tensor_shapes(SHAPES[name]).values())
    assert count / 1e6 == pytest.approx(millions, rel=0.005)


def test_a_large_vocabulary_is_whole(tmp_path: Path) -> None:
    shape = Shape(num_layers=1, hidden_size=32, intermediate_size=32, vocab_size=32_000, tied_embeddings=True)
    artifact = open_artifact(str(write_gguf(tmp_path / "m.gguf", shape, "Q4_0")), cache_dir=tmp_path)
    assert artifact.load_tokenizer().tokenizer.get_vocab_size() == 32_000


def test_the_command_writes_both_formats(tmp_path: Path) -> None:
    for arguments in (["gguf", "tiny-llama", "Q8_0"], ["huggingface", "tiny-qwen3", "BF16"]):
        path = tmp_path / arguments[0]
        subprocess.run([sys.executable, "-m", "tools.random_models", *arguments, str(path)], check=True)
        assert open_artifact(str(path), cache_dir=tmp_path).config.num_layers == 2


def test_a_mix_is_made_as_llama_cpp_makes_it(tmp_path: Path) -> None:
    """The head and some of the values and ways down are Q6_K, the rest Q4_K; rows that do not fit fall back."""
    shape = replace(SHAPES["small-llama"], num_layers=8)
    weights = open_artifact(str(write_gguf(tmp_path / "m.gguf", shape, "Q4_K_M")), cache_dir=tmp_path).weights
    finer = [
        f"model.layers.{layer}.{name}.weight"
        for layer in (0, 3, 6, 7)
        for name in ("self_attn.v_proj", "mlp.down_proj")
    ]
    for name in weights.names():
        if len(weights[name].shape) == 2:
            expected = Encoding.Q6_K if name in ("lm_head.weight", *finer) else Encoding.Q4_K
            assert weights[name].encoding is expected, name
    narrow = replace(SHAPES["tiny-llama"], hidden_size=64, intermediate_size=256)
    weights = open_artifact(str(write_gguf(tmp_path / "n.gguf", narrow, "Q4_K_M")), cache_dir=tmp_path).weights
    assert weights["lm_head.weight"].encoding is Encoding.Q8_0
    assert weights["model.layers.0.self_attn.q_proj.weight"].encoding is Encoding.Q5_0
