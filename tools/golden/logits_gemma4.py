"""Logits of tiny models of Gemma 4, by transformers and by llama.cpp.

    python -m tools.golden.logits_gemma4 tests/golden/logits_gemma4.npz

For each case of transformers, the file has logits of a text, and the ids and logits of an answer that is decoded token
by token with the largest logit. For each case of llama.cpp it has logits of a text. It needs the ``golden`` extra.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tools.golden.architecture_cases import ArchitectureCase
from tools.golden.gemma4_cases import (
    GEMMA4_CASES,
    GEMMA4_GGUF_CASES,
    NUM_PROMPT_TOKENS,
    NUM_TOKENS,
    POSITIONS,
    SEED,
    gemma4_token_ids,
)
from tools.golden.logit_cases import Floats, sharpened
from tools.golden.logits_llama_cpp import llama_cpp_logits
from tools.random_models import write_gguf


def model_of(case: ArchitectureCase) -> Any:
    """The model that transformers builds from a config.json, in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    declared = case.config()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**declared), attn_implementation="eager")
    assert type(model).__name__ == declared["architectures"][0]
    model = model.to(torch.float32).eval()
    state = {name: torch.from_numpy(tensor) for name, tensor in sharpened(case.shape).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    absent = set(missing) - ({"lm_head.weight"} if case.shape.tied_embeddings else set())
    assert not absent, absent
    assert not unexpected, unexpected
    return model


def text_logits(case: ArchitectureCase) -> Floats:
    """Logits [len(POSITIONS), vocab] of a text, computed at once."""
    import torch

    with torch.no_grad():
        logits = model_of(case)(torch.from_numpy(gemma4_token_ids(case.shape))[None], use_cache=False).logits[0]
    return np.asarray(logits.numpy()[list(POSITIONS)], np.float32)


def answer(case: ArchitectureCase) -> tuple[Floats, Floats]:
    """Ids [NUM_TOKENS] of a prompt and its answer, and logits [len(POSITIONS), vocab], token by token."""
    import torch

    model, cache = model_of(case), None
    ids = gemma4_token_ids(case.shape)[:NUM_PROMPT_TOKENS].tolist()
    rows = []
    with torch.no_grad():
        for position in range(NUM_TOKENS):
            out = model(torch.tensor([[ids[position]]]), cache=cache, use_cache=True)
            cache = out.cache
            rows.append(out.logits[0, 0].numpy().copy())
            if len(ids) == position + 1:
                ids.append(int(rows[-1].argmax()))
    return np.array(ids[:NUM_TOKENS]), np.asarray(np.stack(rows)[list(POSITIONS)], np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    golden: dict[str, Any] = {}
    for name, case in GEMMA4_CASES.items():
        golden[name] = text_logits(case)
        golden[f"{name}.answer_ids"], golden[f"{name}.answer"] = answer(case)
    with tempfile.TemporaryDirectory() as directory:
        for name, gguf_case in GEMMA4_GGUF_CASES.items():
            for encoding in gguf_case.encodings:
                path = write_gguf(Path(directory) / f"{name}-{encoding}.gguf", gguf_case.shape, encoding, seed=SEED)
                ids = gemma4_token_ids(gguf_case.shape).tolist()
                golden[f"llama.cpp.{name}.{encoding}"] = llama_cpp_logits(path, gguf_case.shape, ids, POSITIONS)
    np.savez_compressed(out, **golden)
    for key, logits in golden.items():
        print(f"{key}: {logits.shape}, deviation {logits.std():.3f}")
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
