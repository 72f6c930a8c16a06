"""Logits of tiny random GGUF files in every encoding, computed by llama.cpp through llama-cpp-python.

    python -m tools.golden.logits_llama_cpp tests/golden/logits_llama_cpp.npz
    python -m tools.golden.logits_llama_cpp tests/golden/logits_architectures_llama_cpp.npz --architectures
    python -m tools.golden.logits_llama_cpp tests/golden/logits_hybrids_llama_cpp.npz --hybrids

The first file has llama and qwen3 in every encoding, the second one the other architectures in two, the third one
hybrids. It needs the
``golden`` extra. ``tools.random_models`` writes the models from a seed, so only logits are stored.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tools.golden.architecture_cases import GGUF_CASES
from tools.golden.hybrid_cases import HYBRID_GGUF_CASES, hybrid_token_ids
from tools.golden.hybrid_cases import POSITIONS as HYBRID_POSITIONS
from tools.golden.hybrid_cases import SEED as HYBRID_SEED
from tools.golden.logit_cases import GGUF_ARCHITECTURES, GGUF_ENCODINGS, POSITIONS, SEED, Floats, gguf_shape, token_ids
from tools.random_models import Shape, write_gguf

_F32 = 0
"""ggml's number of float32, used for the KV cache."""


def llama_cpp_logits(path: Path, shape: Shape, ids: Sequence[int], positions: Sequence[int]) -> Floats:
    """Logits [len(positions), vocab]: one batch, float32 KV, no flash attention."""
    import llama_cpp

    model_parameters = llama_cpp.llama_model_default_params()
    # Repacked weights (AMX) crash on such small matrices with llama-cpp-python 0.3.36.
    model_parameters.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_parameters)
    assert model, f"llama.cpp does not load {path}"
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = 256 if len(ids) <= 256 else 512
    parameters.type_k = parameters.type_v = _F32
    parameters.flash_attn_type = 0
    context = llama_cpp.llama_init_from_model(model, parameters)
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for index, token in enumerate(ids):
        batch.token[index], batch.pos[index] = int(token), index
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
        batch.logits[index] = 1
    assert llama_cpp.llama_decode(context, batch) == 0
    rows = []
    for position in positions:
        pointer = llama_cpp.llama_get_logits_ith(context, position)
        row = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float * shape.vocab_size)).contents
        rows.append(np.array(row, np.float32))
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return np.stack(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--architectures", action="store_true")
    parser.add_argument("--hybrids", action="store_true")
    args = parser.parse_args()
    out = args.out
    golden = {}
    with tempfile.TemporaryDirectory() as directory:
        if args.architectures or args.hybrids:
            seed, positions = (HYBRID_SEED, HYBRID_POSITIONS) if args.hybrids else (SEED, POSITIONS)
            for name, case in (HYBRID_GGUF_CASES if args.hybrids else GGUF_CASES).items():
                ids = hybrid_token_ids(case.shape) if args.hybrids else token_ids(case.shape.vocab_size)
                for encoding in case.encodings:
                    path = Path(directory) / f"{name}-{encoding}.gguf"
                    write_gguf(path, case.shape, encoding, seed=seed, extra=case.extra)
                    golden[f"{name}.{encoding}"] = llama_cpp_logits(path, case.shape, ids.tolist(), positions)
        else:
            for name in GGUF_ARCHITECTURES:
                for encoding in GGUF_ENCODINGS:
                    shape = gguf_shape(name, encoding)
                    path = write_gguf(Path(directory) / f"{name}-{encoding}.gguf", shape, encoding, seed=SEED)
                    ids = token_ids(shape.vocab_size)
                    golden[f"{name}.{encoding}"] = llama_cpp_logits(path, shape, ids.tolist(), POSITIONS)
    np.savez_compressed(out, **golden)  # type: ignore[arg-type]  # numpy's stub confuses the names with its flag
    for key, logits in golden.items():
        print(f"{key}: {logits.shape}, deviation {logits.std():.3f}")
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
