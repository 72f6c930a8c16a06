"""Models on disk as values, whatever their format: readers produce them and executors consume them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Encoding(Enum):
    """Storage format of a tensor's numbers. Block formats are ggml's: 32 or 256 (_K) values along the last axis."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q5_0 = "Q5_0"
    Q5_1 = "Q5_1"
    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as it is stored, usually a view into a memory-mapped file."""

    name: str
    """Canonical (Hugging Face) name, e.g. ``model.layers.0.self_attn.q_proj.weight``."""
    encoding: Encoding
    shape: tuple[int, ...]
    """Logical shape, row-major, output features first."""
    data: npt.NDArray[np.generic]
    """F32/F16: the array in ``shape``. BF16: uint16 in ``shape``. Blocks: uint8 ``[*shape[:-1], row_bytes]``."""


class Weights(Protocol):
    """The tensors of one artifact under canonical names. Rope-permuted tensors are already rotate-half here."""

    def names(self) -> tuple[str, ...]:
        """Canonical names in file order."""
        ...

    def __contains__(self, name: object) -> bool: ...

    def __getitem__(self, name: str) -> Tensor:
        """The tensor of that name; CorruptArtifactError names it when it is absent or out of bounds."""
        ...


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Scaling of rotary frequencies, as data."""

    kind: str
    """``linear``, ``llama3``, ``yarn`` or ``factors``."""
    factor: float
    parameters: Mapping[str, float] = field(default_factory=dict)
    """``llama3``: low_freq_factor, high_freq_factor, original_max_position_embeddings.
    ``yarn``: original_max_position_embeddings, beta_fast, beta_slow, truncate (1 or 0)."""
    factors: tuple[float, ...] = ()
    """``factors``: rotary_dim / 2 divisors of the frequencies: llama3 scaling as GGUF stores it, and longrope."""
    attention_factor: float = 1.0
    """Cosines and sines are multiplied by it (``yarn``, longrope), and so attention scores by its square."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder as data: differences between architectures are fields here, not subclasses."""

    architecture: str
    """A name of `architectures.ARCHITECTURES`."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    """Context that the artifact declares, in tokens."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    attention_bias: bool = False
    """q, k and v have biases; o_proj has one where the weights hold ``self_attn.o_proj.bias``."""
    qk_norm: bool = False
    """Queries and keys are normalised before they are rotated."""
    qk_norm_whole: bool = False
    """Their norm is over all heads together, not over each one."""
    pre_norm: bool = True
    """Attention and feed-forward see normalised inputs."""
    post_norm: bool = False
    """Their outputs are normalised before they are added to the residual."""
    norm_offset: float = 0.0
    """Added to every norm weight: some files hold the distance from one."""
    activation: str = "silu"
    """Of the feed-forward gate: ``silu`` or ``gelu_tanh``."""
    attention_scale: float | None = None
    """Factor of the attention scores; None: head_dim ** -0.5."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of what attention and feed-forward add to the residual."""
    logits_divisor: float = 1.0
    rotary_dim: int | None = None
    """Leading dimensions of each head that are rotated; None: all."""
    windows: tuple[int, ...] = ()
    """Per layer, how many tokens a query sees, itself included; 0: every earlier one. Empty: no layer has a window."""
    local_rope_theta: float | None = None
    """Base in layers with a window, whose rope is never scaled; None: all layers are rotated alike."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers without rotary embedding."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """Tokenizer of an artifact, with its chat template and the tokens that begin and end a text."""

    tokenizer: Tokenizer
    """A ``tokenizers.Tokenizer``; its post-processor adds BOS if the artifact requires it."""
    chat_template: str | None
    """Jinja source, or None."""
    bos_token: str | None
    eos_token: str | None
    end_token_ids: tuple[int, ...]
    """Sorted; any of them ends a sequence."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A model on disk, opened and checked, nothing large read yet."""

    source: str
    """As the user wrote it."""
    name: str
    path: Path
    format: str
    """``gguf`` or ``safetensors``."""
    fingerprint: str
    """32 hex digits over the content; the path does not matter."""
    num_bytes: int
    """Size of the weight files."""
    config: ModelConfig
    weights: Weights
    load_tokenizer: Callable[[], TokenizerParts]
    """Reads the tokenizer; MissingTokenizerError when there is none."""
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)
    """From generation_config.json: any of temperature, top_k, top_p, min_p, repetition_penalty."""
