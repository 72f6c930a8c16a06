"""What encoders' files say is read as data, in the spelling of every generation, or refused by name."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.artifacts.encoders import BERT_LIKE
from lockstep.artifacts.huggingface_config import read_config
from lockstep.artifacts.layout import check_config
from lockstep.artifacts.metadata import Metadata, without_nulls
from lockstep.artifacts.model import Artifact, HeadLayer, ModelConfig
from lockstep.artifacts.source import open_artifact
from lockstep.artifacts.tensors import dequantise
from lockstep.errors import ArtifactError, CorruptArtifactError, UnsupportedArtifactError
from tools.random_encoders import ENCODERS, encoder_tensors, write_encoder, write_encoder_gguf
from tools.random_models import write_safetensors

CONFIG_JSON = Path("config.json")


def config_of(name: str, **changes: object) -> ModelConfig:
    """What is read of an encoder's config.json; None takes a key out."""
    declared = without_nulls(json.loads(json.dumps(dict(ENCODERS[name].config) | changes)))
    config = read_config(Metadata(CONFIG_JSON, declared))
    check_config(config, CONFIG_JSON)
    return config


def opened(path: Path) -> Artifact:
    return open_artifact(str(path), cache_dir=path.parent / "cache")


@pytest.mark.parametrize("name", BERT_LIKE)
def test_an_encoder_is_known_by_its_type_as_well(name: str) -> None:
    assert config_of(name, architectures=None) == config_of(name)
    assert config_of(name).architecture == name
    assert config_of(name).bidirectional


def test_positions_of_xlm_roberta_begin_after_padding() -> None:
    config = config_of("xlm-roberta")
    assert (config.num_positions, config.position_offset, config.max_model_len) == (258, 2, 256)
    assert config_of("xlm-roberta", pad_token_id=4).position_offset == 5
    bert = config_of("bert")
    assert (bert.num_positions, bert.position_offset, bert.max_model_len) == (256, 0, 256)
    assert bert.unrotated_layers == (0, 1, 2)


def test_windows_of_modernbert_in_both_spellings() -> None:
    older = config_of("modern-bert")
    assert older.windows == (0, 16, 0)
    assert (older.rope_theta, older.local_rope_theta) == (160000.0, 10000.0)
    rope = {kind: {"rope_type": "default", "rope_theta": 5e4} for kind in ("full_attention", "sliding_attention")}
    newer = config_of(
        "modern-bert",
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        rope_parameters=rope,
        global_rope_theta=None,
    )
    assert newer.windows == (16, 0, 0)
    assert (newer.rope_theta, newer.local_rope_theta) == (5e4, 5e4)
    defaults = config_of("modern-bert", local_attention=None, global_attn_every_n_layers=None, global_rope_theta=None)
    assert defaults.windows == (0, 128, 128)
    assert defaults.rope_theta == 160000.0


def test_nomic_in_its_older_spelling() -> None:
    older = {
        "n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 128, "n_positions": 256, "vocab_size": 320,
        "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "activation_function": "swiglu", "qkv_proj_bias": False,
        "prenorm": False, "rotary_emb_fraction": 1.0, "model_type": "nomic_bert", "architectures": ["NomicBertModel"],
    }  # fmt: skip
    assert read_config(Metadata(CONFIG_JSON, older)) == config_of("nomic-bert")
    for key, value in (
        ("prenorm", True),
        ("rotary_emb_fraction", 0.5),
        ("moe_every_n_layers", 2),
        ("mlp_fc1_bias", True),
    ):
        with pytest.raises(UnsupportedArtifactError, match="supported"):
            read_config(Metadata(CONFIG_JSON, {**older, key: value}))


def test_nomic_with_the_names_of_its_first_files(tmp_path: Path) -> None:
    encoder = ENCODERS["nomic-bert"]
    newer = write_encoder(tmp_path / "newer", encoder)
    older = tmp_path / "older"
    older.mkdir()
    (older / "config.json").write_text((newer / "config.json").read_text())
    renamed: dict[str, Any] = {}
    names = {"self_attn.o_proj": "attn.out_proj", "mlp.up_proj": "mlp.fc11", "mlp.gate_proj": "mlp.fc12"}
    names |= {"mlp.down_proj": "mlp.fc2", "post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2"}
    for name, tensor in encoder_tensors(encoder).items():
        own = name.replace("embeddings.LayerNorm", "emb_ln")
        for new, old in names.items():
            own = own.replace(new, old)
        renamed[f"encoder.{own}" if own.startswith("layers") else own] = tensor
    for layer in range(3):
        parts = [renamed.pop(f"encoder.layers.{layer}.self_attn.{each}_proj.weight") for each in "qkv"]
        renamed[f"encoder.layers.{layer}.attn.Wqkv.weight"] = np.concatenate(parts)
    write_safetensors(older / "model.safetensors", renamed)
    a, b = opened(newer), opened(older)
    assert sorted(a.weights.names()) == sorted(b.weights.names())
    for name in a.weights.names():
        assert np.array_equal(dequantise(a.weights[name]), dequantise(b.weights[name])), name


def test_heads_of_classifiers() -> None:
    bert = config_of("bert-classifier")
    assert bert.head == (HeadLayer(64, "tanh"), HeadLayer(3))
    assert (bert.num_labels, bert.classifier_pooling) == (3, "cls")
    assert config_of("xlm-roberta-classifier").head == (HeadLayer(64, "tanh"), HeadLayer(1))
    modern = config_of("modern-bert-classifier")
    assert modern.head == (HeadLayer(64, "gelu_erf", bias=False, norm=True), HeadLayer(3))
    assert modern.classifier_pooling == "mean"
    assert config_of("bert").head == ()
    assert config_of("bert-classifier", id2label=None, label2id=None).num_labels == 2


def test_dense_modules_are_the_head(tmp_path: Path) -> None:
    artifact = opened(write_encoder(tmp_path / "gemma", ENCODERS["gemma-embedding"]))
    assert artifact.config.head == (HeadLayer(96, "", bias=False), HeadLayer(64, "", bias=False))
    assert {"head.0.weight", "head.1.weight"} <= set(artifact.weights.names())
    bert = opened(write_encoder(tmp_path / "bert", ENCODERS["bert-relu-dense"]))
    assert bert.config.head == (HeadLayer(48, "tanh"),)
    assert bert.config.activation == "relu"
    assert bert.num_bytes > sum(each.stat().st_size for each in (tmp_path / "bert").glob("*.safetensors"))


def test_a_dense_module_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    path = write_encoder(tmp_path / "bert", ENCODERS["bert-relu-dense"])
    before = opened(path).fingerprint
    config = path / "2_Dense" / "config.json"
    config.write_text(config.read_text().replace("Tanh", "ReLU"))
    assert opened(path).fingerprint != before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "torch.nn.modules.activation.PReLU"}, "activation 'PReLU'"),
        ({"out_features": 0}, "out_features"),
        ({"out_features": 49}, r"head\.0\.weight"),
        ({"out_features": 2**40}, "head"),
        ({"bias": "yes"}, "boolean"),
    ],
)
def test_wrong_dense_modules_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = write_encoder(tmp_path / "bert", ENCODERS["bert-relu-dense"])
    config = path / "2_Dense" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ArtifactError, match=message):
        opened(path)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"hidden_act": "mish"}, "mish"),
        ("bert", {"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ("bert", {"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ("modern-bert", {"attention_bias": True}, "attention_bias"),
        ("modern-bert-classifier", {"classifier_pooling": "max"}, "classifier_pooling"),
        ("modern-bert", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "yarn"),
        ("gemma-embedding", {"use_bidirectional_attention": False}, "use_bidirectional_attention"),
    ],
)
def test_variants_are_refused_by_name(name: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedArtifactError, match=message):
        config_of(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bert", {"num_hidden_layers": 10**9}, "layers"),
        ("bert", {"hidden_size": -64}, "hidden size"),
        ("xlm-roberta", {"pad_token_id": 300}, "context length"),
        ("xlm-roberta", {"pad_token_id": -5}, "position embeddings"),
        ("modern-bert", {"local_attention": 1}, "local_attention"),
        ("modern-bert", {"layer_types": ["full_attention"]}, "layer_types"),
        ("modern-bert", {"global_attn_every_n_layers": 0}, "global_attn_every_n_layers"),
        ("bert-classifier", {"num_labels": 0}, "num_labels"),
        ("bert", {"layer_norm_eps": 0}, "epsilon"),
    ],
)
def test_impossible_values_are_refused(name: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(CorruptArtifactError, match=message):
        config_of(name, **changes)


ODD: tuple[object, ...] = (None, -1, 0, 1, 2, 3.5, 2**31, 2**70, float("nan"), "", "gelu", [], [1], {}, True)


@pytest.mark.parametrize("name", ENCODERS)
def test_any_value_in_any_place_is_read_or_refused(name: str) -> None:
    for key in ENCODERS[name].config:
        for value in ODD:
            declared = without_nulls(dict(ENCODERS[name].config) | {key: value})
            try:
                check_config(read_config(Metadata(CONFIG_JSON, declared)), CONFIG_JSON)
            except ArtifactError:
                continue


def with_tensors(tmp_path: Path, name: str, change: dict[str, Any]) -> Path:
    path = write_encoder(tmp_path / name, ENCODERS[name])
    tensors = encoder_tensors(ENCODERS[name]) | change
    write_safetensors(path / "model.safetensors", {key: each for key, each in tensors.items() if each is not None})
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder.layer.1.output.dense.bias": None}, r"layers\.1\.mlp\.down_proj\.bias"),
        ({"embeddings.position_embeddings.weight": None}, "embed_positions"),
        ({"embeddings.position_embeddings.weight": np.zeros((255, 64), np.float32)}, "embed_positions"),
        ({"embeddings.token_type_embeddings.weight": np.zeros((2, 63), np.float32)}, "embed_type"),
        ({"embeddings.token_type_embeddings.weight": np.zeros((0, 64), np.float32)}, "token_type"),
        ({"embeddings.LayerNorm.bias": np.zeros(63, np.float32)}, r"embed_norm\.bias"),
        ({"encoder.layer.0.attention.self.rel.weight": np.zeros((4, 64), np.float32)}, "effect is unknown"),
    ],
)
def test_wrong_tensors_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        opened(with_tensors(tmp_path, "bert", change))


def test_tensors_without_effect_are_left_out(tmp_path: Path) -> None:
    extra = {"pooler.dense.weight": np.zeros((64, 64), np.float32), "cls.predictions.bias": np.zeros(320, np.float32)}
    plain = opened(write_encoder(tmp_path / "plain", ENCODERS["bert"]))
    found = opened(with_tensors(tmp_path, "bert", extra))
    assert sorted(found.weights.names()) == sorted(plain.weights.names())


def test_old_names_of_norms_and_prefixes_of_files(tmp_path: Path) -> None:
    tensors = encoder_tensors(ENCODERS["bert"])
    renamed = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): each
        for name, each in tensors.items()
    }
    path = with_tensors(tmp_path, "bert", {**dict.fromkeys(tensors), **renamed})
    plain = opened(write_encoder(tmp_path / "plain", ENCODERS["bert"]))
    assert sorted(opened(path).weights.names()) == sorted(plain.weights.names())


FROM_GGUF = [name for name, encoder in ENCODERS.items() if encoder.gguf]


@pytest.mark.parametrize("name", FROM_GGUF)
def test_gguf_and_config_json_describe_the_same_model(name: str, tmp_path: Path) -> None:
    """XLM-RoBERTa is bert in GGUF, without the rows of positions that it does not use."""
    encoder = ENCODERS[name]
    a = opened(write_encoder(tmp_path / "model", encoder)).config
    b = opened(write_encoder_gguf(tmp_path / "model.gguf", encoder)).config
    assert (a.head, a.num_labels, a.classifier_pooling) == (b.head, b.num_labels, b.classifier_pooling)
    assert (a.windows, a.rope_theta, a.activation) == (b.windows, b.rope_theta, b.activation)
    assert a.local_rope_theta == b.local_rope_theta
    assert a.max_model_len == b.max_model_len
    assert a.num_positions - a.position_offset == b.num_positions


@pytest.mark.parametrize("name", FROM_GGUF)
def test_any_metadata_of_a_gguf_file_is_read_or_refused(name: str, tmp_path: Path) -> None:
    encoder = ENCODERS[name]
    keys = (*encoder.gguf_metadata, "classifier.pooling_type", "attention.sliding_window", "rope.freq_base")
    for index, key in enumerate(dict.fromkeys(keys)):
        for value in (0, 1, 3, 2**32 - 1, 0.0, float("nan"), -1.0):
            changed = replace(encoder, gguf_metadata={**encoder.gguf_metadata, key: value})
            path = write_encoder_gguf(tmp_path / f"{index}.gguf", changed)
            with suppress(ArtifactError):
                check_config(opened(path).config, path)
            path.unlink()


def test_a_causal_bert_in_gguf_is_refused(tmp_path: Path) -> None:
    path = write_encoder_gguf(tmp_path / "model.gguf", ENCODERS["bert"])
    content = path.read_bytes()
    key = b"bert.attention.causal"
    at = content.index(key) + len(key) + 4
    path.write_bytes(content[:at] + b"\x01" + content[at + 1 :])
    with pytest.raises(UnsupportedArtifactError, match="causal attention"):
        opened(path)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    for path in (
        write_encoder(tmp_path / "model", ENCODERS["bert"]) / "model.safetensors",
        write_encoder_gguf(tmp_path / "model.gguf", ENCODERS["bert"]),
    ):
        content = path.read_bytes()
        for size in (0, 9, 100, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:size])
            with pytest.raises(ArtifactError):
                opened(path.parent if path.suffix == ".safetensors" else path)
        path.unlink()
