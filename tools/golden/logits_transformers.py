"""Logits of tiny random checkpoints, computed by Hugging Face transformers in float32 on the CPU.

    python -m tools.golden.logits_transformers tests/golden/logits_transformers.npz
    python -m tools.golden.logits_transformers tests/golden/logits_architectures.npz --architectures
    python -m tools.golden.logits_transformers tests/golden/logits_hybrids.npz --hybrids

The first file has llama and qwen3, the second one the other architectures (architecture_cases.py), the third one
hybrids (hybrid_cases.py), which compute one token after the other. It needs the
``golden`` extra. The weights are drawn from a seed (logit_cases.py), so only prompts and logits are stored.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from tools.golden.architecture_cases import HUGGINGFACE_CASES, ArchitectureCase
from tools.golden.hybrid_cases import HYBRID_CASES, hybrid_token_ids
from tools.golden.hybrid_cases import POSITIONS as HYBRID_POSITIONS
from tools.golden.logit_cases import CASES, POSITIONS, Floats, LogitCase, sharpened, tensors, token_ids
from tools.random_shapes import Shape


def transformers_logits(case: LogitCase) -> Floats:
    """Logits [len(POSITIONS), vocab]."""
    return _logits_of(plain_model(case), tensors(case), case.shape)


def plain_model(case: LogitCase) -> Any:
    """A llama or qwen3 with weights that transformers draws."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape = case.shape
    config_type, model_type = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[shape.architecture]
    config = config_type(
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_model_len,
        rms_norm_eps=shape.rms_norm_eps,
        tie_word_embeddings=shape.tied_embeddings,
        attention_bias=case.attention_bias,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta, **case.rope_scaling},
        attn_implementation="eager",
    )
    return model_type(config)


def architecture_logits(case: ArchitectureCase) -> Floats:
    """Logits [len(POSITIONS), vocab] of the model that transformers builds from a config.json."""
    return _logits_of(model_of(case), sharpened(case.shape), case.shape)


def hybrid_logits(case: ArchitectureCase) -> Floats:
    """Logits [len(HYBRID_POSITIONS), vocab] of a hybrid, token by token.

    transformers computes several tokens at once by another formula (``torch_chunk_gated_delta_rule``).
    """
    import torch

    model = with_weights(model_of(case), sharpened(case.shape), case.shape)
    rows, cache = [], None
    with torch.no_grad():
        for token in hybrid_token_ids(case.shape).tolist():
            out = model(torch.tensor([[token]]), cache=cache, use_cache=True)
            cache = out.cache
            rows.append(out.logits[0, 0].numpy().copy())
    return np.asarray(np.stack(rows)[list(HYBRID_POSITIONS)], np.float32)


def model_of(case: ArchitectureCase) -> Any:
    """The model that transformers builds from a config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    declared = case.config()
    config = AutoConfig.for_model(**declared)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert type(model).__name__ == declared["architectures"][0]
    return model


def _logits_of(model: Any, state: dict[str, Floats], shape: Shape) -> Floats:
    import torch

    model = with_weights(model, state, shape)
    with torch.no_grad():
        logits = model(torch.from_numpy(token_ids(shape.vocab_size))[None], use_cache=False).logits[0]
    return np.asarray(logits.numpy()[list(POSITIONS)], np.float32)


def with_weights(model: Any, state: dict[str, Floats], shape: Shape) -> Any:
    """The model in float32 with these weights, all of which must be there."""
    import torch

    model = model.to(torch.float32).eval()
    missing, unexpected = model.load_state_dict(
        {name: torch.from_numpy(tensor) for name, tensor in state.items()}, strict=False
    )
    absent = set(missing) - ({"lm_head.weight"} if shape.tied_embeddings else set())
    assert not absent, absent
    assert not unexpected, unexpected
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--architectures", action="store_true")
    parser.add_argument("--hybrids", action="store_true")
    args = parser.parse_args()
    out = args.out
    golden: dict[str, Floats] = {}
    prompts = {}
    if args.architectures:
        golden |= {name: architecture_logits(case) for name, case in HUGGINGFACE_CASES.items()}
    elif args.hybrids:
        golden |= {name: hybrid_logits(case) for name, case in HYBRID_CASES.items()}
    else:
        golden |= {name: transformers_logits(case) for name, case in CASES.items()}
        prompts = {f"{name}.token_ids": token_ids(case.shape.vocab_size) for name, case in CASES.items()}
    np.savez_compressed(out, **golden, **prompts)  # type: ignore[arg-type]  # the stub confuses the names with its flag
    for name, logits in golden.items():
        print(f"{name}: {logits.shape}, deviation {logits.std():.3f}")
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
