"""Sampling: chooses one token per row from the logits of a batch, each row independently.

A row's result depends on its logits, its state and its position, and never on the other rows: every reduction runs over
one row (or is a maximum, which does not round), and randomness is a function of seed and position. So a request's
tokens and log-probabilities are bitwise the same alone or in any batch.

The order of the rules is vLLM's: constraint, logit bias, suppressed tokens, penalties, temperature, min-p, top-k,
top-p. The repetition penalty divides positive and multiplies negative logits of tokens in prompt or output (Keskar et
al., "CTRL", 2019; as in Hugging Face and vLLM). Frequency and presence penalties subtract `count * frequency +
presence` for tokens of the output (OpenAI's API reference). Log-probabilities are those of the model itself, before any
of these rules (vLLM's `raw_logprobs`).

With x the logits, m their maximum and T the temperature, a token's weight is w = exp((x - m) / T). Tokens are ranked by
logit; of equal ones, the lowest id is first. min-p keeps tokens with w of at least min_p; top-k keeps the k first in
rank; top-p keeps a token if those before it weigh less than top_p of all tokens kept so far, so that the first always
stays. If few tokens remain, they are sorted, and the draw inverts their cumulative weights. If many remain (temperature
alone, or a wide nucleus), rejection_sampling.py draws without reading them all.

A token with a logit of -inf is never drawn. A row with NaN or +inf, or only -inf, is invalid and fails alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.executors.grammar import TokenBits
from lockstep.executors.logits import Columns, Floats, Ids, TokenLogprobs, at_least, columns, greatest, token_logprobs
from lockstep.executors.rejection_sampling import (
    Support,
    TokenRandom,
    draw_from_nucleus,
    first_hit,
)
from lockstep.executors.row_math import Weights, row_math
from lockstep.executors.sampling_params import ResolvedSampling

_ROOM = 16
"""Initial room for new output tokens in the arrays of a state, which grow by doubling."""
_FEW_ROWS = 8
"""Number of rows up to which reading them one by one is faster than reading them together."""
MAX_SORTED = 256
"""The largest top-k, and the largest number of columns, for which candidates are sorted."""


class Samples(NamedTuple):
    """Tokens sampled from a batch of rows, in row order."""

    token_ids: list[int]
    """Sampled ids; undefined where `finite` is False."""
    logprobs: list[TokenLogprobs | None]
    finite: list[bool]
    """False: the row contained NaN or infinity, or no allowed token; only that request fails."""


class SamplerState:
    """Sampling state of one sequence. Its next token depends on this state and its logits. Only `append` changes it."""

    def __init__(self, sampling: ResolvedSampling, seed: int, prompt_ids: Sequence[int], vocab_size: int) -> None:
        self.sampling = sampling
        self._random = None if sampling.is_greedy else TokenRandom(seed)
        self.needs_history = sampling.has_penalties
        """True if it needs the tokens of the output."""
        self.edits_logits = bool(sampling.logit_bias) or sampling.has_penalties
        """True if a row must be copied and changed before it is sampled."""
        self.is_plain_greedy = sampling.is_greedy and not self.edits_logits
        if self.edits_logits:
            self._begin(sampling, prompt_ids)

    def _begin(self, sampling: ResolvedSampling, prompt_ids: Sequence[int]) -> None:
        """Create the fields that only a state that edits rows has."""
        self._bias_ids = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        seen = dict.fromkeys(prompt_ids) if sampling.repetition_penalty != 1.0 else {}
        self._index = dict(zip(seen, range(len(seen)), strict=True))
        """Index of each token in the two arrays, which have spare room."""
        self._ids = np.zeros(len(seen) + _ROOM, np.int64)
        self._ids[: len(seen)] = np.fromiter(seen, np.int64, len(seen))
        self._counts = np.zeros(len(self._ids), np.float32)

    def append(self, token_id: int) -> None:
        """Record a token of the output."""
        if not self.needs_history:
            return
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token_id
        self._counts[index] += 1

    def random_at(self, position: int) -> TokenRandom | None:
        """This sequence's random words for the token at that position; None: it is greedy and needs none."""
        if self._random is not None:
            self._random.at(position)
        return self._random

    def edit(self, row: Floats) -> None:
        """Apply bias and penalties to a row, in place."""
        if not self.edits_logits:
            return
        sampling = self.sampling
        if len(self._bias_ids):
            row[self._bias_ids] += self._biases
        if not self._index:
            return
        ids, counts = self._ids[: len(self._index)], self._counts[: len(self._index)]
        values = row[ids]
        if sampling.repetition_penalty != 1.0:
            penalty = np.float32(sampling.repetition_penalty)
            values = np.where(values > 0, values / penalty, values * penalty)
        if sampling.frequency_penalty != 0.0:
            values -= counts * np.float32(sampling.frequency_penalty)
        if sampling.presence_penalty != 0.0:
            values -= (counts > 0) * np.float32(sampling.presence_penalty)
        row[ids] = values


def sample(
    logits: Floats,
    states: Sequence[SamplerState],
    positions: Sequence[int],
    suppressed: Sequence[tuple[int, ...]] | None = None,
    allowed: Mapping[int, TokenBits] | None = None,
) -> Samples:
    """Choose one token per row.

    Args:
        logits: [S, V], read only.
        states: one per row.
        positions: index in its sequence of the token to be chosen.
        suppressed: per row, ids that may not be chosen now; None: no row has any.
        allowed: allowed tokens of the rows with a constraint.
    """
    num_rows = len(states)
    assert logits.ndim == 2
    assert len(logits) == num_rows == len(positions)
    if all(state.is_plain_greedy for state in states):
        samples = likeliest(logits)
    else:
        samples = Samples([-1] * num_rows, [None] * num_rows, [True] * num_rows)
    scratch: Floats | None = None
    for index, state in enumerate(states):
        row = logits[index]
        banned = suppressed[index] if suppressed is not None else ()
        bits = allowed.get(index) if allowed is not None else None
        token: int | None = samples.token_ids[index]
        if bits is not None:  # an invalid row fails even if the constraint excludes the invalid logits
            if token == -1:
                samples.finite[index] = math.isfinite(row.max())
            if not samples.finite[index]:
                continue
        if token == -1 or token in banned or (bits is not None and not _has(bits, token)):
            edited = row
            if state.edits_logits or banned or bits is not None:
                scratch = np.empty_like(row) if scratch is None else scratch
                edited = _edited(row, scratch, state, banned, bits)
            token = draw(edited, state.sampling, state.random_at(positions[index]))
            samples.finite[index] = token is not None
            samples.token_ids[index] = 0 if token is None else token
        if state.sampling.logprobs is not None and samples.finite[index]:
            samples.logprobs[index] = token_logprobs(row, samples.token_ids[index], state.sampling.logprobs)
    return samples


def likeliest(logits: Floats) -> Samples:
    """Choose the id of the greatest logit per row, the lowest of equal ones: `sample` for rows that are all plain
    greedy.

    NaN counts as the greatest, so an invalid row needs no second pass.
    """
    best = logits.argmax(axis=1)
    tokens: list[int] = best.tolist()
    if len(tokens) <= _FEW_ROWS:
        peaks = [logits[row, token] for row, token in enumerate(tokens)]
    else:
        peaks = logits[np.arange(len(tokens)), best].tolist()
    return Samples(tokens, [None] * len(tokens), [math.isfinite(peak) for peak in peaks])


def draw(row: Floats, sampling: ResolvedSampling, random: TokenRandom | None) -> int | None:
    """Draw a token; None: the row contains NaN, +inf or no allowed token.

    Args:
        row: [V] float32, contiguous, read only.
        random: random words, set to the token's position; None: choose the most likely token.
    """
    if random is None:
        token = int(row.argmax())
        return token if math.isfinite(row[token]) else None
    cols = columns(row)
    if not math.isfinite(cols.peak):
        return None
    few = _sortable_candidates(cols, sampling)
    if few is not None:
        values, ids = few
        masses = np.cumsum(row_math().weigh(values, cols.peak, sampling.temperature))
        if sampling.top_p < 1.0:
            masses = masses[: masses.searchsorted(sampling.top_p * masses[-1]) + 1]
        return _pick(masses, ids, random)
    support = _support(cols, sampling)
    if sampling.top_p >= 1.0:
        return first_hit(cols, sampling.temperature, support, random)
    return draw_from_nucleus(cols, sampling, support, random)


def _has(bits: TokenBits, token: int | None) -> bool:
    return token is not None and bool(bits[token >> 3] >> (token & 7) & 1)


def _edited(
    row: Floats, scratch: Floats, state: SamplerState, banned: tuple[int, ...], bits: TokenBits | None
) -> Floats:
    """The row after constraint, bias, suppression and penalties, in the scratch space."""
    if bits is None:
        np.copyto(scratch, row)
    else:
        scratch.fill(-np.inf)
        np.copyto(scratch, row, where=np.unpackbits(bits, count=len(row), bitorder="little").view(np.bool_))
    if state.edits_logits:
        state.edit(scratch)
    if banned:
        scratch[list(banned)] = -np.inf
    return scratch


def _pick(masses: Weights, ids: Ids, random: TokenRandom) -> int:
    """Draw one of the tokens with these cumulative weights."""
    return int(ids[masses.searchsorted(random.uniform() * masses[-1], side="right")])


def _min_p_bound(cols: Columns, sampling: ResolvedSampling) -> np.float32:
    """The least logit that min-p keeps, rounded up, so that comparing a float32 with it equals comparing with the exact
    bound."""
    exact = cols.peak + sampling.temperature * row_math().log(sampling.min_p)
    rounded = np.float32(exact)
    return rounded if float(rounded) >= exact else np.nextafter(rounded, np.float32(np.inf))


def _sortable_candidates(cols: Columns, sampling: ResolvedSampling) -> tuple[Floats, Ids] | None:
    """Candidates after min-p and top-k, in rank order; None: they are too many to sort."""
    if 0 < sampling.top_k <= MAX_SORTED:
        values, ids = greatest(cols, min(sampling.top_k, len(cols.row)))
        if sampling.min_p > 0.0:
            kept = (-values).searchsorted(-_min_p_bound(cols, sampling), side="right")
            values, ids = values[:kept], ids[:kept]
        return values, ids
    if sampling.min_p > 0.0:
        bound = _min_p_bound(cols, sampling)
        if np.count_nonzero(cols.maxima >= bound) <= MAX_SORTED:
            values, ids = at_least(cols, bound)
            return (values[: sampling.top_k], ids[: sampling.top_k]) if sampling.top_k else (values, ids)
    return None


def _support(cols: Columns, sampling: ResolvedSampling) -> Support:
    """Support after min-p and a large top-k."""
    size = len(cols.row)
    support = Support(np.float32(-np.inf), size)
    if 0 < sampling.top_k < size:
        kth = np.float32(np.partition(cols.row, size - sampling.top_k)[size - sampling.top_k])
        num_ties = sampling.top_k - int(np.count_nonzero(cols.row > kth))
        support = Support(kth, int(np.flatnonzero(cols.row == kth)[num_ties - 1]))
    if sampling.min_p > 0.0:
        bound = _min_p_bound(cols, sampling)
        if bound > support.bound:
            support = Support(bound, size)
    return support
