"""Every architecture in every encoding whose blocks its tiny rows can hold: right, and the same bytes in any batch.

What an encoding becomes is chosen per tensor, and what an architecture adds looks at no encoding, so that by default
each has its turn and the whole product is a long run.

"Right" is what the same weights give as exact floats; those are compared with transformers and llama.cpp, one
architecture after the other, in test_architectures.py. Rows of the tiny models are no whole blocks of 256, so the _K
types are left to test_golden_logits.py and test_precisions.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from lockstep.artifacts.model import Artifact, Encoding, Tensor
from lockstep.artifacts.tensors import dequantise
from lockstep.executors.base import Logits
from lockstep.executors.probe import quick_probe
from tests.executors.native.loading import loaded
from tests.executors.native.support import TINY, MemoryWeights, random_artifact, run

NUM_BLOCKS = 120
PROMPT = [int(token) for token in np.random.default_rng(8).integers(0, 300, 50)]
MAX_RELATIVE_ERROR = {
    "F16": 1e-6,
    "BF16": 1e-6,
    **dict.fromkeys(("Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "IQ4_NL"), 8e-2),
}
"""Beside blocks, activations are rounded to int8 in groups of 32."""
RECURRENT_FACTOR = 3
"""Of these errors in hybrids, whose gates multiply rounded numbers with each other, and whose states keep errors."""


def as_floats(artifact: Artifact) -> Artifact:
    """The same numbers, stored as F32."""
    tensors = {}
    for name in artifact.weights.names():
        tensor = artifact.weights[name]
        tensors[name] = Tensor(name, Encoding.F32, tensor.shape, dequantise(tensor))
    return replace(artifact, weights=MemoryWeights(tensors), fingerprint=f"{artifact.fingerprint} as floats")


def logits_of(artifact: Artifact) -> Logits:
    with loaded(artifact, 8, 0, kv_cache_precision="f32") as executor:
        return run(executor, (PROMPT, 0, (3, 1)), all_rows=True)


def pairs(encodings: Sequence[str]) -> list[Any]:
    """All of them; by default one of each architecture, in which every encoding has its turn."""
    kept = set(zip(TINY, cycle(encodings), strict=False))
    return [
        pytest.param(
            name, encoding, id=f"{name}-{encoding}", marks=[] if (name, encoding) in kept else pytest.mark.slow
        )
        for name in TINY
        for encoding in encodings
    ]


@pytest.mark.parametrize(("name", "encoding"), pairs(list(MAX_RELATIVE_ERROR)))
def test_logits_are_those_of_the_exact_weights(name: str, encoding: str) -> None:
    artifact = random_artifact(TINY[name], encoding)
    ours, exact = logits_of(artifact), logits_of(as_floats(artifact))
    errors = np.linalg.norm(ours - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert errors.max() <= MAX_RELATIVE_ERROR[encoding] * (RECURRENT_FACTOR if TINY[name].mixers else 1)


@pytest.mark.parametrize(("name", "encoding"), pairs(["Q5_1", "Q4_1", "Q4_0", "Q5_0", "BF16", "IQ4_NL"]))
def test_the_bytes_are_the_same_in_any_batch(name: str, encoding: str) -> None:
    with loaded(random_artifact(TINY[name], encoding), NUM_BLOCKS, 0) as executor:
        report = quick_probe(executor, NUM_BLOCKS)
    assert report.deterministic, [case for case in report.cases if not case.passed]
