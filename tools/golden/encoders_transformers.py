"""Hidden states and heads of tiny random encoders, computed by Hugging Face transformers in float32 on the CPU.

    python -m tools.golden.encoders_transformers tests/golden/encoders_transformers.npz

Needs the ``golden`` extra. The weights are drawn from a seed (tools/random_encoders.py), so only results are stored:
hidden states of each text, and what the head makes of their pooled vectors.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from tools.golden.encoder_cases import LENGTHS, SEED, Floats, pooled, text
from tools.random_encoders import ENCODERS, Encoder, dense_tensors, encoder_tensors


def results(encoder: Encoder) -> tuple[list[Floats], Floats]:
    """Hidden states [length, hidden] of each text, and the head's results [texts, size]."""
    import torch

    model = _loaded(encoder)
    states: list[Floats] = []
    scores = []
    with torch.no_grad():
        for length in LENGTHS:
            ids = torch.from_numpy(text(length))[None]
            body = getattr(model, model.base_model_prefix, model) if encoder.labels else model
            states.append(np.asarray(body(input_ids=ids).last_hidden_state[0].numpy(), np.float32))
            if encoder.labels:
                scores.append(model(input_ids=ids).logits[0].numpy())
    if not encoder.labels:
        scores = list(_dense(encoder, pooled(encoder, states)))
    return states, np.asarray(scores, np.float32)


def _loaded(encoder: Encoder) -> Any:
    import torch
    import transformers

    name = encoder.config["architectures"][0]
    declared = {key: value for key, value in encoder.config.items() if key != "architectures"}
    config = transformers.AutoConfig.for_model(**declared)
    config._attn_implementation = "eager"
    extra = {"add_pooling_layer": False} if name in ("BertModel", "XLMRobertaModel") else {}
    model = getattr(transformers, name)(config, **extra).to(torch.float32).eval()
    state = {key: torch.from_numpy(np.asarray(value)) for key, value in encoder_tensors(encoder, seed=SEED).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not missing and not unexpected, (missing, unexpected)  # noqa: PT018  # both lists tell more than one
    return model


def _dense(encoder: Encoder, vectors: Floats) -> Floats:
    """Apply the dense modules as sentence-transformers does."""
    import torch

    x = torch.from_numpy(vectors)
    for (_, activation, _), tensors in zip(encoder.dense, dense_tensors(encoder, SEED), strict=True):
        weights = {key: torch.from_numpy(np.asarray(value)) for key, value in tensors.items()}
        x = torch.nn.functional.linear(x, weights["linear.weight"], weights.get("linear.bias"))
        x = getattr(torch.nn, activation.rpartition(".")[2])()(x)
    return np.asarray(x.numpy(), np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    golden: dict[str, Floats] = {}
    for name, encoder in ENCODERS.items():
        states, scores = results(encoder)
        golden[name] = np.concatenate(states)
        if encoder.dense or encoder.labels:
            golden[f"{name}.head"] = scores
        print(f"{name}: {golden[name].shape}, deviation {golden[name].std():.3f}, head {scores.shape}")
    np.savez_compressed(args.out, **golden)  # type: ignore[arg-type]  # the stub takes the names for its own flag
    print(f"{args.out}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
