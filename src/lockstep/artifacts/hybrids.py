"""Hybrid decoders: reads which layers are recurrent, their shapes, and their tensors under canonical names.

Sources: the configuration and modelling classes of Qwen3.5, LFM2 and LFM3 in transformers; for GGUF, llama.cpp's
`src/models/{qwen35,lfm2}.cpp` and its converters in `conversion/`.

Converters to GGUF store value heads of gated delta nets in tiled order and their decay rates as such. Tensors keep that
form here (`DeltaNet.is_tiled`, `DeltaNet.has_rates`): the columns of quantised matrices cannot be reordered exactly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.artifacts.architectures import Architecture
from lockstep.artifacts.metadata import Metadata
from lockstep.artifacts.model import DeltaNet, Mixer, ModelConfig, Tensor
from lockstep.errors import CorruptArtifactError

_MAX_HEADS = 1024
_MAX_STATE_DIM = 1024
"""Maximum size of a side of a value head's matrix. A larger one than 128 is not known."""
_MAX_TAPS = 64
_FULL, _SLIDING = "full_attention", "sliding_attention"
_RECURRENT_KINDS = {"delta_net": "linear_attention", "convolution": "conv"}
"""Names of recurrent layers in config.json, by kind."""
KERNELS = (".linear_attn.conv1d.weight", ".conv.conv.weight")
"""Ends of the canonical names of convolutions' kernels ``[channels, taps]``, which are read as vectors are."""
_UNUSED = re.compile(r"(model\.)?(visual|mtp)\..*", re.ASCII)
"""Tensors of image input and of layers that predict several tokens."""
_LFM_MODULES = {
    "operator_norm": "input_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_LFM2_MODULES = {
    **_LFM_MODULES,
    "ffn_norm": "post_attention_layernorm",
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
}
_LFM3_MODULES = {
    **_LFM_MODULES,
    "post_operator_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}
_LFM3_DEFAULTS: Mapping[str, object] = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 128000,
    "conv_L_cache": 7,
    "rope_parameters": {
        _FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    },
}
_NUMBERED = re.compile(r"(?:blk|model\.layers)\.([0-9]+)\.", re.ASCII)
_MAX_EXTRA_LAYERS = 16
_LFM_LAYER = re.compile(r"model\.layers\.([0-9]+)\.([a-z0-9_.]+)\.(weight|bias)", re.ASCII)
GGUF_HYBRID_NAMES: Mapping[str, Mapping[str, str]] = {
    "qwen35": {
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
    "lfm2": {
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
    },
}
"""Names of modules in GGUF files that those of plain decoders do not have, by architecture."""
GGUF_WHOLE_NAMES: Mapping[str, str] = {"ssm_dt.bias": "linear_attn.dt_bias", "ssm_a": "linear_attn.A"}
"""Names of tensors in GGUF files whose canonical names do not end with the same word."""
GGUF_LFM2_NORM = "token_embd_norm.weight"
"""Name of LFM2's final norm."""


def renamed_lfm2(declared: Metadata) -> Metadata:
    """LFM2's config.json under the keys of other decoders, with the size that its feed-forward has.

    Older files state two thirds of it: the size before a gate was added (`Lfm2MLP` in transformers).
    """
    inner = declared.integer("block_ff_dim", declared.integer("intermediate_size", 12288))
    if declared.flag("block_auto_adjust_ff_dim", True):
        factor = declared.real("block_ffn_dim_multiplier", 1.0)
        multiple = declared.integer("block_multiple_of", 256)
        if not (0 < factor <= 1024 and 1 <= multiple <= 1 << 24):
            raise declared.corrupt(
                f"block_ffn_dim_multiplier is {factor} and block_multiple_of {multiple}; positive sizes are expected"
            )
        inner = int(factor * int(2 * inner / 3))
        inner = -(-inner // multiple) * multiple
    renamed: dict[str, object] = {
        "intermediate_size": inner,
        "rms_norm_eps": declared.real("norm_eps", 1e-5),
        "tie_word_embeddings": declared.flag("tie_embedding", declared.flag("tie_word_embeddings", True)),
    }
    return Metadata(declared.path, {**declared.values, **renamed})


def with_lfm3_defaults(declared: Metadata) -> Metadata:
    """LFM3's config.json with the defaults of its class.

    Raises:
        UnsupportedArtifactError: a variant is not supported; the error names the key.
    """
    for key in ("rope_scaling", "partial_rotary_factor"):
        if key in declared.values:
            raise declared.unsupported(f"{key} of all layers; rope_parameters by kind of layer are supported")
    for key, part in (("use_sandwich_norm", "norms of outputs"), ("use_attention_gate", "a gate for each head")):
        if not declared.flag(key, True):
            raise declared.unsupported(f"{key}: false; layers with {part} are supported")
    epsilon = declared.real("norm_eps", declared.real("rms_norm_eps", 1e-5))
    return Metadata(declared.path, {**_LFM3_DEFAULTS, **declared.values, "rms_norm_eps": epsilon})


def read_huggingface_mixers(declared: Metadata, architecture: Architecture, num_layers: int) -> dict[str, Any]:
    """Fields of `ModelConfig` for recurrent layers. Raises errors that name the key."""
    if not architecture.recurrent:
        return {}
    kinds = layer_kinds(declared, architecture, num_layers)
    is_attention = [kind != _RECURRENT_KINDS[architecture.recurrent] for kind in kinds]
    fields: dict[str, Any] = {"mixers": _as_mixers(is_attention, architecture.recurrent)}
    if architecture.name == "lfm3":
        _check_rope_bases(declared, kinds)
    if architecture.recurrent == "convolution":
        return fields | {
            "conv_taps": declared.integer("conv_L_cache", 3), "conv_bias": declared.flag("conv_bias", False),
        }  # fmt: skip
    if not declared.flag("attn_output_gate", True):
        raise declared.unsupported("attn_output_gate: false; attention with an output gate is supported")
    net = DeltaNet(
        num_key_heads=declared.integer("linear_num_key_heads", 16),
        num_value_heads=declared.integer("linear_num_value_heads", 32),
        key_dim=declared.integer("linear_key_head_dim", 128),
        value_dim=declared.integer("linear_value_head_dim", 128),
        taps=declared.integer("linear_conv_kernel_dim", 4),
    )
    return fields | {"delta_net": net}


def _check_rope_bases(declared: Metadata, kinds: Sequence[str]) -> None:
    """Each kind of attention states its rope base, because defaults of transformers depend on what is left out."""
    rope = declared.section("rope_parameters")
    for kind in (_FULL, _SLIDING):
        if kind in kinds and "rope_theta" not in rope.section(kind).values:
            raise declared.corrupt(f"rope_parameters has no rope_theta for layers of type {kind!r}")


def layer_kinds(declared: Metadata, architecture: Architecture, num_layers: int) -> list[str]:
    """Kind of each layer of a hybrid, by its name in ``layer_types``."""
    recurrent = architecture.recurrent
    name = _RECURRENT_KINDS[recurrent]
    known = (_FULL, _SLIDING, name) if architecture.windows == "mixed" else (_FULL, name)
    layers = range(num_layers)
    if "layer_types" in declared.values:
        kinds = declared.strings("layer_types")
        if len(kinds) != num_layers:
            raise declared.corrupt(f"layer_types has {len(kinds)} entries; {num_layers} are expected")
        for kind in kinds:
            if kind not in known:
                raise declared.unsupported(f"a layer of type {kind!r}; supported: {', '.join(known)}")
        return kinds
    if recurrent == "delta_net":
        period = declared.integer("full_attention_interval", architecture.period)
        if period < 1:
            raise declared.corrupt(f"full_attention_interval is {period}; at least 1 is expected")
        return [name if (layer + 1) % period else _FULL for layer in layers]
    if architecture.windows == "mixed":
        return [_FULL if layer % 4 == 2 else _SLIDING if layer and layer % 4 == 0 else name for layer in layers]
    attended = declared.reals("full_attn_idxs") if "full_attn_idxs" in declared.values else tuple(layers)
    return [_FULL if layer in attended else name for layer in layers]


def _as_mixers(is_attention: Sequence[bool], recurrent: str) -> tuple[Mixer, ...]:
    other: Mixer = "delta_net" if recurrent == "delta_net" else "convolution"
    return tuple("attention" if each else other for each in is_attention)


def huggingface_tensors(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a Hugging Face file, and leave out those that have no effect on text.

    An unknown name is kept, so that the layout check rejects it. Kernels of convolutions lose their middle axis of
    length 1.

    Raises:
        CorruptArtifactError: two tensors have the same canonical name.
    """
    modules = {"lfm2": _LFM2_MODULES, "lfm3": _LFM3_MODULES}.get(config.architecture)
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if _UNUSED.fullmatch(name):
            continue
        canonical = name if modules is None else _lfm_name(name, modules)
        if canonical in renamed:
            raise CorruptArtifactError(f"tensor {name!r} is there in two spellings, also as {canonical!r}")
        is_kernel = canonical.endswith(KERNELS)
        if is_kernel and len(tensor.shape) == 3 and tensor.shape[1] == 1:
            shape = (tensor.shape[0], tensor.shape[2])
            tensor = replace(tensor, shape=shape, data=tensor.data.reshape(shape))
        renamed[canonical] = replace(tensor, name=canonical)
    return renamed


def _lfm_name(name: str, modules: Mapping[str, str]) -> str:
    if name == "model.embedding_norm.weight":
        return "model.norm.weight"
    layer = _LFM_LAYER.fullmatch(name)
    if layer is None:
        return name
    return f"model.layers.{layer[1]}.{modules.get(layer[2], layer[2])}.{layer[3]}"


def num_gguf_layers(metadata: Metadata, architecture: Architecture) -> int:
    """Number of layers without those that predict further tokens, which follow the others."""
    num_layers = metadata.integer(f"{architecture.name}.block_count")
    if architecture.recurrent != "delta_net":
        return num_layers
    num_extra = metadata.integer(f"{architecture.name}.nextn_predict_layers", 0)
    if not 0 <= num_extra <= _MAX_EXTRA_LAYERS:
        raise metadata.corrupt(f"nextn_predict_layers is {num_extra}; 0 to {_MAX_EXTRA_LAYERS} is expected")
    return num_layers - num_extra


def without_extra_layers(metadata: Metadata, config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a GGUF file without those of the layers that predict further tokens."""
    num_all = metadata.integer(f"{metadata.text('general.architecture')}.block_count")
    extra = {str(layer) for layer in range(config.num_layers, min(num_all, config.num_layers + _MAX_EXTRA_LAYERS))}
    found = {name: _NUMBERED.match(name) for name in tensors}
    return {name: tensors[name] for name, layer in found.items() if layer is None or layer[1] not in extra}


def read_gguf_mixers(metadata: Metadata, architecture: Architecture, num_layers: int) -> dict[str, Any]:
    """Fields of `ModelConfig` for recurrent layers, as `read_huggingface_mixers`."""
    prefix = architecture.name
    if architecture.recurrent == "convolution":
        heads = _kv_heads_by_layer(metadata, prefix, num_layers)
        if metadata.integer(f"{prefix}.attention.sliding_window", 0):
            raise metadata.unsupported("attention.sliding_window; attention to all tokens is supported")
        if not metadata.flag(f"{prefix}.attention.causal", True):
            raise metadata.unsupported("attention.causal: false; attention to earlier tokens is supported")
        return {
            "mixers": _as_mixers([count > 0 for count in heads], architecture.recurrent),
            "num_kv_heads": max(heads),
            "conv_taps": metadata.integer(f"{prefix}.shortconv.l_cache"),
        }
    if architecture.recurrent != "delta_net":
        return {}
    num_value_heads = metadata.integer(f"{prefix}.ssm.time_step_rank")
    inner, key_dim = metadata.integer(f"{prefix}.ssm.inner_size"), metadata.integer(f"{prefix}.ssm.state_size")
    if num_value_heads < 1 or inner % num_value_heads:
        raise metadata.corrupt(f"{prefix}.ssm.inner_size is {inner}; a multiple of {num_value_heads} heads is expected")
    net = DeltaNet(
        num_key_heads=metadata.integer(f"{prefix}.ssm.group_count"),
        num_value_heads=num_value_heads,
        key_dim=key_dim,
        value_dim=inner // num_value_heads,
        taps=metadata.integer(f"{prefix}.ssm.conv_kernel"),
        is_tiled=True,
        has_rates=True,
    )
    return {"mixers": _gguf_mixers(metadata, architecture, num_layers), "delta_net": net}


def _gguf_mixers(metadata: Metadata, architecture: Architecture, num_layers: int) -> tuple[Mixer, ...]:
    prefix, key = architecture.name, f"{architecture.name}.attention.recurrent_layers"
    if key in metadata.values:
        flags = metadata.numbers(key)
        # Layers that predict further tokens are listed behind the others.
        if not num_layers <= len(flags) <= num_layers + _MAX_EXTRA_LAYERS:
            raise metadata.corrupt(f"{key} has {len(flags)} entries; {num_layers} are expected")
        return _as_mixers([not flag for flag in flags[:num_layers].tolist()], architecture.recurrent)
    period = metadata.integer(f"{prefix}.full_attention_interval", architecture.period)
    if period < 1:
        raise metadata.corrupt(f"{prefix}.full_attention_interval is {period}; at least 1 is expected")
    return _as_mixers([(layer + 1) % period == 0 for layer in range(num_layers)], architecture.recurrent)


def _kv_heads_by_layer(metadata: Metadata, prefix: str, num_layers: int) -> list[int]:
    """Key and value heads of each layer; 0: it is a convolution. Other layers have the same number."""
    key = f"{prefix}.attention.head_count_kv"
    if not isinstance(metadata.values.get(key), np.ndarray):
        return [metadata.integer(key)] * num_layers
    counts = [int(count) for count in metadata.numbers(key).tolist()]
    if len(counts) != num_layers:
        raise metadata.corrupt(f"{key} has {len(counts)} entries; {num_layers} are expected")
    if any(count not in (0, max(counts)) for count in counts):
        raise metadata.unsupported("head counts that differ by layer; equal ones are supported")
    return counts


def check_mixers(config: ModelConfig, path: Path) -> None:
    """Reject shapes of recurrent layers that no model has, before memory is allocated for them."""
    if not config.mixers:
        return
    if len(config.mixers) != config.num_layers or "attention" not in config.mixers:
        raise CorruptArtifactError(
            f"{len(config.mixers)} kinds of layers, {config.mixers.count('attention')} of them attention; "
            f"{config.num_layers} kinds and at least one layer of attention are expected",
            path=path,
        )
    limits: dict[str, tuple[int, int]] = {}
    net = config.delta_net
    if net is not None:
        limits = {
            "number of key heads (linear_num_key_heads)": (net.num_key_heads, _MAX_HEADS),
            "number of value heads (linear_num_value_heads)": (net.num_value_heads, _MAX_HEADS),
            "key size (linear_key_head_dim)": (net.key_dim, _MAX_STATE_DIM),
            "value size (linear_value_head_dim)": (net.value_dim, _MAX_STATE_DIM),
        }
    for what, (size, largest) in limits.items():
        if not 1 <= size <= largest:
            raise CorruptArtifactError(f"the {what} is {size}; 1 to {largest} is expected", path=path)
    taps = config.conv_taps if net is None else net.taps
    if not 2 <= taps <= _MAX_TAPS:
        raise CorruptArtifactError(
            f"convolutions (linear_conv_kernel_dim, conv_L_cache) over {taps} tokens; 2 to {_MAX_TAPS} are expected",
            path=path,
        )
    if net is not None and net.num_value_heads % net.num_key_heads:
        raise CorruptArtifactError(
            f"{net.num_value_heads} value heads (linear_num_value_heads) cannot share {net.num_key_heads} key heads "
            "(linear_num_key_heads) evenly",
            path=path,
        )


def mixer_tensors(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Names in a layer, and shapes, of the tensors of its recurrent part; empty: it is attention."""
    hidden, net = config.hidden_size, config.delta_net
    if config.mixer_of(layer) == "convolution":
        weights: dict[str, tuple[int, ...]] = {
            "conv.in_proj.weight": (3 * hidden, hidden),
            "conv.conv.weight": (hidden, config.conv_taps),
            "conv.out_proj.weight": (hidden, hidden),
        }
        biases = {name.replace("weight", "bias"): shape[:1] for name, shape in weights.items()}
        return weights | (biases if config.conv_bias else {})
    if config.mixer_of(layer) != "delta_net" or net is None:
        return {}
    values = net.num_value_heads * net.value_dim
    return {
        "linear_attn.in_proj_qkv.weight": (net.num_channels, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_b.weight": (net.num_value_heads, hidden),
        "linear_attn.in_proj_a.weight": (net.num_value_heads, hidden),
        "linear_attn.conv1d.weight": (net.num_channels, net.taps),
        "linear_attn.dt_bias": (net.num_value_heads,),
        f"linear_attn.{'A' if net.has_rates else 'A_log'}": (net.num_value_heads,),
        "linear_attn.norm.weight": (net.value_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
    }
