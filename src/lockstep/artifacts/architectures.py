"""Architecture table: lists the supported decoders and encoders, with the defaults of their files.

Data only. Sources: the configuration and modelling classes of transformers (`configuration_*.py`, `modeling_*.py`), and
for GGUF llama.cpp's `src/models/*.cpp` and `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table: constants of a model family, and the defaults of its configuration class."""

    name: str
    """Name in `ModelConfig.architecture`."""
    class_name: str
    """Class name in config.json."""
    classifier_name: str = ""
    """Class name of the architecture's classifier; empty: none is supported."""
    model_type: str = ""
    """Model type in config.json; empty: equal to the name."""
    in_gguf: bool = True
    """True if GGUF files use the name. GGUF files of other architectures have the name of a compatible one."""
    interleaved: bool = False
    """True if GGUF stores the rows of q and k for rope on adjacent pairs; otherwise for rope on halves."""
    traits: Mapping[str, object] = field(default_factory=dict)
    """Fields of `ModelConfig` that are the same for all models of the architecture."""
    norm_offset: float = 0.0
    """Offset that must be added to each norm weight of Hugging Face files. Converters to GGUF have added it."""
    hidden_act: str = "silu"
    """The only supported activation in config.json."""
    fused: bool = False
    """True if q, k and v are rows of one matrix, and gate and up rows of another."""
    has_shared_mlp: bool = False
    """True if the feed-forward is named ``shared_mlp``, and gate and up are rows of its ``input_linear``."""
    partial_rope: bool = False
    """True if rope can be limited to the leading part of each head."""
    rotary_share: float = 1.0
    """Default of this part, as a share of the head."""
    recurrent: str = ""
    """Kind of the layers that are not attention, as in `ModelConfig.mixers`; empty: all layers are attention."""
    windows: str = "none"
    """Layers with a sliding window: ``none``, ``all`` (if its size is set), ``optional`` (the layers that the file
    lists, if it enables them), ``periodic`` (all but every ``period``-th, the last of each period), ``listed`` (those
    that the file lists; without a list, all but the first of each ``period``) or ``mixed`` (those that the file lists
    beside recurrent layers)."""
    period: int = 0
    """Distance of layers with attention to all tokens, if files list no kinds of layers."""
    rms_norm_eps: float = 1e-6
    head_dim: int | None = None
    """Default head size. None: hidden size divided by the number of heads."""
    tied_embeddings: bool = False
    rope_theta: float = 10000.0
    local_rope_theta: float | None = None
    """Rope base in layers with a window; None: equal to ``rope_theta``."""
    sliding_window: int = 0
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of keys that the ``text_config`` of a model with images may lack."""

    @property
    def has_local_rope(self) -> bool:
        """True if files have rope settings for each kind of attention layer."""
        return self.windows in ("periodic", "mixed")


_ENCODER = {"bidirectional": True, "tied_embeddings": True, "layer_norm": True, "embedding_norm": True}
_BERT = {
    **_ENCODER, "norm_bias": True, "pre_norm": False, "sum_norm": True, "final_norm": False, "num_token_types": 2,
}  # fmt: skip
_PLAIN_BERT = {**_BERT, "attention_bias": True, "gated": False, "mlp_bias": True}
_POST_NORM = {"pre_norm": False, "post_norm": True, "qk_norm": True, "qk_norm_whole": True}

ARCHITECTURES: Mapping[str, Architecture] = {
    row.name: row
    for row in (
        Architecture("llama", "LlamaForCausalLM", interleaved=True),
        Architecture("mistral", "MistralForCausalLM", in_gguf=False, windows="all"),
        Architecture("qwen2", "Qwen2ForCausalLM", traits={"attention_bias": True}, windows="optional"),
        Architecture("qwen3", "Qwen3ForCausalLM", traits={"qk_norm": True}, windows="optional", head_dim=128),
        Architecture(
            "gemma3",
            "Gemma3ForCausalLM",
            model_type="gemma3_text",
            traits={"qk_norm": True, "post_norm": True, "activation": "gelu_tanh"},
            norm_offset=1.0,
            hidden_act="gelu_pytorch_tanh",
            windows="periodic",
            period=6,
            head_dim=256,
            tied_embeddings=True,
            rope_theta=1e6,
            local_rope_theta=1e4,
            sliding_window=4096,
            defaults={
                "vocab_size": 262208,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "max_position_embeddings": 131072,
            },
        ),
        Architecture("phi3", "Phi3ForCausalLM", fused=True, partial_rope=True, windows="all", rms_norm_eps=1e-5),
        Architecture("granite", "GraniteForCausalLM", interleaved=True),
        Architecture(
            "granite_swa",
            "GraniteSWAForCausalLM",
            interleaved=True,
            traits={"sinks": True},
            windows="listed",
            period=4,
            rms_norm_eps=1e-5,
            tied_embeddings=True,
            sliding_window=128,
        ),
        Architecture("granitemoehybrid", "GraniteMoeHybridForCausalLM", in_gguf=False, has_shared_mlp=True),
        Architecture(
            "mistral3",
            "Ministral3ForCausalLM",
            model_type="ministral3",
            interleaved=True,
            windows="all",
            rms_norm_eps=1e-5,
            head_dim=128,
            rope_theta=1e6,
        ),
        Architecture("olmo2", "Olmo2ForCausalLM", traits=_POST_NORM, rms_norm_eps=1e-5),
        Architecture(
            "olmo3",
            "Olmo3ForCausalLM",
            in_gguf=False,
            traits=_POST_NORM,
            windows="periodic",
            period=4,
            rms_norm_eps=1e-5,
            rope_theta=5e5,
            sliding_window=4096,
        ),
        Architecture(
            "qwen35",
            "Qwen3_5ForCausalLM",
            model_type="qwen3_5_text",
            traits={"qk_norm": True, "attention_gate": True},
            norm_offset=1.0,
            partial_rope=True,
            rotary_share=0.25,
            recurrent="delta_net",
            period=4,
            head_dim=256,
        ),
        Architecture(
            "lfm2",
            "Lfm2ForCausalLM",
            traits={"qk_norm": True},
            recurrent="convolution",
            rms_norm_eps=1e-5,
            tied_embeddings=True,
            rope_theta=1e6,
        ),
        Architecture(
            "lfm3",
            "Lfm3ForCausalLM",
            in_gguf=False,
            traits={"qk_norm": True, "post_norm": True, "head_gates": True},
            recurrent="convolution",
            windows="mixed",
            rms_norm_eps=1e-5,
            head_dim=128,
            tied_embeddings=True,
            rope_theta=1e6,
            local_rope_theta=1e4,
            sliding_window=256,
        ),
        Architecture(
            "gemma4",
            "Gemma4ForCausalLM",
            model_type="gemma4_text",
            traits={
                "qk_norm": True,
                "value_norm": True,
                "post_norm": True,
                "activation": "gelu_tanh",
                "layer_scalars": True,
            },
            hidden_act="gelu_pytorch_tanh",
            tied_embeddings=True,
            rope_theta=1e6,
            local_rope_theta=1e4,
            sliding_window=512,
        ),
        Architecture("bert", "BertModel", "BertForSequenceClassification", traits=_PLAIN_BERT, rms_norm_eps=1e-12),
        Architecture(
            "xlm-roberta",
            "XLMRobertaModel",
            "XLMRobertaForSequenceClassification",
            model_type="xlm-roberta",
            in_gguf=False,
            traits=_PLAIN_BERT,
            rms_norm_eps=1e-12,
        ),
        Architecture(
            "nomic-bert",
            "NomicBertModel",
            model_type="nomic_bert",
            traits=_BERT,
            fused=True,
            rms_norm_eps=1e-12,
            rope_theta=1000.0,
        ),
        Architecture(
            "modern-bert",
            "ModernBertModel",
            "ModernBertForSequenceClassification",
            model_type="modernbert",
            traits={**_ENCODER, "first_norm": False},
            fused=True,
            windows="periodic",
            period=3,
            rms_norm_eps=1e-5,
            rope_theta=160000.0,
            local_rope_theta=1e4,
            sliding_window=128,
        ),
        Architecture(
            "gemma-embedding",
            "Gemma3TextModel",
            model_type="gemma3_text",
            traits={
                "bidirectional": True,
                "qk_norm": True,
                "post_norm": True,
                "activation": "gelu_tanh",
            },
            norm_offset=1.0,
            hidden_act="gelu_pytorch_tanh",
            windows="periodic",
            period=6,
            head_dim=256,
            tied_embeddings=True,
            rope_theta=1e6,
            local_rope_theta=1e4,
            sliding_window=4096,
        ),
        Architecture(
            "smollm3", "SmolLM3ForCausalLM", interleaved=True, windows="optional", tied_embeddings=True, rope_theta=2e6
        ),
    )
}
