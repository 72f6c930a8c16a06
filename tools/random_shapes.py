"""Shapes of models: small ones of each architecture and some common ones, and the tensors of each.

The module does not import `lockstep`, so that it can test it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tools.random_gemma4 import gemma4_tensors
from tools.random_hybrids import HYBRIDS, DeltaShape, recurrent_tensors

BIASED = ("qwen2",)
BOTH_NORMS = ("gemma3", "lfm3")
"""Architectures with norms before and after attention and feed-forward."""
HEAD_NORMS = ("qwen3", "gemma3", *HYBRIDS)
POST_NORM = ("olmo2", "olmo3")
FUSED = ("phi3",)
SINKS = ("granite_swa",)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a dense decoder, under the names of `lockstep.artifacts.model.ModelConfig`."""

    architecture: str = "llama"
    num_layers: int = 2
    hidden_size: int = 128
    intermediate_size: int = 256
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    vocab_size: int = 512
    max_model_len: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tied_embeddings: bool = False
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    rotary_dim: int | None = None
    windows: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    unrotated_layers: tuple[int, ...] = ()
    mixers: tuple[str, ...] = ()
    delta_net: DeltaShape | None = None
    conv_taps: int = 0
    full_head_dim: int | None = None
    kv_owners: tuple[int, ...] = ()
    intermediate_sizes: tuple[int, ...] = ()
    per_layer_size: int = 0
    logits_cap: float = 0.0

    @property
    def attention_gate(self) -> bool:
        """Whether the queries' projection has a gate for each head, too."""
        return self.architecture == "qwen35"


def _mixed(kind: str, pattern: str) -> tuple[str, ...]:
    """Kinds of layers: ``a`` for attention, other letters for the recurrent kind."""
    return tuple("attention" if letter == "a" else kind for letter in pattern)


_SMALL = Shape(intermediate_size=192, vocab_size=320)
SHAPES: Mapping[str, Shape] = {
    "tiny-llama": Shape(),
    "tiny-qwen3": Shape("qwen3", head_dim=64, rope_theta=1e6, tied_embeddings=True),
    "tiny-qwen2": replace(_SMALL, architecture="qwen2", rope_theta=1e6, tied_embeddings=True),
    "tiny-mistral": replace(_SMALL, architecture="mistral", windows=(16, 16)),
    "tiny-gemma3": replace(
        _SMALL,
        architecture="gemma3",
        num_layers=6,
        hidden_size=96,
        rope_theta=1e6,
        tied_embeddings=True,
        attention_scale=32**-0.5,
        embedding_scale=96**0.5,
        windows=(16, 16, 16, 16, 16, 0),
        local_rope_theta=1e4,
    ),
    "tiny-phi3": replace(_SMALL, architecture="phi3", windows=(16, 16)),
    "tiny-granite": replace(
        _SMALL,
        architecture="granite",
        attention_scale=0.1,
        embedding_scale=6.0,
        residual_scale=0.5,
        logits_divisor=0.25,
        tied_embeddings=True,
    ),
    "tiny-granite_swa": replace(
        _SMALL,
        architecture="granite_swa",
        num_layers=4,
        attention_scale=0.1,
        embedding_scale=6.0,
        residual_scale=0.5,
        logits_divisor=0.25,
        tied_embeddings=True,
        windows=(0, 16, 16, 16),
        unrotated_layers=(0,),
    ),
    "tiny-granitemoehybrid": replace(
        _SMALL,
        architecture="granitemoehybrid",
        attention_scale=0.1,
        embedding_scale=6.0,
        residual_scale=0.5,
        logits_divisor=0.25,
        tied_embeddings=True,
    ),
    "tiny-mistral3": replace(_SMALL, architecture="mistral3", rope_theta=1e6, tied_embeddings=True),
    "tiny-olmo2": replace(_SMALL, architecture="olmo2", rope_theta=5e5),
    "tiny-olmo3": replace(
        _SMALL,
        architecture="olmo3",
        num_layers=4,
        rope_theta=5e5,
        windows=(16, 16, 16, 0),
        local_rope_theta=5e5,
    ),
    "tiny-smollm3": replace(
        _SMALL, architecture="smollm3", num_layers=4, rope_theta=2e6, tied_embeddings=True, unrotated_layers=(3,)
    ),
    "tiny-qwen35": replace(
        _SMALL,
        architecture="qwen35",
        num_layers=4,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tied_embeddings=True,
        rotary_dim=8,
        mixers=_mixed("delta_net", "ddda"),
        delta_net=DeltaShape(2, 4, 32, 32, 4),
    ),
    "tiny-lfm2": replace(
        _SMALL,
        architecture="lfm2",
        num_layers=4,
        rope_theta=1e6,
        tied_embeddings=True,
        mixers=_mixed("convolution", "ccac"),
        conv_taps=3,
    ),
    "tiny-gemma4": replace(
        _SMALL,
        architecture="gemma4",
        num_layers=6,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tied_embeddings=True,
        attention_scale=1.0,
        embedding_scale=128**0.5,
        windows=(16, 16, 0, 16, 16, 0),
        local_rope_theta=1e4,
        full_head_dim=64,
        kv_owners=(0, 1, 2, 1, 1, 2),
        intermediate_sizes=(192,) * 3 + (384,) * 3,
        per_layer_size=32,
        logits_cap=30.0,
    ),
    "tiny-lfm3": replace(
        _SMALL,
        architecture="lfm3",
        num_layers=5,
        rope_theta=1e6,
        tied_embeddings=True,
        mixers=_mixed("convolution", "cacaa"),
        conv_taps=7,
        windows=(0, 16, 0, 0, 16),
        local_rope_theta=1e4,
    ),
    "small-llama": Shape("llama", 2, 256, 512, 4, 2, 64),
    "small-qwen3": Shape("qwen3", 2, 256, 512, 4, 2, 64, rope_theta=1e6, tied_embeddings=True),
    "smollm2-135m": Shape("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, 100000.0, tied_embeddings=True),
    "llama-138m": Shape("llama", 16, 768, 2048, 12, 4, 64, 49152, 8192, 100000.0, tied_embeddings=True),
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960, 1e6, 1e-6, tied_embeddings=True),
    "llama-3.2-1b": Shape("llama", 16, 2048, 8192, 32, 8, 64, 128256, 131072, 500000.0, tied_embeddings=True),
    "qwen3.5-0.8b": Shape(
        "qwen35",
        24,
        1024,
        3584,
        8,
        2,
        256,
        248320,
        262144,
        1e7,
        1e-6,
        tied_embeddings=True,
        rotary_dim=64,
        mixers=_mixed("delta_net", "ddda" * 6),
        delta_net=DeltaShape(16, 16, 128, 128, 4),
    ),
    "lfm2.5-350m": Shape(
        "lfm2",
        16,
        1024,
        4608,
        16,
        8,
        64,
        65536,
        128000,
        1e6,
        1e-5,
        tied_embeddings=True,
        mixers=_mixed("convolution", "ccaccaccacacacac"),
        conv_taps=3,
    ),
    "lfm3-1.7b": Shape(
        "lfm3",
        24,
        2048,
        7680,
        16,
        4,
        128,
        128000,
        128000,
        1e6,
        1e-5,
        tied_embeddings=True,
        mixers=_mixed("convolution", "ccac" + "acac" * 5),
        conv_taps=7,
        windows=(0, 0, 0, 0, *(256, 0, 0, 0) * 5),
        local_rope_theta=1e4,
    ),
    "gemma-4-e2b": Shape(
        "gemma4",
        35,
        1536,
        6144,
        8,
        1,
        256,
        262144,
        131072,
        1e6,
        1e-6,
        tied_embeddings=True,
        attention_scale=1.0,
        embedding_scale=1536**0.5,
        windows=(512, 512, 512, 512, 0) * 7,
        local_rope_theta=1e4,
        full_head_dim=512,
        kv_owners=(*range(15), *(13, 13, 13, 13, 14) * 4),
        intermediate_sizes=(6144,) * 15 + (12288,) * 20,
        per_layer_size=256,
        logits_cap=30.0,
    ),
    "tinyllama-1.1b": Shape("llama", 22, 2048, 5632, 32, 4, 64, 32000, 2048),
}


def tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors by their Hugging Face names."""
    hidden, inner, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_heads * head_dim, shape.num_kv_heads * head_dim
    layer: dict[str, tuple[int, ...]] = {}
    if shape.architecture not in POST_NORM:
        layer["input_layernorm"] = (hidden,)
    if shape.architecture in FUSED:
        layer |= {"self_attn.qkv_proj": (queries + 2 * keys, hidden)}
    else:
        layer |= {
            f"self_attn.{name}_proj": (rows, hidden)
            for name, rows in zip("qkv", (queries * (1 + shape.attention_gate), keys, keys), strict=True)
        }
    layer |= {"self_attn.o_proj": (hidden, queries), "post_attention_layernorm": (hidden,)}
    if shape.architecture == "granitemoehybrid":
        layer |= {"shared_mlp.input_linear": (2 * inner, hidden), "shared_mlp.output_linear": (hidden, inner)}
    elif shape.architecture in FUSED:
        layer |= {"mlp.gate_up_proj": (2 * inner, hidden), "mlp.down_proj": (hidden, inner)}
    else:
        layer |= {f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")} | {"mlp.down_proj": (hidden, inner)}
    if shape.architecture in HEAD_NORMS:
        layer |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
    if shape.architecture in POST_NORM:
        layer |= {"self_attn.q_norm": (queries,), "self_attn.k_norm": (keys,)}
    if shape.architecture in BOTH_NORMS:
        layer |= {"pre_feedforward_layernorm": (hidden,)}
    if shape.architecture in (*BOTH_NORMS, *POST_NORM):
        layer |= {"post_feedforward_layernorm": (hidden,)}
    if shape.architecture == "lfm3":
        layer |= {"self_attn.g_proj": (shape.num_heads, hidden)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    if shape.architecture == "gemma4":
        shapes |= gemma4_tensors(shape)
    for index in range(shape.num_layers if shape.architecture != "gemma4" else 0):
        recurrent = recurrent_tensors(shape, index)
        own = {name: size for name, size in layer.items() if not (recurrent and name.startswith("self_attn."))}
        shapes |= {f"model.layers.{index}.{name}.weight": size for name, size in own.items()}
        shapes |= {f"model.layers.{index}.{name}": size for name, size in recurrent.items()}
        if shape.architecture in SINKS:
            shapes[f"model.layers.{index}.self_attn.sinks"] = (shape.num_heads,)
        if shape.architecture in BIASED:
            sizes = zip("qkv", (queries, keys, keys), strict=True)
            shapes |= {f"model.layers.{index}.self_attn.{name}_proj.bias": (size,) for name, size in sizes}
    shapes["model.norm.weight"] = (hidden,)
    if not shape.tied_embeddings:
        shapes["lm_head.weight"] = (shape.vocab_size, hidden)
    return shapes
