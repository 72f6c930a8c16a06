"""What a caller may say about one generation: sampling, limits and endings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one generation; names and meanings are OpenAI's and vLLM's. None: the model's default."""

    temperature: float | None = None
    """0: greedy. Default 1, or what the artifact's generation_config.json says."""
    top_k: int | None = None
    """Keep the k most likely tokens; 0: all."""
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """None: the engine draws one at submission, so that a recording can repeat it."""
    max_tokens: int | None = None
    """None: as much as the context leaves."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    """None: none. k: the sampled token's log-probability and the k most likely."""
