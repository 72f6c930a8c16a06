"""Long-run variance of series that change slowly, and warm-ups: what latency is judged with.

Block means (`lockstep.release.statistics`) see memory up to a tenth of a series. Latency also has slower changes:
spells of hundreds of pairs, daily swings, memory that never fades. Two things are here for that:

- `spectrum_of` estimates the variance from the power of the lowest cosine frequencies of a series. The first one is
  half a wave over the whole series, so a trend, a step or a swing of twice its length is in the estimate. Power that
  rises towards low frequencies is extrapolated to the mean with the steepest rise that the data allow (fractional
  memory; the variance of a mean by Beran, "Statistics for Long-Memory Processes", 1994; the likelihood by Whittle).
  Power that rises significantly (score test of Robinson, "Efficient tests of nonstationary hypotheses", 1994) means
  that the series changed more slowly than it was observed: then there is no evidence. The variance of single pairs is
  the least.
- `track_times` leaves out a warm-up. A window of first pairs never decides alone: a sixth of the evidence has to come
  from the pairs after it, and where the window is slower by more than chance, it is excluded and the later pairs are
  judged alone. A window that is faster stays in: warm-ups are slow, and what grows slower changes.

No part of this depends on pairs after a look. docs/gate-error-rates.md has the error rates by simulation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np

from lockstep.release.statistics import MIN_PAIRS, Bools, Floats, Looks, Track, track, width_after

MAX_BLOCKS = 512
"""Block means that a spectrum is computed from; longer series have longer blocks."""
BLOCKS_STEP = 16
"""Spectra are of multiples of so many blocks: of few numbers of blocks, whose cosines are computed once."""
MAX_FREQUENCIES = 128
"""Lowest frequencies that are looked at."""
AVERAGES = {2: 0.8, 8: 1.2, 16: 1.2, 32: 1.15, 64: 1.1}
"""Averages of the power of the lowest frequencies: how many, and a factor that covers most of the average's own
deviation. The largest product is the variance."""
EXPONENTS = np.arange(0.0, 0.5, 0.05)
"""Exponents of fractional memory that are tried; 0 is none, and at 0.5 a mean does not converge."""
MAX_LESS_LIKELY = 0.5
"""Logarithm of the likelihood by which an exponent may be less likely than the best one and still count."""
MAX_SCORE = 2.4
"""Standard errors of the score test from which a series counts as changing: 1.5 % of independent series do."""
MAX_DIFFERENCE = 1.8
"""Standard errors by which a window may be slower than the pairs after it and still count with them."""
SHARE_AFTER_WINDOW = 1 / 6
"""Part of the evidence (of its logarithm) that the pairs after the window have to show alone."""
WINDOWS_TO_PASS = 5
"""Windows after which a series can be certainly below its bound. A rollback cannot wait for so many, a promotion can:
that errors are rare takes longer."""
_INFLATION = np.array([math.pi ** (2 * d) / (math.gamma(2 * d + 2) * math.cos(math.pi * d)) for d in EXPONENTS])
"""Variance of a mean of n values over the power of its first frequencies, by exponent."""


@dataclass(frozen=True, slots=True)
class TimesTrack:
    """A series of times at each look."""

    line: Track
    is_excluded: Bools
    """Whether the window is slower than the pairs after it, which are judged alone."""
    is_changing: Bools
    """Whether the series changes more slowly than it was observed: there is no evidence."""
    window: int
    """Pairs in the window."""
    window_mean: Floats
    """Mean of the window; NaN where it is empty."""


def spectrum_of(sums: Floats, looks: Looks) -> tuple[Floats, Floats]:
    """Variance of one pair as the mean's uncertainty has it, and the pairs with which evidence begins (inf: none yet).

    Args:
        sums: of the first 0, 1, 2, ... pairs, along the last axis.
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
    """Power of the lowest cosine frequencies; of independent pairs each is the variance of one, on average."""
    size = -(-num // MAX_BLOCKS)
    num_blocks = num // size // BLOCKS_STEP * BLOCKS_STEP  # what is left over at the beginning is not looked at
    ends = sums[..., num - num_blocks * size : num + 1 : size]
    power: Floats = ((ends[..., 1:] - ends[..., :-1]) @ _cosines(num_blocks)) ** 2 / (num_blocks * size)
    return power


@lru_cache(maxsize=MAX_BLOCKS // BLOCKS_STEP)
def _cosines(num_blocks: int) -> Floats:
    """The lowest cosine frequencies, along the last axis, at blocks; each of mean 0 and mean square 1."""
    frequencies = np.arange(1, min(MAX_FREQUENCIES, num_blocks // 2) + 1)
    middles = (np.arange(num_blocks) + 0.5) / num_blocks
    found: Floats = math.sqrt(2.0) * np.cos(math.pi * middles[:, None] * frequencies)
    return found


def _variance_of(power: Floats) -> tuple[Floats, Bools]:
    """Variance that covers what the mean can do, and whether the series changes too slowly for any."""
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
    """Follow a series of times; the arguments of `lockstep.release.statistics.track`, and these.

    Args:
        counts: pairs of the series at each look.
        looks: pairs of all series together at each look.
        window: pairs of all series in which a candidate may warm up, and how many of them this series has.
        is_event: as there; the window of a series of events is always excluded.
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


def beside(times: TimesTrack, latency: TimesTrack) -> TimesTrack:
    """Latency's tail, which is no evidence where latency itself changes too slowly."""
    is_changing = times.is_changing | latency.is_changing
    line = replace(
        _withheld(times.line, ~is_changing, ~is_changing), begins=np.where(is_changing, math.inf, times.line.begins)
    )
    return replace(times, line=line, is_changing=is_changing)


def _line(series: Floats, bound: float, alpha: float, counts: Looks, is_event: bool) -> Track:
    return track(series, bound, alpha, counts, is_event=is_event, measure=spectrum_of)


def _together(whole: Track, after: Track, alpha: float, later: Looks) -> Track:
    """The whole series, as far as the pairs after the window agree with it."""
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
    """The one series where the condition holds, and the other elsewhere."""
    return Track(
        **{
            each.name: np.where(is_first, getattr(first, each.name), getattr(second, each.name))
            for each in fields(Track)
        }
    )


def _withheld(line: Track, is_ready: Bools, can_pass: Bools) -> Track:
    """The series without evidence while it is not ready, and never below its bound while it cannot pass."""
    return replace(
        line,
        lower=np.where(is_ready, line.lower, -math.inf),
        upper=np.where(is_ready, line.upper, math.inf),
        log_above=np.where(is_ready, line.log_above, -math.inf),
        log_below=np.where(is_ready & can_pass, line.log_below, -math.inf),
    )
