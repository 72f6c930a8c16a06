"""Gemma 4 is read in the spelling of every file, and what no model has is refused by the name of its field."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.artifacts.gemma4 import PER_LAYER_EMBEDDING
from lockstep.artifacts.huggingface_config import read_config
from lockstep.artifacts.layout import check_config
from lockstep.artifacts.metadata import Metadata, without_nulls
from lockstep.artifacts.model import ModelConfig
from lockstep.artifacts.source import open_artifact
from lockstep.artifacts.tensors import dequantise
from lockstep.errors import ArtifactError, CorruptArtifactError, UnsupportedArtifactError
from tools.golden.logit_cases import sharpened
from tools.random_configs import huggingface_config
from tools.random_gemma4 import flattened
from tools.random_models import SHAPES, random_tensor, tensor_shapes, write_gguf, write_huggingface, write_safetensors

SHAPE = SHAPES["tiny-gemma4"]


def declared_config(**changes: object) -> dict[str, Any]:
    config: dict[str, Any] = without_nulls(json.loads(json.dumps(huggingface_config(SHAPE) | changes)))
    return config


def config_of(**changes: object) -> ModelConfig:
    """The configuration that is read from a tiny model's config.json; None takes a key out."""
    config = read_config(Metadata(Path("config.json"), declared_config(**changes)))
    check_config(config, Path("config.json"))
    return config


@pytest.mark.parametrize("encoding", ["F32", "BF16"])
def test_both_formats_hold_the_same_numbers(encoding: str, tmp_path: Path) -> None:
    hf = open_artifact(str(write_huggingface(tmp_path / "hf", SHAPE, encoding, seed=6)), cache_dir=tmp_path)
    gguf = open_artifact(str(write_gguf(tmp_path / "m.gguf", SHAPE, encoding, seed=6)), cache_dir=tmp_path)
    written, found, other = asdict(SHAPE), asdict(hf.config), asdict(gguf.config)
    assert found.pop("rope_scaling") == other.pop("rope_scaling")
    assert [key for key in found if found[key] != pytest.approx(other[key])] == []
    assert {key: found[key] for key in written if key in found} == {
        key: written[key] for key in written if key in found
    }
    assert set(hf.weights.names()) == set(gguf.weights.names()) == set(tensor_shapes(SHAPE))
    for name, size in tensor_shapes(SHAPE).items():
        drawn = flattened(SHAPE, name, random_tensor(name, size, "F32", 6)).astype(np.float32)
        for artifact in (hf, gguf):
            np.testing.assert_allclose(dequantise(artifact.weights[name]), drawn, rtol=8e-3, atol=8e-3)


def test_a_quarter_of_each_whole_head_turns() -> None:
    scaling = config_of().rope_scaling
    assert scaling is not None
    assert scaling.factors == (1.0,) * 8 + (float(np.float32(1e30)),) * 24
    whole = {"full_attention": {"rope_type": "default", "rope_theta": 5.0}}
    config = config_of(rope_parameters=whole)
    assert (config.rope_scaling, config.rope_theta, config.local_rope_theta) == (None, 5.0, 1e4)
    assert config_of(rope_parameters=None).rope_scaling == scaling, "the defaults of the configuration's class"


def test_layers_read_the_last_layer_of_their_kind() -> None:
    assert config_of().kv_owners == (0, 1, 2, 1, 1, 2)
    assert config_of(num_kv_shared_layers=0).kv_owners == ()
    assert config_of(num_kv_shared_layers=1).kv_owners == (0, 1, 2, 3, 4, 2)
    assert config_of(num_kv_shared_layers=1).intermediate_sizes == (192,) * 5 + (384,)
    assert config_of(layer_types=None, num_kv_shared_layers=0).windows == (16, 16, 16, 16, 16, 0)


def wrapped(directory: Path) -> Path:
    """The files of a tiny model as those of one that also reads images and sound."""
    directory.mkdir()
    text = {
        key: value for key, value in declared_config().items() if key not in ("architectures", "tie_word_embeddings")
    }
    declared = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": {"hidden_size": 64},
        "audio_config": {"hidden_size": 64},
    }
    (directory / "config.json").write_text(json.dumps(declared))
    inner = {f"model.language_model.{name.removeprefix('model.')}": each for name, each in sharpened(SHAPE).items()}
    inner |= {
        f"model.language_model.layers.3.self_attn.{name}_proj.weight": np.ones((64, 128), np.float32) for name in "kv"
    }
    others = (
        "model.vision_tower.patch_embedder.input_proj.weight", "model.audio_tower.output_proj.weight",
        "model.embed_vision.embedding_projection.weight", "model.embed_audio.embedding_projection.weight",
    )  # fmt: skip
    write_safetensors(directory / "model.safetensors", inner | {name: np.ones((4, 4), np.float32) for name in others})
    return directory


def test_the_part_for_text_of_a_larger_model_is_read(tmp_path: Path) -> None:
    artifact = open_artifact(str(wrapped(tmp_path / "w")), cache_dir=tmp_path)
    assert artifact.config == config_of()
    assert set(tensor_shapes(SHAPE)) <= set(artifact.weights.names())
    assert "model.layers.3.self_attn.k_proj.weight" in artifact.weights, "stored beside, and not used"


UNSUPPORTED: dict[str, dict[str, object]] = {
    "enable_moe_block": {"enable_moe_block": True},
    "attention_k_eq_v": {"attention_k_eq_v": True},
    "num_global_key_value_heads": {"num_global_key_value_heads": 1},
    "use_bidirectional_attention": {"use_bidirectional_attention": "all"},
    "attention_bias": {"attention_bias": True},
    "hidden_activation": {"hidden_activation": "silu"},
    "vocab_size_per_layer_input": {"vocab_size_per_layer_input": 321},
    "layer_types": {"layer_types": ["sliding_attention"] * 6},
    "chunked": {"layer_types": ["chunked", *["full_attention"] * 5]},
    "rope factor": {"rope_parameters": {"full_attention": {"rope_type": "proportional", "factor": 2.0}}},
    "yarn": {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
    "linear": {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
    "per_layer_config": {"per_layer_config": {"0": {"head_dim": 64}}},
    "another head_dim": {"per_layer_config": {"2": {"head_dim": 64}, "5": {"head_dim": 32}}},
    "awq": {"quantization_config": {"quant_method": "awq"}},
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_a_variant_is_refused_by_the_name_of_its_field(what: str) -> None:
    with pytest.raises(UnsupportedArtifactError, match=what):
        config_of(**UNSUPPORTED[what])


CORRUPT: dict[str, dict[str, object]] = {
    "no layer without a window stores the keys and values for layer 2": {"num_kv_shared_layers": 4},
    "num_kv_shared_layers is 6": {"num_kv_shared_layers": 6},
    "num_kv_shared_layers is -1": {"num_kv_shared_layers": -1},
    "sliding_window is 0": {"sliding_window": 0},
    "sliding windows": {"sliding_window": 1 << 40},
    "layer_types has 2 entries": {"layer_types": ["sliding_attention", "full_attention"]},
    "hidden_size_per_layer_input": {"hidden_size_per_layer_input": -1},
    "numbers .hidden_size_per_layer_input": {"hidden_size_per_layer_input": 1 << 20},
    "global_head_dim": {"global_head_dim": 63},
    r"the head size of layers without a window \(global_head_dim\) is 0": {"global_head_dim": 0},
    "the head size is -1": {"head_dim": -1},
    "final_logit_softcapping": {"final_logit_softcapping": -3.0},
    "partial_rotary_factor is 0": {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.0}}},
    "'num_kv_shared_layers' is of type str": {"num_kv_shared_layers": "2"},
    "feed-forward size of layer 3": {"intermediate_size": 1 << 24},
}


@pytest.mark.parametrize("what", CORRUPT)
def test_what_no_model_has_is_refused_by_the_name_of_its_field(what: str) -> None:
    with pytest.raises(CorruptArtifactError, match=what):
        config_of(**CORRUPT[what])


@pytest.mark.parametrize(
    "name", [PER_LAYER_EMBEDDING, "model.layers.3.layer_scalar", "model.layers.2.self_attn.q_norm.weight"]
)
@pytest.mark.parametrize("change", [lambda tensor: tensor[:-1], lambda tensor: np.concatenate([tensor, tensor])])
def test_tensors_of_another_size_are_refused_by_name(name: str, change: Callable[[Any], Any], tmp_path: Path) -> None:
    tensors = dict(sharpened(SHAPE))
    tensors[name] = change(tensors[name])
    (tmp_path / "config.json").write_text(json.dumps(declared_config()))
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ArtifactError, match=name):
        open_artifact(str(tmp_path), cache_dir=tmp_path / "cache")


def test_a_file_that_ends_inside_the_table_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", SHAPE, "F32")
    content = path.read_bytes()
    for length in (len(content) - 4, len(content) // 2):
        path.write_bytes(content[:length])
        with pytest.raises(CorruptArtifactError, match="tensor"):
            open_artifact(str(path), cache_dir=tmp_path / "cache")


GGUF_CHANGES: dict[str, tuple[str, object]] = {
    "attention.value_length": ("gemma4.attention.value_length", 32),
    "rope.dimension_count_swa": ("gemma4.rope.dimension_count_swa", 16),
    "rope_freqs.weight": ("gemma4.rope.scaling.type", "linear"),
    "attention.sliding_window is 0": ("gemma4.attention.sliding_window", 0),
    "attention.shared_kv_layers is 6": ("gemma4.attention.shared_kv_layers", 6),
    "no layer without a window": ("gemma4.attention.shared_kv_layers", 4),
    "feed_forward_length has 5 entries": ("gemma4.feed_forward_length", [192] * 5),
    "sliding_window_pattern has 1 entries": ("gemma4.attention.sliding_window_pattern", [True]),
    "sliding_window_pattern": ("gemma4.attention.sliding_window_pattern", [True] * 6),
    "head counts": ("gemma4.attention.head_count_kv", [2, 1, 2, 2, 2, 2]),
    "mixture of experts": ("gemma4.expert_count", 4),
    "attn_logit_softcapping": ("gemma4.attn_logit_softcapping", 50.0),
    "per_layer": ("gemma4.embedding_length_per_layer_input", 16),
}


@pytest.mark.parametrize("what", GGUF_CHANGES)
def test_a_gguf_file_that_does_not_fit_is_refused_by_the_name_of_its_field(what: str, tmp_path: Path) -> None:
    key, value = GGUF_CHANGES[what]

    def change(writer: Any) -> None:
        for values in writer.kv_data:
            values.pop(key, None)
        add = {list: writer.add_array, str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        add[type(value)](key, value)

    path = write_gguf(tmp_path / "m.gguf", SHAPE, "F32", extra=change)
    with pytest.raises(ArtifactError, match=what):
        open_artifact(str(path), cache_dir=tmp_path / "cache")
