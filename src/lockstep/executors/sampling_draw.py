"""One token from one row: temperature, min-p, top-k, top-p and the draw itself."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lockstep.executors.sampling_params import ResolvedSampling
from lockstep.executors.sampling_random import uniforms
from lockstep.executors.sampling_rows import Columns, Floats, Ids, at_least, bound_of_greatest, columns

Weights = npt.NDArray[np.float64]


def draw(row: Floats, sampling: ResolvedSampling, seed: int, position: int) -> int | None:
    """The token, or None when the row holds NaN, +inf or nothing that may come."""
    if sampling.is_greedy:
        token = int(row.argmax())
        return token if math.isfinite(row[token]) else None
    cols = columns(row)
    if not math.isfinite(cols.peak):
        return None
    uniform = uniforms(seed, position)[0]
    if sampling.top_p >= 1.0 and sampling.min_p == 0.0 and not 0 < sampling.top_k < len(row):
        masses = np.cumsum(_weights(row, cols.peak, sampling.temperature))
        return int(np.searchsorted(masses, uniform * masses[-1], side="right"))
    values, ids = _candidates(cols, sampling)
    masses = np.cumsum(_weights(values, cols.peak, sampling.temperature))
    return int(ids[np.searchsorted(masses, uniform * masses[-1], side="right")])


def _candidates(cols: Columns, sampling: ResolvedSampling) -> tuple[Floats, Ids]:
    """The tokens that survive min-p, top-k and top-p, most likely first."""
    bound = np.float32(-np.inf)
    if sampling.min_p > 0.0:
        bound = _round_up(cols.peak + sampling.temperature * math.log(sampling.min_p))
    if 0 < sampling.top_k < len(cols.row):
        bound = max(bound, bound_of_greatest(cols, sampling.top_k))
    if sampling.top_p >= 1.0 or bound > -np.inf:
        values, ids = at_least(cols, bound)
        if sampling.top_k > 0:
            values, ids = values[: sampling.top_k], ids[: sampling.top_k]
        if sampling.top_p >= 1.0:
            return values, ids
        total = float(np.sum(_weights(values, cols.peak, sampling.temperature)))
        count = _nucleus(values, cols.peak, sampling, total)
        return values[:count], ids[:count]
    total = float(np.sum(_weights(cols.row, cols.peak, sampling.temperature)))
    wanted = 32
    while True:
        bound = bound_of_greatest(cols, wanted)
        values, ids = at_least(cols, bound)
        count = _nucleus(values, cols.peak, sampling, total)
        if count < len(values) or bound == -np.inf:
            return values[:count], ids[:count]
        wanted *= 8


def _nucleus(values: Floats, peak: float, sampling: ResolvedSampling, total: float) -> int:
    """How many of the sorted values are needed for a share of top_p of the total; all when it is not reached."""
    masses = np.cumsum(_weights(values, peak, sampling.temperature))
    return min(len(values), int(np.searchsorted(masses, sampling.top_p * total, side="left")) + 1)


def _weights(values: Floats, peak: float, temperature: float) -> Weights:
    """Unnormalised probabilities; the peak's is 1."""
    return np.exp((values.astype(np.float64) - peak) / temperature)


def _round_up(value: float) -> np.float32:
    """The least float32 that is at least `value`: comparing float32 with it is comparing with `value`."""
    rounded = np.float32(value)
    return rounded if float(rounded) >= value else np.nextafter(rounded, np.float32(np.inf))
