"""Sequences of a played recording have their requests, tokens, times and ends."""

from __future__ import annotations

from pathlib import Path

from lockstep.engine.options import LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.executors.sampling_params import SamplingParams
from lockstep.replay.playback import played
from lockstep.replay.played_sequences import PlayedSequence, PlayedSequences
from lockstep.replay.trace import open_trace
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.messages import Submit
from tests.replay.recordings import POOL
from tests.worker.support import running

NUM_REQUESTS = 9


def record(folder: Path, *, has_content: bool) -> None:
    """Requests with one, two and three completions."""
    with running(trace=TraceOptions(str(folder), has_content=has_content)) as bench:
        bench.ready("a", "stub://alpha", LoadOptions(POOL))
        for number in range(NUM_REQUESTS):
            params = SamplingParams(max_tokens=5 + number, ignore_eos=True, n=1 + number % 3)
            bench.tell(Submit(number, "a", GenerationRequest((1, 2, number), params, external_id=f"r{number}")))
        for number in range(NUM_REQUESTS):
            bench.answer(number)


def sequences_in(folder: Path) -> list[PlayedSequence]:
    sequences = PlayedSequences(with_tokens=True)
    ended = [each for event in played(open_trace(folder)) for each in sequences.take(event)]
    assert not sequences.open
    return ended


def test_every_sequence_has_its_request_its_tokens_and_its_end(tmp_path: Path) -> None:
    record(tmp_path, has_content=True)
    ended = sequences_in(tmp_path)
    assert len(ended) == sum(1 + number % 3 for number in range(NUM_REQUESTS))
    for each in ended:
        assert each.arrival is not None
        assert each.end is not None
        assert each.engine.name == "alpha"
        assert len(each.tokens) == each.end.num_tokens == each.outcome.num_output_tokens
        assert sum(num_tokens for _, num_tokens in each.steps) == len(each.tokens)
        assert (each.first is None) == (each.added.request.sibling_of is None)
        assert (each.digest is None) == (each.first is not None)
    for first in (each for each in ended if each.first is None):
        siblings = sorted(each.index for each in ended if each.first is first)
        assert siblings == list(range(1, first.num_siblings + 1))


def test_without_content_sequences_have_times_but_no_tokens(tmp_path: Path) -> None:
    record(tmp_path, has_content=False)
    for each in sequences_in(tmp_path):
        assert not each.tokens
        assert sum(num_tokens for _, num_tokens in each.steps) == each.outcome.num_output_tokens
