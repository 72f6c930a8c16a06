"""Statistics of latency: estimates the long-run variance of series that change slowly, and excludes warm-ups.

Block means (`lockstep.release.statistics`) detect correlation up to a tenth of a series. Latency also changes more
slowly: slow periods of hundreds of pairs, daily variation, long memory. Two functions account for that:

- `spectrum_of` estimates the variance from the power of the lowest cosine frequencies of a series. The first one is
  half a wave over the whole series, so the estimate includes a trend, a step or a period of twice the length. If power
  rises towards low frequencies, it is extrapolated to the mean with the steepest rise that the data allow (fractional
  memory; the variance of a mean by Beran, "Statistics for Long-Memory Processes", 1994; the likelihood by Whittle).
  If power rises significantly (score test of Robinson, "Efficient tests of nonstationary hypotheses", 1994), the series
  changes more slowly than the observation lasted, and there is no evidence. The estimate is at least the variance of
  single pairs.
- `track_times` excludes a warm-up. A window of first pairs never decides alone: a sixth of the evidence must come from
  the pairs after it. If the window is slower by more than chance, it is excluded, and only the later pairs are judged.
  A faster window is not excluded: warm-ups are slow, and a series that becomes slower is a real change.

No estimate at a look depends on later pairs. docs/gate-error-rates.md has simulated error rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np

from lockstep.release.statistics import MIN_PAIRS, Bools, Floats, Looks, Track, track, width_after

MAX_BLOCKS = 512
"""Maximum number of block means from which a spectrum is computed; longer series have longer blocks."""
BLOCKS_STEP = 16
"""Step between the possible numbers of blocks. There are few numbers, so the cosines of each are computed only once."""
MAX_FREQUENCIES = 128
"""Maximum number of lowest frequencies in a spectrum."""
AVERAGES = {2: 0.8, 8: 1.2, 16: 1.2, 32: 1.15, 64: 1.1}
"""Averages of the power of the lowest frequencies: the number of frequencies, and a factor that covers most of the
average's own deviation. The largest product is used as the variance."""
EXPONENTS = np.arange(0.0, 0.5, 0.05)
"""Candidate exponents of fractional memory; 0 is no memory, and at 0.5 the mean does not converge."""
MAX_LESS_LIKELY = 0.5
"""Maximum log-likelihood difference from the best exponent at which an exponent is still considered."""
MAX_SCORE = 2.4
"""Score, in standard errors, from which a series counts as changing. 1.5 % of independent series exceed it."""
MAX_DIFFERENCE = 1.8
"""Standard errors by which the window may be slower than the later pairs without being excluded."""
SHARE_AFTER_WINDOW = 1 / 6
"""Fraction of the log-evidence that the pairs after the window must provide alone."""
WINDOWS_TO_PASS = 5
"""Number of windows after which a series can be certainly below its bound. A rollback must not wait that long, but a
promotion can, since it takes longer to show that errors are rare."""
_INFLATION = np.array([math.pi ** (2 * d) / (math.gamma(2 * d + 2) * math.cos(math.pi * d)) for d in EXPONENTS])
"""Variance of a mean of n values divided by the power of its first frequencies, by exponent."""


@dataclass(frozen=True, slots=True)
class TimesTrack:
    """Test of a series of times at each look."""

    line: Track
    is_excluded: Bools
    """True if the window is slower than the later pairs, so that only these are judged."""
    is_changing: Bools
    """True if the series changes more slowly than the observation lasted, so that there is no evidence."""
    window: int
    """Number of the series' pairs in the window."""
    window_mean: Floats
    """Mean of the window; NaN if it is empty."""


def spectrum_of(sums: Floats, looks: Looks) -> tuple[Floats, Floats]:
    """Long-run variance of one pair, and the number of pairs with which evidence begins (inf: not yet), at each look.

    Args:
        sums: sums of the first 0, 1, 2, ... pairs, along the last axis.
    """
    values = np.diff(sums, axis=-1)
    squares = np.concatenate([np.zeros_like(sums[..., :1]), np.cumsum(values * values, axis=-1)], axis=-1)
    num_pairs = np.maximum(looks, 1)
    variance = squares[..., looks] / num_pairs - (sums[..., looks] / num_pairs) ** 2
    begins = np.full(variance.shape, float(MIN_PAIRS))
    for at, num in enumerate(looks):
        if num >= MIN_PAIRS:
            power = _power(sums, int(num))
            found, is_changing = _variance_of(power)
            variance[..., at] = np.maximum(variance[..., at], found)
            begins[..., at] = np.where(is_changing, math.inf, MIN_PAIRS)
    return variance, begins


def _power(sums: Floats, num: int) -> Floats:
    """Power of the lowest cosine frequencies. For independent pairs, each is the variance of one pair on average."""
    size = -(-num // MAX_BLOCKS)
    num_blocks = num // size // BLOCKS_STEP * BLOCKS_STEP  # the first pairs that fill no block are ignored
    ends = sums[..., num - num_blocks * size : num + 1 : size]
    power: Floats = ((ends[..., 1:] - ends[..., :-1]) @ _cosines(num_blocks)) ** 2 / (num_blocks * size)
    return power


@lru_cache(maxsize=MAX_BLOCKS // BLOCKS_STEP)
def _cosines(num_blocks: int) -> Floats:
    """Values of the lowest cosine frequencies at the blocks, with frequencies along the last axis. Each has mean 0 and
    mean square 1."""
    frequencies = np.arange(1, min(MAX_FREQUENCIES, num_blocks // 2) + 1)
    middles = (np.arange(num_blocks) + 0.5) / num_blocks
    found: Floats = math.sqrt(2.0) * np.cos(math.pi * middles[:, None] * frequencies)
    return found


def _variance_of(power: Floats) -> tuple[Floats, Bools]:
    """Long-run variance of one pair, and whether the series changes too slowly for an estimate."""
    num = power.shape[-1]
    logs = np.log(np.arange(1, num + 1))
    sums = np.cumsum(power, axis=-1)
    largest = np.maximum.reduce([factor * sums[..., min(n, num) - 1] / min(n, num) for n, factor in AVERAGES.items()])
    power = power + np.finfo(np.float64).tiny  # a series that never changes is flat
    levels = power @ np.exp(2.0 * logs[:, None] * EXPONENTS) / num
    likelihood = -0.5 * num * (np.log(levels) - 2.0 * EXPONENTS * logs.mean())
    is_likely = likelihood >= likelihood.max(axis=-1, keepdims=True) - MAX_LESS_LIKELY
    extrapolated = np.where(is_likely, levels * _INFLATION, 0.0).max(axis=-1)
    centred = logs - logs.mean()
    score = -(power @ centred) / (math.sqrt(2.0 * float(centred @ centred)) * power.mean(axis=-1))
    return np.maximum(largest, extrapolated), (score > MAX_SCORE) | is_likely[..., -1]


def track_times(
    series: Floats, bound: float, alpha: float, counts: Looks, looks: Looks, window: tuple[int, int], *, is_event: bool
) -> TimesTrack:
    """Test a series of times. Other arguments are those of `lockstep.release.statistics.track`.

    Args:
        counts: number of the series' pairs at each look.
        looks: number of all pairs at each look.
        window: number of all pairs in which a candidate may warm up, and how many of them belong to this series.
        is_event: True if the numbers are -1, 0 and 1. The window is then always excluded.
    """
    length, own = window
    whole = after = _line(series, bound, alpha, counts, is_event)
    has_later = own < series.shape[-1]
    if own and has_later:
        after = _line(series[..., own:], bound, alpha, np.maximum(counts - own, 0), is_event)
    mean = series[..., :own].mean(axis=-1) if own else np.full(series.shape[:-1], math.nan)
    is_late = (looks >= length + MIN_PAIRS) & (counts > own)
    is_late_alone = is_late & (looks >= 2 * length + MIN_PAIRS)
    line, is_excluded = after, np.zeros(after.mean.shape, np.bool_)
    if is_event:
        is_ready = np.broadcast_to(is_late_alone, is_excluded.shape)
    else:
        if own and has_later:
            later = np.maximum(counts - own, 1)
            slower = mean[..., None] - after.mean
            is_excluded = is_late & (slower > MAX_DIFFERENCE * after.scale * np.sqrt(1.0 / own + 1.0 / later))
            line = _chosen(is_excluded, after, _together(whole, after, alpha, later))
        is_ready = np.where(is_excluded, is_late_alone, is_late)
    line = _withheld(line, is_ready, looks >= WINDOWS_TO_PASS * length)
    is_changing = is_ready & np.isinf(line.begins)
    passes_with = np.where(looks > 0, WINDOWS_TO_PASS * length * counts / np.maximum(looks, 1), 0.0)
    line = replace(line, begins=np.maximum(line.begins, passes_with))
    return TimesTrack(line, is_excluded, is_changing, own, mean)


def without_changing(times: TimesTrack, latency: TimesTrack) -> TimesTrack:
    """Series of the latency tail, without evidence at looks at which latency itself changes too slowly."""
    is_changing = times.is_changing | latency.is_changing
    line = replace(
        _withheld(times.line, ~is_changing, ~is_changing), begins=np.where(is_changing, math.inf, times.line.begins)
    )
    return replace(times, line=line, is_changing=is_changing)


def _line(series: Floats, bound: float, alpha: float, counts: Looks, is_event: bool) -> Track:
    return track(series, bound, alpha, counts, is_event=is_event, measure=spectrum_of)


def _together(whole: Track, after: Track, alpha: float, later: Looks) -> Track:
    """Test of the whole series, limited to the evidence that the pairs after the window confirm."""
    with np.errstate(invalid="ignore"):
        width = np.where(np.isinf(after.upper), math.inf, width_after(after.scale, later, alpha**SHARE_AFTER_WINDOW))
    return replace(
        whole,
        lower=np.minimum(whole.lower, after.mean - width),
        upper=np.maximum(whole.upper, after.mean + width),
        log_above=np.minimum(whole.log_above, after.log_above / SHARE_AFTER_WINDOW),
        log_below=np.minimum(whole.log_below, after.log_below / SHARE_AFTER_WINDOW),
    )


def _chosen(is_first: Bools, first: Track, second: Track) -> Track:
    """Values of the first track where the condition is true, and of the second elsewhere."""
    return Track(
        **{
            each.name: np.where(is_first, getattr(first, each.name), getattr(second, each.name))
            for each in fields(Track)
        }
    )


def _withheld(line: Track, is_ready: Bools, can_pass: Bools) -> Track:
    """Copy of a track without evidence where it is not ready, and without evidence below its bound where it cannot
    pass."""
    return replace(
        line,
        lower=np.where(is_ready, line.lower, -math.inf),
        upper=np.where(is_ready, line.upper, math.inf),
        log_above=np.where(is_ready, line.log_above, -math.inf),
        log_below=np.where(is_ready & can_pass, line.log_below, -math.inf),
    )
