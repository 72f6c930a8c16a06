"""When requests are due: gaps drawn from a gamma distribution, a function of rate, burstiness and seed."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(count: int, rate_per_s: float, burstiness: float, seed: int) -> tuple[float, ...]:
    """Seconds after the start at which each of ``count`` requests is due, ascending.

    Gaps have the mean ``1 / rate`` and the shape ``burstiness``: 1 is a Poisson process, less comes in bursts, more
    comes evenly, infinity is a metronome. As in `vllm bench serve`, times are scaled so that the last request is due at
    ``count / rate`` whatever the seed: throughputs of two seeds can then be compared.

    Args:
        rate_per_s: above 0; infinity makes everything due at once.
        burstiness: above 0.
    """
    if count == 0 or math.isinf(rate_per_s):
        return (0.0,) * count
    if math.isinf(burstiness):
        return tuple((index + 1) / rate_per_s for index in range(count))
    gaps = np.random.default_rng([seed, 0]).gamma(burstiness, 1.0, count)
    times = np.cumsum(gaps)
    return tuple((times * (count / rate_per_s / times[-1])).tolist())
