"""Error rates of the sequential gate by simulation, beside those of what others do on the same streams.

    python -m benchmarks.gate_error_rates [--canaries 10000] [--pairs 20000] [--looks 200] [--seed 1] [--markdown]

A *canary* is a stream of pairs. At a true effect of 0 each rollback is a false one; at an effect of exactly the margin
each rollback and each promotion is. A canary counts as rolled back, or promoted, if that is said at any of the looks.
Rates come with their Clopper-Pearson upper bounds (97.5 %).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from lockstep.release.sequential import EVENTS_FLOOR
from lockstep.release.statistics import MIN_PAIRS, e_bh, track

Floats = NDArray[np.float64]
ALPHA = 0.05
MARGIN = math.log(1.05)
SD = 0.3 * math.sqrt(2 * (1 - 0.8))
"""Of a pair's log-ratio: log-sd 0.3 on each side, correlation 0.8."""
CHUNK = 200
"""Canaries that are drawn at one time."""
Draw = Callable[[np.random.Generator, int, int], Floats]


def independent(rng: np.random.Generator, count: int, pairs: int) -> Floats:
    """Log-ratios without memory."""
    return rng.normal(0.0, SD, (count, pairs))


def autoregressive(phi: float) -> Draw:
    """Log-ratios of which each remembers the one before it."""

    def draw(rng: np.random.Generator, count: int, pairs: int) -> Floats:
        noise = rng.normal(0.0, SD * math.sqrt(1 - phi * phi), (pairs, count))
        noise[0] /= math.sqrt(1 - phi * phi)
        for at in range(1, pairs):
            noise[at] += phi * noise[at - 1]
        return noise.T.copy()

    return draw


def bursts(rng: np.random.Generator, count: int, pairs: int) -> Floats:
    """Each side doubles its latency in bursts of 50 pairs on average, a tenth of the time, each side its own."""

    def states() -> Floats:
        found = np.empty((pairs, count))
        state = rng.random(count) < 0.1
        for at in range(pairs):
            draw = rng.random(count)
            state = np.where(state, draw >= 1 / 50, draw < 1 / 450)
            found[at] = state
        return found.T

    return independent(rng, count, pairs) + math.log(2) * (states() - states())


def pareto(rng: np.random.Generator, count: int, pairs: int) -> Floats:
    """Latencies on both sides with a tail of index 1.2: no variance of their own."""
    return np.log1p(rng.pareto(1.2, (count, pairs))) - np.log1p(rng.pareto(1.2, (count, pairs)))


def ties(rng: np.random.Generator, count: int, pairs: int) -> Floats:
    """A coarse clock: few different ratios, most of them 1."""
    return np.round(independent(rng, count, pairs) * 4) / 4


SCENARIOS: Mapping[str, Draw] = {
    "independent": independent,
    "AR(1) 0.5": autoregressive(0.5),
    "AR(1) 0.9": autoregressive(0.9),
    "AR(1) 0.98": autoregressive(0.98),
    "bursts": bursts,
    "Pareto tails": pareto,
    "ties": ties,
}


def upper_bound(events: int, count: int) -> float:
    """Clopper-Pearson upper bound of a rate at 97.5 %, by bisection of the binomial tail."""
    if events == count:
        return 1.0
    low, high = events / count, 1.0
    for _ in range(60):
        rate = 0.5 * (low + high)
        low, high = (rate, high) if _log_tail(events, count, rate) > math.log(0.025) else (low, rate)
    return high


def _log_tail(events: int, count: int, rate: float) -> float:
    """Logarithm of the chance of so many events or fewer."""
    terms = [
        math.lgamma(count + 1)
        - math.lgamma(k + 1)
        - math.lgamma(count - k + 1)
        + k * math.log(rate)
        + (count - k) * math.log1p(-rate)
        for k in range(events + 1)
    ]
    most = max(terms)
    return most + math.log(sum(math.exp(term - most) for term in terms))


def rates(draw: Draw, canaries: int, pairs: int, looks: NDArray[np.int64], seed: int) -> dict[str, int]:
    """How many canaries were wrongly rolled back at no effect, rolled back at the margin, promoted at the margin."""
    rng = np.random.default_rng(seed)
    found = {"rollback at 0": 0, "rollback at margin": 0, "promotion at margin": 0, "judged": 0}
    limit = math.log(1 / ALPHA)
    for start in range(0, canaries, CHUNK):
        series = draw(rng, min(CHUNK, canaries - start), pairs)
        at_margin = track(series, 0.0, ALPHA, looks)
        without = track(series, MARGIN, ALPHA, looks)
        found["rollback at 0"] += int((without.log_above >= limit).any(axis=-1).sum())
        found["rollback at margin"] += int((at_margin.log_above >= limit).any(axis=-1).sum())
        found["promotion at margin"] += int((at_margin.log_below >= limit).any(axis=-1).sum())
        found["judged"] += int(np.isfinite(at_margin.half_width[:, -1]).sum())
    return found


def main() -> None:
    """Print a line per scenario."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--canaries", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--looks", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    looks = np.unique(np.linspace(MIN_PAIRS, args.pairs, args.looks).astype(np.int64))
    for name, draw in SCENARIOS.items():
        begun = time.perf_counter()
        found = rates(draw, args.canaries, args.pairs, looks, args.seed)
        cells = [
            f"{100 * found[key] / args.canaries:.2f} % (<= {100 * upper_bound(found[key], args.canaries):.2f} %)"
            for key in ("rollback at 0", "rollback at margin", "promotion at margin")
        ]
        print(
            f"{name:14} {' '.join(f'{cell:22}' for cell in cells)} judged {found['judged']:,} {time.perf_counter() - begun:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
