"""Inverse frequencies and attention factors of scaled rotary embeddings, computed by transformers.

    python -m tools.golden.rope tests/golden/rope.json

It needs the ``golden`` extra.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 16384,
}
_PHI3 = _LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096}
_FACTORS = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + index / 8 for index in range(24)],
    "long_factor": [4.0 + index / 8 for index in range(24)],
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 4096,
}


def _case(base: dict[str, Any], rope: dict[str, Any], **more: Any) -> dict[str, Any]:
    return base | {"rope_parameters": rope} | more


CONFIGS = {
    "linear": _case(_LLAMA, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "dynamic": _case(_LLAMA, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}),
    "llama3": _case(_LLAMA, _LLAMA3),
    "llama3-trained-outside": _case(_LLAMA, _LLAMA3, original_max_position_embeddings=8192),
    "yarn": _case(_LLAMA, _YARN),
    "yarn-betas": _case(_LLAMA, _YARN | {"beta_fast": 16, "beta_slow": 2}),
    "yarn-attention": _case(_LLAMA, _YARN | {"attention_factor": 1.5}),
    "yarn-mscale": _case(_LLAMA, _YARN | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}),
    "yarn-not-truncated": _case(_LLAMA, _YARN | {"truncate": False}),
    "yarn-short": _case(_LLAMA, _YARN | {"factor": 0.5, "rope_theta": 100.0, "original_max_position_embeddings": 16}),
    "partial": _case(_PHI3, {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    "longrope": _case(_PHI3, _FACTORS, original_max_position_embeddings=4096),
    "longrope-attention": _case(_PHI3, _FACTORS | {"attention_factor": 1.25}, original_max_position_embeddings=4096),
    "longrope-whole": _case(_PHI3, _FACTORS, original_max_position_embeddings=16384),
}


def rope_of(declared: dict[str, Any]) -> dict[str, Any]:
    """Config with the frequencies that transformers initialises from it."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    config = AutoConfig.for_model(**json.loads(json.dumps(declared)))
    kind = config.rope_parameters["rope_type"]
    compute = ROPE_INIT_FUNCTIONS.get(kind, Phi3RotaryEmbedding.compute_default_rope_parameters)
    frequencies, factor = compute(config)
    return {"config": declared, "frequencies": frequencies.tolist(), "attention_factor": float(factor)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.write_text(json.dumps({name: rope_of(config) for name, config in CONFIGS.items()}) + "\n")
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
