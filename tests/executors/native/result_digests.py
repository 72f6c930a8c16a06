"""Digests of what a sampler and a rotation compute, by the native library and by numpy, in a process of its own.

``python -m tests.executors.native.result_digests LIBRARY ISA`` prints them as JSON. Inputs are made of integers and
basic arithmetic, so that they are the same everywhere.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.model import ModelConfig, RopeScaling
from lockstep.engine.output_rules import unit_vectors
from lockstep.executors.logits import token_logprobs
from lockstep.executors.openvino.graph import inverse_frequencies
from lockstep.executors.rejection_sampling import weigh, weigh_lightly
from tests.executors.native.native_elements import Elements, Floats, logarithm, powers

TRAINED = {"original_max_position_embeddings": 8192.0}
SCALINGS = (
    None,
    RopeScaling("linear", 4.0),
    RopeScaling("llama3", 8.0, {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED}),
    RopeScaling("yarn", 4.0, {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": 1.0, **TRAINED}, attention_factor=1.14),
    RopeScaling("yarn", 4.0, {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": 0.0, **TRAINED}, attention_factor=1.14),
    RopeScaling("factors", 1.0, factors=tuple(1.0 + index / 8 for index in range(24)), attention_factor=1.19),
)
CONFIG = ModelConfig("llama", 1, 64, 64, 1, 1, 64, 10, 131072, 1e-5, 500000.0, rotary_dim=48)
"""Of each head of 64 dimensions 48 are rotated."""
CONFIGS = tuple(replace(CONFIG, rope_scaling=scaling) for scaling in SCALINGS)


def frequencies_by(library: ctypes.CDLL, rotary_dim: int, theta: float) -> Floats:
    """Unscaled frequencies from powers of the native library."""
    return powers(library, theta, -np.arange(0, rotary_dim, 2) / rotary_dim).astype(np.float32)


def native_frequencies(library: ctypes.CDLL, config: ModelConfig) -> Floats:
    return inverse_frequencies(config, partial(frequencies_by, library), partial(logarithm, library))


def attention_factor(config: ModelConfig) -> float:
    return 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor


def logits() -> Floats:
    words = np.random.Philox(key=7).random_raw(6 * 5000)
    return ((words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-19)).reshape(6, 5000)


def native_results(elements: Elements) -> dict[str, Callable[[], Any]]:
    rows, positions = logits(), np.arange(0, 100_000, 997)
    library = elements.library
    return {
        "weights": lambda: [elements.weigh(row, float(row.max()), 0.7) for row in rows],
        "light weights": lambda: [elements.weigh_lightly(row, float(row.max()), 0.7) for row in rows],
        "log-probabilities": lambda: elements.logprobs(rows, [0] * len(rows), 20),
        "frequencies": lambda: [native_frequencies(library, config) for config in CONFIGS],
        "rotation": lambda: [
            elements.rotation(native_frequencies(library, config), positions, attention_factor(config))
            for config in CONFIGS
        ],
        "unit vectors": lambda: [elements.unit(rows)],
        "similarity": lambda: [elements.dot(elements.unit(rows), elements.unit(rows)[0])],
    }


def numpy_results() -> dict[str, Callable[[], Any]]:
    """The same by the formulas that run today."""
    rows, positions = logits(), np.arange(0, 100_000, 997).astype(np.float32)

    def rotation(config: ModelConfig) -> npt.NDArray[np.float32]:
        angles = positions[:, None] * inverse_frequencies(config)
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)

    def logprobs(row: Floats) -> npt.NDArray[np.float64]:
        found = token_logprobs(row, 0, 20)
        return np.array([found.logprob, *(each for _, each in found.top)])

    return {
        "weights": lambda: [weigh(row, float(row.max()), 0.7) for row in rows],
        "light weights": lambda: [weigh_lightly(row, float(row.max()), 0.7) for row in rows],
        "log-probabilities": lambda: [logprobs(row) for row in rows],
        "frequencies": lambda: [inverse_frequencies(config) for config in CONFIGS],
        "rotation": lambda: [rotation(config) for config in CONFIGS],
        "unit vectors": lambda: [unit_vectors(rows)],
        "similarity": lambda: [unit_vectors(rows) @ unit_vectors(rows)[0]],
    }


def digests(results: dict[str, Callable[[], Any]]) -> dict[str, str]:
    return {
        name: hashlib.sha256(b"".join(np.ascontiguousarray(each).tobytes() for each in result())).hexdigest()[:16]
        for name, result in results.items()
    }


if __name__ == "__main__":
    native = Elements(ctypes.CDLL(sys.argv[1]), sys.argv[2])
    print(json.dumps({"native": digests(native_results(native)), "numpy": digests(numpy_results())}))
