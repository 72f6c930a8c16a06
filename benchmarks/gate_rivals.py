"""Other tests of a canary, applied repeatedly: a t test, Mann and Whitney's test, thresholds on p95."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from benchmarks.gate_streams import Bools, Floats, normal_quantile
from lockstep.release.statistics import Looks

WINDOW = 500
"""Number of pairs of a sliding window."""
P95_RATIO = 1.10
ALPHA = 0.05
Rival = Callable[[Floats, Floats, Looks], Bools]


def t_test(baseline: Floats, candidate: Floats, looks: Looks) -> Bools:
    """Paired one-sided t test of all log-ratios so far at 0.05; from 100 pairs on, t is normal."""
    ratio = candidate - baseline
    num = looks.astype(np.float64)
    first, second = np.cumsum(ratio, axis=1)[:, looks - 1], np.cumsum(ratio * ratio, axis=1)[:, looks - 1]
    mean = first / num
    variance = (second - num * mean * mean) / (num - 1)
    found: Bools = mean > normal_quantile(1 - ALPHA) * np.sqrt(variance / num)
    return found


def mann_whitney(baseline: Floats, candidate: Floats, looks: Looks) -> Bools:
    """Mann and Whitney's one-sided test at 0.05 on the window before each look, ties corrected."""
    found = np.zeros((len(baseline), len(looks)), np.bool_)
    for at, look in enumerate(looks):
        start = max(0, look - WINDOW)
        for canary in range(len(baseline)):
            found[canary, at] = _is_shifted(baseline[canary, start:look], candidate[canary, start:look])
    return found


def _is_shifted(baseline: Floats, candidate: Floats) -> bool:
    num = len(baseline)
    values, places, times = np.unique(np.concatenate([baseline, candidate]), return_inverse=True, return_counts=True)
    last = np.cumsum(times)
    ranks = (last - (times - 1) / 2)[places]
    above = ranks[num:].sum() - num * (num + 1) / 2 - num * num / 2
    total = 2 * num
    variance = num * num / 12 * (total + 1 - float((times.astype(float) ** 3 - times).sum()) / (total * (total - 1)))
    return len(values) > 1 and above > normal_quantile(1 - ALPHA) * math.sqrt(variance)


def p95_threshold(baseline: Floats, candidate: Floats, looks: Looks) -> Bools:
    """95th percentile on the window before each look more than a tenth above the baseline's."""
    found = np.zeros((len(baseline), len(looks)), np.bool_)
    for at, look in enumerate(looks):
        start = max(0, look - WINDOW)
        rank = math.ceil(0.95 * (look - start)) - 1
        sides = [np.partition(side[:, start:look], rank, axis=1)[:, rank] for side in (baseline, candidate)]
        found[:, at] = sides[1] - sides[0] > math.log(P95_RATIO)
    return found


RIVALS: Mapping[str, Rival] = {
    "t test, peeked at": t_test,
    f"Mann-Whitney on {WINDOW} pairs": mann_whitney,
    f"p95 above {P95_RATIO:g} times, on {WINDOW} pairs": p95_threshold,
}
