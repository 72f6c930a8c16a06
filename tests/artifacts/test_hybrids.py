"""Recurrent layers are read in the spelling of every file, and what they are read as computes what other engines do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.artifacts.huggingface_config import read_config
from lockstep.artifacts.layout import check_config
from lockstep.artifacts.metadata import Metadata, without_nulls
from lockstep.artifacts.model import Artifact, DeltaNet, ModelConfig
from lockstep.artifacts.source import open_artifact
from lockstep.artifacts.tensors import dequantise
from lockstep.errors import ArtifactError, CorruptArtifactError, UnsupportedArtifactError
from tests.artifacts.hybrid_reference import hybrid_logits
from tests.artifacts.support import edit_json
from tests.golden_hybrids import (
    llama_cpp_hybrid_logits,
    open_gguf_hybrid,
    open_huggingface_hybrid,
    transformers_hybrid_logits,
)
from tools.golden.hybrid_cases import HYBRID_CASES, HYBRID_GGUF_CASES, POSITIONS, hybrid_token_ids
from tools.random_configs import huggingface_config
from tools.random_hybrids import as_gguf
from tools.random_models import SHAPES, random_tensor, tensor_shapes, write_gguf, write_huggingface

HYBRIDS = ("tiny-qwen35", "tiny-lfm2")
NUM_EXACT = 150
"""Tokens that the slow twins compute; the whole length is compared once per case."""
MAX_RELATIVE_ERROR = {"F32": 1e-5, "Q8_0": 0.12}
"""Relative error of a row beside llama.cpp, which rounds activations beside Q8_0. Seen: 1.7e-6 and 6.8e-2."""


def config_of(name: str, **changes: object) -> ModelConfig:
    """The configuration that is read from a tiny model's config.json; None takes a key out."""
    declared = without_nulls(json.loads(json.dumps(huggingface_config(SHAPES[name]) | changes)))
    config = read_config(Metadata(Path("config.json"), declared))
    check_config(config, Path("config.json"))
    return config


def relative_error(logits: Any, golden: Any) -> float:
    return float((np.linalg.norm(logits - golden, axis=1) / np.linalg.norm(golden, axis=1)).max())


@pytest.mark.parametrize("name", HYBRID_CASES)
def test_weights_of_safetensors_give_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    ids = hybrid_token_ids(HYBRID_CASES[name].shape).tolist()
    logits = hybrid_logits(open_huggingface_hybrid(name, tmp_path), ids)[list(POSITIONS)]
    assert np.abs(logits - transformers_hybrid_logits(name)).max() <= 1e-4, (
        "5e-5 was seen, with angles that are exact here"
    )


@pytest.mark.parametrize(
    ("name", "encoding"), [(n, e) for n, case in HYBRID_GGUF_CASES.items() for e in case.encodings]
)
def test_weights_of_gguf_give_the_logits_of_llama_cpp(name: str, encoding: str, tmp_path: Path) -> None:
    ids = hybrid_token_ids(HYBRID_GGUF_CASES[name].shape).tolist()
    logits = hybrid_logits(open_gguf_hybrid(name, encoding, tmp_path), ids)[list(POSITIONS)]
    assert relative_error(logits, llama_cpp_hybrid_logits(name, encoding)) <= MAX_RELATIVE_ERROR[encoding]


def test_value_heads_of_gguf_are_in_another_order_and_rates_in_another_form(tmp_path: Path) -> None:
    """Negative twins: each fact of the conversion changes the logits if it is ignored."""
    artifact = open_gguf_hybrid("qwen35", "F32", tmp_path)
    net = artifact.config.delta_net
    assert net == DeltaNet(2, 4, 32, 32, 4, is_tiled=True, has_rates=True)
    ids = hybrid_token_ids(HYBRID_CASES["qwen35"].shape).tolist()[:NUM_EXACT]
    exact = hybrid_logits(artifact, ids)
    grouped = replace(artifact, config=replace(artifact.config, delta_net=replace(net, is_tiled=False)))
    assert relative_error(hybrid_logits(grouped, ids), exact) > 0.5
    offset = replace(artifact, config=replace(artifact.config, norm_offset=1.0))
    assert relative_error(hybrid_logits(offset, ids), exact) > 0.1


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16"])
def test_both_formats_hold_the_same_numbers(name: str, encoding: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    hf = open_artifact(str(write_huggingface(tmp_path / "hf", name, encoding, seed=6)), cache_dir=tmp_path)
    gguf = open_artifact(str(write_gguf(tmp_path / "m.gguf", name, encoding, seed=6)), cache_dir=tmp_path)
    found, other, written = asdict(hf.config), asdict(gguf.config), asdict(shape)
    assert {key: found[key] for key in written} == written
    differing = {key for key in found if found[key] != pytest.approx(other[key])}
    assert differing <= {"delta_net", "norm_offset"}
    assert set(hf.weights.names()) == set(tensor_shapes(shape))
    for tensor_name, size in tensor_shapes(shape).items():
        drawn = random_tensor(tensor_name, size, "F32", 6)
        stored = as_gguf(shape, tensor_name, drawn)
        canonical = tensor_name.replace(".A_log", ".A")
        np.testing.assert_allclose(dequantise(gguf.weights[canonical]), stored.astype(np.float32), rtol=8e-3, atol=8e-3)


def wrapped(directory: Path) -> Path:
    """The files of a tiny Qwen3.5 as those of a model that also reads images and predicts several tokens."""
    from tools.golden.logit_cases import sharpened
    from tools.random_models import write_safetensors

    directory.mkdir()
    case = HYBRID_CASES["qwen35"]
    text = {key: value for key, value in case.config().items() if key not in ("architectures", "tie_word_embeddings")}
    declared = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": {**text, "eos_token_id": 2, "tie_word_embeddings": False},
        "vision_config": {"depth": 2, "hidden_size": 64},
    }
    (directory / "config.json").write_text(json.dumps(declared))
    inner = {
        f"model.language_model.{name.removeprefix('model.')}": each for name, each in sharpened(case.shape).items()
    }
    others = ("model.visual.blocks.0.attn.qkv.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.fc.weight")
    write_safetensors(directory / "model.safetensors", inner | {name: np.ones((4, 4), np.float32) for name in others})
    return directory


def test_the_text_part_of_a_model_with_images_is_the_same_decoder(tmp_path: Path) -> None:
    plain = open_huggingface_hybrid("qwen35", tmp_path / "plain")
    part = open_artifact(str(wrapped(tmp_path / "wrapped")), cache_dir=tmp_path)
    assert part.config == plain.config
    assert part.weights.names() == plain.weights.names()
    edit_json(tmp_path / "wrapped" / "config.json", lambda config: config.pop("architectures"))
    assert open_artifact(str(tmp_path / "wrapped"), cache_dir=tmp_path).config == plain.config


def test_the_whole_model_may_be_quantised_where_its_text_part_is_not(tmp_path: Path) -> None:
    path = wrapped(tmp_path / "wrapped")
    edit_json(path / "config.json", lambda config: config.update(quantization_config={"quant_method": "fp8"}))
    with pytest.raises(UnsupportedArtifactError, match="quantised by 'fp8'"):
        open_artifact(str(path), cache_dir=tmp_path)


def test_every_fourth_layer_of_qwen35_is_attention_unless_the_file_lists_them() -> None:
    absent = dict.fromkeys(("layer_types", "head_dim", "rope_parameters"))
    config = config_of("tiny-qwen35", **absent, num_hidden_layers=8, rope_theta=5e5)
    assert config.mixers == ("delta_net", "delta_net", "delta_net", "attention") * 2
    assert (config.head_dim, config.rotary_dim, config.rope_theta) == (256, 64, 5e5)
    period = config_of("tiny-qwen35", layer_types=None, full_attention_interval=2)
    assert period.mixers == ("delta_net", "attention") * 2
    sizes = dict.fromkeys(
        ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
         "linear_conv_kernel_dim")
    )  # fmt: skip
    assert config_of("tiny-qwen35", **sizes).delta_net == DeltaNet(16, 32, 128, 128, 4)


def test_lfm2_in_its_older_spelling() -> None:
    absent = dict.fromkeys(("layer_types", "intermediate_size", "tie_word_embeddings", "rope_parameters", "norm_eps"))
    older = config_of(
        "tiny-lfm2", **absent, full_attn_idxs=[1, 3], block_ff_dim=6656, block_auto_adjust_ff_dim=True,
        block_multiple_of=256, tie_embedding=False, rope_theta=5e5, conv_bias=True,
    )  # fmt: skip
    assert older.mixers == ("convolution", "attention") * 2
    assert (older.intermediate_size, older.tied_embeddings, older.conv_bias) == (4608, False, True)
    assert (older.rope_theta, older.rms_norm_eps) == (5e5, 1e-5)
    assert not config_of("tiny-lfm2", **dict.fromkeys(("layer_types", "full_attn_idxs"))).mixers.count("convolution")
    assert config_of("tiny-lfm2", block_ff_dim=100, block_auto_adjust_ff_dim=False).intermediate_size == 100


LFM3_ROPE = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}


def test_lfm3_by_the_defaults_of_its_class() -> None:
    absent = dict.fromkeys(
        ("layer_types", "rope_parameters", "sliding_window", "head_dim", "conv_L_cache", "num_key_value_heads",
         "norm_eps", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "use_sandwich_norm",
         "use_attention_gate")
    )  # fmt: skip
    config = config_of("tiny-lfm3", **absent, num_hidden_layers=8)
    convolution, attention = "convolution", "attention"
    assert config.mixers == (*[convolution] * 2, attention, convolution, *[attention, convolution] * 2)
    assert config.windows == (0, 0, 0, 0, 256, 0, 0, 0)
    assert (config.head_dim, config.num_kv_heads, config.conv_taps, config.max_model_len) == (128, 4, 7, 128000)
    assert (config.rms_norm_eps, config.rope_theta, config.local_rope_theta) == (1e-5, 1e6, 1e4)
    assert config.rope_scaling is not None
    assert config.rope_scaling.factors == (1.0,) * 32 + (float(np.float32(1e30)),) * 32
    assert (config.tied_embeddings, config.post_norm, config.head_gates) == (True, True, True)
    assert config_of("tiny-lfm3", norm_eps=None, rms_norm_eps=1e-3).rms_norm_eps == 1e-3
    only_full = {"layer_types": ["conv", "full_attention"] * 2 + ["conv"], "rope_parameters": LFM3_ROPE}
    assert config_of("tiny-lfm3", **only_full).windows == ()


@pytest.mark.parametrize("change", [{"self_attn.g_proj": (128, 128)}, {"self_attn.g_proj": None}])
def test_gates_of_heads_have_a_row_for_each_head(change: dict[str, Any], tmp_path: Path) -> None:
    from tools.golden.logit_cases import sharpened
    from tools.random_models import write_safetensors

    path = write_huggingface(tmp_path / "m", "tiny-lfm3", "F32")
    [(module, size)] = change.items()
    name = f"model.layers.1.{module}.weight"
    tensors: dict[str, Any] = {**sharpened(SHAPES["tiny-lfm3"])}
    tensors.pop(name)
    write_safetensors(path / "model.safetensors", tensors | ({} if size is None else {name: np.ones(size, np.float32)}))
    with pytest.raises(CorruptArtifactError, match=r"self_attn\.g_proj\.weight'.* \[4, 128\]"):
        open_artifact(str(path), cache_dir=tmp_path)


def test_a_tensor_in_two_spellings_is_refused(tmp_path: Path) -> None:
    from tools.random_models import write_safetensors

    path = write_huggingface(tmp_path / "m", "tiny-lfm3", "F32")
    write_safetensors(path / "more.safetensors", {"model.layers.0.input_layernorm.weight": np.ones(128, np.float32)})
    index = {"metadata": {}, "weight_map": {"a": "model.safetensors", "b": "more.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptArtifactError, match=r"'model\.layers\.0\.input_layernorm\.weight'"):
        open_artifact(str(path), cache_dir=tmp_path)


def test_biases_of_convolutions_are_read(tmp_path: Path) -> None:
    from tools.random_models import write_safetensors

    path = write_huggingface(tmp_path / "m", "tiny-lfm2", "F32")
    edit_json(path / "config.json", lambda config: config.update(conv_bias=True))
    with pytest.raises(CorruptArtifactError, match=r"no tensor 'model\.layers\.0\.conv\.in_proj\.bias'"):
        open_artifact(str(path), cache_dir=tmp_path)
    shape = SHAPES["tiny-lfm2"]
    biases = {
        f"model.layers.{layer}.conv.{name}.bias": np.ones(size * shape.hidden_size, np.float32)
        for layer in (0, 1, 3)
        for name, size in (("in_proj", 3), ("conv", 1), ("out_proj", 1))
    }
    edit_json(path / "config.json", lambda config: config)
    write_safetensors(path / "more.safetensors", biases)
    index = {"metadata": {}, "weight_map": {"a": "model.safetensors", "b": "more.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = open_artifact(str(path), cache_dir=tmp_path).weights
    assert weights["model.layers.0.conv.in_proj.bias"].shape == (384,)


UNSUPPORTED: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "another kind of layer": ("qwen35", {"layer_types": ["sliding_attention"] * 4}, "'sliding_attention'; supported"),
    "the other family's kind": ("lfm2", {"layer_types": ["linear_attention"] * 4}, "type 'linear_attention'"),
    "no gate": ("qwen35", {"attn_output_gate": False}, "attn_output_gate"),
    "no gates of heads": ("lfm3", {"use_attention_gate": False}, "use_attention_gate"),
    "norms on one side": ("lfm3", {"use_sandwich_norm": False}, "use_sandwich_norm"),
    "windows in lfm2": ("lfm2", {"layer_types": ["sliding_attention"] * 4}, "'sliding_attention'; supported"),
    "delta nets in lfm3": ("lfm3", {"layer_types": ["linear_attention"] * 5}, "'linear_attention'; supported"),
    "one rope for all kinds": (
        "lfm3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "without 'full_attention'",
    ),
    "scaled rope": ("lfm3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
    "a part of heads in all layers": ("lfm3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "a part of heads without its type": (
        "lfm3",
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
                "sliding_attention": {},
            }
        },
        "a part of each head",
    ),
    "scaled rope in windows": (
        "lfm3",
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_type": "yarn"}}},
        "'yarn' in layers with a sliding window",
    ),
}
CORRUPT: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "too few kinds": ("qwen35", {"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries; 4 are"),
    "too many kinds": ("lfm2", {"layer_types": ["conv"] * 5}, "layer_types has 5 entries; 4 are"),
    "no attention": ("qwen35", {"layer_types": ["linear_attention"] * 4}, "at least one layer of attention"),
    "heads that do not divide": ("qwen35", {"linear_num_value_heads": 3}, "linear_num_value_heads"),
    "fewer value than key heads": ("qwen35", {"linear_num_key_heads": 8}, "linear_num_key_heads"),
    "no key heads": ("qwen35", {"linear_num_key_heads": 0}, "linear_num_key_heads"),
    "huge keys": ("qwen35", {"linear_key_head_dim": 1 << 40}, "linear_key_head_dim"),
    "huge values": ("qwen35", {"linear_value_head_dim": 4096}, "linear_value_head_dim"),
    "no taps": ("qwen35", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
    "many taps": ("lfm2", {"conv_L_cache": 1 << 33}, "conv_L_cache"),
    "no period": ("qwen35", {"layer_types": None, "full_attention_interval": 0}, "full_attention_interval"),
    "no multiple": ("lfm2", {"block_auto_adjust_ff_dim": True, "block_multiple_of": 0}, "block_multiple_of"),
    "no window": ("lfm3", {"sliding_window": 0}, "sliding_window is 0"),
    "a huge window": ("lfm3", {"sliding_window": 1 << 40}, "sliding windows"),
    "convolutions only": ("lfm3", {"layer_types": ["conv"] * 5}, "at least one layer of attention"),
    "taps without a width": ("lfm3", {"conv_L_cache": 0}, "conv_L_cache"),
    "no base of windows": ("lfm3", {"rope_parameters": LFM3_ROPE}, "rope_theta for layers of type 'sliding_attention'"),
    "no base": (
        "lfm3", {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_theta": 1e4}}},
        "rope_theta for layers of type 'full_attention'"),
    "more than a head turns": (
        "lfm3", {"rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 1.5},
            "sliding_attention": {"rope_theta": 1e4}}},
        "partial_rotary_factor is 1.5"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*UNSUPPORTED, *CORRUPT])
def test_shapes_that_do_not_fit_are_refused_by_the_name_of_the_key(case: str) -> None:
    name, changes, message = {**UNSUPPORTED, **CORRUPT}[case]
    error = UnsupportedArtifactError if case in UNSUPPORTED else CorruptArtifactError
    with pytest.raises(error, match=message):
        config_of(f"tiny-{name}", **changes)


@pytest.mark.parametrize(
    ("name", "key", "value", "tensor"),
    [
        ("tiny-qwen35", "linear_conv_kernel_dim", 3, r"linear_attn\.conv1d\.weight' has shape \[256, 4\]"),
        ("tiny-qwen35", "linear_key_head_dim", 16, r"linear_attn\.in_proj_qkv\.weight'"),
        ("tiny-qwen35", "linear_value_head_dim", 64, r"linear_attn\.in_proj_qkv\.weight'"),
        ("tiny-lfm2", "conv_L_cache", 4, r"conv\.conv\.weight' has shape \[128, 3\]; \[128, 4\]"),
        ("tiny-lfm2", "layer_types", ["conv"] * 3 + ["full_attention"], "conv"),
        ("tiny-lfm3", "conv_L_cache", 6, r"conv\.conv\.weight' has shape \[128, 7\]; \[128, 6\]"),
        ("tiny-lfm3", "num_attention_heads", 2, r"self_attn\.q_proj\.weight' has shape \[128, 128\]; \[64, 128\]"),
        ("tiny-lfm3", "layer_types", ["conv"] * 4 + ["full_attention"], "conv"),
    ],
)
def test_states_that_the_tensors_do_not_have_are_refused(
    name: str, key: str, value: object, tensor: str, tmp_path: Path
) -> None:
    path = write_huggingface(tmp_path / "m", name, "BF16")
    edit_json(path / "config.json", lambda config: config.update({key: value}))
    with pytest.raises(CorruptArtifactError, match=tensor):
        open_artifact(str(path), cache_dir=tmp_path)


def gguf_with(directory: Path, name: str, **changes: object) -> Artifact:
    """A tiny file with metadata replaced, or removed by None; underscores of Python stand for dots."""

    def change(writer: Any) -> None:
        for key, value in changes.items():
            full = key.replace("__", ".")
            for values in writer.kv_data:
                values.pop(full, None)
            add: dict[type, Callable[[str, Any], None]] = {
                list: writer.add_array, int: writer.add_uint32, bool: writer.add_bool,
            }  # fmt: skip
            if value is not None:
                add[type(value)](full, value)

    return open_artifact(str(write_gguf(directory / "m.gguf", name, "F32", extra=change)), cache_dir=directory)


def test_layers_of_gguf_files_without_a_list_have_a_period(tmp_path: Path) -> None:
    qwen = gguf_with(tmp_path, "tiny-qwen35", qwen35__attention__recurrent_layers=None)
    assert qwen.config.mixers == SHAPES["tiny-qwen35"].mixers
    default = {"qwen35__attention__recurrent_layers": None, "qwen35__full_attention_interval": None}
    assert gguf_with(tmp_path, "tiny-qwen35", **default).config.mixers == SHAPES["tiny-qwen35"].mixers


KV_HEADS = "lfm2__attention__head_count_kv"
GGUF_FAULTS: Mapping[str, tuple[str, dict[str, Any], type[ArtifactError], str]] = {
    "flags of too few layers": (
        "qwen35", {"qwen35__attention__recurrent_layers": [True] * 3}, CorruptArtifactError, "recurrent_layers has 3"),
    "no period": (
        "qwen35", {"qwen35__attention__recurrent_layers": None, "qwen35__full_attention_interval": 0},
        CorruptArtifactError, "full_attention_interval is 0"),
    "values that heads cannot share": (
        "qwen35", {"qwen35__ssm__inner_size": 130}, CorruptArtifactError, "inner_size is 130"),
    "no value heads": ("qwen35", {"qwen35__ssm__time_step_rank": 0}, CorruptArtifactError, "inner_size"),
    "no key heads": ("qwen35", {"qwen35__ssm__group_count": 0}, CorruptArtifactError, "number of key heads"),
    "key heads that do not divide": (
        "qwen35", {"qwen35__ssm__group_count": 3}, CorruptArtifactError, "4 value heads .* cannot share 3"),
    "another state size": ("qwen35", {"qwen35__ssm__state_size": 64}, CorruptArtifactError, "in_proj_qkv"),
    "huge state size": ("qwen35", {"qwen35__ssm__state_size": 1 << 31}, CorruptArtifactError, "key size"),
    "another width": ("qwen35", {"qwen35__ssm__conv_kernel": 5}, CorruptArtifactError, r"conv1d\.weight'"),
    "no width": ("qwen35", {"qwen35__ssm__conv_kernel": None}, CorruptArtifactError, "conv_kernel' is missing"),
    "more predicting layers than layers": (
        "qwen35", {"qwen35__nextn_predict_layers": 4}, CorruptArtifactError, "0 layers"),
    "heads of too few layers": ("lfm2", {KV_HEADS: [0, 0, 2]}, CorruptArtifactError, "head_count_kv has 3 entries"),
    "heads that differ": ("lfm2", {KV_HEADS: [0, 1, 2, 0]}, UnsupportedArtifactError, "differ by layer"),
    "no attention": ("lfm2", {KV_HEADS: [0] * 4}, CorruptArtifactError, "number of key-value heads is 0"),
    "attention everywhere": ("lfm2", {KV_HEADS: 2}, CorruptArtifactError, r"no tensor 'model\.layers\.0\.self_attn"),
    "a window": ("lfm2", {"lfm2__attention__sliding_window": 64}, UnsupportedArtifactError, "sliding_window"),
    "looks both ways": ("lfm2", {"lfm2__attention__causal": False}, UnsupportedArtifactError, "causal"),
    "another kernel": ("lfm2", {"lfm2__shortconv__l_cache": 4}, CorruptArtifactError, r"conv\.conv\.weight'"),
}  # fmt: skip


@pytest.mark.parametrize("case", GGUF_FAULTS)
def test_inconsistent_metadata_of_gguf_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, changes, error, message = GGUF_FAULTS[case]
    with pytest.raises(error, match=message):
        gguf_with(tmp_path, f"tiny-{name}", **changes)


def test_a_layer_behind_the_last_is_refused_unless_it_predicts_further_tokens(tmp_path: Path) -> None:
    assert len(open_gguf_hybrid("qwen35-extra-layer", "F32", tmp_path).config.mixers) == 4
    with pytest.raises(CorruptArtifactError, match=r"model\.layers\.4"):
        gguf_with(tmp_path, "tiny-qwen35", qwen35__block_count=5, qwen35__attention__recurrent_layers=None)
