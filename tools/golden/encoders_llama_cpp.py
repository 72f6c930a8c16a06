"""Hidden states of tiny random encoders in GGUF files, computed by llama.cpp through llama-cpp-python.

    python -m tools.golden.encoders_llama_cpp tests/golden/encoders_llama_cpp.npz

Needs the ``golden`` extra. The files are written from a seed by ``tools.random_encoders``, so only states are stored.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from tools.golden.encoder_cases import LENGTHS, SEED, Floats, text
from tools.random_encoders import ENCODERS, write_encoder_gguf

_F32 = 0
"""ggml's number for float32."""
_NO_POOLING = 0


def hidden_states(path: Path, hidden_size: int) -> Floats:
    """States [tokens of all texts, hidden]: each text in a batch of its own, without flash attention."""
    import llama_cpp

    model_parameters = llama_cpp.llama_model_default_params()
    model_parameters.use_extra_bufts = False  # repacked weights crash on such small matrices
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_parameters)
    assert model, f"llama.cpp does not load {path}"
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = 256
    parameters.embeddings, parameters.pooling_type = True, _NO_POOLING
    parameters.type_k = parameters.type_v = _F32
    parameters.flash_attn_type = 0
    context = llama_cpp.llama_init_from_model(model, parameters)
    rows = []
    for length in LENGTHS:
        batch = llama_cpp.llama_batch_init(length, 0, 1)
        batch.n_tokens = length
        for index, token in enumerate(text(length)):
            batch.token[index], batch.pos[index] = int(token), index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = 1
        assert llama_cpp.llama_encode(context, batch) == 0
        for index in range(length):
            pointer = llama_cpp.llama_get_embeddings_ith(context, index)
            state = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float * hidden_size)).contents
            rows.append(np.array(state, np.float32))
        llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return np.stack(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    golden = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, encoder in ENCODERS.items():
            if encoder.gguf:
                bare = replace(encoder, dense=())  # llama.cpp would apply dense modules to the states
                path = write_encoder_gguf(Path(folder) / f"{name}.gguf", bare, seed=SEED)
                golden[name] = hidden_states(path, encoder.config["hidden_size"])
    np.savez_compressed(args.out, **golden)  # type: ignore[arg-type]  # numpy's stub takes the names for its own flag
    for name, states in golden.items():
        print(f"{name}: {states.shape}, deviation {states.std():.3f}")


if __name__ == "__main__":
    main()
