"""Encoders beside PyTorch: tokens per second of mean-pooled vectors, on shapes of models that people run.

    python -m benchmarks.encoders --peer-python PY             MiniLM's shape, Q8_0 and F16, 32 texts of 128 tokens
    python -m benchmarks.encoders --shape bge-small --texts 8 --length 512

The peer is transformers' BertModel in float32 with SDPA attention, as sentence-transformers runs it, without the time
of tokenisation, in a process of its own that takes turns with ours. PY needs the ``golden`` extra. Weights are random,
and texts have one length, so that the peer computes no padding. Processor time counts all threads; it is the steadier
figure where other processes run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from tools.random_encoders import ENCODERS, Encoder, write_encoder_gguf

_MINILM = {
    **ENCODERS["bert"].config, "vocab_size": 30522, "max_position_embeddings": 512, "hidden_size": 384,
    "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536,
}  # fmt: skip
SHAPES = {
    "minilm": Encoder("bert", _MINILM, gguf="bert"),
    "bge-small": Encoder("bert", {**_MINILM, "num_hidden_layers": 12}, gguf="bert"),
}
SECONDS = 5.0


def texts_of(args: argparse.Namespace) -> npt.NDArray[np.int64]:
    return np.random.default_rng(0).integers(2, _MINILM["vocab_size"], (args.texts, args.length))


def report(name: str, num_tokens: int, run: Callable[[], object]) -> None:
    """Print tokens per second, of the best and of the median turn, and per second of the processor."""
    run()
    walls: list[float] = []
    began = time.process_time()
    while sum(walls) < SECONDS:
        start = time.perf_counter()
        run()
        walls.append(time.perf_counter() - start)
    per_cpu = num_tokens * len(walls) / (time.process_time() - began)
    best, middle = num_tokens / min(walls), num_tokens / median(walls)
    print(f"{name}: {best:,.0f} tokens/s at best, {middle:,.0f} in the median, {per_cpu:,.0f} a CPU second", flush=True)


def run_torch(args: argparse.Namespace) -> None:
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    declared = {key: value for key, value in SHAPES[args.shape].config.items() if key != "architectures"}
    model = transformers.BertModel(transformers.AutoConfig.for_model(**declared), add_pooling_layer=False).eval()
    ids = torch.from_numpy(texts_of(args))
    mask = torch.ones_like(ids)

    def run() -> None:
        with torch.inference_mode():
            model(input_ids=ids, attention_mask=mask).last_hidden_state.mean(dim=1)

    report(f"torch float32, {args.threads} threads", ids.numel(), run)


def run_ours(args: argparse.Namespace, encoding: str, folder: Path) -> None:
    # Only here, because the peer's environment does not have the dependencies.
    from lockstep.artifacts.source import open_artifact
    from tests.executors.native.encoder_models import Chunk, loaded_encoder, step_of

    path = folder / f"{args.shape}-{encoding}.gguf"
    if not path.exists():
        write_encoder_gguf(path, SHAPES[args.shape], encoding)
    texts = texts_of(args)
    num_blocks = -(-args.length // 32)
    tables = {i: tuple(range(1 + i * num_blocks, 1 + (i + 1) * num_blocks)) for i in range(args.texts)}
    artifact = open_artifact(str(path), cache_dir=folder)
    with loaded_encoder(artifact, args.texts * num_blocks, threads=args.threads, cache_dir=folder) as executor:
        num_positions = args.length * executor.geometry.num_stages
        for index, ids in enumerate(texts):
            executor.begin(index, ids.tolist(), 0)
        last = np.arange(num_positions - args.length, num_positions)
        rows = np.concatenate([index * num_positions + last for index in range(args.texts)])
        batch = step_of([Chunk(index, 0, num_positions) for index in range(args.texts)], tables, rows.tolist())

        def run() -> None:
            executor.execute(batch)
            executor.hidden_states.reshape(args.texts, args.length, -1).mean(axis=1)

        report(f"ours {encoding}, {args.threads} threads, {executor.machine['isa']}", texts.size, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="minilm")
    parser.add_argument("--encodings", default="Q8_0,F16")
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--peer-python", type=Path)
    parser.add_argument("--torch", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.torch:
        run_torch(args)
        return
    print(f"{args.shape}, {args.texts} texts of {args.length} tokens")
    peer = [str(args.peer_python), "-W", "ignore", "-m", "benchmarks.encoders", *sys.argv[1:], "--torch"]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.turns):
            for encoding in args.encodings.split(","):
                run_ours(args, encoding, Path(folder))
            if args.peer_python is not None:
                subprocess.run(peer, check=True)


if __name__ == "__main__":
    main()
