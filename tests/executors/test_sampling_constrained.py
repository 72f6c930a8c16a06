"""A constrained row chooses among what is allowed, as if the rest did not exist, and the other rows do not notice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.executors.sampling import SamplerState, sample
from lockstep.executors.sampling_params import ResolvedSampling
from tests.executors.sampling_reference import log_softmax

VOCAB = 5_003
SAMPLINGS = {
    "greedy": ResolvedSampling(0.0),
    "plain": ResolvedSampling(),
    "peaked": ResolvedSampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05),
    "penalised": ResolvedSampling(repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3),
    "biased": ResolvedSampling(logit_bias=((7, 30.0), (8, -100.0)), logprobs=3),
}


def bits_of(allowed: list[int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    flags = np.zeros((VOCAB + 31) // 32 * 32, np.uint8)
    flags[allowed] = 1
    return np.packbits(flags, bitorder="little")


def state_of(sampling: ResolvedSampling) -> SamplerState:
    state = SamplerState(sampling, 11, [1, 2, 3], VOCAB)
    for token in (4, 4, 9):
        state.append(token)
    return state


def logits_of(seed: int, num_rows: int = 1) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(0, 3, (num_rows, VOCAB)).astype(np.float32)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_it_is_sampling_from_a_row_in_which_nothing_else_can_come(name: str) -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        allowed = sorted(rng.choice(VOCAB, int(rng.integers(1, 60)), replace=False).tolist())
        logits = logits_of(seed)
        masked = np.full_like(logits, -np.inf)
        masked[0, allowed] = logits[0, allowed]
        one = sample(logits, [state_of(SAMPLINGS[name])], [seed], None, {0: bits_of(allowed)})
        other = sample(masked, [state_of(SAMPLINGS[name])], [seed])
        assert one.finite == [True]
        assert one.token_ids == other.token_ids
        assert one.token_ids[0] in allowed


@pytest.mark.parametrize("name", SAMPLINGS)
def test_constraint_of_a_row_does_not_affect_other_rows(name: str) -> None:
    logits = logits_of(3, 6)
    before = logits.copy()

    def run(allowed: dict[int, Any] | None) -> list[int]:
        states = [state_of(SAMPLINGS[name]) for _ in range(6)]
        return sample(logits, states, list(range(6)), None, allowed).token_ids

    free, mixed = run(None), run({1: bits_of([5]), 4: bits_of([6, 4_999])})
    assert [mixed[index] for index in (0, 2, 3, 5)] == [free[index] for index in (0, 2, 3, 5)]
    assert (mixed[1], mixed[4] in (6, 4_999)) == (5, True)
    assert np.array_equal(logits, before)


def test_a_greedy_choice_that_is_allowed_is_not_looked_at_again() -> None:
    logits = logits_of(5)
    best = int(logits[0].argmax())
    samples = sample(logits, [state_of(SAMPLINGS["greedy"])], [0], None, {0: bits_of([best, 1])})
    assert samples.token_ids == [best]


def test_log_probabilities_are_those_before_the_constraint() -> None:
    logits = logits_of(6)
    samples = sample(logits, [state_of(SAMPLINGS["biased"])], [0], None, {0: bits_of([42])})
    entry = samples.logprobs[0]
    assert entry is not None
    exact = log_softmax(logits[0])
    assert entry.logprob == pytest.approx(float(exact[42]), abs=1e-4)
    assert [token for token, _ in entry.top] == np.argsort(-logits[0], kind="stable")[:3].tolist()


@pytest.mark.parametrize("fault", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["greedy", "plain"])
def test_a_fault_in_a_token_that_is_not_allowed_is_still_a_fault(name: str, fault: float) -> None:
    logits = logits_of(7)
    logits[0, 4_000] = fault
    assert sample(logits, [state_of(SAMPLINGS[name])], [0], None, {0: bits_of([1, 2])}).finite == [False]


def test_nothing_allowed_is_a_fault_of_the_row_alone() -> None:
    states = [state_of(SAMPLINGS["plain"]) for _ in range(2)]
    assert sample(logits_of(8, 2), states, [0, 0], None, {0: bits_of([])}).finite == [False, True]
