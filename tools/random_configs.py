"""Metadata of a `Shape` in each format: config.json as transformers writes it, GGUF metadata as converters write
them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tools.random_gemma4 import add_gemma4_metadata, gemma4_config
from tools.random_hybrids import HYBRIDS, add_hybrid_metadata, hybrid_config, kv_heads_by_layer
from tools.random_shapes import Shape

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granite_swa": "GraniteSWAForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "mistral3": "Ministral3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
}
_MODEL_TYPES = {"gemma3": "gemma3_text", "mistral3": "ministral3", "qwen35": "qwen3_5_text", "gemma4": "gemma4_text"}
_WRITTEN_AS = {"mistral": "llama", "olmo3": "olmo2"}
"""Architectures whose GGUF files have another architecture's name."""
INTERLEAVED = ("llama", "mistral", "mistral3", "granite", "granite_swa", "smollm3")
"""Architectures whose q and k rows converters permute for a rope on neighbouring pairs."""


def huggingface_config(shape: Shape, encoding: str = "F32") -> dict[str, Any]:
    """Content of config.json."""
    sizes = asdict(shape)
    config = {
        "architectures": [_CLASSES[shape.architecture]],
        "model_type": _MODEL_TYPES.get(shape.architecture, shape.architecture),
        "hidden_act": "silu",
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": shape.max_model_len,
        "tie_word_embeddings": shape.tied_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "dtype": {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[encoding],
    } | {key: sizes[key] for key in ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "rms_norm_eps")}
    return config | _particulars(shape)


def _particulars(shape: Shape) -> dict[str, Any]:
    kinds = ["sliding_attention" if window else "full_attention" for window in shape.windows]
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    match shape.architecture:
        case "mistral":
            return {"sliding_window": max(shape.windows, default=0) or None}
        case "phi3":
            share = (shape.rotary_dim or shape.head_dim) / shape.head_dim
            return {
                "sliding_window": max(shape.windows, default=0) or None,
                "original_max_position_embeddings": shape.max_model_len,
                "rope_parameters": {**rope, "partial_rotary_factor": share},
                "pad_token_id": 0,
            }
        case "gemma3":
            assert shape.attention_scale is not None
            return {
                "hidden_activation": "gelu_pytorch_tanh",
                "hidden_act": None,
                "layer_types": kinds,
                "sliding_window": max(shape.windows),
                "query_pre_attn_scalar": round(shape.attention_scale**-2),
                "rope_parameters": {
                    "full_attention": rope,
                    "sliding_attention": rope | {"rope_theta": shape.local_rope_theta},
                },
            }
        case "olmo3":
            layers = {"full_attention": rope, "sliding_attention": rope | {"rope_theta": shape.local_rope_theta}}
            return {"layer_types": kinds, "sliding_window": max(shape.windows), "rope_parameters": layers}
        case "granite" | "granite_swa" | "granitemoehybrid":
            multipliers = {
                "embedding_multiplier": shape.embedding_scale,
                "attention_multiplier": shape.attention_scale,
                "residual_multiplier": shape.residual_scale,
                "logits_scaling": shape.logits_divisor,
            }
            if shape.architecture == "granite":
                return multipliers
            if shape.architecture == "granite_swa":
                bases = [0.0 if layer in shape.unrotated_layers else shape.rope_theta for layer in range(len(kinds))]
                return multipliers | {
                    "layer_types": kinds,
                    "sliding_window": max(shape.windows),
                    "layer_rope_theta": bases,
                }
            return multipliers | {
                "shared_intermediate_size": shape.intermediate_size,
                "num_local_experts": 0,
                "layer_types": ["full_attention"] * shape.num_layers,
                "position_embedding_type": None if shape.unrotated_layers else "rope",
            }
        case "smollm3":
            rotated = [int(layer not in shape.unrotated_layers) for layer in range(shape.num_layers)]
            return {"no_rope_layers": rotated, "pad_token_id": 0}
        case "qwen35" | "lfm2" | "lfm3":
            return hybrid_config(shape)
        case "gemma4":
            return gemma4_config(shape)
        case _:
            return {}


def gguf_architecture(shape: Shape) -> str:
    return _WRITTEN_AS.get(shape.architecture, shape.architecture)


def add_gguf_metadata(writer: Any, shape: Shape) -> None:
    """Write the metadata of a shape through a `gguf.GGUFWriter`."""
    if shape.architecture == "gemma4":
        return add_gemma4_metadata(writer, shape)
    writer.add_name("random numbers")  # llama.cpp looks special tokens up by some of these names
    writer.add_context_length(shape.max_model_len)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(kv_heads_by_layer(shape))
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_rope_dimension_count(shape.rotary_dim or shape.head_dim)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_vocab_size(shape.vocab_size)
    if shape.windows and shape.architecture != "mistral":
        writer.add_sliding_window(max(shape.windows))
    if shape.architecture in HYBRIDS:
        add_hybrid_metadata(writer, shape)
    if shape.architecture == "granite_swa":
        prefix = "granite_swa.attention"
        writer.add_array(f"{prefix}.sliding_window_pattern", [window > 0 for window in shape.windows])
        rotated = [layer not in shape.unrotated_layers for layer in range(shape.num_layers)]
        writer.add_array(f"{prefix}.rope_pattern", rotated)
    if shape.architecture in ("granite", "granite_swa"):
        assert shape.attention_scale is not None
        writer.add_attention_scale(shape.attention_scale)
        writer.add_embedding_scale(shape.embedding_scale)
        writer.add_residual_scale(shape.residual_scale)
        writer.add_logit_scale(shape.logits_divisor)
    return None
