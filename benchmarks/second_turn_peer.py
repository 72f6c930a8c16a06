"""llama.cpp in a separate process for ``python -m benchmarks.second_turn``: reads conversations as JSON lines, writes
times.

A line holds the token ids of the first turn (prompt and answer) and of the second turn's prompt. The second turn keeps
what both have in common, as far as llama.cpp can go back to it: a recurrent state cannot take tokens back, and then
the whole prompt is computed again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

MAX_TOKENS = 16_384
BATCH_TOKENS = 512


class Peer:
    """A model with one context of one sequence, with flash attention and KV cache by llama.cpp's defaults."""

    def __init__(self, model: str, threads: int) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda *ignored: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.use_extra_bufts = False  # repacking weights can crash
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), options)
        context: Any = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max = MAX_TOKENS, BATCH_TOKENS, BATCH_TOKENS, 1
        context.n_threads = context.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, context)

    def conversation(self, first: Sequence[int], second: Sequence[int]) -> dict[str, float]:
        """Milliseconds to the first token of the second turn after the first turn, and how many of its tokens were
        kept."""
        memory = self._lib.llama_get_memory(self._context)
        self._lib.llama_memory_clear(memory, False)
        self._compute(first, 0)
        begin_s = time.perf_counter()
        pairs = zip(first, second, strict=False)
        kept = next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
        if not self._lib.llama_memory_seq_rm(memory, 0, kept, -1):
            self._lib.llama_memory_clear(memory, False)
            kept = 0
        self._compute(second, kept)
        return {"first_ms": (time.perf_counter() - begin_s) * 1e3, "kept": kept}

    def _compute(self, tokens: Sequence[int], start: int) -> None:
        lib = self._lib
        for begin in range(start, len(tokens), BATCH_TOKENS):
            part = tokens[begin : begin + BATCH_TOKENS]
            batch = lib.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for index, token in enumerate(part):
                batch.token[index], batch.pos[index], batch.logits[index] = token, begin + index, index == len(part) - 1
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            code = lib.llama_decode(self._context, batch)
            lib.llama_batch_free(batch)
            if code:
                raise ValueError(f"llama_decode failed with {code}")
        lib.llama_synchronize(self._context)
        lib.llama_get_logits_ith(self._context, -1)


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries is not part of the protocol
    peer = Peer(sys.argv[1], int(sys.argv[2]))
    for line in sys.stdin:
        out.write(json.dumps(peer.conversation(*json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
