"""A Hugging Face directory: the configuration of every generation of transformers, and each way it can be wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from lockstep.artifacts.huggingface_config import read_config
from lockstep.artifacts.metadata import read_json
from lockstep.artifacts.model import Artifact, Encoding, RopeScaling
from lockstep.artifacts.safetensors_file import read_safetensors
from lockstep.artifacts.source import open_artifact
from lockstep.artifacts.tensors import dequantise
from lockstep.errors import ArtifactNotFoundError, CorruptArtifactError, UnsupportedArtifactError
from tests.artifacts.support import approximately, edit_json
from tools.golden.vector_cases import EMBEDDERS, write_case
from tools.random_models import (
    FLOATS,
    SHAPES,
    as_float,
    random_tensor,
    tensor_shapes,
    write_gguf,
    write_huggingface,
    write_safetensors,
)

Json = dict[str, object]


def reopen(path: Path) -> Artifact:
    return open_artifact(str(path), cache_dir=path.parent / "cache")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_huggingface(tmp_path / "llama", "tiny-llama", "F16")


UNFUSED = ["llama", "mistral", "mistral3", "qwen2", "qwen3", "granite", "granite_swa", "olmo2", "olmo3", "smollm3"]


@pytest.mark.parametrize("name", [f"tiny-{name}" for name in UNFUSED])
@pytest.mark.parametrize("encoding", FLOATS)
def test_written_model_is_read_unchanged(name: str, encoding: str, tmp_path: Path) -> None:
    artifact = reopen(write_huggingface(tmp_path / name, name, encoding, seed=5))
    found, shape = asdict(artifact.config), asdict(SHAPES[name])
    assert {key: found[key] for key in shape} == shape
    assert (artifact.name, artifact.format) == (name, "safetensors")
    assert artifact.config.qk_norm == (name in ("tiny-qwen3", "tiny-olmo2", "tiny-olmo3"))
    assert artifact.sampling_defaults == {"temperature": 0.6}
    assert artifact.weights.names() == tuple(tensor_shapes(SHAPES[name]))
    for tensor_name, size in tensor_shapes(SHAPES[name]).items():
        tensor = artifact.weights[tensor_name]
        drawn = random_tensor(tensor_name, size, "F32", seed=5).astype(np.float32)
        assert tensor.encoding is Encoding(encoding)
        np.testing.assert_array_equal(tensor.data, as_float(drawn, encoding))


@pytest.mark.parametrize("name", [f"tiny-{name}" for name in UNFUSED if name not in ("mistral", "olmo3")])
def test_both_formats_of_one_model_hold_the_same_numbers(name: str, tmp_path: Path) -> None:
    one = open_artifact(str(write_gguf(tmp_path / "m.gguf", name, "F32")), cache_dir=tmp_path)
    other = reopen(write_huggingface(tmp_path / "directory", name, "F32"))
    assert asdict(one.config) == approximately(asdict(other.config))
    assert one.weights.names() == other.weights.names()
    for tensor_name in one.weights.names():
        np.testing.assert_array_equal(dequantise(one.weights[tensor_name]), dequantise(other.weights[tensor_name]))


def nested(path: Path, name: str, *prefixes: str, **changes: object) -> Path:
    """A directory of the model as the language model of one that also takes images.

    Args:
        prefixes: what names of its tensors begin with instead of ``model.``, and instead of nothing.
    """

    def nest(config: Json) -> None:
        text = config | {key: value for key, value in changes.items() if value is not None}
        text = {key: value for key, value in text.items() if key != "architectures" and changes.get(key, 0) is not None}
        config.clear()
        config |= {
            "architectures": [name],
            "model_type": "images",
            "text_config": text,
            "vision_config": {"hidden_size": 8},
            "tie_word_embeddings": True,
        }

    edit_json(path / "config.json", nest)
    tensors = {each.name: np.asarray(each.data) for each in read_safetensors(path / "model.safetensors").values()}
    inner, outer = prefixes
    renamed = {
        inner + each.removeprefix("model.") if each.startswith("model.") else outer + each: data.copy()
        for each, data in tensors.items()
    }
    renamed["vision_tower.patch_conv.weight"] = renamed["multi_modal_projector.norm.weight"] = np.ones(8, np.float32)
    write_safetensors(path / "model.safetensors", renamed)
    return path


NESTED = {
    "Ministral 3": ("tiny-mistral3", "Mistral3ForConditionalGeneration"),
    "Mistral Small 3.1": ("tiny-mistral", "Mistral3ForConditionalGeneration"),
    "Gemma 3": ("tiny-gemma3", "Gemma3ForConditionalGeneration"),
}
PREFIXES = {"4.52": ("model.language_model.", ""), "others": ("language_model.model.", "language_model.")}
"""By version of transformers that wrote the files."""


@pytest.mark.parametrize("version", PREFIXES)
@pytest.mark.parametrize("model", NESTED)
def test_the_language_model_beside_a_vision_tower_is_read(model: str, version: str, tmp_path: Path) -> None:
    shape, name = NESTED[model]
    flat = reopen(write_huggingface(tmp_path / "flat", shape, "F32"))
    path = nested(write_huggingface(tmp_path / "nested", shape, "F32"), name, *PREFIXES[version])
    artifact = reopen(path)
    assert (artifact.config, artifact.task) == (flat.config, "generate")
    assert artifact.weights.names() == flat.weights.names()
    for tensor in flat.weights.names():
        np.testing.assert_array_equal(artifact.weights[tensor].data, flat.weights[tensor].data)
    assert artifact.load_tokenizer().end_token_ids == flat.load_tokenizer().end_token_ids


def test_text_configurations_of_gemma3_lack_what_is_always_the_same(tmp_path: Path) -> None:
    path = write_huggingface(tmp_path / "m", "tiny-gemma3", "F32")
    keys = ("vocab_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "head_dim")
    nested(path, "Gemma3ForConditionalGeneration", *PREFIXES["4.52"], **dict.fromkeys(keys))
    config = read_config(read_json(path / "config.json"))
    found = (config.vocab_size, config.num_heads, config.num_kv_heads, config.max_model_len, config.head_dim)
    assert found == (262208, 8, 4, 131072, 256)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model_type": "mistral5"}, UnsupportedArtifactError, "text of type 'mistral5'; supported: llama, mistral"),
        ({"model_type": "bert"}, UnsupportedArtifactError, "text of type 'bert'"),
        ({"model_type": 3}, CorruptArtifactError, "model_type"),
        ({"hidden_size": None}, CorruptArtifactError, "hidden_size"),
    ],
)
def test_a_language_model_that_cannot_be_read_is_refused(
    changes: Json, error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = write_huggingface(tmp_path / "m", "tiny-mistral", "F32")
    nested(path, "Mistral3ForConditionalGeneration", *PREFIXES["4.52"], **changes)
    with pytest.raises(error, match=message):
        reopen(path)


def test_quantised_weights_of_a_model_with_images_are_refused(tmp_path: Path) -> None:
    path = write_huggingface(tmp_path / "m", "tiny-mistral", "F32")
    nested(path, "Mistral3ForConditionalGeneration", *PREFIXES["4.52"])
    edit_json(path / "config.json", lambda config: config.update(quantization_config={"quant_method": "fp8"}))
    with pytest.raises(UnsupportedArtifactError, match="quantised by 'fp8'"):
        reopen(path)


def test_shards_are_one_model(tmp_path: Path) -> None:
    whole = reopen(write_huggingface(tmp_path / "whole", "tiny-llama", "F16"))
    sharded = reopen(write_huggingface(tmp_path / "sharded", "tiny-llama", "F16", num_shards=3))
    assert sorted(whole.weights.names()) == sorted(sharded.weights.names())
    for name in whole.weights.names():
        np.testing.assert_array_equal(whole.weights[name].data, sharded.weights[name].data)
    assert whole.fingerprint != sharded.fingerprint


def test_the_older_spelling_of_rope_is_read(llama: Path) -> None:
    def older(config: Json) -> None:
        del config["rope_parameters"]
        config |= {"rope_theta": 500000, "rope_scaling": {"type": "linear", "factor": 2.0}}

    edit_json(llama / "config.json", older)
    config = reopen(llama).config
    assert (config.rope_theta, config.rope_scaling) == (500000.0, RopeScaling("linear", 2.0))


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_llama3_scaling_is_data_in_both_spellings(spelling: str, llama: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    trained = {"original_max_position_embeddings": 8192}

    def change(config: Json) -> None:
        del config["rope_parameters"]
        config |= {"rope_theta": 5e5, spelling: {**scaling, **trained, "rope_theta": 5e5}}

    edit_json(llama / "config.json", change)
    parameters = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192.0}
    assert reopen(llama).config.rope_scaling == RopeScaling("llama3", 8.0, parameters)
    assert reopen(llama).config.rope_theta == 5e5


def test_absent_and_null_fields_have_the_defaults_of_transformers(llama: Path) -> None:
    def change(config: Json) -> None:
        for key in ("rope_parameters", "rms_norm_eps", "tie_word_embeddings", "head_dim"):
            del config[key]
        config |= {"rope_scaling": None, "architectures": None}

    edit_json(llama / "config.json", change)
    config = reopen(llama).config
    assert (config.rope_theta, config.rope_scaling, config.rms_norm_eps) == (10000.0, None, 1e-6)
    assert (config.head_dim, config.tied_embeddings) == (32, False)


def test_a_tied_model_may_carry_its_head_twice(llama: Path) -> None:
    edit_json(llama / "config.json", lambda config: config.update(tie_word_embeddings=True))
    assert reopen(llama).config.tied_embeddings


def test_a_decoder_that_makes_vectors_needs_no_head_and_no_beginnings_of_names(tmp_path: Path) -> None:
    path = write_case(tmp_path / "model", EMBEDDERS["qwen3-embedding"])
    edit_json(path / "config.json", lambda config: config.update(tie_word_embeddings=False))
    artifact = reopen(path)
    assert (artifact.task, artifact.config.tied_embeddings) == ("embed", True)
    edit_json(path / "config.json", lambda config: config.update(architectures=["Qwen3Model"]))
    again = reopen(path)
    assert (again.config, again.task, again.embedding) == (artifact.config, "embed", artifact.embedding)
    (path / "modules.json").unlink()
    embedding = reopen(path).embedding
    assert embedding is not None
    assert (embedding.pooling, embedding.max_tokens) == ("mean", 131072)
    edit_json(path / "config.json", lambda config: config.update(architectures=["Qwen3ForCausalLM"]))
    with pytest.raises(CorruptArtifactError, match=r"has no tensor 'model\."):
        reopen(path)


def set_config(**values: object) -> Callable[[Json], None]:
    return lambda config: config.update(values)


UNSUPPORTED = {
    "architecture": (set_config(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel; supported: LlamaFor"),
    "embedder of images": (set_config(architectures=["EmbeddingGemma2Model"]), "EmbeddingGemma2Model; supported"),
    "classifier": (set_config(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
    "model type": (set_config(architectures=None, model_type="mamba"), "model type 'mamba'"),
    "activation": (set_config(hidden_act="gelu"), "activation 'gelu'"),
    "mlp bias": (set_config(mlp_bias=True), "mlp_bias"),
    "looks both ways": (set_config(is_causal=False), "is_causal: false in a decoder"),
    "quantised": (set_config(quantization_config={"quant_method": "awq"}), "quantised by 'awq'"),
    "rope type": (
        set_config(rope_parameters={"rope_type": "spiral"}),
        "rope type 'spiral'; supported: default",
    ),
    "partial rope": (set_config(partial_rotary_factor=0.5), "part of each head"),
    "rope by layer": (set_config(rope_parameters={"full_attention": {"rope_type": "default"}}), "differ by layer"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_a_variant_that_is_not_known_is_refused_by_name(case: str, llama: Path) -> None:
    change, message = UNSUPPORTED[case]
    edit_json(llama / "config.json", change)
    with pytest.raises(UnsupportedArtifactError, match=message) as caught:
        reopen(llama)
    assert caught.value.path == llama / "config.json"


CORRUPT = {
    "no size": (set_config(hidden_size=None), "'hidden_size' is missing; an integer"),
    "size is a string": (set_config(hidden_size="128"), "'hidden_size' is of type str"),
    "size is a boolean": (set_config(num_hidden_layers=True), "'num_hidden_layers' is of type bool"),
    "no heads": (set_config(num_attention_heads=0), "number of heads is 0"),
    "negative layers": (set_config(num_hidden_layers=-1), "-1 layers"),
    "NaN": (set_config(rms_norm_eps=float("nan")), "'rms_norm_eps' is nan"),
    "infinity": (set_config(rope_parameters={"rope_theta": float("inf")}), "'rope_theta' is inf"),
    "an integer beyond floats": (set_config(rms_norm_eps=10**400), "a finite number is expected"),
    "rope is a string": (set_config(rope_parameters="linear"), "an object is expected"),
    "linear without factor": (set_config(rope_parameters={"rope_type": "linear"}), "'factor' is missing"),
    "llama3 without bounds": (set_config(rope_parameters={"rope_type": "llama3"}), "'low_freq_factor' is missing"),
    "llama3 with crossed bounds": (
        set_config(
            rope_parameters={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}
        ),
        "not below high_freq_factor",
    ),
    "wrong vocabulary": (set_config(vocab_size=511), r"embed_tokens.weight' has shape \[512, 128\]; \[511, 128\]"),
    "a layer too many": (set_config(num_hidden_layers=3), "no tensor 'model.layers.2.input_layernorm.weight'"),
    "architectures is a string": (set_config(architectures="LlamaForCausalLM"), "a list of strings is expected"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_configuration_that_contradicts_itself_is_corrupt(case: str, llama: Path) -> None:
    change, message = CORRUPT[case]
    edit_json(llama / "config.json", change)
    with pytest.raises(CorruptArtifactError, match=message):
        reopen(llama)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"a": 1' + b"0" * 5000 + b"}"])
def test_a_configuration_that_is_no_object_is_corrupt(content: bytes, llama: Path) -> None:
    (llama / "config.json").write_bytes(content)
    with pytest.raises(CorruptArtifactError, match=r"config\.json"):
        reopen(llama)


def test_bad_sampling_defaults_are_corrupt(llama: Path) -> None:
    edit_json(llama / "generation_config.json", lambda config: config.update(top_p="high"))
    with pytest.raises(CorruptArtifactError, match=r"generation_config\.json: sampling default 'top_p' is 'high'"):
        reopen(llama)


def test_greedy_by_file_is_not_taken_for_a_temperature(llama: Path) -> None:
    """As vLLM: `do_sample` says nothing, the values that are present do."""
    edit_json(
        llama / "generation_config.json", lambda config: config.update(do_sample=False, top_k=7, temperature=None)
    )
    assert reopen(llama).sampling_defaults == {"top_k": 7}


def test_a_directory_without_weights_is_rejected_with_the_files_that_it_has(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(ArtifactNotFoundError, match=r"no \*\.safetensors \(pytorch_model\.bin is a pickle"):
        reopen(llama)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = write_huggingface(tmp_path / "m", "tiny-llama", "F16", num_shards=2)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ArtifactNotFoundError, match="model-00002-of-00002"):
        reopen(path)


def test_shards_without_an_index_are_not_guessed(tmp_path: Path) -> None:
    path = write_huggingface(tmp_path / "m", "tiny-llama", "F16", num_shards=2)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(ArtifactNotFoundError, match=r"2 \.safetensors files but no model\.safetensors\.index\.json"):
        reopen(path)


def test_a_shard_outside_the_directory_is_refused(tmp_path: Path) -> None:
    path = write_huggingface(tmp_path / "m", "tiny-llama", "F16", num_shards=2)
    edit_json(path / "model.safetensors.index.json", lambda index: index.update(weight_map={"a": "../x.safetensors"}))
    with pytest.raises(CorruptArtifactError, match=r"'\.\./x\.safetensors'"):
        reopen(path)


def test_a_tensor_in_two_shards_is_corrupt(tmp_path: Path) -> None:
    path = write_huggingface(tmp_path / "m", "tiny-llama", "F16", num_shards=2)
    first, second = (path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    second.write_bytes(first.read_bytes())
    with pytest.raises(CorruptArtifactError, match="is also in an earlier shard"):
        reopen(path)


def test_a_truncated_weight_file_is_named(llama: Path) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptArtifactError, match=r"model\.safetensors: tensor 'lm_head\.weight' lies at"):
        reopen(llama)
    assert len(read_safetensors(write_huggingface(llama, "tiny-llama", "F16") / "model.safetensors")) == 21
