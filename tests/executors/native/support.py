"""Random models in memory, a plain numpy decoder to compare with, and plans written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.architectures import ARCHITECTURES
from lockstep.artifacts.layout import split_fused
from lockstep.artifacts.model import Artifact, DeltaNet, Encoding, ModelConfig, Tensor
from lockstep.artifacts.tensors import dequantise
from lockstep.core.groups import ONE_GROUP
from lockstep.errors import MissingTokenizerError
from lockstep.executors.base import Logits, StepBatch
from lockstep.executors.fixed_plans import Regions, step_of
from lockstep.executors.native.executor import NativeExecutor
from lockstep.executors.rotary import inverse_frequencies
from tools.random_gemma4 import flattened
from tools.random_models import SHAPES, Shape, random_tensor, stored_encoding, tensor_shapes

Floats = npt.NDArray[np.float64]
TINY_LLAMA, TINY_QWEN3 = SHAPES["tiny-llama"], SHAPES["tiny-qwen3"]
TINY = {name: shape for name, shape in SHAPES.items() if name.startswith("tiny-")}
"""One of each architecture."""
SMALL_LLAMA, SMALL_QWEN3 = SHAPES["small-llama"], SHAPES["small-qwen3"]


@dataclass(frozen=True)
class MemoryWeights:
    """Weights without a file."""

    tensors: Mapping[str, Tensor]

    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


def config_of(shape: Shape) -> ModelConfig:
    traits: Mapping[str, Any] = ARCHITECTURES[shape.architecture].traits
    sizes = asdict(shape)
    net = sizes.pop("delta_net")
    return ModelConfig(**sizes, delta_net=None if net is None else DeltaNet(**net), **traits)


def random_artifact(shape: Shape = TINY_LLAMA, encoding: str = "F32", seed: int = 0) -> Artifact:
    """An opened artifact whose tensors live in memory; in block encodings the embedding and the head are Q8_0."""
    tensors = {}
    for name, size in tensor_shapes(shape).items():
        stored = stored_encoding(shape, name, size, encoding)
        numbers = flattened(shape, name, random_tensor(name, size, stored, seed))
        tensors[name] = Tensor(name, Encoding(stored), size, numbers)
    config = config_of(shape)
    return artifact_of(config, split_fused(config, tensors, Path("memory")), f"{shape}-{encoding}-{seed}")


def artifact_of(config: ModelConfig, tensors: Mapping[str, Tensor], fingerprint: str) -> Artifact:
    def no_tokenizer() -> None:
        raise MissingTokenizerError("a model in memory has no tokenizer")

    return Artifact(
        source="memory",
        name="random",
        path=Path("memory"),
        format="gguf",
        fingerprint=fingerprint,
        num_bytes=sum(tensor.data.nbytes for tensor in tensors.values()),
        config=config,
        weights=MemoryWeights(tensors),
        load_tokenizer=no_tokenizer,  # type: ignore[arg-type]  # it only raises
    )


def with_tensor(artifact: Artifact, tensor: Tensor) -> Artifact:
    """The artifact with one tensor replaced."""
    tensors = {name: artifact.weights[name] for name in artifact.weights.names()}
    return replace(artifact, weights=MemoryWeights(tensors | {tensor.name: tensor}))


def reference_logits(artifact: Artifact, token_ids: Sequence[int]) -> Floats:
    """Logits [T, vocab] in float64, straight from the definition: no cache, no fusing, whole causal attention."""
    config, weights = artifact.config, artifact.weights

    def tensor(name: str) -> Floats:
        return dequantise(weights[name]).astype(np.float64)

    def norm(x: Floats, name: str) -> Floats:
        scaled: Floats = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps)
        return scaled * tensor(f"{name}.weight")

    def linear(x: Floats, name: str) -> Floats:
        y = x @ tensor(f"{name}.weight").T
        return y + tensor(f"{name}.bias") if f"{name}.bias" in weights else y

    def rotate(x: Floats) -> Floats:
        half = config.head_dim // 2
        angles = np.arange(len(x))[:, None] * inverse_frequencies(config).astype(np.float64)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    hidden = tensor("model.embed_tokens.weight")[list(token_ids)]
    length, groups = len(token_ids), config.num_heads // config.num_kv_heads
    mask = np.where(np.tri(length, dtype=bool), 0.0, -np.inf)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        x = norm(hidden, prefix + "input_layernorm")
        query = linear(x, prefix + "self_attn.q_proj").reshape(length, config.num_heads, -1)
        key = linear(x, prefix + "self_attn.k_proj").reshape(length, config.num_kv_heads, -1)
        value = linear(x, prefix + "self_attn.v_proj").reshape(length, config.num_kv_heads, -1)
        if config.qk_norm:
            query, key = norm(query, prefix + "self_attn.q_norm"), norm(key, prefix + "self_attn.k_norm")
        query, key = rotate(query), np.repeat(rotate(key), groups, 1)
        scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(config.head_dim) + mask
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, np.repeat(value, groups, 1)).reshape(length, -1)
        hidden = hidden + linear(mixed, prefix + "self_attn.o_proj")
        x = norm(hidden, prefix + "post_attention_layernorm")
        gate = linear(x, prefix + "mlp.gate_proj")
        hidden = hidden + linear(
            gate / (1 + np.exp(-gate)) * linear(x, prefix + "mlp.up_proj"), prefix + "mlp.down_proj"
        )
    hidden = norm(hidden, "model.norm")
    logits: Floats = hidden @ tensor("model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight").T
    return logits


Item = tuple[Sequence[int], int, tuple[int, ...]]
"""Tokens of one chunk, position of the first, block table of the first KV group, which determines the others."""
ONE_TABLE = Regions(ONE_GROUP, 32, 0)


def batch_of(
    *items: Item,
    regions: Regions = ONE_TABLE,
    swap_out: tuple[tuple[int, int], ...] = (),
    swap_in: tuple[tuple[int, int], ...] = (),
    copies: tuple[tuple[int, int], ...] = (),
    all_rows: bool = False,
) -> StepBatch:
    """A step that samples every chunk's last row, or wants every row.

    Args:
        regions: those of the executor, if its model has several KV groups.
    """
    return step_of(items, regions, all_rows=all_rows, swap_out=swap_out, swap_in=swap_in, copies=copies)


def regions_of(executor: NativeExecutor) -> Regions:
    """The regions of an executor's pool. Each has as many blocks as `loaded` was loaded for."""
    return Regions.of(executor.geometry, executor.num_blocks)


def run(executor: NativeExecutor, *items: Item, all_rows: bool = False) -> Logits:
    """One step's logits, as a copy that outlives the next step."""
    return executor.execute(batch_of(*items, regions=regions_of(executor), all_rows=all_rows)).copy()
