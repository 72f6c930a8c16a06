"""Hybrid decoders with random weights: their layers' tensors, and their form in the files of each format.

Tensors have the canonical names of `lockstep.artifacts.layout`. The module does not import `lockstep`, so that it can
test it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tools.random_shapes import Shape

Array = npt.NDArray[np.generic]

HYBRIDS = ("qwen35", "lfm2", "lfm3")
ROTATED_SHARE = 0.5
"""Part of each head that LFM3's layers without a window rotate."""
KERNELS = (".linear_attn.conv1d.weight", ".conv.conv.weight")
"""Ends of the names of convolutions' kernels, which are never quantised."""
_LFM_NAMES = {
    "input_layernorm": "operator_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}
_LFM2_NAMES = {
    **_LFM_NAMES,
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
}
_LFM3_NAMES = {
    **_LFM_NAMES,
    "post_attention_layernorm": "post_operator_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffn_norm",
}
_GGUF_NAMES = {
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "conv.in_proj.weight": "shortconv.in_proj.weight",
    "conv.conv.weight": "shortconv.conv.weight",
    "conv.out_proj.weight": "shortconv.out_proj.weight",
}


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes of gated delta nets, under the names of `lockstep.artifacts.model.DeltaNet`."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    is_tiled: bool = False
    has_rates: bool = False

    @property
    def num_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


def recurrent_tensors(shape: Shape, layer: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the recurrent part of a layer; empty: it is attention."""
    kind = shape.mixers[layer] if shape.mixers else "attention"
    hidden = shape.hidden_size
    if kind == "convolution":
        return {
            "conv.in_proj.weight": (3 * hidden, hidden),
            "conv.conv.weight": (hidden, shape.conv_taps),
            "conv.out_proj.weight": (hidden, hidden),
        }
    net = shape.delta_net
    if kind != "delta_net" or net is None:
        return {}
    values = net.num_value_heads * net.value_dim
    return {
        "linear_attn.in_proj_qkv.weight": (net.num_channels, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_b.weight": (net.num_value_heads, hidden),
        "linear_attn.in_proj_a.weight": (net.num_value_heads, hidden),
        "linear_attn.conv1d.weight": (net.num_channels, net.taps),
        "linear_attn.dt_bias": (net.num_value_heads,),
        "linear_attn.A_log": (net.num_value_heads,),
        "linear_attn.norm.weight": (net.value_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def huggingface_name(shape: Shape, name: str) -> str:
    """Name of a tensor in a Hugging Face file."""
    if shape.architecture not in ("lfm2", "lfm3"):
        return name
    names = _LFM2_NAMES if shape.architecture == "lfm2" else _LFM3_NAMES
    if name == "model.norm.weight":
        return "model.embedding_norm.weight"
    if not name.startswith("model.layers."):
        return name
    layer, module = name.removeprefix("model.layers.").split(".", 1)
    module, _, kind = module.rpartition(".")
    return f"model.layers.{layer}.{names.get(module, module)}.{kind}"


def gguf_name(shape: Shape, name: str) -> str | None:
    """Name of a tensor of a recurrent part, or of a norm, in a GGUF file; None: it is that of plain decoders."""
    if name == "model.norm.weight" and shape.architecture == "lfm2":
        return "token_embd_norm.weight"
    if shape.architecture not in HYBRIDS or not name.startswith("model.layers."):
        return None
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    if rest == "post_attention_layernorm.weight" and shape.architecture == "qwen35":
        return f"blk.{layer}.post_attention_norm.weight"
    return f"blk.{layer}.{_GGUF_NAMES[rest]}" if rest in _GGUF_NAMES else None


def as_huggingface(shape: Shape, name: str, tensor: Array) -> Array:
    """A tensor in the form of a Hugging Face file: kernels have an axis more, Qwen3.5's norms are stored minus one."""
    if name.endswith(KERNELS):
        return tensor[:, None, :]
    is_norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return tensor.astype(np.float32) - np.float32(1) if shape.architecture == "qwen35" and is_norm else tensor


def as_gguf(shape: Shape, name: str, tensor: Array) -> Array:
    """A tensor in the form of a GGUF file: value heads in tiled order, and decay rates instead of their logarithms.

    Columns of blocks stay where they are, since they are random in any order.
    """
    net = shape.delta_net
    if net is None or ".linear_attn." not in name:
        return tensor
    module = name.split(".linear_attn.")[1]
    if module == "A_log":
        tensor = -np.exp(tensor.astype(np.float32))
    is_blocks = tensor.dtype == np.uint8
    if module == "out_proj.weight":
        return tensor if is_blocks else np.ascontiguousarray(_tiled(net, tensor.T, net.value_dim).T)
    if module in ("in_proj_qkv.weight", "conv1d.weight"):
        begin = 2 * net.num_key_heads * net.key_dim
        return np.concatenate([tensor[:begin], _tiled(net, tensor[begin:], net.value_dim)])
    if module == "norm.weight":
        return tensor
    return _tiled(net, tensor, net.value_dim if module == "in_proj_z.weight" else 1)


def _tiled(net: DeltaShape, rows: Array, head_rows: int) -> Array:
    """Rows of value heads, ordered by key head and then by number, in the order by number and then by key head."""
    ratio = net.num_value_heads // net.num_key_heads
    heads = rows.reshape(net.num_key_heads, ratio, head_rows, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(rows.shape)


def hybrid_config(shape: Shape) -> dict[str, Any]:
    """Keys of config.json that only hybrid decoders have."""
    net = shape.delta_net
    names = {"attention": "full_attention", "delta_net": "linear_attention", "convolution": "conv"}
    windows = shape.windows or (0,) * shape.num_layers
    kinds = ["sliding_attention" if window else names[kind] for kind, window in zip(shape.mixers, windows, strict=True)]
    config: dict[str, Any] = {"layer_types": kinds}
    if shape.architecture == "lfm3":
        rope = {"rope_type": "proportional", "rope_theta": shape.rope_theta, "partial_rotary_factor": ROTATED_SHARE}
        return config | {
            "conv_L_cache": shape.conv_taps, "conv_bias": False, "norm_eps": shape.rms_norm_eps,
            "sliding_window": max(windows), "use_sandwich_norm": True, "use_attention_gate": True, "pad_token_id": 0,
            "rope_parameters": {
                "full_attention": rope,
                "sliding_attention": {"rope_type": "default", "rope_theta": shape.local_rope_theta},
            },
        }  # fmt: skip
    if net is None:
        return config | {
            "conv_L_cache": shape.conv_taps, "conv_bias": False, "norm_eps": shape.rms_norm_eps,
            "block_auto_adjust_ff_dim": False, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 64,
        }  # fmt: skip
    quarter = (shape.rotary_dim or shape.head_dim) // 8
    rope = {
        "rope_type": "default",
        "rope_theta": shape.rope_theta,
        "partial_rotary_factor": (shape.rotary_dim or shape.head_dim) / shape.head_dim,
        "mrope_interleaved": True,
        "mrope_section": [2 * quarter, quarter, quarter],
    }
    return config | {
        "rope_parameters": rope,
        "attn_output_gate": True,
        "linear_num_key_heads": net.num_key_heads,
        "linear_num_value_heads": net.num_value_heads,
        "linear_key_head_dim": net.key_dim,
        "linear_value_head_dim": net.value_dim,
        "linear_conv_kernel_dim": net.taps,
    }


def add_hybrid_metadata(writer: Any, shape: Shape) -> None:
    """Write what only hybrid decoders have through a `gguf.GGUFWriter`."""
    net = shape.delta_net
    if net is None:
        writer.add_shortconv_l_cache(shape.conv_taps)
        return
    quarter = (shape.rotary_dim or shape.head_dim) // 8
    writer.add_rope_dimension_sections([2 * quarter, quarter, quarter, 0])
    writer.add_ssm_conv_kernel(net.taps)
    writer.add_ssm_state_size(net.key_dim)
    writer.add_ssm_group_count(net.num_key_heads)
    writer.add_ssm_time_step_rank(net.num_value_heads)
    writer.add_ssm_inner_size(net.num_value_heads * net.value_dim)
    writer.add_array("qwen35.attention.recurrent_layers", [kind == "delta_net" for kind in shape.mixers])
    writer.add_uint32("qwen35.full_attention_interval", 4)


def kv_heads_by_layer(shape: Shape) -> int | list[int]:
    """Value of the key for key and value heads: a list if some layers are convolutions."""
    if "convolution" not in shape.mixers:
        return shape.num_kv_heads
    return [shape.num_kv_heads if kind == "attention" else 0 for kind in shape.mixers]
