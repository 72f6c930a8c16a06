"""The sampling rules written down without a trick: sort everything, sum everything in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep.executors.sampling_params import ResolvedSampling

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Kept:
    """What the rules leave of a row, in rank order."""

    ids: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]


def ranked(row: Floats) -> npt.NDArray[np.int64]:
    """All ids, greatest logit first, of equals the lowest id first."""
    return np.lexsort((np.arange(len(row)), -row.astype(np.float64)))


def kept(row: Floats, sampling: ResolvedSampling) -> Kept:
    """Min-p, then top-k, then top-p over the sorted vocabulary."""
    ids = ranked(row)
    exact = row[ids].astype(np.float64)
    peak = exact[0]
    if sampling.min_p > 0.0:
        exact = exact[exact >= peak + sampling.temperature * math.log(sampling.min_p)]
    if sampling.top_k > 0:
        exact = exact[: sampling.top_k]
    weights = np.exp((exact - peak) / sampling.temperature)
    before = np.concatenate(([0.0], np.cumsum(weights)[:-1]))
    if sampling.top_p < 1.0:
        weights = weights[before < sampling.top_p * weights.sum()]
    return Kept(ids[: len(weights)], weights / weights.sum())


def penalised(row: Floats, sampling: ResolvedSampling, prompt_ids: list[int], output_ids: list[int]) -> Floats:
    """Bias and penalties, token by token."""
    changed = row.copy()
    for token, bias in sampling.logit_bias:
        changed[token] += np.float32(bias)
    for token in {*prompt_ids, *output_ids}:
        value = changed[token]
        if sampling.repetition_penalty != 1.0:
            penalty = np.float32(sampling.repetition_penalty)
            value = value / penalty if value > 0 else value * penalty
        count = output_ids.count(token)
        value = value - np.float32(count) * np.float32(sampling.frequency_penalty)
        changed[token] = value - np.float32(count > 0) * np.float32(sampling.presence_penalty)
    return changed


def log_softmax(row: Floats) -> npt.NDArray[np.float64]:
    exact = row.astype(np.float64)
    result: npt.NDArray[np.float64] = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    return result
