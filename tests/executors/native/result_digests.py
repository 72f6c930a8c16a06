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
from lockstep.executors import logits as logits_module
from lockstep.executors import rejection_sampling, sampling
from lockstep.executors.native.library import NativeLibrary, native_library
from lockstep.executors.rotary import inverse_frequencies
from lockstep.executors.row_math import NativeMath, NumpyMath, RowMath
from lockstep.executors.sampling import SamplerState, sample
from lockstep.executors.sampling_params import ResolvedSampling
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
    """The same by NumPy's functions."""
    math = NumpyMath()
    rows, positions = logits(), np.arange(0, 100_000, 997).astype(np.float32)

    def rotation(config: ModelConfig) -> npt.NDArray[np.float32]:
        angles = positions[:, None] * inverse_frequencies(config)
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)

    return {
        "weights": lambda: [math.weigh(row, float(row.max()), 0.7) for row in rows],
        "light weights": lambda: [math.weigh_lightly(row, float(row.max()), 0.7) for row in rows],
        "log-probabilities": lambda: [np.array([math.log_total(row) for row in rows])],
        "frequencies": lambda: [inverse_frequencies(config) for config in CONFIGS],
        "rotation": lambda: [rotation(config) for config in CONFIGS],
        "unit vectors": lambda: [math.unit(rows)],
        "similarity": lambda: [math.unit(rows) @ math.unit(rows)[0]],
    }


SAMPLINGS = (
    ResolvedSampling(temperature=0.0, logprobs=8),
    ResolvedSampling(temperature=0.7, top_k=40, top_p=0.9, logprobs=8),
    ResolvedSampling(temperature=1.0, min_p=0.02, logprobs=0),
    ResolvedSampling(temperature=1.2, top_p=0.95, logprobs=0),
    ResolvedSampling(temperature=1.0, repetition_penalty=1.2, logprobs=0),
    ResolvedSampling(temperature=2.0, top_p=0.3, logprobs=0),
)


def answers(math: RowMath) -> dict[str, Callable[[], Any]]:
    """Tokens and log-probabilities of the whole sampler, with these functions in the place of those in use."""

    def run() -> list[npt.NDArray[Any]]:
        for module in (logits_module, rejection_sampling, sampling):
            module.row_math = lambda: math  # type: ignore[attr-defined]  # the one name by which they are called
        found: list[npt.NDArray[Any]] = []
        rows = logits() / np.float32(4)
        for seed in range(15):
            for number, rules in enumerate(SAMPLINGS):
                states = [SamplerState(rules, seed, (1, 2, 3), rows.shape[1]) for _ in rows]
                samples = sample(rows, states, [number + 5] * len(rows))
                found.append(np.array(samples.token_ids))
                entries = [entry for entry in samples.logprobs if entry is not None]
                found.append(np.array([[entry.logprob, *(lp for _, lp in entry.top)] for entry in entries]))
        return found

    return {"answers": run}


def digests(results: dict[str, Callable[[], Any]]) -> dict[str, str]:
    return {
        name: hashlib.sha256(b"".join(np.ascontiguousarray(each).tobytes() for each in result())).hexdigest()[:16]
        for name, result in results.items()
    }


if __name__ == "__main__":
    native = Elements(ctypes.CDLL(sys.argv[1]), sys.argv[2])
    chosen = native_library(sys.argv[2])
    assert isinstance(chosen, NativeLibrary)
    by_library, by_numpy = native_results(native) | answers(NativeMath(chosen)), numpy_results() | answers(NumpyMath())
    print(json.dumps({"native": digests(by_library), "numpy": digests(by_numpy)}))
