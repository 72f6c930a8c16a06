"""Bad tensors are refused by name: else the model would compute NaN without a word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from lockstep.artifacts.model import Artifact, Encoding, Tensor
from lockstep.artifacts.tensors import dequantise
from lockstep.errors import CorruptArtifactError, UnsupportedArtifactError
from lockstep.executors.quantise import vector
from tests.executors.native.loading import loaded
from tests.executors.native.support import SMALL_LLAMA, config_of, random_artifact, with_tensor
from tools.random_models import ENCODINGS, FLOATS, SHAPES, random_tensor

NAME = "model.layers.1.self_attn.k_proj.weight"


def load(artifact: Artifact, **options: str) -> None:
    with loaded(artifact, 1, 0, **options):
        pass


def spoilt(tensor: Tensor, spoil: Callable[[np.ndarray[tuple[int, ...], np.dtype[np.generic]]], None]) -> Tensor:
    data = tensor.data.copy()
    spoil(data)
    return replace(tensor, data=data)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_or_scale_that_is_not_finite_is_named(encoding: str, value: float) -> None:
    def spoil(data: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> None:
        if encoding == "BF16":
            data[3, 5] = np.array(value, np.float32).view(np.uint32) >> 16
        elif encoding not in FLOATS:
            at = {"Q6_K": 208, "Q3_K": 108}.get(encoding, 0)
            data[3, at : at + 2] = np.array([value], np.float16).view(np.uint8)
        else:
            data[3, 5] = value

    artifact = random_artifact(SMALL_LLAMA, encoding)
    wrong = with_tensor(artifact, spoilt(artifact.weights[NAME], spoil))
    with pytest.raises(CorruptArtifactError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight .* NaN or infinity"):
        load(wrong)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("encoding", FLOATS)
def test_weight_that_is_not_finite_is_rejected_when_quantised(encoding: str, quantize: str) -> None:
    artifact = random_artifact(encoding=encoding)
    nan = np.array(0x7FC0, np.uint16) if encoding == "BF16" else np.nan
    wrong = with_tensor(artifact, spoilt(artifact.weights[NAME], lambda data: data.__setitem__((3, 5), nan)))
    with pytest.raises(CorruptArtifactError, match="NaN or infinity"):
        load(wrong, quantize=quantize)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_buffer_shorter_than_its_shape_is_named(encoding: str) -> None:
    artifact = random_artifact(SMALL_LLAMA, encoding)
    tensor = artifact.weights[NAME]
    for data in (tensor.data[:-1], tensor.data[:, :-2], tensor.data.reshape(-1), tensor.data.astype(np.int64)):
        wrong = with_tensor(artifact, replace(tensor, data=data))
        with pytest.raises(CorruptArtifactError, match=r"k_proj\.weight .* stored as"):
            load(wrong)


def test_rows_that_are_not_whole_groups_are_refused() -> None:
    artifact = random_artifact(encoding="Q8_0")
    odd = Tensor(NAME, Encoding.Q8_0, (64, 120), np.zeros((64, 128), np.uint8))
    wrong = with_tensor(replace(artifact, config=replace(artifact.config, hidden_size=120)), odd)
    with pytest.raises(CorruptArtifactError, match=r"120 values|has shape"):
        load(wrong)


def test_a_quantised_norm_is_refused() -> None:
    artifact = random_artifact()
    norm = Tensor("model.norm.weight", Encoding.Q8_0, (128,), np.zeros(136, np.uint8))
    with pytest.raises(CorruptArtifactError, match=r"model\.norm\.weight is Q8_0"):
        load(with_tensor(artifact, norm))


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    config = replace(config_of(SHAPES["tiny-llama"]), architecture="mamba")
    with pytest.raises(UnsupportedArtifactError, match="architecture 'mamba'; it supports llama, mistral, qwen2"):
        load(replace(random_artifact(), config=config))


@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16"])
def test_norms_of_every_float_encoding_are_widened_exactly(encoding: str) -> None:
    stored = random_tensor("norm", (2, 64), encoding, 0)[0]
    tensor = Tensor("model.norm.weight", Encoding(encoding), (64,), stored)
    assert np.array_equal(vector(tensor, 64), dequantise(tensor))
    assert vector(tensor, 64).dtype == np.float32
