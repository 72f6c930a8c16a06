"""A GGUF file as an artifact: its metadata becomes a `ModelConfig`, its tensors get canonical names.

Names and keys: llama.cpp's `gguf-py/gguf/constants.py`. Knows no bytes (that is `gguf_file`) and no token
(`vocabulary`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.artifacts.fingerprint import file_fingerprint
from lockstep.artifacts.gguf_file import GgufFile, read_gguf
from lockstep.artifacts.layout import EMBEDDING, KNOWN_ARCHITECTURES, LM_HEAD, check_config, check_tensors
from lockstep.artifacts.metadata import Metadata
from lockstep.artifacts.model import Artifact, Encoding, ModelConfig, RopeScaling, Tensor, TokenizerParts
from lockstep.artifacts.sampling_defaults import from_gguf
from lockstep.artifacts.weights import MappedWeights
from lockstep.errors import CorruptArtifactError, UnsupportedArtifactError

_ROPE_FACTORS = "rope_freqs.weight"
_GLOBAL_NAMES = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": "model.norm.weight",
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
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]*)\.([a-z_]+)\.(weight|bias)", re.ASCII)


def open_gguf(path: Path, source: str, cache_dir: Path) -> Artifact:
    """Open and check a file; reads metadata, and the whole content once for its fingerprint.

    Raises:
        ArtifactNotFoundError, CorruptArtifactError, UnsupportedArtifactError: see `read_gguf`, `read_config`.
    """
    file = read_gguf(path)
    tensors = _canonical(file.tensors)
    config = read_config(file, tensors)
    check_config(config, path)
    check_tensors(config, tensors, path)
    return Artifact(
        source=source,
        name=path.stem,
        path=path,
        format="gguf",
        fingerprint=file_fingerprint(path, cache_dir),
        num_bytes=path.stat().st_size,
        config=config,
        weights=MappedWeights(path, tensors, _interleaved(config, tensors)),
        load_tokenizer=functools.partial(_load_tokenizer, file.metadata, config.vocab_size),
        sampling_defaults=from_gguf(file.metadata.values, path),
    )


def read_config(file: GgufFile, tensors: Mapping[str, Tensor]) -> ModelConfig:
    """The architecture's metadata; what the tensors show (vocabulary, ties, biases) is read from them.

    Raises:
        UnsupportedArtifactError: an architecture or a variant that we do not know, by name.
        CorruptArtifactError: a value is missing or of the wrong kind.
    """
    metadata = file.metadata
    architecture = metadata.text("general.architecture")
    if architecture not in KNOWN_ARCHITECTURES:
        known = ", ".join(KNOWN_ARCHITECTURES)
        raise UnsupportedArtifactError(f"architecture {architecture!r}; the known ones are {known}", path=file.path)
    _refuse_variants(metadata, architecture)
    embedding = tensors.get(EMBEDDING)
    if embedding is None:
        raise CorruptArtifactError("has no tensor 'token_embd.weight'", path=file.path)
    hidden_size = metadata.integer(f"{architecture}.embedding_length")
    num_heads = metadata.integer(f"{architecture}.attention.head_count")
    head_dim = metadata.integer(f"{architecture}.attention.key_length", hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        other = metadata.integer(f"{architecture}.{key}", head_dim)
        if other != head_dim:
            raise UnsupportedArtifactError(
                f"{key} is {other} and the head size {head_dim}; equal ones are supported", path=file.path
            )
    return ModelConfig(
        architecture=architecture,
        num_layers=metadata.integer(f"{architecture}.block_count"),
        hidden_size=hidden_size,
        intermediate_size=metadata.integer(f"{architecture}.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=metadata.integer(f"{architecture}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        max_model_len=metadata.integer(f"{architecture}.context_length"),
        rms_norm_eps=metadata.real(f"{architecture}.attention.layer_norm_rms_epsilon"),
        rope_theta=metadata.real(f"{architecture}.rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(file, architecture, head_dim),
        tied_embeddings=LM_HEAD not in tensors,
        attention_bias="model.layers.0.self_attn.q_proj.bias" in tensors,
        qk_norm=architecture == "qwen3",
    )


def _refuse_variants(metadata: Metadata, architecture: str) -> None:
    if metadata.integer("split.count", 1) > 1:
        raise UnsupportedArtifactError(
            "one part of a split GGUF; merge the parts into one file (llama-gguf-split --merge)", path=metadata.path
        )
    if metadata.integer(f"{architecture}.expert_count", 0) > 0:
        raise UnsupportedArtifactError("a mixture of experts; dense models are supported", path=metadata.path)
    if isinstance(metadata.values.get(f"{architecture}.attention.head_count_kv"), np.ndarray):
        raise UnsupportedArtifactError("head counts that differ by layer; equal ones are supported", path=metadata.path)


def _rope_scaling(file: GgufFile, architecture: str, head_dim: int) -> RopeScaling | None:
    """llama.cpp divides by `rope_freqs.weight` where there is one, and by the linear factor; never both in practice."""
    metadata = file.metadata
    factors = file.tensors.get(_ROPE_FACTORS)
    kind = metadata.text(f"{architecture}.rope.scaling.type", "none")
    old_factor = metadata.real(f"{architecture}.rope.scale_linear", 1.0)
    if kind == "none" and old_factor not in (0.0, 1.0):
        kind = "linear"
    if kind not in ("none", "linear"):
        raise UnsupportedArtifactError(
            f"rope scaling {kind!r}; linear and llama3 (rope_freqs.weight) are known", path=file.path
        )
    if factors is not None:
        if kind == "linear":
            raise UnsupportedArtifactError("linear rope scaling beside rope_freqs.weight", path=file.path)
        if factors.encoding is not Encoding.F32 or factors.shape != (head_dim // 2,):
            raise CorruptArtifactError(
                f"tensor {_ROPE_FACTORS!r} is {factors.encoding.value} {list(factors.shape)}; "
                f"F32 {[head_dim // 2]} is expected",
                path=file.path,
            )
        return RopeScaling("factors", 1.0, factors=tuple(float(value) for value in factors.data))
    if kind == "linear":
        return RopeScaling("linear", metadata.real(f"{architecture}.rope.scaling.factor", old_factor))
    return None


def _canonical(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename; a name that we do not know stays, so that the layout check can refuse it."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name == _ROPE_FACTORS:
            continue
        canonical = _GLOBAL_NAMES.get(name, name)
        layer = _LAYER.fullmatch(name)
        if layer is not None and layer[2] in _LAYER_NAMES:
            canonical = f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
        renamed[canonical] = replace(tensor, name=canonical)
    return renamed


def _interleaved(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Converters permute q and k for architectures whose rope llama.cpp computes on neighbouring pairs: llama."""
    if config.architecture != "llama":
        return {}
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    return {name: heads[name.split(".")[-2]] for name in tensors if name.split(".")[-2] in heads}


def _load_tokenizer(metadata: Metadata, vocab_size: int) -> TokenizerParts:
    from lockstep.artifacts.vocabulary import read_vocabulary

    return read_vocabulary(metadata, vocab_size)
