"""A batch is its rows: same bits alone or together, the caller's logits untouched, faults contained."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.executors.sampling import SamplerState, Samples, sample
from lockstep.executors.sampling_params import ResolvedSampling
from tests.executors.sampling_reference import Floats, log_softmax, penalised
from tests.executors.test_logits import rows

GREEDY = ResolvedSampling(0.0)

SAMPLINGS = st.builds(
    ResolvedSampling,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 5, 50, 300]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([(), ((0, 5.0), (9, -100.0))]),
    logprobs=st.sampled_from([None, None, 0, 4]),
)


def states_of(samplings: list[ResolvedSampling], vocab_size: int) -> list[SamplerState]:
    states = []
    for index, sampling in enumerate(samplings):
        state = SamplerState(sampling, 1_000 + index, [1, 2, 3, 2], vocab_size)
        for token in (4, 4, 2):
            state.append(token)
        states.append(state)
    return states


def row_of(samples: Samples, index: int) -> tuple[int, object, bool]:
    return samples.token_ids[index], samples.logprobs[index], samples.finite[index]


@settings(max_examples=120)
@given(
    st.integers(0, 2**32),
    st.sampled_from([17, 257, 4_099, 5_000]),
    st.lists(SAMPLINGS, min_size=1, max_size=9),
    st.integers(0, 7),
    st.data(),
)
def test_a_row_gives_the_same_bits_alone_and_in_any_batch(
    seed: int, vocab_size: int, samplings: list[ResolvedSampling], offset: int, data: st.DataObject
) -> None:
    """Other rows, their order and the alignment of the memory do not matter."""
    logits = np.stack([rows(seed + index, vocab_size, None) for index in range(len(samplings))])
    order = data.draw(st.permutations(range(len(samplings))))
    suppressed = [data.draw(st.sampled_from([(), (0, 5), (int(row.argmax()),)])) for row in logits]
    states = states_of(samplings, vocab_size)
    shifted = np.empty(logits.size + offset, np.float32)[offset:].reshape(logits.shape)
    shifted[:] = logits[order]
    batch = sample(shifted, [states[i] for i in order], [7 + i for i in order], [suppressed[i] for i in order])
    for place, index in enumerate(order):
        alone = sample(logits[index : index + 1].copy(), [states[index]], [7 + index], [suppressed[index]])
        assert row_of(alone, 0) == row_of(batch, place)
        assert batch.token_ids[place] not in suppressed[index]


def test_the_callers_logits_are_only_read() -> None:
    samplings = [GREEDY, ResolvedSampling(1.0, repetition_penalty=1.5, logprobs=2), ResolvedSampling(2.0, top_p=0.9)]
    logits = np.stack([rows(seed, 5_003, None) for seed in range(3)])
    logits.flags.writeable = False
    sample(logits, states_of(samplings, 5_003), [0, 1, 2], [(1,), (2,), ()])


def test_a_seed_gives_the_same_tokens_and_another_gives_others() -> None:
    logits = np.zeros((1, 5_003), np.float32)

    def tokens(seed: int) -> list[int]:
        state = SamplerState(ResolvedSampling(1.0), seed, (), 5_003)
        return [sample(logits, [state], [position]).token_ids[0] for position in range(20)]

    assert tokens(1) == tokens(1)
    assert len(set(tokens(1))) > 15
    assert tokens(1) != tokens(2)


@pytest.mark.parametrize("vocab_size", [17, 5_003])
def test_greedy_takes_the_lowest_of_equals(vocab_size: int) -> None:
    logits = np.zeros((2, vocab_size), np.float32)
    logits[0, [5, 9, 16]] = 2.0
    for samplings in ([GREEDY, GREEDY], [GREEDY, ResolvedSampling(1.0)]):
        assert sample(logits, states_of(samplings, vocab_size), [0, 0]).token_ids[0] == 5
    suppressed = [(5,), (0, 1)]
    assert sample(logits, states_of([GREEDY, GREEDY], vocab_size), [0, 0], suppressed).token_ids == [9, 2]


@pytest.mark.parametrize("others", [GREEDY, ResolvedSampling(1.0), ResolvedSampling(1.0, top_p=0.5, logprobs=3)])
@pytest.mark.parametrize("fault", [np.nan, np.inf])
@pytest.mark.parametrize("faulty", [GREEDY, ResolvedSampling(0.7, top_k=4, logprobs=2)])
def test_a_faulty_row_fails_alone(others: ResolvedSampling, fault: float, faulty: ResolvedSampling) -> None:
    logits = np.stack([rows(seed, 5_003, None) for seed in range(3)])
    expected = sample(logits, states_of([others, faulty, others], 5_003), [4, 4, 4])
    logits[1, 4_000] = fault
    found = sample(logits, states_of([others, faulty, others], 5_003), [4, 4, 4])
    assert found.finite == [True, False, True]
    assert found.logprobs[1] is None
    assert [row_of(found, i) for i in (0, 2)] == [row_of(expected, i) for i in (0, 2)]


def test_when_everything_is_suppressed_the_row_fails() -> None:
    logits = np.zeros((2, 3), np.float32)
    states = [SamplerState(ResolvedSampling(1.0), 1, (), 3), SamplerState(GREEDY, 1, (), 3)]
    assert sample(logits, states, [0, 0], [(0, 1, 2), (0, 1, 2)]).finite == [False, False]


def test_an_empty_batch_is_empty() -> None:
    assert sample(np.empty((0, 5_003), np.float32), [], []) == Samples([], [], [])


@settings(max_examples=150)
@given(
    st.integers(0, 2**32),
    st.lists(st.integers(0, 39), max_size=30),
    st.lists(st.integers(0, 39), max_size=60),
    st.builds(
        ResolvedSampling,
        temperature=st.just(0.0),
        repetition_penalty=st.sampled_from([1.0, 0.5, 1.7]),
        presence_penalty=st.sampled_from([0.0, -1.0, 0.7]),
        frequency_penalty=st.sampled_from([0.0, -0.3, 1.1]),
        logit_bias=st.sampled_from([(), ((3, 2.0), (30, -4.0))]),
    ),
)
def test_penalties_are_those_of_the_rules(
    seed: int, prompt_ids: list[int], output_ids: list[int], sampling: ResolvedSampling
) -> None:
    row = rows(seed, 40, None)
    state = SamplerState(sampling, 0, prompt_ids, 40)
    for token in output_ids:
        state.append(token)
    edited = row.copy()
    state.edit(edited)
    assert edited.tolist() == penalised(row, sampling, prompt_ids, output_ids).tolist()
    assert sample(row[None], [state], [0]).token_ids == [int(np.argmax(edited))]


def test_logprobs_are_the_models_own() -> None:
    """Before temperature, penalties, bias and suppression, as vLLM's raw_logprobs."""
    row: Floats = rows(8, 5_003, None)
    exact = log_softmax(row)
    best = int(row.argmax())
    sampling = ResolvedSampling(0.3, top_k=3, repetition_penalty=2.0, logit_bias=((best, -100.0),), logprobs=3)
    found = sample(row[None], [SamplerState(sampling, 1, [best], 5_003)], [0], [(best,)])
    (logprobs,) = found.logprobs
    assert logprobs is not None
    assert found.token_ids[0] != best
    assert logprobs.logprob == pytest.approx(exact[found.token_ids[0]], abs=1e-5)
    assert logprobs.top[0][0] == best
    assert logprobs.top[0][1] == pytest.approx(exact[best], abs=1e-5)


def test_without_penalties_the_past_is_not_kept() -> None:
    state = SamplerState(ResolvedSampling(1.0), 1, list(range(1_000)), 5_003)
    state.append(5)
    assert not state.edits_logits
    row = rows(1, 5_003, None)
    edited = row.copy()
    state.edit(edited)
    assert edited.tolist() == row.tolist()
