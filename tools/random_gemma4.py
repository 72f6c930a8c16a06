"""Gemma 4 with random weights: its tensors, and its metadata in each format.

Tensors have the canonical names of `lockstep.artifacts.layout`. The module does not import `lockstep`, so that it can
test it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tools.random_shapes import Shape

Array = npt.NDArray[np.generic]

ROTATED_SHARE = 0.25
"""Part of each head that layers without a window rotate."""
_GGUF_NAMES = {
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    "layer_scalar": "layer_output_scale.weight",
}
_GGUF_GLOBAL_NAMES = {
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}


def gemma4_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors but the embedding, the final norm and the head."""
    hidden, size = shape.hidden_size, shape.per_layer_size
    found: dict[str, tuple[int, ...]] = {}
    if size:
        columns = size * shape.num_layers
        found["model.embed_tokens_per_layer.weight"] = (shape.vocab_size, columns)
        found["model.per_layer_model_projection.weight"] = (columns, hidden)
        found["model.per_layer_projection_norm.weight"] = (size,)
    for layer in range(shape.num_layers):
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer(shape, layer).items()}
    return found


def _layer(shape: Shape, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, size = shape.hidden_size, shape.per_layer_size
    head_dim = head_dim_of(shape, layer)
    queries, keys = shape.num_heads * head_dim, shape.num_kv_heads * head_dim
    inner = shape.intermediate_sizes[layer] if shape.intermediate_sizes else shape.intermediate_size
    names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    found: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in names}
    found |= {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.o_proj.weight": (hidden, queries),
    }
    if not shape.kv_owners or shape.kv_owners[layer] == layer:
        found |= {f"self_attn.{name}_proj.weight": (keys, hidden) for name in "kv"}
        found["self_attn.k_norm.weight"] = (head_dim,)
    found |= {f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    found["mlp.down_proj.weight"] = (hidden, inner)
    if size:
        found |= {
            "per_layer_input_gate.weight": (size, hidden),
            "per_layer_projection.weight": (hidden, size),
            "post_per_layer_input_norm.weight": (hidden,),
        }
    return found | {"layer_scalar": (1,)}


def head_dim_of(shape: Shape, layer: int) -> int:
    has_window = bool(shape.windows) and shape.windows[layer] > 0
    return shape.head_dim if has_window or shape.full_head_dim is None else shape.full_head_dim


def flattened(shape: Shape, name: str, tensor: Array) -> Array:
    """Norms of queries and keys in the form of a file: smaller, since scores are not divided by the size of heads."""
    if shape.architecture != "gemma4" or not name.endswith(("q_norm.weight", "k_norm.weight")):
        return tensor
    return tensor.astype(np.float32) * np.float32(tensor.shape[0] ** -0.25)


def gemma4_gguf_name(name: str) -> str | None:
    """Name of a tensor in a GGUF file; None: it is that of other decoders."""
    if name in _GGUF_GLOBAL_NAMES:
        return _GGUF_GLOBAL_NAMES[name]
    if not name.startswith("model.layers."):
        return None
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_GGUF_NAMES[rest]}" if rest in _GGUF_NAMES else None


def gemma4_config(shape: Shape) -> dict[str, Any]:
    """Keys of config.json that other decoders do not have."""
    num_shared = _num_shared(shape)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": None,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in shape.windows],
        "sliding_window": max(shape.windows),
        "global_head_dim": shape.full_head_dim,
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": bool(shape.intermediate_sizes),
        "hidden_size_per_layer_input": shape.per_layer_size,
        "vocab_size_per_layer_input": shape.vocab_size,
        "final_logit_softcapping": shape.logits_cap or None,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": ROTATED_SHARE,
                "rope_theta": shape.rope_theta,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": shape.local_rope_theta},
        },
    }


def add_gemma4_metadata(writer: Any, shape: Shape) -> None:
    """Write all metadata of a shape, and the divisors of its frequencies, through a `gguf.GGUFWriter`."""
    full = shape.full_head_dim or shape.head_dim
    writer.add_name("random numbers")
    writer.add_context_length(shape.max_model_len)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length([*shape.intermediate_sizes] or shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_rope_freq_base_swa(shape.local_rope_theta)
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(shape.head_dim)
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(shape.head_dim)
    writer.add_value_length_swa(shape.head_dim)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_sliding_window(max(shape.windows))
    writer.add_sliding_window_pattern([window > 0 for window in shape.windows])
    writer.add_shared_kv_layers(_num_shared(shape))
    writer.add_embedding_length_per_layer_input(shape.per_layer_size)
    if shape.logits_cap:
        writer.add_final_logit_softcapping(shape.logits_cap)
    turning = int(full * ROTATED_SHARE / 2)
    divisors = np.array([1.0] * turning + [1e30] * (full // 2 - turning), np.float32)
    writer.add_tensor("rope_freqs.weight", divisors)


def _num_shared(shape: Shape) -> int:
    return sum(owner != layer for layer, owner in enumerate(shape.kv_owners))
