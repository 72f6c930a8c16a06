"""Tensor layout of a model: defines canonical names and shapes, and provides views under these names.

llama.cpp's rope permutation is reversed on access. Fused projections are split into views.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.architectures import ARCHITECTURES
from lockstep.artifacts.gemma4 import check_gemma4, is_redundant, per_layer_tensors, tensors_in_layer
from lockstep.artifacts.hybrids import KERNELS, check_mixers, mixer_tensors
from lockstep.artifacts.model import ModelConfig, Tensor
from lockstep.errors import CorruptArtifactError, UnsupportedArtifactError
from lockstep.spelling import nearest

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
POSITIONS = "model.embed_positions.weight"
TOKEN_TYPE = "model.embed_type.weight"
"""A vector: the embedding of token type 0."""
EMBEDDING_NORM, FINAL_NORM = "model.embed_norm", "model.norm"
HEAD = "head."
"""Beginning of the names of an encoder's dense layers, which have numbers: ``head.0.weight``."""
_MAX_SIZE = 1 << 24
"""Maximum size of a dimension. No supported model has a larger one."""
_MAX_LAYERS = 1024
_MAX_HEAD_LAYERS = 8
_ADAPTER_UNIT = 32
"""Multiple to which rows and columns of an adapter's matrices are filled up in memory; ranks are to 4."""
_ADAPTER_ALIGNMENT = 64
_NO_HEADS: Mapping[str, int] = {}


def check_config(config: ModelConfig, path: Path) -> None:
    """Reject values that no model has, before memory is allocated for them."""
    sizes = {
        "hidden size": config.hidden_size,
        "feed-forward size": config.intermediate_size,
        "number of heads": config.num_heads,
        "number of key-value heads": config.num_kv_heads,
        "head size": config.head_dim,
        "vocabulary size": config.vocab_size,
        "context length": config.max_model_len,
    }
    if config.query_scaling is not None:
        sizes["period of the queries' scaling"] = config.query_scaling.period
    for what, size in sizes.items():
        if not 1 <= size <= _MAX_SIZE:
            raise CorruptArtifactError(f"the {what} is {size}; 1 to {_MAX_SIZE} is expected", path=path)
    check_num_layers(config.num_layers, path)
    if config.num_heads % config.num_kv_heads:
        raise CorruptArtifactError(
            f"{config.num_heads} heads cannot share {config.num_kv_heads} key-value heads evenly", path=path
        )
    if config.head_dim % 2:
        raise CorruptArtifactError(f"a head size of {config.head_dim}; rope requires an even one", path=path)
    rotary_dim = config.head_dim if config.rotary_dim is None else config.rotary_dim
    if rotary_dim % 2 or not 2 <= rotary_dim <= config.head_dim:
        raise CorruptArtifactError(
            f"rope over {rotary_dim} dimensions; an even number up to {config.head_dim} is expected", path=path
        )
    if len(config.windows) not in (0, config.num_layers) or any(not 0 <= size <= _MAX_SIZE for size in config.windows):
        raise CorruptArtifactError(
            f"sliding windows {list(config.windows)[:8]}; one of at least 0 tokens per layer is expected", path=path
        )
    _check_encoder(config, path)
    check_mixers(config, path)
    check_gemma4(config, path)
    for what, value in _positive_numbers(config).items():
        if not (math.isfinite(value) and value > 0):
            raise CorruptArtifactError(f"{what} is {value}; a positive number is expected", path=path)


def _check_encoder(config: ModelConfig, path: Path) -> None:
    sizes = {"number of positions": config.num_positions, "number of labels": config.num_labels}
    sizes |= {f"size of layer {index} of the head": each.size for index, each in enumerate(config.head)}
    for what, size in sizes.items():
        if not 0 <= size <= _MAX_SIZE:
            raise CorruptArtifactError(f"the {what} is {size}; at most {_MAX_SIZE} is expected", path=path)
    if len(config.head) > _MAX_HEAD_LAYERS or any(each.size < 1 for each in config.head):
        raise CorruptArtifactError(
            f"a head of {len(config.head)} dense layers; at most {_MAX_HEAD_LAYERS} of at least 1 feature are expected",
            path=path,
        )
    if config.num_positions and not 0 <= config.position_offset <= config.num_positions - config.max_model_len:
        raise CorruptArtifactError(
            f"{config.num_positions} position embeddings, of which the first {config.position_offset} are not used; "
            f"there must be one for each of {config.max_model_len} tokens",
            path=path,
        )


def check_num_layers(num_layers: int, path: Path) -> None:
    """Check the number of layers, before readers create lists of layers."""
    if not 1 <= num_layers <= _MAX_LAYERS:
        raise CorruptArtifactError(f"{num_layers} layers; 1 to {_MAX_LAYERS} are expected", path=path)


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Canonical names of one layer's norms, without ``.weight``. None: the layer does not have the norm."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


def layer_norms(config: ModelConfig) -> LayerNorms:
    """Names as in Hugging Face. In most models, the norm before the feed-forward is ``post_attention_layernorm``. Norms
    after attention and feed-forward are those of outputs, or of the residual (`ModelConfig.sum_norm`)."""
    if config.sum_norm:
        return LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
    if not config.post_norm:
        return LayerNorms("input_layernorm", None, "post_attention_layernorm", None)
    return LayerNorms(
        "input_layernorm" if config.pre_norm else None,
        "post_attention_layernorm",
        "pre_feedforward_layernorm" if config.pre_norm else None,
        "post_feedforward_layernorm",
    )


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes of all tensors that the forward pass needs."""
    hidden = config.hidden_size
    expected: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    if config.num_positions:
        expected[POSITIONS] = (config.num_positions, hidden)
    if config.num_token_types:
        expected[TOKEN_TYPE] = (config.num_token_types * hidden,)
    if config.embedding_norm:
        expected |= _norm_tensors(config, EMBEDDING_NORM, hidden)
    expected |= per_layer_tensors(config)
    for index in range(config.num_layers):
        expected |= {f"model.layers.{index}.{name}": shape for name, shape in _layer_tensors(config, index).items()}
    if config.final_norm:
        expected |= _norm_tensors(config, FINAL_NORM, hidden)
    if not config.tied_embeddings and not config.bidirectional:
        expected[LM_HEAD] = (config.vocab_size, hidden)
    return expected | _head_tensors(config)


def _layer_tensors(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    """Names in a layer, and shapes, of its tensors."""
    hidden, inner = config.hidden_size, config.intermediate_size_of(index)
    norms = layer_norms(config)
    before_attention = norms.before_attention if index or config.first_norm else None
    layer: dict[str, tuple[int, ...]] = {}
    for name in (before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp):
        layer |= {} if name is None else _norm_tensors(config, name, hidden)
    layer |= mixer_tensors(config, index) or _attention_tensors(config, index)
    layer |= {
        **({"mlp.gate_proj.weight": (inner, hidden)} if config.gated else {}),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.mlp_bias:
        layer |= {
            **({"mlp.gate_proj.bias": (inner,)} if config.gated else {}),
            "mlp.up_proj.bias": (inner,),
            "mlp.down_proj.bias": (hidden,),
        }
    return layer | tensors_in_layer(config)


def _attention_tensors(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    """The tensors of attention. A layer that reads the keys and values of another one has queries only."""
    hidden, head_dim = config.hidden_size, config.head_dim_of(index)
    queries, keys = config.num_heads * head_dim, config.kv_heads_of(index) * head_dim
    rows = {"q": queries * 2 if config.attention_gate else queries}
    norms = {"q": queries if config.qk_norm_whole else head_dim}
    if config.owns_kv(index):
        rows |= {"k": keys, "v": keys}
        norms["k"] = keys if config.qk_norm_whole else head_dim
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj.weight": (size, hidden) for name, size in rows.items()}
    layer["self_attn.o_proj.weight"] = (hidden, queries)
    if config.attention_bias:
        layer |= {f"self_attn.{name}_proj.bias": (size,) for name, size in rows.items()}
    if config.sinks:
        layer["self_attn.sinks"] = (config.num_heads,)
    if config.head_gates:
        layer["self_attn.g_proj.weight"] = (config.num_heads, hidden)
    if config.qk_norm:
        layer |= {f"self_attn.{name}_norm.weight": (size,) for name, size in norms.items()}
    return layer


def adapter_bytes(config: ModelConfig, rank: int) -> int:
    """Memory of a LoRA adapter of this rank on all products of all layers: for each product A [rank, columns] and B
    [rows, rank] in 16 bits, in whole units of the kernels."""
    num_bytes = 0
    for name, shape in expected_tensors(config).items():
        if name.startswith("model.layers.") and len(shape) == 2 and not name.endswith(KERNELS):
            rows, columns = (-(-size // _ADAPTER_UNIT) * _ADAPTER_UNIT for size in shape)
            num_bytes += 2 * (rows * rank + columns * (-(-rank // 4) * 4)) + 2 * _ADAPTER_ALIGNMENT
    return num_bytes


def _norm_tensors(config: ModelConfig, name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{kind}": (size,) for kind in ("weight", "bias")[: 1 + config.norm_bias]}


def _head_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {}
    columns = config.hidden_size
    for index, layer in enumerate(config.head):
        tensors[f"head.{index}.weight"] = (layer.size, columns)
        if layer.bias:
            tensors[f"head.{index}.bias"] = (layer.size,)
        if layer.norm:
            tensors |= _norm_tensors(config, f"head.{index}.norm", layer.size)
        columns = layer.size
    return tensors


def check_tensors(config: ModelConfig, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Check that all required tensors exist with the right shape, and that no tensor would be silently ignored.

    Raises:
        CorruptArtifactError: names the first invalid tensor, with the expected and the actual shape.
        UnsupportedArtifactError: names a tensor that is not part of a plain model of this architecture.
    """
    expected = expected_tensors(config)
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise CorruptArtifactError(f"has no tensor {name!r}; one of shape {list(shape)} is expected", path=path)
        if tensor.shape != shape:
            raise CorruptArtifactError(
                f"tensor {name!r} has shape {list(tensor.shape)}; {list(shape)} is expected", path=path
            )
    for name, tensor in tensors.items():
        if name not in expected and not _is_harmless(config, name, tensor):
            raise UnsupportedArtifactError(
                f"tensor {name!r} is not part of a plain {config.architecture} model; its effect is unknown",
                path=path,
            )


@dataclass(frozen=True, slots=True)
class MappedWeights:
    """Views of mapped files. Permuted tensors are copied on each access; other tensors are never copied."""

    path: Path
    tensors: Mapping[str, Tensor] = field(repr=False)
    interleaved: Mapping[str, int] = field(default_factory=lambda: _NO_HEADS, repr=False)
    """Numbers of heads of tensors whose rows are stored for interleaved rope, by name."""

    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            close = nearest(name, self.tensors)
            hint = f"; the nearest name is {close[0]!r}" if close else ""
            raise CorruptArtifactError(f"has no tensor {name!r}{hint}", path=self.path)
        num_heads = self.interleaved.get(name)
        return tensor if num_heads is None else replace(tensor, data=rotate_half_rows(tensor.data, num_heads))


def split_fused(config: ModelConfig, tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Split fused projections into views, as if each part were a separate tensor. Works on whole rows of any encoding.

    Raises:
        CorruptArtifactError: the number of rows of a fused tensor does not match its parts.
    """
    row = ARCHITECTURES[config.architecture]
    if row.has_shared_mlp:
        tensors = {_without_shared_mlp(name): tensor for name, tensor in tensors.items()}
    elif not row.fused:
        return dict(tensors)
    queries, keys, inner = config.num_heads, config.num_kv_heads, config.intermediate_size
    parts = {
        "qkv_proj": {name: heads * config.head_dim for name, heads in zip("qkv", (queries, keys, keys), strict=True)},
        "gate_up_proj": {"gate": inner, "up": inner},
    }
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        prefix, _, last = module.rpartition(".")
        if last not in parts or kind != "weight" or len(tensor.shape) != 2:
            split[name] = tensor
            continue
        begin, rows = 0, sum(parts[last].values())
        if tensor.shape[0] != rows:
            raise CorruptArtifactError(
                f"tensor {tensor.name!r} has {tensor.shape[0]} rows; {rows} are expected", path=path
            )
        for part, size in parts[last].items():
            own = f"{prefix}.{part}_proj.weight"
            data = tensor.data[begin : begin + size]
            split[own] = replace(tensor, name=own, shape=(size, tensor.shape[1]), data=data)
            begin += size
    return split


def _without_shared_mlp(name: str) -> str:
    """Name of a tensor of a plain feed-forward, instead of that of a mixture's shared expert."""
    name = name.replace(".shared_mlp.input_linear.", ".mlp.gate_up_proj.")
    return name.replace(".shared_mlp.output_linear.", ".mlp.down_proj.")


def rotate_half_rows(rows: npt.NDArray[np.generic], num_heads: int) -> npt.NDArray[np.generic]:
    """Reorder rows ``[num_heads * head_dim, ...]`` from interleaved pairs (0, 1), (2, 3) … to halves (0, d/2), …

    Only whole rows move, so this also works for rows of quantized blocks. It is the inverse of `LlamaModel.permute` in
    llama.cpp's `convert_hf_to_gguf.py`.
    """
    half = len(rows) // num_heads // 2
    return rows.reshape(num_heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _positive_numbers(config: ModelConfig) -> dict[str, float]:
    numbers = {
        "rms norm epsilon": config.rms_norm_eps,
        "rope theta": config.rope_theta,
        "local rope theta": 1.0 if config.local_rope_theta is None else config.local_rope_theta,
        "attention scale": 1.0 if config.attention_scale is None else config.attention_scale,
        "embedding scale": config.embedding_scale,
        "residual scale": config.residual_scale,
        "logits divisor": config.logits_divisor,
    }
    if config.query_scaling is not None:
        numbers["scaling of queries"] = config.query_scaling.beta
    scaling = config.rope_scaling
    if scaling is not None:
        numbers |= {"rope scaling factor": scaling.factor, "rope attention factor": scaling.attention_factor}
        numbers |= {f"rope scaling {key}": value for key, value in scaling.parameters.items() if key != "truncate"}
        numbers |= {f"rope factor {index}": value for index, value in enumerate(scaling.factors)}
    return numbers


def _is_harmless(config: ModelConfig, name: str, tensor: Tensor) -> bool:
    """True if an additional tensor can be accepted: the bias of the attention output is used, others are redundant."""
    if name.endswith(".self_attn.o_proj.bias"):
        return config.attention_bias and tensor.shape == (config.hidden_size,)
    if is_redundant(config, name, tensor):
        return True
    return name.endswith("rotary_emb.inv_freq") or (name == LM_HEAD and config.tied_embeddings)
