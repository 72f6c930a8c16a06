"""A GGUF file as an artifact: its tensors get canonical names, fused ones are split, permuted ones put in order.

Names: llama.cpp's `gguf-py/gguf/constants.py`. Knows no bytes (that is `gguf_file`), no configuration (`gguf_config`)
and no token (`vocabulary`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lockstep.artifacts.architectures import ARCHITECTURES
from lockstep.artifacts.fingerprint import file_fingerprint
from lockstep.artifacts.gguf_config import ROPE_TENSORS, read_config
from lockstep.artifacts.gguf_file import read_gguf
from lockstep.artifacts.layout import EMBEDDING, LM_HEAD, check_config, check_tensors
from lockstep.artifacts.metadata import Metadata
from lockstep.artifacts.model import Artifact, ModelConfig, Tensor, TokenizerParts
from lockstep.artifacts.sampling_defaults import from_gguf
from lockstep.artifacts.weights import MappedWeights, split_fused

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
_POST_NORM_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Where the outputs of attention and feed-forward are normalised, Hugging Face's names shift."""
_FUSED_NAMES = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]*)\.([a-z_]+)\.(weight|bias)", re.ASCII)


def open_gguf(path: Path, source: str, cache_dir: Path) -> Artifact:
    """Open and check a file; reads metadata, and the whole content once for its fingerprint.

    Raises:
        ArtifactNotFoundError, CorruptArtifactError, UnsupportedArtifactError: see `read_gguf`, `read_config`.
    """
    file = read_gguf(path)
    tensors = _canonical(file.tensors, file.metadata.text("general.architecture"))
    config = read_config(file, tensors)
    check_config(config, path)
    tensors = split_fused(config, tensors, path)
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


def _canonical(tensors: Mapping[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """Rename; a name that we do not know stays, so that the layout check can refuse it."""
    row = ARCHITECTURES.get(architecture)
    names = dict(_LAYER_NAMES)
    if row is not None and row.traits.get("post_norm", False):
        names |= _POST_NORM_NAMES
    if row is not None and row.fused:
        names |= _FUSED_NAMES
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in ROPE_TENSORS:
            continue
        canonical = _GLOBAL_NAMES.get(name, name)
        layer = _LAYER.fullmatch(name)
        if layer is not None and layer[2] in names:
            canonical = f"model.layers.{layer[1]}.{names[layer[2]]}.{layer[3]}"
        renamed[canonical] = replace(tensor, name=canonical)
    return renamed


def _interleaved(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Converters permute q and k for architectures whose rope llama.cpp computes on neighbouring pairs."""
    if not ARCHITECTURES[config.architecture].interleaved:
        return {}
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    return {name: heads[name.split(".")[-2]] for name in tensors if name.split(".")[-2] in heads}


def _load_tokenizer(metadata: Metadata, vocab_size: int) -> TokenizerParts:
    from lockstep.artifacts.vocabulary import read_vocabulary

    return read_vocabulary(metadata, vocab_size)
