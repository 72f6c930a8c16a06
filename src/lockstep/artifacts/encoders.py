"""Encoders: read their configuration from config.json and GGUF metadata, and rename their tensors.

Keys, names and defaults are those of transformers (`configuration_*.py`, `conversion_mapping.py`) and of llama.cpp's
converters. EmbeddingGemma has the configuration of a Gemma decoder, and only its tensors are renamed here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lockstep.artifacts.architectures import Architecture
from lockstep.artifacts.layout import (
    EMBEDDING,
    EMBEDDING_NORM,
    FINAL_NORM,
    HEAD,
    POSITIONS,
    TOKEN_TYPE,
    check_num_layers,
)
from lockstep.artifacts.metadata import Metadata
from lockstep.artifacts.model import HeadLayer, ModelConfig, Tensor

BERT_LIKE = ("bert", "xlm-roberta", "nomic-bert", "modern-bert")
"""Encoders whose configuration is read here."""
ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu_erf",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "swiglu": "silu",
}
"""Names in config.json, and those of `ModelConfig`."""
_PREFIXES = ("bert.", "roberta.", "nomic_bert.", "model.")
"""Beginnings of names in files of classifiers and of models for pretraining."""
_UNUSED = re.compile(
    r"(pooler\.dense|lm_head|cls)\..*|embeddings\.(position_ids|token_type_ids)|.*rotary_emb\.inv_freq"
)
"""Tensors that have no effect on hidden states."""
_NUMBERED = re.compile(r"(.*?)\.?(0|[1-9][0-9]*)\.(.+)\.(weight|bias|gamma|beta)", re.ASCII)
_OLD_KINDS = {"gamma": "weight", "beta": "bias"}

_BERT_NAMES = {
    "embeddings.word_embeddings": EMBEDDING.removesuffix(".weight"),
    "embeddings.position_embeddings": POSITIONS.removesuffix(".weight"),
    "embeddings.token_type_embeddings": TOKEN_TYPE.removesuffix(".weight"),
    "embeddings.LayerNorm": EMBEDDING_NORM,
}
_BERT_LAYER = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "post_attention_layernorm",
    "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
    "output.LayerNorm": "post_feedforward_layernorm",
}
_GLOBAL_NAMES: Mapping[str, Mapping[str, str]] = {
    "bert": _BERT_NAMES,
    "xlm-roberta": _BERT_NAMES,
    "nomic-bert": {**_BERT_NAMES, "emb_ln": EMBEDDING_NORM},
    "modern-bert": {
        "embeddings.tok_embeddings": EMBEDDING.removesuffix(".weight"),
        "embeddings.norm": EMBEDDING_NORM,
        "final_norm": FINAL_NORM,
    },
    "gemma-embedding": {"embed_tokens": EMBEDDING.removesuffix(".weight"), "norm": FINAL_NORM},
}
_LAYER_NAMES: Mapping[str, Mapping[str, str]] = {
    "bert": _BERT_LAYER,
    "xlm-roberta": _BERT_LAYER,
    "nomic-bert": {
        "post_mlp_layernorm": "post_feedforward_layernorm",
        "attn.Wqkv": "self_attn.qkv_proj",
        "attn.out_proj": "self_attn.o_proj",
        "mlp.fc11": "mlp.up_proj",
        "mlp.fc12": "mlp.gate_proj",
        "mlp.fc2": "mlp.down_proj",
        "norm1": "post_attention_layernorm",
        "norm2": "post_feedforward_layernorm",
    },
    "modern-bert": {
        "attn_norm": "input_layernorm",
        "attn.Wqkv": "self_attn.qkv_proj",
        "attn.Wo": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.Wi": "mlp.gate_up_proj",
        "mlp.Wo": "mlp.down_proj",
    },
    "gemma-embedding": {},
}
"""Names of modules in config.json's formats, by architecture; the others are canonical."""
_HEAD_NAMES: Mapping[str, Mapping[str, str]] = {
    "bert": {"pooler.dense": f"{HEAD}0", "classifier": f"{HEAD}1"},
    "xlm-roberta": {"classifier.dense": f"{HEAD}0", "classifier.out_proj": f"{HEAD}1"},
    "modern-bert": {"head.dense": f"{HEAD}0", "head.norm": f"{HEAD}0.norm", "classifier": f"{HEAD}1"},
}
"""Modules of classifiers."""
GGUF_GLOBAL_NAMES: Mapping[str, str] = {
    "token_embd_norm.weight": f"{EMBEDDING_NORM}.weight",
    "token_embd_norm.bias": f"{EMBEDDING_NORM}.bias",
    "position_embd.weight": POSITIONS,
    "token_types.weight": TOKEN_TYPE,
    "cls.weight": f"{HEAD}0.weight",
    "cls.bias": f"{HEAD}0.bias",
    "cls.norm.weight": f"{HEAD}0.norm.weight",
    "cls.output.weight": f"{HEAD}1.weight",
    "cls.output.bias": f"{HEAD}1.bias",
    "dense_2.weight": f"{HEAD}0.weight",
    "dense_3.weight": f"{HEAD}1.weight",
}
_GGUF_BERT = {
    "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "post_feedforward_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
}
GGUF_LAYER_NAMES: Mapping[str, Mapping[str, str]] = {
    "bert": _GGUF_BERT,
    "nomic-bert": _GGUF_BERT,
    "modern-bert": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gemma-embedding": {},
}
"""Names in GGUF files that those of decoders do not have, by architecture."""


def read_huggingface_encoder(declared: Metadata, architecture: Architecture) -> ModelConfig:
    """Convert config.json to a model configuration.

    Raises:
        UnsupportedArtifactError: a variant is not supported; the error names it.
        CorruptArtifactError: a value is missing or has the wrong type.
    """
    if architecture.name == "nomic-bert" and "n_embd" in declared.values:
        declared = _renamed_nomic(declared)
    name = architecture.name
    num_layers = declared.integer("num_hidden_layers")
    check_num_layers(num_layers, declared.path)
    hidden_size, num_heads = declared.integer("hidden_size"), declared.integer("num_attention_heads")
    _refuse_variants(declared, architecture)
    context = declared.integer("max_position_embeddings")
    fields: dict[str, Any] = dict(architecture.traits)
    if "num_token_types" in fields:
        fields["num_token_types"] = declared.integer("type_vocab_size", 2)
    if name in ("bert", "xlm-roberta"):
        offset = declared.integer("pad_token_id", 1) + 1 if name == "xlm-roberta" else 0
        fields |= {
            "num_positions": context, "position_offset": offset, "unrotated_layers": tuple(range(num_layers)),
        }  # fmt: skip
        context -= offset
    theta = architecture.rope_theta
    if name == "nomic-bert":
        theta = declared.section("rope_parameters").real("rope_theta", declared.real("rope_theta", theta))
    if name == "modern-bert":
        fields["windows"] = _modern_windows(declared, architecture, num_layers)
        theta = _modern_theta(declared, "full_attention", "global_rope_theta", theta)
        local = _modern_theta(declared, "sliding_attention", "local_rope_theta", architecture.local_rope_theta or theta)
        fields |= {"local_rope_theta": local, "norm_bias": declared.flag("norm_bias", False)}
    default = "silu" if name == "nomic-bert" else "gelu"
    key = "hidden_activation" if name == "modern-bert" else "hidden_act"
    config = ModelConfig(
        architecture=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=declared.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=declared.integer("head_dim", hidden_size // max(num_heads, 1)),
        vocab_size=declared.integer("vocab_size"),
        max_model_len=context,
        rms_norm_eps=declared.real(
            "norm_eps" if name == "modern-bert" else "layer_norm_eps", architecture.rms_norm_eps
        ),
        rope_theta=theta,
        activation=_activation(declared, key, default),
        **fields,
    )
    return _with_classifier(config, declared, architecture)


def read_gguf_encoder(
    metadata: Metadata, architecture: Architecture, tensors: Mapping[str, Tensor], context: int
) -> ModelConfig:
    """Convert GGUF metadata to a model configuration. Sizes that tensors show are read from them.

    Args:
        tensors: tensors by canonical name.
        context: declared context length.

    Raises:
        UnsupportedArtifactError: a variant is not supported; the error names it.
        CorruptArtifactError: a value is missing or has the wrong type.
    """
    prefix = architecture.name
    num_layers = metadata.integer(f"{prefix}.block_count")
    check_num_layers(num_layers, metadata.path)
    hidden_size, num_heads = (
        metadata.integer(f"{prefix}.embedding_length"),
        metadata.integer(f"{prefix}.attention.head_count"),
    )
    if metadata.flag(f"{prefix}.attention.causal", False):
        raise metadata.unsupported("causal attention; attention that looks both ways is supported")
    fields: dict[str, Any] = dict(architecture.traits)
    types = tensors.get(TOKEN_TYPE)
    fields["num_token_types"] = 0 if types is None else types.shape[0] // max(hidden_size, 1)
    if prefix == "bert":
        positions = tensors.get(POSITIONS)
        fields |= {
            "num_positions": context if positions is None else positions.shape[0],
            "unrotated_layers": tuple(range(num_layers)),
        }
    if prefix == "modern-bert":
        size = metadata.integer(f"{prefix}.attention.sliding_window", 0)
        period = metadata.integer(f"{prefix}.attention.sliding_window_pattern", architecture.period)
        local = tuple(size if size and period > 0 and layer % period else 0 for layer in range(num_layers))
        fields |= {"windows": local if any(local) else (), "num_token_types": 0}
        default = architecture.local_rope_theta or architecture.rope_theta
        fields["local_rope_theta"] = metadata.real(f"{prefix}.rope.freq_base_swa", default) if any(local) else None
    default_act = "silu" if prefix == "nomic-bert" else "gelu"
    config = ModelConfig(
        architecture=prefix,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=metadata.integer(f"{prefix}.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // max(num_heads, 1),
        vocab_size=tensors[EMBEDDING].shape[0],
        max_model_len=context,
        rms_norm_eps=metadata.real(f"{prefix}.attention.layer_norm_epsilon"),
        rope_theta=metadata.real(f"{prefix}.rope.freq_base", architecture.rope_theta),
        activation=_activation(metadata, f"{prefix}.hidden_activation", default_act),
        **fields,
    )
    return with_gguf_head(config, metadata, tensors)


def with_gguf_head(config: ModelConfig, metadata: Metadata, tensors: Mapping[str, Tensor]) -> ModelConfig:
    """The configuration with the head that the tensors of a GGUF file show."""
    is_modern, is_classifier = config.architecture == "modern-bert", config.architecture != "gemma-embedding"
    layers: list[HeadLayer] = []
    while len(layers) < 2 and (weight := tensors.get(f"{HEAD}{len(layers)}.weight")) is not None:
        name = f"{HEAD}{len(layers)}"
        inner = ("gelu_erf" if is_modern else "tanh") if is_classifier and not layers else ""
        layers.append(HeadLayer(weight.shape[0], inner, f"{name}.bias" in tensors, f"{name}.norm.weight" in tensors))
    if not layers or not is_classifier:
        return replace(config, head=tuple(layers))
    # 1 is the mean, 2 the first token. Files of ModernBERT without the key have the mean (llama.cpp's src/models).
    pooling = metadata.integer(f"{config.architecture}.classifier.pooling_type", 1 if is_modern else 2)
    kind = "mean" if pooling == 1 else "cls"
    return replace(config, head=tuple(layers), num_labels=layers[-1].size, classifier_pooling=kind)


def canonical_tensors(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a Hugging Face file, and leave out those that have no effect.

    An unknown name is kept, so that the layout check rejects it.
    """
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        canonical = _canonical_name(config, name)
        if canonical is not None:
            renamed[canonical] = replace(tensor, name=canonical)
    return with_token_types(renamed)


def with_token_types(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace the table of token types by its rows one after the other."""
    table = tensors.get(TOKEN_TYPE)
    if table is not None and len(table.shape) == 2:
        size = table.shape[0] * table.shape[1]
        tensors[TOKEN_TYPE] = replace(table, shape=(size,), data=table.data.reshape(-1))
    return tensors


def _canonical_name(config: ModelConfig, name: str) -> str | None:
    """The canonical name of a tensor; None: it has no effect."""
    architecture = config.architecture
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    module, _, kind = name.rpartition(".")
    kind = _OLD_KINDS.get(kind, kind)
    heads = _HEAD_NAMES.get(architecture, {}) if config.num_labels else {}
    if module in heads:
        return f"{heads[module]}.{kind}"
    if _UNUSED.fullmatch(name):
        return None
    names = _GLOBAL_NAMES[architecture]
    if module in names:
        return f"{names[module]}.{kind}"
    layer = _NUMBERED.fullmatch(name)
    if layer is None or layer[1] not in ("encoder.layer", "encoder.layers", "layers"):
        return name
    module = _LAYER_NAMES[architecture].get(layer[3], layer[3])
    return f"model.layers.{layer[2]}.{module}.{kind}"


def _renamed_nomic(declared: Metadata) -> Metadata:
    """The configuration of a Nomic model under today's keys. Variants that its first version could have are refused."""
    expected: Mapping[str, object] = {
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "prenorm": False,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "parallel_block": False,
        "activation_function": "swiglu",
    }
    for key, value in expected.items():
        found = declared.values.get(key, value)
        if found != value:
            raise declared.unsupported(f"{key} {found!r}; {value!r} is supported")
    if declared.values.get("rotary_scaling_factor") or declared.integer("moe_every_n_layers", 0) > 0:
        raise declared.unsupported(
            "rotary_scaling_factor or a mixture of experts; dense models without it are supported"
        )
    renamed = {
        "hidden_size": declared.integer("n_embd"),
        "num_hidden_layers": declared.integer("n_layer"),
        "num_attention_heads": declared.integer("n_head"),
        "intermediate_size": declared.integer("n_inner"),
        "max_position_embeddings": min(
            declared.integer("n_positions"), declared.integer("max_trained_positions", 2048)
        ),
        "layer_norm_eps": declared.real("layer_norm_epsilon", 1e-12),
        "rope_theta": declared.real("rotary_emb_base", 1000.0),
        "hidden_act": "silu",
    }
    kept = {
        key: declared.values[key] for key in ("vocab_size", "architectures", "model_type") if key in declared.values
    }
    return Metadata(declared.path, {**kept, **renamed})


def _refuse_variants(declared: Metadata, architecture: Architecture) -> None:
    problem = None
    kind = declared.text("position_embedding_type", "absolute")
    if kind not in ("absolute", "rotary", "sans_pos"):
        problem = f"position_embedding_type {kind!r}; absolute is supported"
    elif declared.flag("is_decoder", False) or declared.flag("add_cross_attention", False):
        problem = "is_decoder or add_cross_attention; encoders are supported"
    elif "quantization_config" in declared.values:
        problem = "quantised weights; float safetensors, or a GGUF file, are supported"
    elif declared.flag("mlp_bias", False) or declared.flag("attention_bias", False):
        problem = "mlp_bias or attention_bias; their absence is supported"
    for key in ("rope_scaling", "embedding_size"):
        if declared.values.get(key) not in (None, declared.values.get("hidden_size")):
            problem = f"{key}; a model without it is supported"
    if problem is not None:
        raise declared.unsupported(problem)


def _activation(declared: Metadata, key: str, default: str) -> str:
    name = declared.text(key, default)
    if name not in ACTIVATIONS:
        raise declared.unsupported(f"{key} {name!r}; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _modern_windows(declared: Metadata, architecture: Architecture, num_layers: int) -> tuple[int, ...]:
    size = declared.integer("local_attention", architecture.sliding_window)
    if size < 2:
        raise declared.corrupt(f"local_attention is {size}; at least 2 is expected")
    if "layer_types" in declared.values:
        kinds = declared.strings("layer_types")
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if unknown or len(kinds) != num_layers:
            raise declared.corrupt(f"layer_types has {len(kinds)} entries and {unknown}; {num_layers} are expected")
        return tuple(size if kind == "sliding_attention" else 0 for kind in kinds)
    period = declared.integer("global_attn_every_n_layers", architecture.period)
    if period < 1:
        raise declared.corrupt(f"global_attn_every_n_layers is {period}; at least 1 is expected")
    return tuple(size if layer % period else 0 for layer in range(num_layers))


def _modern_theta(declared: Metadata, kind: str, old_key: str, default: float) -> float:
    section = declared.section("rope_parameters").section(kind)
    rope_type = section.text("rope_type", "default")
    if rope_type != "default":
        raise section.unsupported(f"rope type {rope_type!r}; default is supported")
    return section.real("rope_theta", declared.real(old_key, default))


def _with_classifier(config: ModelConfig, declared: Metadata, architecture: Architecture) -> ModelConfig:
    """The configuration with the head of a classifier, if the model is one."""
    named = declared.strings("architectures") if "architectures" in declared.values else []
    if not architecture.classifier_name or architecture.classifier_name not in named:
        return config
    labels = declared.section("id2label").values
    num_labels = declared.integer("num_labels", len(labels) or 2)
    if num_labels < 1:
        raise declared.corrupt(f"num_labels is {num_labels}; at least 1 is expected")
    inner, pooling = HeadLayer(config.hidden_size, "tanh"), "cls"
    if architecture.name == "modern-bert":
        activation = _activation(declared, "classifier_activation", "gelu")
        inner = HeadLayer(config.hidden_size, activation, declared.flag("classifier_bias", False), norm=True)
        pooling = declared.text("classifier_pooling", "cls")
        if pooling not in ("cls", "mean"):
            raise declared.unsupported(f"classifier_pooling {pooling!r}; supported: cls, mean")
    return replace(config, head=(inner, HeadLayer(num_labels)), num_labels=num_labels, classifier_pooling=pooling)
