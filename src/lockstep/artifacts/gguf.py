"""GGUF artifacts: convert the metadata to a `ModelConfig`, and rename, split and unpermute the tensors.

Keys and names are from llama.cpp's `gguf-py/gguf/constants.py`; defaults and constants from its `src/models/*.cpp`.
Properties that the tensors show (vocabulary size, tied embeddings, biases) are read from the tensors. `gguf_file` reads
the container, `gguf_tokenizer` the vocabulary.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.artifacts import gemma4
from lockstep.artifacts.architectures import ARCHITECTURES, Architecture
from lockstep.artifacts.embedding import embedding_of, from_gguf_metadata, task_of
from lockstep.artifacts.encoders import (
    BERT_LIKE,
    GGUF_GLOBAL_NAMES,
    GGUF_LAYER_NAMES,
    read_gguf_encoder,
    with_gguf_head,
    with_token_types,
)
from lockstep.artifacts.fingerprint import file_fingerprint
from lockstep.artifacts.generation_config import from_gguf
from lockstep.artifacts.gguf_file import GgufFile, read_gguf
from lockstep.artifacts.gguf_tokenizer import read_vocabulary
from lockstep.artifacts.huggingface_config import yarn_attention
from lockstep.artifacts.hybrids import (
    GGUF_HYBRID_NAMES,
    GGUF_LFM2_NORM,
    GGUF_WHOLE_NAMES,
    num_gguf_layers,
    read_gguf_mixers,
    without_extra_layers,
)
from lockstep.artifacts.layout import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    MappedWeights,
    check_config,
    check_num_layers,
    check_tensors,
    split_fused,
)
from lockstep.artifacts.metadata import Metadata
from lockstep.artifacts.model import (
    ADAPTER_AS_MODEL,
    Artifact,
    Encoding,
    ModelConfig,
    QueryScaling,
    RopeScaling,
    Tensor,
)
from lockstep.artifacts.task import Task
from lockstep.artifacts.tensors import bytes_by_encoding
from lockstep.errors import CorruptArtifactError, UnsupportedArtifactError

_GLOBAL_NAMES = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": f"{FINAL_NORM}.weight",
    "output.weight": LM_HEAD,
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE_NAMES = {"attn_sinks.weight": "self_attn.sinks"}
"""Names of tensors whose canonical names do not end with the same word."""
_POST_NORM_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Names in models that normalize the outputs of attention and feed-forward, where Hugging Face's names are shifted."""
_FUSED_NAMES = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]*)\.([a-z0-9_.]+)", re.ASCII)
ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)
"""Tensors that are part of the configuration and not of the weights."""
_GEMMA3_27B_LAYERS = 62
_SMOLLM3_PERIOD = 4
_OLMO3_PERIOD = 4
_KNOWN_SCALINGS = ("none", "linear", "yarn", "longrope")


def open_gguf(path: Path, source: str, cache_dir: Path) -> Artifact:
    """Open and check a file. Reads the metadata, and the whole content once for the fingerprint.

    Raises:
        ArtifactNotFoundError, CorruptArtifactError, UnsupportedArtifactError: see `read_gguf` and `read_config`.
    """
    file = read_gguf(path)
    tensors = canonical_tensors(file.tensors, file.metadata.text("general.architecture"))
    config = read_config(file, tensors)
    check_config(config, path)
    tensors = without_extra_layers(file.metadata, config, tensors)
    tensors = split_fused(config, tensors, path)
    check_tensors(config, tensors, path)
    embedding = from_gguf_metadata(file.metadata, config.architecture)
    return Artifact(
        source=source,
        name=path.stem,
        path=path,
        format="gguf",
        fingerprint=file_fingerprint(path, cache_dir),
        num_bytes=path.stat().st_size,
        config=config,
        weights=MappedWeights(path, tensors, _interleaved(config, tensors)),
        load_tokenizer=functools.partial(read_vocabulary, file.metadata, config.vocab_size),
        bytes_by_encoding=bytes_by_encoding(tensors.values()),
        sampling_defaults=from_gguf(file.metadata.values, path),
        task=task_of(config, embedding),
        embedding=embedding_of(config, embedding),
    )


def read_task(path: Path) -> Task:
    """Return the task of a file by its header: metadata, and names and shapes of tensors. No weights are read.

    Raises:
        ArtifactNotFoundError, CorruptArtifactError, UnsupportedArtifactError: see `read_gguf` and `read_config`.
    """
    file = read_gguf(path)
    config = read_config(file, canonical_tensors(file.tensors, file.metadata.text("general.architecture")))
    return task_of(config, from_gguf_metadata(file.metadata, config.architecture))


def read_config(file: GgufFile, tensors: Mapping[str, Tensor]) -> ModelConfig:
    """Convert the metadata to a model configuration.

    Args:
        tensors: tensors by canonical name.

    Raises:
        UnsupportedArtifactError: the architecture or a variant is not supported; the error names it.
        CorruptArtifactError: a value is missing or has the wrong type.
    """
    metadata = file.metadata
    architecture = _architecture(metadata)
    prefix = architecture.name
    _refuse_variants(metadata, prefix)
    embedding = tensors.get(EMBEDDING)
    if embedding is None:
        raise CorruptArtifactError("has no tensor 'token_embd.weight'", path=file.path)
    if prefix in BERT_LIKE:
        return read_gguf_encoder(metadata, architecture, tensors, metadata.integer(f"{prefix}.context_length"))
    hidden_size = metadata.integer(f"{prefix}.embedding_length")
    num_layers = num_gguf_layers(metadata, architecture)
    check_num_layers(num_layers, file.path)
    if prefix == "gemma4":
        return gemma4.read_gguf_gemma4(metadata, architecture, tensors, file.tensors.get(ROPE_FACTORS))
    num_heads = metadata.integer(f"{prefix}.attention.head_count")
    head_dim = metadata.integer(f"{prefix}.attention.key_length", hidden_size // max(num_heads, 1))
    rotary_dim = _rotary_dim(metadata, architecture, head_dim)
    scaling, max_model_len = _rope_scaling(file, architecture, head_dim if rotary_dim is None else rotary_dim)
    theta = metadata.real(f"{prefix}.rope.freq_base", 10000.0)
    windows = _windows(metadata, architecture, num_layers)
    fields: dict[str, Any] = {
        "attention_bias": any(name.endswith(".self_attn.q_proj.bias") for name in tensors),
        **_scales(metadata, prefix, hidden_size, num_layers, num_heads, head_dim),
        **architecture.traits,
        **read_gguf_mixers(metadata, architecture, num_layers),
    }
    if "num_kv_heads" not in fields:
        fields["num_kv_heads"] = metadata.integer(f"{prefix}.attention.head_count_kv", num_heads)
    config = ModelConfig(
        architecture=prefix,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=metadata.integer(f"{prefix}.feed_forward_length"),
        num_heads=num_heads,
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        max_model_len=max_model_len,
        rms_norm_eps=metadata.real(f"{prefix}.attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=scaling,
        query_scaling=_query_scaling(metadata, prefix),
        rotary_dim=rotary_dim,
        local_rope_theta=_local_theta(metadata, architecture, theta) if windows and prefix != "granite_swa" else None,
        tied_embeddings=LM_HEAD not in tensors,
        windows=windows,
        unrotated_layers=_unrotated_layers(metadata, prefix, num_layers),
        **fields,
    )
    return with_gguf_head(config, metadata, tensors) if config.bidirectional else config


def canonical_tensors(tensors: Mapping[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """Rename tensors to canonical names. An unknown name is kept, so that the layout check rejects it."""
    row = ARCHITECTURES.get(architecture)
    names = dict(_LAYER_NAMES)
    if row is not None and row.traits.get("post_norm", False):
        names |= _POST_NORM_NAMES
    global_names, whole_names = dict(_GLOBAL_NAMES), dict(_WHOLE_NAMES)
    if architecture in GGUF_LAYER_NAMES:
        names |= GGUF_LAYER_NAMES[architecture]
        global_names |= GGUF_GLOBAL_NAMES
    elif architecture in GGUF_HYBRID_NAMES:
        names |= GGUF_HYBRID_NAMES[architecture]
        whole_names |= GGUF_WHOLE_NAMES if architecture == "qwen35" else {}
        global_names[GGUF_LFM2_NORM] = f"{FINAL_NORM}.weight"
    elif architecture == "gemma4":
        names |= gemma4.GGUF_NAMES
        global_names |= gemma4.GGUF_GLOBAL_NAMES
        whole_names |= gemma4.GGUF_WHOLE_NAMES
    elif row is not None and row.fused:
        names |= _FUSED_NAMES
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in ROPE_TENSORS:
            continue
        canonical = global_names.get(name, name)
        layer = _LAYER.fullmatch(name)
        if layer is not None:
            module, dot, kind = layer[2].rpartition(".")
            if layer[2] in whole_names:
                canonical = f"model.layers.{layer[1]}.{whole_names[layer[2]]}"
            elif dot and kind in ("weight", "bias") and module in names:
                canonical = f"model.layers.{layer[1]}.{names[module]}.{kind}"
        renamed[canonical] = replace(tensor, name=canonical)
    return with_token_types(renamed)


def _interleaved(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Numbers of heads of permuted q and k tensors: those of architectures with rope on adjacent pairs in llama.cpp."""
    if not ARCHITECTURES[config.architecture].interleaved:
        return {}
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    return {name: heads[name.split(".")[-2]] for name in tensors if name.split(".")[-2] in heads}


def _architecture(metadata: Metadata) -> Architecture:
    if metadata.text("general.type", "model") == "adapter":
        raise metadata.unsupported(ADAPTER_AS_MODEL)
    name = metadata.text("general.architecture")
    known = {row.name: row for row in ARCHITECTURES.values() if row.in_gguf}
    if name not in known:
        raise metadata.unsupported(f"architecture {name!r}; supported: {', '.join(known)}")
    return known[name]


def _refuse_variants(metadata: Metadata, prefix: str) -> None:
    if metadata.integer("split.count", 1) > 1:
        raise metadata.unsupported("one part of a split GGUF; merge the parts into one file (llama-gguf-split --merge)")
    if metadata.integer(f"{prefix}.expert_count", 0) > 0:
        raise metadata.unsupported("a mixture of experts; dense models are supported")
    is_listed = isinstance(metadata.values.get(f"{prefix}.attention.head_count_kv"), np.ndarray)
    if is_listed and ARCHITECTURES[prefix].recurrent != "convolution" and prefix != "gemma4":
        raise metadata.unsupported("head counts that differ by layer; equal ones are supported")
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    for key in caps[:1] if prefix == "gemma4" else caps:
        if metadata.real(f"{prefix}.{key}", 0.0) != 0.0:
            raise metadata.unsupported(f"{key}; scores and logits without a cap are supported")
    if prefix == "granite" and not metadata.flag(f"{prefix}.rope.scaling.finetuned", True):
        raise metadata.unsupported("attention without rope in every layer")


def _rotary_dim(metadata: Metadata, architecture: Architecture, head_dim: int) -> int | None:
    prefix = architecture.name
    rotary_dim = metadata.integer(f"{prefix}.rope.dimension_count", head_dim)
    for key, other in (
        ("attention.value_length", metadata.integer(f"{prefix}.attention.value_length", head_dim)),
        ("rope.dimension_count", head_dim if architecture.partial_rope else rotary_dim),
    ):
        if other != head_dim:
            raise metadata.unsupported(f"{key} is {other} and the head size {head_dim}; equal ones are supported")
    return None if rotary_dim == head_dim else rotary_dim


def _scales(
    metadata: Metadata, prefix: str, hidden_size: int, num_layers: int, num_heads: int, head_dim: int
) -> dict[str, float | None]:
    """Scaling factors under the names of `ModelConfig`. Gemma's are constants in llama.cpp's code, not in its files."""
    if prefix in ("gemma3", "gemma-embedding"):
        is_largest = prefix == "gemma3" and num_layers == _GEMMA3_27B_LAYERS
        scaled_by = hidden_size // max(num_heads, 1) if is_largest else head_dim
        return {"embedding_scale": max(hidden_size, 0) ** 0.5, "attention_scale": max(scaled_by, 1) ** -0.5}
    if prefix in ("granite", "granite_swa"):
        attention = metadata.real(f"{prefix}.attention.scale", 0.0)
        return {
            "embedding_scale": metadata.real(f"{prefix}.embedding_scale", 0.0) or 1.0,
            "attention_scale": attention or None,
            "residual_scale": metadata.real(f"{prefix}.residual_scale", 0.0) or 1.0,
            "logits_divisor": metadata.real(f"{prefix}.logit_scale"),
        }
    return {}


def _windows(metadata: Metadata, architecture: Architecture, num_layers: int) -> tuple[int, ...]:
    """Window sizes as in llama.cpp, which ignores those of phi3."""
    if architecture.name == "granite_swa":
        size = metadata.integer("granite_swa.attention.sliding_window")
        flags = _flags(metadata, "granite_swa.attention.sliding_window_pattern", num_layers)
        return tuple(size if flag else 0 for flag in flags)
    periods = {"gemma3": architecture.period, "gemma-embedding": architecture.period, "olmo2": _OLMO3_PERIOD}
    size = metadata.integer(f"{architecture.name}.attention.sliding_window", 0)
    if architecture.name not in periods or size == 0:
        return ()
    period = metadata.integer(f"{architecture.name}.attention.sliding_window_pattern", periods[architecture.name])
    return tuple(size if period > 0 and (layer + 1) % period else 0 for layer in range(num_layers))


def _unrotated_layers(metadata: Metadata, prefix: str, num_layers: int) -> tuple[int, ...]:
    if prefix == "smollm3":
        return tuple(range(_SMOLLM3_PERIOD - 1, num_layers, _SMOLLM3_PERIOD))
    pattern = f"{prefix}.attention.rope_pattern"
    if prefix != "granite_swa" or pattern not in metadata.values:
        return ()
    return tuple(layer for layer, is_rotated in enumerate(_flags(metadata, pattern, num_layers)) if not is_rotated)


def _flags(metadata: Metadata, key: str, num_layers: int) -> list[bool]:
    flags = metadata.numbers(key)
    if flags.shape != (num_layers,):
        raise metadata.corrupt(f"{key!r} has {len(flags)} entries; {num_layers} are expected")
    return [bool(flag) for flag in flags]


def _local_theta(metadata: Metadata, architecture: Architecture, theta: float) -> float:
    return metadata.real(f"{architecture.name}.rope.freq_base_swa", architecture.local_rope_theta or theta)


def _rope_scaling(file: GgufFile, architecture: Architecture, rotary_dim: int) -> tuple[RopeScaling | None, int]:
    """Return the rope scaling, and the context length for which it is valid.

    llama.cpp divides by `rope_freqs.weight` if present, and by the linear factor. No known file has both.
    """
    metadata, prefix = file.metadata, architecture.name
    context = metadata.integer(f"{prefix}.context_length")
    kind = metadata.text(f"{prefix}.rope.scaling.type", "none")
    old_factor = metadata.real(f"{prefix}.rope.scale_linear", 1.0)
    if kind == "none" and old_factor not in (0.0, 1.0):
        kind = "linear"
    if kind not in _KNOWN_SCALINGS:
        known = ", ".join(_KNOWN_SCALINGS)
        raise UnsupportedArtifactError(
            f"rope scaling {kind!r}; supported: {known}, and llama3 (rope_freqs.weight)", path=file.path
        )
    if SHORT_FACTORS in file.tensors:
        trained = metadata.integer(f"{prefix}.rope.scaling.original_context_length", context)
        factor = metadata.real(f"{prefix}.rope.scaling.attn_factor", 1.0)
        divisors = _divisors(file, SHORT_FACTORS, rotary_dim)
        return RopeScaling("factors", 1.0, factors=divisors, attention_factor=factor), min(context, trained)
    if kind == "longrope":
        raise CorruptArtifactError(f"longrope without {SHORT_FACTORS}", path=file.path)
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise UnsupportedArtifactError(f"{kind} rope scaling beside rope_freqs.weight", path=file.path)
        return RopeScaling("factors", 1.0, factors=_divisors(file, ROPE_FACTORS, rotary_dim)), context
    if kind == "none":
        return None, context
    factor = metadata.real(f"{prefix}.rope.scaling.factor", old_factor)
    if kind == "linear":
        return RopeScaling("linear", factor), context
    return _yarn(metadata, f"{prefix}.rope.scaling.", factor, context), context


def _query_scaling(metadata: Metadata, prefix: str) -> QueryScaling | None:
    beta = metadata.real(f"{prefix}.attention.temperature_scale", 0.0)
    if not beta or prefix != "mistral3":
        return None
    context = metadata.integer(f"{prefix}.context_length")
    return QueryScaling(beta, metadata.integer(f"{prefix}.rope.scaling.original_context_length", context))


def _yarn(metadata: Metadata, prefix: str, factor: float, context: int) -> RopeScaling:
    parameters = {
        "original_max_position_embeddings": float(metadata.integer(f"{prefix}original_context_length", context)),
        "beta_fast": metadata.real(f"{prefix}yarn_beta_fast", 32.0),
        "beta_slow": metadata.real(f"{prefix}yarn_beta_slow", 1.0),
        "truncate": 1.0,
    }
    attention = metadata.real(f"{prefix}attn_factor", 1.0) * yarn_attention(factor)
    attention /= yarn_attention(factor, metadata.real(f"{prefix}yarn_log_multiplier", 0.0))
    return RopeScaling("yarn", factor, parameters, attention_factor=attention)


def _divisors(file: GgufFile, name: str, rotary_dim: int) -> tuple[float, ...]:
    tensor = file.tensors[name]
    if tensor.encoding is not Encoding.F32 or tensor.shape != (rotary_dim // 2,):
        raise CorruptArtifactError(
            f"tensor {name!r} is {tensor.encoding.value} {list(tensor.shape)}; F32 {[rotary_dim // 2]} is expected",
            path=file.path,
        )
    return tuple(float(value) for value in tensor.data)
