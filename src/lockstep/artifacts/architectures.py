"""The architectures that the one dense decoder covers, and what their files take for granted. Data, no code.

Sources: the configuration and modelling classes of transformers (`configuration_*.py`, `modeling_*.py`), and for GGUF
llama.cpp's `src/models/*.cpp` and `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table: constants of a family of models, and the defaults of its configuration class."""

    name: str
    """Ours, and the one that `ModelConfig.architecture` bears."""
    class_name: str
    """In config.json."""
    model_type: str = ""
    """In config.json; empty: as the name."""
    in_gguf: bool = True
    """True if GGUF files bear the name; models of the others are written under another one's."""
    interleaved: bool = False
    """GGUF stores the rows of q and k for a rope on neighbouring pairs; otherwise for one on halves."""
    traits: Mapping[str, object] = field(default_factory=dict)
    """Fields of `ModelConfig` that all its models have."""
    norm_offset: float = 0.0
    """Offset that Hugging Face files leave out of each norm weight. Converters to GGUF add it."""
    hidden_act: str = "silu"
    """The one activation of config.json that is computed."""
    fused: bool = False
    """q, k and v are rows of one matrix, gate and up of another."""
    partial_rope: bool = False
    """Rope may cover the leading part of each head only."""
    windows: str = "none"
    """Layers with a sliding window: ``none``, ``all`` (when its size is set), ``optional`` (those that the file
    names, when it switches them on) or ``periodic`` (all but every ``period``-th)."""
    period: int = 0
    rms_norm_eps: float = 1e-6
    head_dim: int | None = None
    """None: hidden size by number of heads."""
    tied_embeddings: bool = False
    rope_theta: float = 10000.0
    local_rope_theta: float | None = None
    """Base in layers with a window; None: as ``rope_theta``."""
    sliding_window: int = 0


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
        ),
        Architecture("phi3", "Phi3ForCausalLM", fused=True, partial_rope=True, windows="all", rms_norm_eps=1e-5),
        Architecture("granite", "GraniteForCausalLM", interleaved=True),
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
            "smollm3", "SmolLM3ForCausalLM", interleaved=True, windows="optional", tied_embeddings=True, rope_theta=2e6
        ),
    )
}
