"""What each architecture's files say is read as data, in the spelling of every generation, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.artifacts.architectures import ARCHITECTURES
from lockstep.artifacts.huggingface_config import read_config
from lockstep.artifacts.layout import check_config
from lockstep.artifacts.metadata import Metadata, without_nulls
from lockstep.artifacts.model import ModelConfig, QueryScaling, RopeScaling
from lockstep.artifacts.source import open_artifact
from lockstep.errors import ArtifactError, CorruptArtifactError, UnsupportedArtifactError
from tests.artifacts.support import LLAMA, HandMadeGguf, edit_json, text
from tools.random_configs import huggingface_config
from tools.random_models import SHAPES, random_tensor, write_gguf, write_huggingface

CONFIG_JSON = Path("config.json")
ROPE = {"rope_theta": 10000.0}
DECODERS = [name for name, row in ARCHITECTURES.items() if not row.traits.get("bidirectional", False)]


def config_of(name: str, **changes: object) -> ModelConfig:
    """What is read of a tiny model's config.json; None takes a key out."""
    declared = without_nulls(json.loads(json.dumps(huggingface_config(SHAPES[f"tiny-{name}"]) | changes)))
    config = read_config(Metadata(CONFIG_JSON, declared))
    check_config(config, CONFIG_JSON)
    return config


@pytest.mark.parametrize("name", DECODERS)
def test_a_model_is_known_by_its_type_as_well(name: str) -> None:
    assert config_of(name, architectures=None) == config_of(name)
    assert config_of(name).architecture == name


def test_gemma3_in_its_older_spelling() -> None:
    older = config_of(
        "gemma3",
        rope_parameters=None,
        layer_types=None,
        sliding_window_pattern=3,
        rope_theta=2e6,
        rope_local_base_freq=5e3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        tie_word_embeddings=None,
    )
    assert older.windows == (16, 16, 0, 16, 16, 0)
    assert (older.rope_theta, older.local_rope_theta) == (2e6, 5e3)
    assert older.rope_scaling == RopeScaling("linear", 8.0)
    assert older.tied_embeddings


def test_gemma3_has_defaults_of_its_own() -> None:
    names = ("rope_parameters", "layer_types", "sliding_window", "head_dim", "query_pre_attn_scalar")
    config = config_of("gemma3", **dict.fromkeys(names))
    assert config.windows == (4096,) * 5 + (0,)
    assert (config.rope_theta, config.local_rope_theta, config.head_dim) == (1e6, 1e4, 256)
    assert config.attention_scale == 1 / 16


def test_olmo3_scales_the_rope_of_full_attention_only() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    config = config_of("olmo3", rope_parameters=None, rope_theta=5e5, rope_scaling=yarn, layer_types=None)
    assert config.rope_scaling is not None
    assert config.rope_scaling.kind == "yarn"
    assert (config.local_rope_theta, config.windows) == (5e5, (16, 16, 16, 0))


def test_windows_that_a_file_does_not_switch_on_do_not_exist() -> None:
    assert config_of("qwen2", sliding_window=16).windows == ()
    assert config_of("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=1).windows == (0, 16)
    assert config_of("qwen3", sliding_window=16, use_sliding_window=True).windows == ()
    kinds = ["sliding_attention", "full_attention"]
    assert config_of("qwen3", sliding_window=8, use_sliding_window=True, layer_types=kinds).windows == (8, 0)
    assert config_of("mistral", sliding_window=None).windows == ()
    assert config_of("smollm3", sliding_window=8).windows == ()
    assert config_of("smollm3", sliding_window=8, use_sliding_window=True).windows == (0, 0, 0, 8)


def test_every_fourth_layer_of_smollm3_is_not_rotated_unless_the_file_lists_others() -> None:
    assert config_of("smollm3", no_rope_layers=None).unrotated_layers == (3,)
    assert config_of("smollm3", no_rope_layers=None, no_rope_layer_interval=2).unrotated_layers == (1, 3)
    assert config_of("smollm3", no_rope_layers=[1, 0, 1, 1]).unrotated_layers == (1,)


def test_yarn_extends_the_context_from_the_stated_original_length() -> None:
    """Files that state the trained context often repeat it as the whole one."""
    yarn = {**ROPE, "rope_type": "yarn", "factor": 4.0}
    assert config_of("qwen2", rope_parameters=yarn).max_model_len == 2048
    stated = yarn | {"original_max_position_embeddings": 2048}
    assert config_of("qwen2", rope_parameters=stated).max_model_len == 8192


def test_longrope_ends_where_its_short_factors_end() -> None:
    for kind in ("longrope", "su", "yarn"):
        rope = {**ROPE, "rope_type": kind, "short_factor": [1.5] * 16, "long_factor": [4.0] * 16}
        config = config_of("phi3", rope_parameters=rope, original_max_position_embeddings=1024)
        assert config.max_model_len == 1024
        assert config.rope_scaling is not None
        assert config.rope_scaling.factors == (1.5,) * 16
        assert config.rope_scaling.attention_factor == pytest.approx((1 + np.log(2) / np.log(1024)) ** 0.5)


YARN_16 = {**ROPE, "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 1024}


def test_ministral_scales_queries_by_position() -> None:
    """Its factor of cosines and sines is 1, because mscale and mscale_all_dim cancel each other."""
    ministral = {**YARN_16, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    config = config_of("mistral3", rope_parameters=ministral, max_position_embeddings=16384)
    assert (config.max_model_len, config.query_scaling) == (16384, QueryScaling(0.1, 1024))
    assert config.rope_scaling is not None
    assert config.rope_scaling.attention_factor == 1.0
    unscaled = config_of("mistral3", rope_parameters=ministral | {"llama_4_scaling_beta": 0}, head_dim=None)
    assert (unscaled.max_model_len, unscaled.head_dim, unscaled.query_scaling) == (16384, 128, None)
    assert config_of("qwen2", rope_parameters=ministral).query_scaling is None


def test_granite_swa_has_windows_and_rope_bases_by_layer() -> None:
    config = config_of("granite_swa")
    assert (config.windows, config.unrotated_layers, config.sinks) == ((0, 16, 16, 16), (0,), True)
    assert (config.rope_theta, config.local_rope_theta) == (1e4, None)
    plain = config_of("granite_swa", layer_types=None, sliding_window=None, layer_rope_theta=None)
    assert (plain.windows, plain.unrotated_layers, plain.rope_theta) == ((0, 128, 128, 128), (), 1e4)
    two = config_of("granite_swa", layer_rope_theta=[1e6, 5e3, 0, 5e3])
    assert (two.rope_theta, two.local_rope_theta, two.unrotated_layers) == (1e6, 5e3, (2,))


def test_granite_hybrid_without_experts_and_states_is_a_granite() -> None:
    granite, hybrid = config_of("granite"), config_of("granitemoehybrid", layer_types=["attention"] * 2)
    assert replace(hybrid, architecture="granite") == granite
    assert config_of("granitemoehybrid", position_embedding_type=None).unrotated_layers == (0, 1)
    assert config_of("granitemoehybrid", position_embedding_type="nope").unrotated_layers == (0, 1)
    assert config_of("granitemoehybrid", shared_intermediate_size=96).intermediate_size == 96


SLIDING = ["sliding_attention"] * 2
UNSUPPORTED: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "capped scores": ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "capped logits": ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "not causal": ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "another activation": ("gemma3", {"hidden_activation": "gelu"}, "'gelu'; gelu_pytorch_tanh"),
    "rope without layers": ("gemma3", {"rope_parameters": {"rope_theta": 1.0}}, "without 'full_attention'"),
    "scaled local rope": (
        "gemma3",
        {"rope_parameters": {"full_attention": ROPE, "sliding_attention": {"rope_type": "linear"}}},
        "'linear' in layers with a sliding window",
    ),
    "sliding layers of llama": ("llama", {"layer_types": SLIDING}, "not part of a plain llama model"),
    "not switched on": ("qwen3", {"layer_types": SLIDING}, "is not enabled"),
    "another kind of layer": ("qwen3", {"layer_types": ["linear_attention"]}, "type 'linear_attention'"),
    "experts": ("granitemoehybrid", {"num_local_experts": 8}, "num_local_experts"),
    "experts by default": ("granitemoehybrid", {"num_local_experts": None}, "num_local_experts"),
    "states by default": ("granitemoehybrid", {"layer_types": None}, "no layer_types"),
    "states": ("granitemoehybrid", {"layer_types": ["mamba", "attention"]}, "type 'mamba'"),
    "yarn by default": ("mistral3", {"rope_parameters": None}, "no rope_parameters"),
    "bases by layer": ("granite_swa", {"layer_rope_theta": [1e4, 1e4, 1e5, 0]}, "layer_rope_theta"),
    "scaled rope of two bases": (
        "granite_swa",
        {
            "layer_rope_theta": [1e6, 1e4, 1e4, 1e4],
            "rope_parameters": {**ROPE, "rope_type": "linear", "factor": 2.0},
        },
        "scaled rope beside rope bases",
    ),
    "partial rope": ("qwen2", {"partial_rotary_factor": 0.5}, "a part of each head"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_features_are_rejected_by_name(case: str) -> None:
    name, changes, message = UNSUPPORTED[case]
    with pytest.raises(UnsupportedArtifactError, match=message):
        config_of(name, **changes)


YARN = {**ROPE, "rope_type": "yarn"}
CORRUPT: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "a window of nothing": ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
    "a negative window": ("gemma3", {"sliding_window": -1}, "sliding_window is -1"),
    "windows without a size": (
        "qwen3",
        {"use_sliding_window": True, "layer_types": SLIDING, "sliding_window": None},
        "sliding_window is 0",
    ),
    "too few layer types": ("gemma3", {"layer_types": ["full_attention"]}, "1 entries; 6 are"),
    "too few rope bases": ("granite_swa", {"layer_rope_theta": [1e4]}, "1 entries; 4 are"),
    "queries of no period": (
        "mistral3",
        {"rope_parameters": {**YARN, "factor": 2.0, "llama_4_scaling_beta": 0.1}},
        "'original_max_position_embeddings' is missing",
    ),
    "queries that shrink": (
        "mistral3",
        {"rope_parameters": {**YARN_16, "llama_4_scaling_beta": -0.1}},
        "scaling of queries is -0.1",
    ),
    "too few rotated layers": ("smollm3", {"no_rope_layers": [1]}, "1 entries; 4 are"),
    "no scalar": ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
    "no embeddings": ("granite", {"embedding_multiplier": 0.0}, "embedding scale is 0"),
    "no logits": ("granite", {"logits_scaling": -1.0}, "logits divisor is -1"),
    "no rotation": ("phi3", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.01}}, "rope over 0 dimensions"),
    "odd rotation": ("phi3", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.1}}, "rope over 3 dimensions"),
    "too much rotation": ("phi3", {"rope_parameters": {**ROPE, "partial_rotary_factor": 2.0}}, "over 64 dimensions"),
    "yarn without a factor": ("qwen2", {"rope_parameters": YARN}, "'factor' is missing"),
    "yarn of nothing": ("qwen2", {"rope_parameters": {**YARN, "factor": 0.0}}, "factor is 0.0"),
    "trained on nothing": (
        "qwen2",
        {"rope_parameters": {**YARN, "factor": 2.0, "original_max_position_embeddings": 0}},
        "original_max_position_embeddings is 0.0",
    ),
    "longrope without factors": ("phi3", {"rope_parameters": {**ROPE, "rope_type": "longrope"}}, "'short_factor'"),
    "too few factors": (
        "phi3",
        {"rope_parameters": {**ROPE, "rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "1 short rope factors; 16",
    ),
    "factors that are words": (
        "phi3",
        {"rope_parameters": {**ROPE, "rope_type": "longrope", "short_factor": ["a"] * 16}},
        r"short_factor\[0\]' is of type str",
    ),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_contradictory_config_is_corrupt(case: str) -> None:
    name, changes, message = CORRUPT[case]
    with pytest.raises(CorruptArtifactError, match=message):
        config_of(name, **changes)


@pytest.mark.parametrize("encoding", ["F32", "Q8_0", "Q4_0"])
def test_fused_projections_are_read_in_parts(encoding: str, tmp_path: Path) -> None:
    artifact = open_artifact(str(write_gguf(tmp_path / "m.gguf", "tiny-phi3", encoding, seed=3)), cache_dir=tmp_path)
    for module, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
        prefix, _, fused = f"model.layers.1.{module}.weight".partition(module.split(".")[1])
        tensors = [artifact.weights[f"{prefix}{part}_proj{fused}"] for part in parts]
        rows = sum(tensor.shape[0] for tensor in tensors)
        name = f"model.layers.1.{module}.weight"
        whole = random_tensor(name, (rows, 128), encoding, seed=3)
        assert np.concatenate([tensor.data for tensor in tensors]).tobytes() == whole.tobytes()
        assert name not in artifact.weights


def test_a_shared_mlp_is_read_as_a_plain_one(tmp_path: Path) -> None:
    path = write_huggingface(tmp_path / "m", "tiny-granitemoehybrid", "F32", seed=3)
    weights = open_artifact(str(path), cache_dir=tmp_path).weights
    prefix = "model.layers.1."
    whole = random_tensor(f"{prefix}shared_mlp.input_linear.weight", (384, 128), "F32", seed=3)
    for part, rows in (("gate", whole[:192]), ("up", whole[192:])):
        np.testing.assert_array_equal(weights[f"{prefix}mlp.{part}_proj.weight"].data, rows)
    down = random_tensor(f"{prefix}shared_mlp.output_linear.weight", (128, 192), "F32", seed=3)
    np.testing.assert_array_equal(weights[f"{prefix}mlp.down_proj.weight"].data, down)
    edit_json(path / "config.json", lambda config: config.update(shared_intermediate_size=96))
    with pytest.raises(CorruptArtifactError, match=r"shared_mlp.input_linear.weight' has 384 rows; 192 are expected"):
        open_artifact(str(path), cache_dir=tmp_path)


def test_a_fused_projection_of_another_height_is_corrupt(tmp_path: Path) -> None:
    path = write_huggingface(tmp_path / "m", "tiny-phi3", "F32")
    edit_json(path / "config.json", lambda config: config.update(num_key_value_heads=1))
    with pytest.raises(CorruptArtifactError, match=r"qkv_proj.weight' has 256 rows; 192 are expected"):
        open_artifact(str(path), cache_dir=tmp_path)


def test_windows_of_a_phi3_gguf_are_left_out_as_llama_cpp_does(tmp_path: Path) -> None:
    artifact = open_artifact(str(write_gguf(tmp_path / "m.gguf", "tiny-phi3", "F32")), cache_dir=tmp_path)
    assert artifact.config.windows == ()


def open_gguf(tmp_path: Path, name: str, **keys: object) -> ModelConfig:
    """A tiny model whose file has further keys, under its architecture's prefix."""
    shape = replace(SHAPES[f"tiny-{name}"], windows=()) if name == "phi3" else SHAPES[f"tiny-{name}"]

    def extra(writer: Any) -> None:
        for key, value in keys.items():
            full = f"{name}.{key.replace('__', '.')}"
            if isinstance(value, np.ndarray):
                writer.add_tensor(f"{key}.weight", value)
            elif isinstance(value, str):
                writer.add_string(full, value)
            elif isinstance(value, bool):
                writer.add_bool(full, value)
            elif isinstance(value, int):
                writer.add_uint32(full, value)
            else:
                writer.add_float32(full, value)

    path = write_gguf(tmp_path / "m.gguf", shape, "F32", extra=extra)
    return open_artifact(str(path), cache_dir=tmp_path).config


def test_scalings_of_a_gguf_are_data(tmp_path: Path) -> None:
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 512}
    scaling = open_gguf(tmp_path, "qwen2", **yarn).rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor) == ("yarn", 4.0)
    assert scaling.parameters["original_max_position_embeddings"] == 512
    assert scaling.attention_factor == pytest.approx(1 + 0.1 * np.log(4))
    ministral = {**yarn, "rope__scaling__yarn_log_multiplier": 1.0, "attention__temperature_scale": 0.125}
    config = open_gguf(tmp_path, "mistral3", **ministral)
    assert config.rope_scaling is not None
    assert (config.max_model_len, config.rope_scaling.attention_factor) == (2048, 1.0)
    assert config.query_scaling == QueryScaling(0.125, 512)
    local = open_gguf(tmp_path, "gemma3", rope__freq_base_swa=5e3, attention__sliding_window_pattern=2)
    assert local.local_rope_theta == 5e3
    assert local.windows == (16, 0, 16, 0, 16, 0)


REFUSED: Mapping[str, tuple[str, dict[str, object], type[Exception], str]] = {
    "capped logits": ("gemma3", {"final_logit_softcapping": 30.0}, UnsupportedArtifactError, "final_logit_softcapping"),
    "no rope at all": ("granite", {"rope__scaling__finetuned": False}, UnsupportedArtifactError, "without rope"),
    "yarn beside factors": (
        "qwen2",
        {"rope__scaling__type": "yarn", "rope_freqs": np.ones(16, np.float32)},
        UnsupportedArtifactError,
        "yarn rope scaling beside rope_freqs.weight",
    ),
    "longrope without factors": (
        "phi3",
        {"rope__scaling__type": "longrope"},
        CorruptArtifactError,
        "longrope without rope_factors_short.weight",
    ),
    "too few factors": (
        "phi3",
        {"rope_factors_short": np.ones(8, np.float32), "rope_factors_long": np.ones(8, np.float32)},
        CorruptArtifactError,
        r"F32 \[8\]; F32 \[16\] is expected",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_or_unsupported_gguf_metadata_is_rejected(case: str, tmp_path: Path) -> None:
    name, keys, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        open_gguf(tmp_path, name, **keys)


@pytest.mark.parametrize("name", ["mistral", "olmo3", "granitemoehybrid", "lfm3"])
def test_names_that_no_converter_writes_are_not_known(name: str, tmp_path: Path) -> None:
    values = {**LLAMA, "general.architecture": text(name)}
    with pytest.raises(UnsupportedArtifactError, match=f"architecture '{name}'; supported: llama"):
        HandMadeGguf(values).open(tmp_path)


SPELLINGS = (
    "layer_rope_theta",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "sliding_window_pattern",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "no_rope_layer_interval",
    "layer_types",
    "position_embedding_type",
    "num_local_experts",
    "llama_4_scaling_beta",
    "attention_bias",
)
ROPE_KEYS = (
    "llama_4_scaling_beta",
    "rope_theta",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "beta_fast",
    "beta_slow",
    "truncate",
)
ODD_VALUES: tuple[Any, ...] = (
    None,
    -1,
    0,
    1,
    3,
    10**400,
    -(10**400),
    4_000_000_000,
    1e308,
    -1e308,
    1e-308,
    "x",
    [],
    [1],
    {},
    True,
)


@pytest.mark.parametrize("name", DECODERS)
def test_any_value_in_any_place_is_read_or_refused(name: str) -> None:
    declared = {"rope_theta": 10000.0, **huggingface_config(SHAPES[f"tiny-{name}"])}
    scalings = (
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 16},
        {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "linear", "factor": 2.0},
    )
    keys = (*declared, *SPELLINGS)
    places = [(key, {**declared, key: value}) for key in keys for value in ODD_VALUES]
    for scaling in scalings:
        plain = {key: value for key, value in declared.items() if key != "rope_parameters"}
        for key in (*scaling, *ROPE_KEYS):
            places += [(key, {**plain, "rope_scaling": {**scaling, key: value}}) for value in ODD_VALUES]
        places += [(key, {**plain, "rope_scaling": scaling, key: value}) for key in SPELLINGS for value in ODD_VALUES]
    for _, changed in places:
        try:
            config = read_config(Metadata(CONFIG_JSON, without_nulls(changed)))
            check_config(config, CONFIG_JSON)
        except ArtifactError:
            continue
