"""Non-negative least squares that outliers do not bend, for a handful of features. Arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

MAX_FEATURES = 8
"""Every subset of features is tried: 256 systems of at most 8 unknowns."""
HUBER_K = 1.345
"""Residuals beyond this many deviations count linearly: 95 % efficient for normal errors (Huber, "Robust Statistics",
1981)."""
MAX_ROUNDS = 50
"""Of reweighting; it settles in about ten."""
_MAD_TO_DEVIATION = 1.4826
"""Median absolute deviation to standard deviation, for normal errors."""
_SETTLED = 1e-9


def non_negative(features: Array, values: Array, weights: Array) -> Array:
    """The coefficients, none negative, with the least weighted sum of squares.

    The optimum over non-negative coefficients is the ordinary solution over its own support (Karush-Kuhn-Tucker), so
    the best of all supports whose ordinary solution is not negative is exact.

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
    """Non-negative coefficients that follow the mean of the values, stalls excepted.

    First Huber's estimator on relative residuals, because a step's noise grows with the step, reweighted until it
    settles, with the median absolute deviation as scale: it says what is an outlier. Then residuals are cut at ``CUT``
    deviations of it, and weighted least squares with the inverse of the prediction as weight gives the coefficients:
    with those weights the predictions add up to the (cut) values, as sums of steps need.
    """
    floor = max(float(np.median(values)) / 4, 1e-9)
    typical = _reweighted(features, values, floor, _huber_weights)
    scale = np.maximum(features @ typical, floor)
    residuals = values - features @ typical
    limit = CUT * deviation(residuals / scale) * scale
    return _reweighted(features, features @ typical + np.clip(residuals, -limit, limit), floor, _mean_weights)


CUT = 10.0
"""Deviations at which a residual is cut: a stall of a second is no price of a token."""


def _reweighted(features: Array, values: Array, floor: float, weights_of: Callable[[Array, Array], Array]) -> Array:
    """Least squares again and again, with weights by the predictions (at least ``floor``) and residuals before."""
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
    """A standard deviation by the median absolute one; not 0, so that it can be divided by."""
    return max(float(np.median(np.abs(residuals - np.median(residuals)))) * _MAD_TO_DEVIATION, 1e-9)


def dependence(features: Array) -> Array:
    """How well each feature follows from the others, 0 to 1 (R squared); 1 where it never varies and is no constant."""
    num_features = features.shape[1]
    result = np.zeros(num_features)
    for index in range(1, num_features):
        own = features[:, index]
        spread = float(((own - own.mean()) ** 2).sum())
        others: Any = np.delete(features, index, axis=1)
        solution = np.linalg.lstsq(others, own, rcond=None)[0]
        result[index] = 1.0 if spread == 0 else 1.0 - float(((own - others @ solution) ** 2).sum()) / spread
    return result
