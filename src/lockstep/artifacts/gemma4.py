"""Gemma 4: reads layers with windows and without, keys and values that layers share, and embeddings per layer.

Sources: `configuration_gemma4.py` and `modeling_gemma4.py` in transformers; for GGUF, llama.cpp's
`src/models/gemma4.cpp` and its converter in `conversion/gemma.py`.

Layers without a window rotate a part of each head. Both formats describe this by divisors of all frequencies: those of
the other dimensions are so large that nothing turns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.artifacts.architectures import Architecture
from lockstep.artifacts.metadata import Metadata
from lockstep.artifacts.model import Encoding, ModelConfig, RopeScaling, Tensor
from lockstep.errors import CorruptArtifactError

PER_LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"
"""Table of the embeddings per layer ``[vocabulary, layers * size]``: rows are read where the file has them."""
PER_LAYER_PROJECTION, PER_LAYER_NORM = "model.per_layer_model_projection.weight", "model.per_layer_projection_norm"
PER_LAYER_GATE, PER_LAYER_OUT = "per_layer_input_gate.weight", "per_layer_projection.weight"
AFTER_PER_LAYER, LAYER_SCALAR = "post_per_layer_input_norm", "layer_scalar"
_STILL = float(np.float32(1e30))
"""Divisor of the frequencies that do not turn, as converters to GGUF write it."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_MAX_COLUMNS = 1 << 20
"""Maximum columns of a matrix."""
_MAX_SIZE = 1 << 24
_OF_OWNERS = re.compile(r"model\.layers\.([0-9]+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight", re.ASCII)
GGUF_NAMES: Mapping[str, str] = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": AFTER_PER_LAYER,
}
"""Names of modules of a layer in GGUF files that other decoders do not have."""
GGUF_WHOLE_NAMES: Mapping[str, str] = {"layer_output_scale.weight": LAYER_SCALAR}
GGUF_GLOBAL_NAMES: Mapping[str, str] = {
    "per_layer_token_embd.weight": PER_LAYER_EMBEDDING,
    "per_layer_model_proj.weight": PER_LAYER_PROJECTION,
    "per_layer_proj_norm.weight": f"{PER_LAYER_NORM}.weight",
}


def read_huggingface_gemma4(declared: Metadata, architecture: Architecture, num_layers: int) -> ModelConfig:
    """Convert the part of config.json that describes the decoder.

    Raises:
        UnsupportedArtifactError: a variant is not supported; the error names the key.
        CorruptArtifactError: a value is missing, has the wrong type or does not fit the others.
    """
    _refuse_variants(declared)
    kinds = _kinds(declared, num_layers)
    window = declared.integer("sliding_window", architecture.sliding_window)
    if window < 1:
        raise declared.corrupt(f"sliding_window is {window}; at least 1 is expected")
    hidden, num_heads = declared.integer("hidden_size"), declared.integer("num_attention_heads")
    kv_heads = declared.integer("num_key_value_heads", 4)
    head_dim = declared.integer("head_dim", 256)
    full_head_dim = _of_full_layers(declared, kinds, "head_dim", declared.integer("global_head_dim", 512))
    rope = declared.section("rope_parameters")
    share, theta = rotated_share(rope.section(_FULL) if rope.values else None)
    num_shared = declared.integer("num_kv_shared_layers", 0)
    owners = _owners(declared, [kind == _SLIDING for kind in kinds], num_shared, "num_kv_shared_layers")
    inner = declared.integer("intermediate_size")
    doubled = num_shared if declared.flag("use_double_wide_mlp", False) else 0
    return ModelConfig(
        architecture=architecture.name,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=inner,
        intermediate_sizes=(inner,) * (num_layers - doubled) + (2 * inner,) * doubled if doubled else (),
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        full_kv_heads=_of_full_layers(declared, kinds, "num_key_value_heads", kv_heads),
        head_dim=head_dim,
        full_head_dim=full_head_dim,
        vocab_size=declared.integer("vocab_size"),
        max_model_len=declared.integer("max_position_embeddings"),
        rms_norm_eps=declared.real("rms_norm_eps", architecture.rms_norm_eps),
        rope_theta=theta,
        rope_scaling=proportional_scaling(share, full_head_dim),
        local_rope_theta=_local_theta(rope.section(_SLIDING), architecture),
        tied_embeddings=declared.flag("tie_word_embeddings", architecture.tied_embeddings),
        windows=tuple(window if kind == _SLIDING else 0 for kind in kinds),
        kv_owners=owners,
        per_layer_size=_per_layer_size(declared),
        logits_cap=declared.real("final_logit_softcapping", 0.0),
        **_constants(architecture, hidden),
    )


def read_gguf_gemma4(
    metadata: Metadata, architecture: Architecture, tensors: Mapping[str, Tensor], divisors: Tensor | None
) -> ModelConfig:
    """Convert the metadata of a GGUF file.

    Args:
        tensors: tensors by canonical name.
        divisors: divisors of the frequencies of layers without a window; None: the file has none.
    """
    prefix = architecture.name
    num_layers = metadata.integer(f"{prefix}.block_count")
    is_local = [bool(flag) for flag in _numbers(metadata, f"{prefix}.attention.sliding_window_pattern", num_layers)]
    window = metadata.integer(f"{prefix}.attention.sliding_window")
    if window < 1:
        raise metadata.corrupt(f"{prefix}.attention.sliding_window is {window}; at least 1 is expected")
    if is_local and is_local[-1]:
        raise metadata.unsupported("a last layer with a window (attention.sliding_window_pattern)")
    head_dim = _gguf_head_dim(metadata, prefix, "_swa")
    full_head_dim = _gguf_head_dim(metadata, prefix, "")
    heads = _numbers(metadata, f"{prefix}.attention.head_count_kv", num_layers)
    inner = _numbers(metadata, f"{prefix}.feed_forward_length", num_layers)
    embedding = tensors["model.embed_tokens.weight"]
    num_shared = metadata.integer(f"{prefix}.attention.shared_kv_layers", 0)
    hidden = metadata.integer(f"{prefix}.embedding_length")
    return ModelConfig(
        architecture=prefix,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=inner[0],
        intermediate_sizes=tuple(inner) if len(set(inner)) > 1 else (),
        num_heads=metadata.integer(f"{prefix}.attention.head_count"),
        num_kv_heads=_same(metadata, heads, is_local, True),
        full_kv_heads=_same(metadata, heads, is_local, False),
        head_dim=head_dim,
        full_head_dim=full_head_dim,
        vocab_size=embedding.shape[0],
        max_model_len=metadata.integer(f"{prefix}.context_length"),
        rms_norm_eps=metadata.real(f"{prefix}.attention.layer_norm_rms_epsilon"),
        rope_theta=metadata.real(f"{prefix}.rope.freq_base"),
        rope_scaling=_gguf_scaling(metadata, divisors, full_head_dim),
        local_rope_theta=metadata.real(f"{prefix}.rope.freq_base_swa", architecture.local_rope_theta),
        tied_embeddings="lm_head.weight" not in tensors,
        windows=tuple(window if flag else 0 for flag in is_local),
        kv_owners=_owners(metadata, is_local, num_shared, f"{prefix}.attention.shared_kv_layers"),
        per_layer_size=metadata.integer(f"{prefix}.embedding_length_per_layer_input", 0),
        logits_cap=metadata.real(f"{prefix}.final_logit_softcapping", 0.0),
        **_constants(architecture, hidden),
    )


def check_gemma4(config: ModelConfig, path: Path) -> None:
    """Reject sizes of layers that no model has, before memory is allocated for them."""
    sizes = {"head size of layers without a window (global_head_dim)": config.full_head_dim}
    sizes |= {"number of their key-value heads (num_global_key_value_heads)": config.full_kv_heads}
    sizes |= {f"feed-forward size of layer {layer}": size for layer, size in enumerate(config.intermediate_sizes)}
    for what, size in sizes.items():
        if size is not None and not 1 <= size <= _MAX_SIZE:
            raise CorruptArtifactError(f"the {what} is {size}; 1 to {_MAX_SIZE} is expected", path=path)
    full_head_dim, full_kv_heads = config.full_head_dim or 2, config.full_kv_heads or 1
    if full_head_dim % 2 or config.num_heads % full_kv_heads:
        raise CorruptArtifactError(
            f"layers without a window have heads of {full_head_dim} dimensions (global_head_dim), and "
            f"{full_kv_heads} key-value heads for {config.num_heads} heads; an even size and a divisor are expected",
            path=path,
        )
    columns = config.per_layer_size * config.num_layers
    if config.per_layer_size < 0 or columns > _MAX_COLUMNS:
        raise CorruptArtifactError(
            f"embeddings per layer of {config.per_layer_size} numbers (hidden_size_per_layer_input) in "
            f"{config.num_layers} layers; 0 to {_MAX_COLUMNS} in all are expected",
            path=path,
        )
    if not 0 <= config.logits_cap < float("inf"):
        raise CorruptArtifactError(
            f"the cap of logits (final_logit_softcapping) is {config.logits_cap}; at least 0 is expected", path=path
        )


def per_layer_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors for embeddings per layer that are not part of a layer; empty: there are none."""
    columns = config.per_layer_size * config.num_layers
    return {
        PER_LAYER_EMBEDDING: (config.vocab_size, columns),
        PER_LAYER_PROJECTION: (columns, config.hidden_size),
        f"{PER_LAYER_NORM}.weight": (config.per_layer_size,),
    } if columns else {}  # fmt: skip


def tensors_in_layer(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The same, of each layer."""
    size, hidden = config.per_layer_size, config.hidden_size
    return {
        PER_LAYER_GATE: (size, hidden),
        PER_LAYER_OUT: (hidden, size),
        f"{AFTER_PER_LAYER}.weight": (hidden,),
    } if size else {}  # fmt: skip


def is_redundant(config: ModelConfig, name: str, tensor: Tensor) -> bool:
    """True for tensors that a file may have beside those of the layout: the factor of a layer, which is used, and
    projections of layers that read the keys and values of another one."""
    if name.endswith(f".{LAYER_SCALAR}"):
        return config.layer_scalars and tensor.shape == (1,)
    found = _OF_OWNERS.fullmatch(name)
    return found is not None and int(found[1]) < config.num_layers and not config.owns_kv(int(found[1]))


def _constants(architecture: Architecture, hidden_size: int) -> dict[str, Any]:
    return {"embedding_scale": max(hidden_size, 0) ** 0.5, "attention_scale": 1.0, **architecture.traits}


def _refuse_variants(declared: Metadata) -> None:
    if declared.flag("enable_moe_block", False):
        raise declared.unsupported("experts (enable_moe_block); models without experts are supported")
    if declared.flag("attention_k_eq_v", False):
        raise declared.unsupported("keys that are values as well (attention_k_eq_v)")
    for key in ("attention_bias", "mlp_bias"):
        if declared.flag(key, False):
            raise declared.unsupported(f"{key}; layers without biases are supported")
    # With "vision", only the tokens of an image see each other.
    if declared.values.get("use_bidirectional_attention", "vision") not in ("vision", False):
        raise declared.unsupported("use_bidirectional_attention; attention to earlier tokens is supported")
    activation = declared.text("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise declared.unsupported(f"activation {activation!r} (hidden_activation); gelu_pytorch_tanh is supported")
    if "quantization_config" in declared.values:
        method = declared.section("quantization_config").values.get("quant_method", "unknown")
        raise declared.unsupported(f"weights quantised by {method!r}; float safetensors, or a GGUF file, are supported")


def _kinds(declared: Metadata, num_layers: int) -> list[str]:
    """Kind of each layer. By default, every sixth layer and the last one have no window."""
    if "layer_types" not in declared.values:
        kinds = [_SLIDING if (layer + 1) % 6 else _FULL for layer in range(num_layers)]
        return [*kinds[:-1], _FULL]
    kinds = declared.strings("layer_types")
    if len(kinds) != num_layers:
        raise declared.corrupt(f"layer_types has {len(kinds)} entries; {num_layers} are expected")
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            raise declared.unsupported(f"a layer of type {kind!r} (layer_types); supported: {_FULL}, {_SLIDING}")
    if kinds[-1] != _FULL:
        raise declared.unsupported(f"a last layer of type {kinds[-1]!r} (layer_types); {_FULL} is supported")
    return kinds


def _of_full_layers(declared: Metadata, kinds: Sequence[str], key: str, default: int) -> int:
    """Value of a key in layers without a window: newer files list it by layer."""
    if key == "num_key_value_heads" and "num_global_key_value_heads" in declared.values:
        raise declared.unsupported("num_global_key_value_heads, which belongs to attention_k_eq_v")
    listed = declared.section("per_layer_config")
    layers = [layer for layer, kind in enumerate(kinds) if kind == _FULL]
    values = {listed.section(str(layer)).integer(key, default) for layer in layers} or {default}
    others = [layer for layer in listed.values if not (layer.isdecimal() and int(layer) in layers)]
    if others or len(values) > 1:
        raise declared.unsupported(f"per_layer_config that gives layers of one type another {key}")
    return values.pop()


def rotated_share(rope: Metadata | None) -> tuple[float, float]:
    """Part of each head that layers without a window rotate, and their rope base.

    Args:
        rope: settings of the rope type ``proportional`` or ``default``; None: the file has none.
    """
    if rope is None:
        return 0.25, 1e6
    kind = rope.text("rope_type", "proportional")
    if kind not in ("proportional", "default"):
        raise rope.unsupported(f"rope type {kind!r} in {_FULL}; proportional is supported")
    if rope.real("factor", 1.0) != 1.0:
        raise rope.unsupported("a rope factor; unscaled frequencies are supported")
    share = rope.real("partial_rotary_factor", 1.0) if kind == "proportional" else 1.0
    if not 0 < share <= 1:
        raise rope.corrupt(f"partial_rotary_factor is {share}; a part of a head is expected")
    return share, rope.real("rope_theta", 1e6)


def _local_theta(rope: Metadata, architecture: Architecture) -> float:
    kind = rope.text("rope_type", "default")
    if kind != "default" or rope.real("partial_rotary_factor", 1.0) != 1.0:
        raise rope.unsupported(f"rope type {kind!r}, or a part of each head, in {_SLIDING}; default is supported")
    return rope.real("rope_theta", architecture.local_rope_theta)


def proportional_scaling(share: float, head_dim: int) -> RopeScaling | None:
    """Divisors of the frequencies, so that only the first pairs of dimensions turn."""
    if share == 1.0 or not 2 <= head_dim <= _MAX_SIZE:  # the latter is refused with the other sizes
        return None
    turning = int(share * head_dim // 2)
    return RopeScaling("factors", 1.0, factors=(1.0,) * turning + (_STILL,) * (head_dim // 2 - turning))


def _gguf_scaling(metadata: Metadata, divisors: Tensor | None, head_dim: int) -> RopeScaling | None:
    kind = metadata.text("gemma4.rope.scaling.type", "none")
    if kind != "none":
        raise metadata.unsupported(f"rope scaling {kind!r} beside rope_freqs.weight")
    if divisors is None:
        return None
    if divisors.encoding is not Encoding.F32 or divisors.shape != (head_dim // 2,):
        raise metadata.corrupt(
            f"tensor 'rope_freqs.weight' is {divisors.encoding.value} {list(divisors.shape)}; F32 {[head_dim // 2]} "
            "is expected"
        )
    return RopeScaling("factors", 1.0, factors=tuple(float(value) for value in divisors.data))


def _owners(declared: Metadata, is_local: Sequence[bool], num_shared: int, key: str) -> tuple[int, ...]:
    """By layer, the layer whose keys and values it reads: the last ones read those of the last layer of their kind."""
    num_layers = len(is_local)
    if not 0 <= num_shared < num_layers:
        raise declared.corrupt(f"{key} is {num_shared} in a model of {num_layers} layers; some must store their own")
    first = num_layers - num_shared
    last = {is_local[layer]: layer for layer in range(first)}
    for layer in range(first, num_layers):
        if is_local[layer] not in last:
            kind = "with" if is_local[layer] else "without"
            raise declared.corrupt(
                f"{key} is {num_shared}: no layer {kind} a window stores the keys and values for layer {layer}"
            )
    return (*range(first), *(last[is_local[layer]] for layer in range(first, num_layers))) if num_shared else ()


def _per_layer_size(declared: Metadata) -> int:
    size = declared.integer("hidden_size_per_layer_input", 256)
    rows = declared.integer("vocab_size_per_layer_input", 262144)
    if size and rows != declared.integer("vocab_size"):
        raise declared.unsupported(f"vocab_size_per_layer_input is {rows}; the size of the vocabulary is supported")
    return size


def _gguf_head_dim(metadata: Metadata, prefix: str, suffix: str) -> int:
    head_dim = metadata.integer(f"{prefix}.attention.key_length{suffix}")
    for key in (f"attention.value_length{suffix}", f"rope.dimension_count{suffix}"):
        other = metadata.integer(f"{prefix}.{key}", head_dim)
        if other != head_dim:
            raise metadata.unsupported(f"{key} is {other} and the head size {head_dim}; equal ones are supported")
    return head_dim


def _numbers(metadata: Metadata, key: str, num_layers: int) -> list[int]:
    """An integer of each layer; files may list them, or have one for all layers."""
    if not isinstance(metadata.values.get(key), np.ndarray):
        return [metadata.integer(key)] * num_layers
    numbers = [int(number) for number in metadata.numbers(key).tolist()]
    if len(numbers) != num_layers:
        raise metadata.corrupt(f"{key} has {len(numbers)} entries; {num_layers} are expected")
    return numbers


def _same(metadata: Metadata, heads: Sequence[int], is_local: Sequence[bool], flag: bool) -> int:
    """Key and value heads of the layers with a window, or without."""
    counts = {count for count, each in zip(heads, is_local, strict=True) if each == flag} or set(heads[:1])
    if len(counts) != 1:
        raise metadata.unsupported("head counts that differ by layer (attention.head_count_kv) in layers of one kind")
    return counts.pop()
