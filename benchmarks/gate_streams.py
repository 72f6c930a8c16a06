"""Streams of paired answers with a known truth, on which the error rates of the gate are simulated.

A stream is the logarithm of the latency of requests on both sides, with shape (canaries, pairs), without an effect:
log-sd 0.3 on each side, mostly common to both. Effects are added to the candidate, so they are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Stream = tuple[Floats, Floats]
Draw = Callable[[np.random.Generator, int, int], Stream]
LOG_SD = 0.3
CORRELATION = 0.8


def independent(rng: np.random.Generator, count: int, pairs: int, correlation: float = CORRELATION) -> Stream:
    """Independent answers.

    Args:
        correlation: correlation of the two answers of a pair.
    """
    shared = rng.normal(0.0, LOG_SD * math.sqrt(correlation), (count, pairs))
    own = rng.normal(0.0, LOG_SD * math.sqrt(1 - correlation), (2, count, pairs))
    return shared + own[0], shared + own[1]


def autoregressive(phi: float, rng: np.random.Generator, count: int, pairs: int) -> Stream:
    """Answers in which each side is correlated with its previous one by ``phi``."""
    shared = rng.normal(0.0, LOG_SD * math.sqrt(CORRELATION), (count, pairs))
    noise = gaussian(rng, 2 * count, pairs, phi) * (LOG_SD * math.sqrt(1 - CORRELATION))
    return shared + noise[:count], shared + noise[count:]


def gaussian(rng: np.random.Generator, count: int, pairs: int, phi: float) -> Floats:
    """Stationary Gaussian AR(1) series of variance 1."""
    noise = rng.normal(0.0, math.sqrt(1 - phi * phi), (pairs, count))
    noise[0] /= math.sqrt(1 - phi * phi)
    for at in range(1, pairs):
        noise[at] += phi * noise[at - 1]
    return noise.T.copy()


def slow_spells(length: int, rng: np.random.Generator, count: int, pairs: int) -> Stream:
    """Each side independently doubles its latency in spells of ``length`` pairs on average, a tenth of the time."""
    baseline, candidate = independent(rng, count, pairs)
    slow = _spells(rng, 2 * count, pairs, length=length, share=0.1)
    return baseline + math.log(2) * slow[:count], candidate + math.log(2) * slow[count:]


def _spells(rng: np.random.Generator, count: int, pairs: int, length: float, share: float) -> Bools:
    found = np.empty((pairs, count), np.bool_)
    state = rng.random(count) < share
    for at in range(pairs):
        draw = rng.random(count)
        state = np.where(state, draw >= 1 / length, draw < share / (1 - share) / length)
        found[at] = state
    return found.T.copy()


def swing(rng: np.random.Generator, count: int, pairs: int) -> Stream:
    """The candidate is alternately up to 10 % slower and up to 10 % faster, with a period of 5,000 pairs."""
    baseline, candidate = independent(rng, count, pairs)
    phase = rng.uniform(0.0, 2 * math.pi, (count, 1))
    return baseline, candidate + 0.1 * np.sin(2 * math.pi * np.arange(pairs) / 5_000 + phase)


def warm_up(rng: np.random.Generator, count: int, pairs: int) -> Stream:
    """The candidate is 30 % slower in its first 500 pairs."""
    baseline, candidate = independent(rng, count, pairs)
    return baseline, candidate + math.log(1.3) * (np.arange(pairs) < 500)


def long_memory(rng: np.random.Generator, count: int, pairs: int) -> Stream:
    """The noise of each side is fractional Gaussian noise with a Hurst exponent of 0.7, so its memory decays slowly."""
    shared = rng.normal(0.0, LOG_SD * math.sqrt(CORRELATION), (count, pairs))
    noise = fractional(rng, 2 * count, pairs, 0.7) * (LOG_SD * math.sqrt(1 - CORRELATION))
    return shared + noise[:count], shared + noise[count:]


def fractional(rng: np.random.Generator, count: int, pairs: int, hurst: float) -> Floats:
    """Fractional Gaussian noise of variance 1, by circulant embedding of its covariance."""
    lags = np.arange(pairs + 1.0)
    power = 2 * hurst
    covariance = 0.5 * ((lags + 1) ** power - 2 * lags**power + np.abs(lags - 1) ** power)
    scales = np.sqrt(np.maximum(np.fft.fft(np.concatenate([covariance, covariance[-2:0:-1]])).real, 0.0))
    found = np.empty((count, pairs))
    for row in found:
        noise = rng.normal(size=len(scales)) + 1j * rng.normal(size=len(scales))
        row[:] = np.fft.fft(scales * noise).real[:pairs] / math.sqrt(len(scales))
    return found


def slow_level(rng: np.random.Generator, count: int, pairs: int) -> Stream:
    """Independent answers around a level of the candidate (log-sd 0.1) that is an AR(1) series with 0.999."""
    baseline, candidate = independent(rng, count, pairs)
    return baseline, candidate + 0.1 * gaussian(rng, count, pairs, 0.999)


def queue(rng: np.random.Generator, count: int, pairs: int) -> Stream:
    """Bursty arrivals at a server with one request at a time on each side: latency is waiting plus service.

    Arrivals are four times as dense in bursts, which have a fifth of the requests; servers are busy 60 % of the time.
    """
    dense = _spells(rng, count, pairs, length=30, share=0.2)
    gaps = rng.exponential(1.0, (count, pairs)) * np.where(dense, 0.25, 1.0) / (0.2 * 0.25 + 0.8)
    shared = rng.normal(0.0, LOG_SD * math.sqrt(CORRELATION), (count, pairs))
    sides = []
    for _ in range(2):
        own = rng.normal(0.0, LOG_SD * math.sqrt(1 - CORRELATION), (count, pairs))
        service = 0.6 * np.exp(shared + own - LOG_SD**2 / 2)
        waiting = np.zeros((pairs, count))
        for at in range(1, pairs):
            waiting[at] = np.maximum(0.0, waiting[at - 1] + service[:, at - 1] - gaps[:, at])
        sides.append(np.log(waiting.T + service))
    return sides[0], sides[1]


def pareto(rng: np.random.Generator, count: int, pairs: int) -> Stream:
    """Latencies with a tail of index 1.2 on both sides, so without a finite variance."""
    return np.log1p(rng.pareto(1.2, (count, pairs))), np.log1p(rng.pareto(1.2, (count, pairs)))


def ties(rng: np.random.Generator, count: int, pairs: int) -> Stream:
    """A coarse clock: latencies are multiples of half the median, most of them one of two values."""
    baseline, candidate = independent(rng, count, pairs)
    return tuple(np.log(np.maximum(1.0, np.round(2 * np.exp(side))) / 2) for side in (baseline, candidate))  # type: ignore[return-value]  # two of two


LATENCIES: Mapping[str, Draw] = {
    "independent": independent,
    "AR(1), 0.5": partial(autoregressive, 0.5),
    "AR(1), 0.9": partial(autoregressive, 0.9),
    "AR(1), 0.98": partial(autoregressive, 0.98),
    "slow spells of 50": partial(slow_spells, 50),
    "bursty arrivals at a queue": queue,
    "Pareto tails, index 1.2": pareto,
    "ties": ties,
}
"""Streams of latency by name."""
SLOW: Mapping[str, Draw] = {
    "slow spells of 200": partial(slow_spells, 200),
    "slow spells of 500": partial(slow_spells, 500),
    "swing of 10 %, period 5,000": swing,
    "long memory, H 0.7": long_memory,
    "AR(1), 0.999": partial(autoregressive, 0.999),
    "level of AR(1), 0.999": slow_level,
    "warm-up of 500, 30 % slower": warm_up,
}
"""Streams of slowly changing latency, by name."""


def failures(rate: float, length: int, rng: np.random.Generator, count: int, pairs: int) -> Floats:
    """Failures in bursts: 1 for each pair with a failure.

    Args:
        rate: share of failing pairs.
        length: number of pairs of a burst.
    """
    begins = rng.random((count, pairs + length - 1)) < -math.expm1(math.log1p(-rate) / length)
    summed = np.concatenate([np.zeros((count, 1)), np.cumsum(begins, axis=1)], axis=1)
    return (summed[:, length:] > summed[:, :-length]).astype(np.float64)


def excess_failures(
    rates: tuple[float, float], length: int, rng: np.random.Generator, count: int, pairs: int
) -> Floats:
    """Candidate's failures minus baseline's; rates of the baseline and the candidate."""
    return failures(rates[1], length, rng, count, pairs) - failures(rates[0], length, rng, count, pairs)


def exceedances(phi: float, shares: tuple[float, float], rng: np.random.Generator, count: int, pairs: int) -> Floats:
    """Answers beyond a fixed latency, candidate's minus baseline's, on AR(1) sides; shares of both sides."""
    limits = [normal_quantile(1 - share) for share in shares]
    noise = gaussian(rng, 2 * count, pairs, phi)
    return (noise[count:] > limits[1]).astype(np.float64) - (noise[:count] > limits[0])


def normal_quantile(fraction: float) -> float:
    """Quantile of the standard normal distribution, by bisection."""
    low, high = -10.0, 10.0
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if 0.5 * math.erfc(-middle / math.sqrt(2)) < fraction else (low, middle)
    return high
