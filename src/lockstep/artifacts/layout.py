"""Which tensors a dense decoder has, under canonical names, and whether an artifact has them in the right shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from lockstep.artifacts.model import ModelConfig, Tensor
from lockstep.errors import CorruptArtifactError, UnsupportedArtifactError

KNOWN_ARCHITECTURES = ("llama", "qwen3")
EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"

_MAX_SIZE = 1 << 24
"""No dimension of a model that this program could serve is larger."""
_MAX_LAYERS = 1024


def check_config(config: ModelConfig, path: Path) -> None:
    """Refuse numbers that no model has, before anything is allocated by them."""
    sizes = {
        "hidden size": config.hidden_size,
        "feed-forward size": config.intermediate_size,
        "number of heads": config.num_heads,
        "number of key-value heads": config.num_kv_heads,
        "head size": config.head_dim,
        "vocabulary size": config.vocab_size,
        "context length": config.max_model_len,
    }
    for what, size in sizes.items():
        if not 1 <= size <= _MAX_SIZE:
            raise CorruptArtifactError(f"the {what} is {size}; 1 to {_MAX_SIZE} is expected", path=path)
    if not 1 <= config.num_layers <= _MAX_LAYERS:
        raise CorruptArtifactError(f"{config.num_layers} layers; 1 to {_MAX_LAYERS} are expected", path=path)
    if config.num_heads % config.num_kv_heads:
        raise CorruptArtifactError(
            f"{config.num_heads} heads cannot share {config.num_kv_heads} key-value heads evenly", path=path
        )
    if config.head_dim % 2:
        raise CorruptArtifactError(f"a head size of {config.head_dim}; rope needs an even one", path=path)
    reals = {"rms norm epsilon": config.rms_norm_eps, "rope theta": config.rope_theta}
    if config.rope_scaling is not None:
        reals["rope scaling factor"] = config.rope_scaling.factor
        reals |= {f"rope scaling {key}": value for key, value in config.rope_scaling.parameters.items()}
        reals |= {f"rope factor {index}": value for index, value in enumerate(config.rope_scaling.factors)}
    for what, value in reals.items():
        if not (math.isfinite(value) and value > 0):
            raise CorruptArtifactError(f"{what} is {value}; a positive number is expected", path=path)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes of everything that the forward pass needs."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.attention_bias:
        layer |= {
            "self_attn.q_proj.bias": (queries,),
            "self_attn.k_proj.bias": (keys,),
            "self_attn.v_proj.bias": (keys,),
        }
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    expected: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        expected |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    expected["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        expected[LM_HEAD] = (config.vocab_size, hidden)
    return expected


def check_tensors(config: ModelConfig, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Everything needed is there in its shape, and nothing is there that the forward pass would silently ignore.

    Raises:
        CorruptArtifactError: names the first tensor at fault, the expected and the found shape.
        UnsupportedArtifactError: names a tensor that a plain model of this architecture does not have.
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


def _is_harmless(config: ModelConfig, name: str, tensor: Tensor) -> bool:
    """The bias of the attention output is used where it is present; the rest repeats what is known."""
    if name.endswith(".self_attn.o_proj.bias"):
        return config.attention_bias and tensor.shape == (config.hidden_size,)
    return name.endswith("rotary_emb.inv_freq") or (name == LM_HEAD and config.tied_embeddings)
