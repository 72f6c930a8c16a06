"""Calibration of step prices from a live run: fits prices robustly, and measures prediction intervals and errors.

The cost of a step is its duration plus the gap before it, if an engine had work in that gap. The two are fitted
separately, because a gap after an idle time has no relation to the step, and because the sum of two linear models is
linear. Steps are divided into three parts by their number, so that each part spans the whole run: three fifths for the
fit, one fifth for the interval, and one fifth for the test.

The interval is that of split conformal prediction (Lei, G'Sell, Rinaldo, Tibshirani and Wasserman, "Distribution-free
predictive inference for regression", JASA 2018) with residuals relative to the prediction: with a = 1 - level, from the
floor((n + 1) a / 2)th to the ceil((n + 1) (1 - a / 2))th smallest of n residuals. It assumes no distribution, only that
steps are exchangeable. Noise that changes over minutes makes it too narrow at some times and too wide at others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations
from math import ceil, floor
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import TraceError
from lockstep.replay.cost_file import CostFile, HeldOut, Interval, MadeOn, Residuals
from lockstep.replay.live import LiveStep

FEATURES = ("constant", "prefill tokens", "decoding sequences", "context tokens", "steps with prefill tokens")
MIN_STEPS = 50
"""Minimum number of steps: thirty for four prices, ten for the interval, ten for the test."""
MAX_STEPS = 2_000_000
"""Maximum number of steps. More would not change the prices and would take too much memory."""
LEVEL = 0.9
_PARTS = ("fit", "fit", "fit", "interval", "test")
_DEPENDENT = 0.999
"""Maximum R squared of a feature by the others. Above it the feature has no separate price."""
_US_TO_PS = 1_000_000
METHOD = "split conformal, relative residuals (Lei et al. 2018)"


def calibrate(steps: Iterable[LiveStep], made_on: MadeOn, level: float = LEVEL) -> CostFile:
    """Fit prices to steps, and measure how well they predict.

    Args:
        level: share of steps that the interval should contain.

    Raises:
        TraceError: too few steps, or no step with a feature that needs a price.
    """
    table, num_left_out = _table(steps)
    _check(table)
    features, durations, gaps, is_after_idle = _columns(table)
    parts = np.array(_PARTS)[np.arange(len(table)) % len(_PARTS)]
    notes = _notes(features, num_left_out)
    is_fit = parts == "fit"
    duration_prices = robust(features[is_fit], durations[is_fit])
    has_gap = is_fit & ~is_after_idle
    if has_gap.sum() >= MIN_STEPS // 2:
        gap_prices = robust(features[has_gap], gaps[has_gap])
    else:
        gap_prices = np.zeros(len(FEATURES))
        notes.append("nearly every step follows an idle time: the gaps between steps have no price")
    whole = durations + np.where(is_after_idle, 0.0, gaps)
    predicted = features @ duration_prices + np.where(is_after_idle, 0.0, features @ gap_prices)
    relative = whole / np.maximum(predicted, 1e-9) - 1
    interval = _interval(relative[parts == "interval"], level, notes)
    is_test = parts == "test"
    prices = [round(float(each) * _US_TO_PS) for each in duration_prices + gap_prices]
    return CostFile(
        constant_ps=prices[0],
        prefill_token_ps=prices[1],
        decode_seq_ps=prices[2],
        context_token_ps=prices[3],
        prefill_step_ps=prices[4],
        interval=interval,
        residuals=_residuals(relative[is_fit], whole[is_fit], predicted[is_fit]),
        held_out=_held_out(relative[is_test], whole[is_test], predicted[is_test], interval),
        ranges={
            name: (int(features[:, index].min()), int(features[:, index].max()))
            for index, name in enumerate(FEATURES)
            if index
        },
        made_on=made_on,
        notes=tuple(notes),
    )


def _table(steps: Iterable[LiveStep]) -> tuple[Any, int]:
    """Steps as [steps, 6] integers: prefill, decode, context, duration, gap, after idle; and the number of omitted
    steps."""
    rows: list[tuple[int, int, int, int, int, int]] = []
    num_left_out = 0
    for step in steps:
        if len(rows) == MAX_STEPS:
            num_left_out += 1
            continue
        work = step.num_prefill_tokens, step.num_decode_seqs, step.num_context_tokens
        if any(work):
            rows.append((*work, step.duration_us, step.gap_us, step.is_after_idle))
    return np.array(rows, dtype=np.int64).reshape(-1, 6), num_left_out


def _check(table: Any) -> None:
    if len(table) < MIN_STEPS:
        raise TraceError(f"the recording has {len(table)} steps; a cost model needs at least {MIN_STEPS}")
    if not table[:, 0].any():
        raise TraceError("no step computed prompt tokens, so they have no price; record requests from their start")
    if not table[:, 1].any():
        raise TraceError("no step decoded, so decoding has no price; record requests with several output tokens")
    if not table[:, 3].any():
        raise TraceError("every step took 0 microseconds: the recording has no durations; record a real run")


def _columns(table: Any) -> tuple[Array, Array, Array, Any]:
    features = np.ones((len(table), len(FEATURES)))
    features[:, 1:4] = table[:, :3]
    features[:, 4] = table[:, 0] > 0
    return features, table[:, 3].astype(float), table[:, 4].astype(float), table[:, 5].astype(bool)


def _notes(features: Array, num_left_out: int) -> list[str]:
    explained = dependence(features)
    notes = [
        f"{name} depend on the other features in this run (R squared {explained[index]:.6f}): the model has the sum of"
        " their prices but not each price; record a run with varying load"
        for index, name in enumerate(FEATURES)
        if explained[index] > _DEPENDENT
    ]
    if num_left_out:
        notes.append(f"based on the first {MAX_STEPS:,} steps; {num_left_out:,} more are omitted")
    return notes


def _interval(relative: Array, level: float, notes: list[str]) -> Interval:
    ordered, number = np.sort(relative), len(relative)
    low, high = floor((number + 1) * (1 - level) / 2), ceil((number + 1) * (1 + level) / 2)
    if low < 1 or high > number:
        low, high, level = 1, number, (number - 1) / (number + 1)
        notes.append(f"{number} residuals are too few for an interval above {level:.0%}; record more steps")
    return Interval(
        level=round(level, 6),
        low=round(max(0.0, 1 + float(ordered[low - 1])), 6),
        high=round(1 + float(ordered[high - 1]), 6),
        steps=number,
        method=METHOD,
    )


def _residuals(relative: Array, whole: Array, predicted: Array) -> Residuals:
    p5, median, p95 = (round(float(np.percentile(relative, percent)), 6) for percent in (5, 50, 95))
    spread = float(((whole - whole.mean()) ** 2).sum())
    return Residuals(
        steps=len(relative),
        median=median,
        p5=p5,
        p95=p95,
        mean_absolute=round(float(np.abs(relative).mean()), 6),
        r_squared=round(1 - float(((whole - predicted) ** 2).sum()) / spread, 6) if spread else 0.0,
    )


def _held_out(relative: Array, whole: Array, predicted: Array, interval: Interval) -> HeldOut:
    is_within = (1 + relative >= interval.low - 1e-6) & (1 + relative <= interval.high + 1e-6)
    return HeldOut(
        steps=len(relative),
        coverage=round(float(is_within.mean()), 6),
        total_error=round(float(predicted.sum() / max(whole.sum(), 1e-9)) - 1, 6),
    )


Array = npt.NDArray[np.float64]

MAX_FEATURES = 8
"""Maximum number of features. The fit tries every subset of them: 256 systems of at most 8 unknowns."""
HUBER_K = 1.345
"""Residuals beyond this many deviations count linearly: 95 % efficient for normal errors (Huber, "Robust Statistics",
1981)."""
MAX_ROUNDS = 50
"""Maximum rounds of reweighting; about ten are usual."""
_MAD_TO_DEVIATION = 1.4826
"""Factor from a median absolute deviation to a standard deviation, for normal errors."""
_SETTLED = 1e-9


def non_negative(features: Array, values: Array, weights: Array) -> Array:
    """Non-negative coefficients with the least weighted sum of squares.

    The optimum over non-negative coefficients is the ordinary solution over its own support (Karush-Kuhn-Tucker), so
    the best of all supports with a non-negative ordinary solution is exact.

    Args:
        features: [observations, features], at most MAX_FEATURES.
        values: [observations].
        weights: [observations], positive.
    """
    num_features = features.shape[1]
    assert num_features <= MAX_FEATURES
    scales = np.sqrt((weights[:, None] * features * features).sum(axis=0))
    scales[scales == 0] = 1.0
    scaled = features / scales
    gram = scaled.T @ (weights[:, None] * scaled)
    moments = scaled.T @ (weights * values)
    best, best_gain = np.zeros(num_features), 0.0
    for size in range(1, num_features + 1):
        for support in map(list, combinations(range(num_features), size)):
            solution = np.linalg.lstsq(gram[np.ix_(support, support)], moments[support], rcond=None)[0]
            gain = float(2 * solution @ moments[support] - solution @ gram[np.ix_(support, support)] @ solution)
            if (solution >= 0).all() and gain > best_gain * (1 + 1e-12):
                best, best_gain = np.zeros(num_features), gain
                best[support] = solution
    result: Array = best / scales
    return result


def robust(features: Array, values: Array) -> Array:
    """Non-negative coefficients that predict the mean of the values, with outliers limited.

    Huber's estimator runs first, on relative residuals, because a step's noise grows with the step. It is reweighted
    until it converges, with the median absolute deviation as scale, which defines the outliers. Then residuals are
    limited to ``CUT`` deviations, and weighted least squares with the inverse of the prediction as weight returns the
    coefficients. With those weights the sum of the predictions equals the sum of the limited values, as totals of steps
    require.
    """
    floor = max(float(np.median(values)) / 4, 1e-9)
    typical = _reweighted(features, values, floor, _huber_weights)
    scale = np.maximum(features @ typical, floor)
    residuals = values - features @ typical
    limit = CUT * deviation(residuals / scale) * scale
    return _reweighted(features, features @ typical + np.clip(residuals, -limit, limit), floor, _mean_weights)


CUT = 10.0
"""Maximum residual in deviations: a stall of one second must not change the price of a token."""


def _reweighted(features: Array, values: Array, floor: float, weights_of: Callable[[Array, Array], Array]) -> Array:
    """Repeat least squares, with weights from the previous predictions (at least ``floor``) and residuals."""
    coefficients = non_negative(features, values, np.ones(len(values)))
    for _ in range(MAX_ROUNDS):
        fitted = features @ coefficients
        weights = weights_of(np.maximum(fitted, floor), values - fitted)
        before, coefficients = coefficients, non_negative(features, values, weights)
        if np.allclose(before, coefficients, rtol=_SETTLED, atol=0):
            break
    return coefficients


def _huber_weights(predicted: Array, residuals: Array) -> Array:
    relative = residuals / predicted
    weights: Array = np.minimum(1.0, HUBER_K * deviation(relative) / np.maximum(np.abs(relative), 1e-12))
    return weights / predicted**2


def _mean_weights(predicted: Array, residuals: Array) -> Array:
    return 1.0 / predicted


def deviation(residuals: Array) -> float:
    """Standard deviation, estimated by the median absolute deviation; never 0, so that callers can divide by it."""
    return max(float(np.median(np.abs(residuals - np.median(residuals)))) * _MAD_TO_DEVIATION, 1e-9)


def dependence(features: Array) -> Array:
    """R squared of each feature by the others; 1 for a feature that never varies and is not the constant."""
    num_features = features.shape[1]
    result = np.zeros(num_features)
    for index in range(1, num_features):
        own = features[:, index]
        spread = float(((own - own.mean()) ** 2).sum())
        others: Any = np.delete(features, index, axis=1)
        solution = np.linalg.lstsq(others, own, rcond=None)[0]
        result[index] = 1.0 if spread == 0 else 1.0 - float(((own - others @ solution) ** 2).sum()) / spread
    return result
