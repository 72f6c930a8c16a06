"""The texts of golden encoders, and how their vectors are pooled: numpy alone, for scripts and tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tools.random_encoders import Encoder

Floats = npt.NDArray[np.float32]
SEED = 20261128
LENGTHS = (1, 31, 33, 70)
"""Tokens of the texts: around a block of 32, and longer than the windows."""
_VOCAB = 320


def text(length: int) -> npt.NDArray[np.int64]:
    """Token ids [length]. Ids 0 and 1 are padding in some models, so that they do not occur."""
    return np.random.default_rng([SEED, length]).integers(2, _VOCAB, length)


def pooled(encoder: Encoder, states: Sequence[Floats]) -> Floats:
    """Vectors [texts, hidden]: the mean of a text's states, or the first one for a classifier that takes it."""
    is_mean = not encoder.labels or encoder.config.get("classifier_pooling") == "mean"
    return np.stack([each.mean(axis=0) if is_mean else each[0] for each in states]).astype(np.float32)
