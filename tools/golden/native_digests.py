"""Writes tests/golden/native_digests.json: digests of the native executor's results, equal on every machine.

    python -m tools.golden.native_digests

They change if bits change: then raise ``BITS_VERSION`` in bits.hpp and run this script again.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.artifacts.model import Artifact
from lockstep.engine.loading import verify_model
from lockstep.engine.options import LoadOptions
from lockstep.executors.fixed_plans import num_regions
from lockstep.executors.native.executor import NativeExecutor, load_executor
from lockstep.executors.options import ExecutorOptions
from tests.executors.native.encoder_models import loaded_encoder, open_encoder_gguf, states_of
from tests.executors.native.support import SMALL_LLAMA, SMALL_QWEN3, TINY, random_artifact, run

DIGESTS = Path(__file__).resolve().parents[2] / "tests" / "golden" / "native_digests.json"
LENGTH = 140
"""Prompt length in tokens: longer than a segment of attention, so that segments are merged."""


def cases() -> dict[str, tuple[str, str, str]]:
    """Cases by name: shape, encoding, and precision of keys and values."""
    of_architectures = {f"{name} F32 f32": (name, "F32", "f32") for name in TINY}
    of_architectures |= {f"{name} Q8_0 f16": (name, "Q8_0", "f16") for name in TINY}
    encodings = ("BF16", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")
    of_encodings = {f"tiny-llama {each} int8": ("tiny-llama", each, "int8") for each in encodings}
    blocks = ("Q4_K", "Q5_K", "Q6_K", "Q4_K_M", "Q3_K", "IQ4_XS")
    of_blocks = {f"small-qwen3 {each} f16": ("small-qwen3", each, "f16") for each in blocks}
    return of_architectures | of_encodings | of_blocks


def artifact_of(name: str) -> Artifact:
    shape_name, encoding, _ = cases()[name]
    shapes = {**TINY, "small-llama": SMALL_LLAMA, "small-qwen3": SMALL_QWEN3}
    return random_artifact(replace(shapes[shape_name]), encoding)


def prompt_digest(name: str, isa: str | None = None) -> str:
    """Digest of the logits of every token of a prompt, and of the last one decoded individually."""
    artifact = artifact_of(name)
    options = ExecutorOptions(isa=isa, kv_cache_precision=cases()[name][2])
    executor = load_executor(artifact, options, lambda stage, share: None)
    assert isinstance(executor, NativeExecutor)
    executor.allocate(12 * num_regions(executor.geometry), 0)
    tokens = (np.arange(LENGTH) * 37 % artifact.config.vocab_size).tolist()
    table = (7, 3, 9, 1, 5)
    logits = [run(executor, (tokens[:-1], 0, table), all_rows=True), run(executor, (tokens[-1:], LENGTH - 1, table))]
    executor.close()
    return hashlib.blake2b(np.concatenate(logits).tobytes(), digest_size=12).hexdigest()


def encoder_cases() -> dict[str, tuple[str, str, str]]:
    """By name: encoder, encoding of its GGUF file, and precision of keys and values."""
    return {
        f"encoder {name} {encoding} {storage}": (name, encoding, storage)
        for name in ("bert", "xlm-roberta-classifier", "nomic-bert", "modern-bert", "gemma-embedding")
        for encoding, storage in (("F32", "f32"), ("Q8_0", "f16"))
    }


def encoder_digest(name: str, folder: Path, isa: str | None = None) -> str:
    """Digest of the hidden states of a text, and of what the head makes of some of them."""
    encoder, encoding, storage = encoder_cases()[name]
    artifact = open_encoder_gguf(folder, encoder, encoding)
    with loaded_encoder(artifact, isa=isa, kv_cache_precision=storage) as executor:
        [states] = states_of(executor, [np.arange(LENGTH) * 37 % artifact.config.vocab_size])
        head = executor.project(states[:3]) if executor.head_size else states[:0]
    return hashlib.blake2b(states.tobytes() + head.tobytes(), digest_size=12).hexdigest()


def main() -> None:
    digests = {name: prompt_digest(name) for name in cases()}
    with tempfile.TemporaryDirectory() as folder:
        digests |= {name: encoder_digest(name, Path(folder)) for name in encoder_cases()}
    options = LoadOptions(executor=ExecutorOptions())
    digests["pocket://"] = verify_model("pocket://", options).digest or ""
    DIGESTS.write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    main()
