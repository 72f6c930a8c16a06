"""Artifact types: describe models on disk independent of their format; readers create them and executors use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.task import Pooling
from lockstep.artifacts.task import Task as Task

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from lockstep.artifacts.fingerprint import MappedFile


class Encoding(Enum):
    """Storage format of a tensor. The block formats are ggml's, with 32 or 256 (_K, _XS) values along the last axis."""

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
    Q3_K = "Q3_K"
    IQ4_NL = "IQ4_NL"
    IQ4_XS = "IQ4_XS"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A stored tensor, usually a view of a memory-mapped file."""

    name: str
    """Canonical (Hugging Face) name, such as ``model.layers.0.self_attn.q_proj.weight``."""
    encoding: Encoding
    shape: tuple[int, ...]
    """Logical shape, row-major, output features first."""
    data: npt.NDArray[np.generic]
    """F32/F16: the array in ``shape``. BF16: uint16 in ``shape``. Blocks: uint8 ``[*shape[:-1], row_bytes]``."""


class Weights(Protocol):
    """The tensors of one artifact by canonical name. Rope permutations are already reversed (rotate-half layout)."""

    def names(self) -> tuple[str, ...]:
        """Return the canonical names in file order."""
        ...

    def __contains__(self, name: object) -> bool: ...

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor. Raises CorruptArtifactError with its name if it is missing or out of bounds."""
        ...


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Scaling of rotary frequencies."""

    kind: str
    """Kind of scaling: ``linear``, ``llama3``, ``yarn`` or ``factors``."""
    factor: float
    parameters: Mapping[str, float] = field(default_factory=dict)
    """Parameters by kind. ``llama3``: low_freq_factor, high_freq_factor, original_max_position_embeddings. ``yarn``:
    original_max_position_embeddings, beta_fast, beta_slow, truncate (1 or 0)."""
    factors: tuple[float, ...] = ()
    """For kind ``factors``: rotary_dim / 2 divisors of the frequencies (longrope, and llama3 scaling in GGUF)."""
    attention_factor: float = 1.0
    """Factor for cosines and sines (``yarn``, longrope). Attention scores are scaled by its square."""


Mixer = Literal["attention", "delta_net", "convolution"]
"""Part of a layer that lets a token depend on the tokens before it."""


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Shapes of gated delta nets: recurrent layers whose state is a matrix per value head."""

    num_key_heads: int
    num_value_heads: int
    """A multiple of the key heads. Value head v reads key head v // (value heads / key heads), unless `is_tiled`."""
    key_dim: int
    value_dim: int
    taps: int
    """Number of tokens that the convolution before the recurrence sees, including its own."""
    is_tiled: bool = False
    """Whether value heads are stored in the order of GGUF files, where value head v reads key head v % key heads."""
    has_rates: bool = False
    """Whether the decay rates are stored themselves, in a tensor ``A``, and not as logarithms ``A_log`` of their
    negations."""

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Factor of queries that grows with their position: 1 + beta * log(1 + floor(position / period))."""

    beta: float
    period: int
    """Number of tokens after which the factor grows."""


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """One dense layer of the head of an encoder: a product, its activation, and a norm."""

    size: int
    """Number of output features."""
    activation: str = ""
    """``tanh``, ``relu``, ``gelu_erf``, ``gelu_tanh``, ``silu``, or empty for none."""
    bias: bool = True
    norm: bool = False
    """Whether the results are normalized, as the model's other norms do it."""


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A dense layer on the pooled vector, in a folder of its own."""

    folder: str
    layer: HeadLayer


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """Pooling and further steps by which a model makes vectors."""

    pooling: Pooling = "mean"
    normalize: bool = True
    """True if the model's own pipeline scales vectors to length 1."""
    dense: tuple[DenseModule, ...] = ()
    answer_ids: tuple[int, ...] | None = None
    """Token that means relevant, and perhaps one that means not relevant, if the model scores documents by their
    logits; None: it does not, or its files name no tokens."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that are put before an input, by name, e.g. ``query``."""
    default_prompt: str | None = None
    """Name of the prompt that is used if a request names none; None: no prompt."""
    max_tokens: int | None = None
    """Maximum tokens of a text, if it is less than the context of the model."""
    lowercase: bool = False
    """True if texts are put into lower case before the tokenizer's own steps."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Configuration of a decoder or encoder. Differences between architectures are fields, not subclasses."""

    architecture: str
    """Name in `architectures.ARCHITECTURES`."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    """Context length that the artifact declares, in tokens."""
    rms_norm_eps: float
    """Epsilon of all norms."""
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    attention_bias: bool = False
    """Whether q, k and v have biases. o_proj has one if the weights contain ``self_attn.o_proj.bias``."""
    qk_norm: bool = False
    """Whether queries and keys are normalized before the rotation."""
    qk_norm_whole: bool = False
    """Whether queries and keys are normalized over all heads together instead of per head."""
    pre_norm: bool = True
    """Whether the inputs of attention and feed-forward are normalized."""
    post_norm: bool = False
    """Whether the outputs of attention and feed-forward are normalized before they are added to the residual."""
    norm_offset: float = 0.0
    """Offset added to every norm weight, because some files store the difference from one."""
    activation: str = "silu"
    """Activation of the feed-forward gate, or of the feed-forward without one: ``silu``, ``gelu_tanh``, ``gelu_erf`` or
    ``relu``."""
    attention_scale: float | None = None
    """Factor of the attention scores; None: head_dim ** -0.5."""
    query_scaling: QueryScaling | None = None
    """Factor of rotated queries by their position; None: queries are not scaled."""
    sinks: bool = False
    """Whether each head of a layer has a sink: the score of one more key, which has no value."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of the outputs of attention and feed-forward that are added to the residual."""
    logits_divisor: float = 1.0
    rotary_dim: int | None = None
    """Number of leading dimensions of each head that are rotated; None: all."""
    windows: tuple[int, ...] = ()
    """Number of tokens that a query sees, including itself, per layer; 0: all. Empty: no windows. In bidirectional
    models, a query sees half as many tokens on each side, rounded down, and itself."""
    local_rope_theta: float | None = None
    """Rope base in layers with a window, which are never scaled; None: all layers use the same rope."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers without rotary embedding."""
    bidirectional: bool = False
    """Whether tokens see later tokens. Such an encoder has hidden states and no logits."""
    layer_norm: bool = False
    """Whether norms subtract the mean. Otherwise they are RMS norms."""
    norm_bias: bool = False
    sum_norm: bool = False
    """Whether the residual is normalized after each addition, instead of the inputs."""
    embedding_norm: bool = False
    """Whether the embeddings are normalized."""
    first_norm: bool = True
    """Whether the first layer normalizes the input of its attention, if the others do."""
    final_norm: bool = True
    gated: bool = True
    """Whether the feed-forward has a gate. Otherwise it is one product, its activation, and another product."""
    mlp_bias: bool = False
    num_positions: int = 0
    """Rows of the table of position embeddings, which are added to those of tokens; 0: no table."""
    position_offset: int = 0
    """Row of the first position in this table."""
    num_token_types: int = 0
    """Number of token types, whose embeddings are added to those of tokens: the texts of a pair have different types.
    0: none."""
    head: tuple[HeadLayer, ...] = ()
    """Dense layers that are applied to a pooled vector, in order."""
    num_labels: int = 0
    """Number of scores of a classifier, whose head they leave; 0: the model embeds text."""
    classifier_pooling: str = ""
    """Pooling before a classifier: ``cls`` for the first token, or ``mean``."""

    mixers: tuple[Mixer, ...] = ()
    """Kind of each layer; empty: all are attention."""
    delta_net: DeltaNet | None = None
    """Shapes of layers of the kind ``delta_net``."""
    conv_taps: int = 0
    """Number of tokens that a layer of the kind ``convolution`` sees, including its own."""
    conv_bias: bool = False
    """Whether layers of the kind ``convolution`` have biases."""
    attention_gate: bool = False
    """Whether the output of attention is multiplied by the sigmoid of a gate. Then q_proj has, for each head, the
    query and the gate."""
    head_gates: bool = False
    """Whether the output of each head is multiplied by the sigmoid of one number, which g_proj has for it."""
    kv_owners: tuple[int, ...] = ()
    """By layer, the layer whose keys and values it reads; empty: each layer has its own."""
    full_head_dim: int | None = None
    """Head size of layers without a window, if it differs from `head_dim`."""
    full_kv_heads: int | None = None
    """Key and value heads of layers without a window, if their number differs from `num_kv_heads`."""
    intermediate_sizes: tuple[int, ...] = ()
    """Size of the feed-forward by layer; empty: `intermediate_size` everywhere."""
    value_norm: bool = False
    """Whether values are normalized per head, without weights, before they are stored."""
    per_layer_size: int = 0
    """Size of the embedding that a token has for each layer beside its own one; 0: none."""
    layer_scalars: bool = False
    """Whether a layer may have a factor, in ``layer_scalar``, by which its result is multiplied."""
    logits_cap: float = 0.0
    """Logits x become cap * tanh(x / cap); 0: they stay what they are."""

    def mixer_of(self, layer: int) -> Mixer:
        """Kind of a layer."""
        return self.mixers[layer] if self.mixers else "attention"

    def window_of(self, layer: int) -> int:
        """Number of tokens that a query of the layer sees, including itself; 0: all."""
        return self.windows[layer] if self.windows else 0

    def head_dim_of(self, layer: int) -> int:
        """Size of a layer's heads."""
        if self.full_head_dim is None or self.window_of(layer):
            return self.head_dim
        return self.full_head_dim

    def kv_heads_of(self, layer: int) -> int:
        """Number of a layer's key and value heads."""
        if self.full_kv_heads is None or self.window_of(layer):
            return self.num_kv_heads
        return self.full_kv_heads

    def intermediate_size_of(self, layer: int) -> int:
        """Size of a layer's feed-forward."""
        return self.intermediate_sizes[layer] if self.intermediate_sizes else self.intermediate_size

    def owns_kv(self, layer: int) -> bool:
        """True if a layer stores keys and values."""
        return self.mixer_of(layer) == "attention" and (not self.kv_owners or self.kv_owners[layer] == layer)


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """Tokenizer of an artifact, with its chat template and the tokens that start and end a text."""

    tokenizer: Tokenizer
    """A ``tokenizers.Tokenizer``. Its post-processor adds BOS if the artifact requires it."""
    chat_template: str | None
    """Jinja source, or None."""
    bos_token: str | None
    eos_token: str | None
    end_token_ids: tuple[int, ...]
    """Sorted ids of all tokens that end a sequence."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that are put before a text to embed, by name, e.g. ``query``."""
    default_prompt: str | None = None
    """Name of the prompt that is used if a request names none; None: no prompt."""
    answer_ids: tuple[int, ...] | None = None
    """Token of a reranker that means relevant, and perhaps one that means not relevant; None: those of ``yes`` and
    ``no``."""
    has_raw_scores: bool = False
    """Whether the scores of a reranker are its logits. Otherwise they are the sigmoids of its logits."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A model on disk that has been opened and checked. Large data has not been read yet."""

    source: str
    """Source as specified by the user."""
    name: str
    path: Path
    format: str
    """``gguf`` or ``safetensors``."""
    fingerprint: str
    """Fingerprint of the content, as 32 hex digits. It does not depend on the path."""
    num_bytes: int
    """Size of the weight files."""
    config: ModelConfig
    weights: Weights
    load_tokenizer: Callable[[], TokenizerParts]
    """Reads the tokenizer. Raises MissingTokenizerError if there is none."""
    bytes_by_encoding: Mapping[Encoding, int] = field(default_factory=dict)
    """Stored bytes of the tensors of a GGUF file, by encoding."""
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)
    """Defaults from generation_config.json: any of temperature, top_k, top_p, min_p, repetition_penalty."""
    task: Task = "generate"
    embedding: EmbeddingConfig | None = None
    """How the model makes vectors; None: the artifact does not describe it."""
    adapters: tuple[Adapter, ...] = ()
    """LoRA adapters that a load adds to the weights, in this order. `weights` are those without them."""


class AdapterTarget(NamedTuple):
    """The change of one product: y + scale * (x A^T) B^T."""

    a: Tensor
    """[rank, columns], in F32, F16 or BF16."""
    b: Tensor
    """[features, rank]"""
    scale: float


ADAPTER_AS_MODEL = (
    "a LoRA adapter, not a model; name its base as the model, and the adapter by --lora-modules NAME=PATH, --lora PATH "
    "or `adapter:` in a manifest"
)
"""Reason why a source that is an adapter cannot be opened as a model."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter on disk that has been opened and checked against its base model."""

    name: str
    path: Path
    fingerprint: str
    """Fingerprint of the content, as 32 hex digits. It does not depend on the path."""
    rank: int
    """The largest rank of its products."""
    scale: float
    """alpha / rank, or alpha / sqrt(rank) for rank-stabilised adapters. Products may have factors of their own."""
    targets: Mapping[str, AdapterTarget] = field(repr=False)
    """Changes by canonical name of the base's tensor, in the order of the base's tensors."""
    num_bytes: int
    """Memory of its numbers in 16 bits."""
    invocation_ids: tuple[int, ...] = ()
    """Tokens that activate the adapter (aLoRA): it applies from the first token of their last occurrence in the
    prompt on. Empty: it applies from the first token of a text on."""
    weights_file: MappedFile | None = None
    """The file of its numbers, which are read from it with every load into an executor; None: they are in memory."""
