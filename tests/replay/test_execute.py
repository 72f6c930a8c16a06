"""Recordings with content are executed in this process, without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.outputs import RequestOutput
from lockstep.engine.request import GenerationRequest
from lockstep.executors.sampling_params import SamplingParams
from lockstep.replay.execute import execute
from lockstep.replay.execution import describe
from lockstep.replay.playback import Playback
from lockstep.replay.rerun import AppliedCommand, DecidedStep
from lockstep.replay.trace import open_trace
from lockstep.replay.verify import verify
from lockstep.worker.flight.entries import Entry, Named
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.messages import Abort, Outputs, Submit
from tests.replay.recordings import files_of, rewrite_entries
from tests.worker.support import Bench, running

SOURCE = "stub://alpha"
POOL = LoadOptions(EngineOptions(num_blocks=40, max_num_seqs=3, max_num_batched_tokens=40))


def answer(bench: Bench, request_id: int) -> RequestOutput:
    output = bench.answer(request_id).request
    assert output is not None
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three conversations of four turns, with and without sessions; then one with a disconnecting client."""
    folder = tmp_path_factory.mktemp("answers")
    with running(trace=TraceOptions(str(folder), has_content=True)) as bench:
        bench.ready("a", SOURCE, POOL)
        histories: list[tuple[int, ...]] = [(number,) * 20 for number in range(3)]
        for turn in range(4):
            for number, history in enumerate(histories):
                params = SamplingParams(max_tokens=20 + 7 * number, ignore_eos=True)
                session = None if number == 2 else f"s{number}"
                request = GenerationRequest((*history, turn), params, session_id=session, session_owner="m")
                bench.tell(Submit(10 * turn + number, "a", request))
            for number in range(3):
                output = answer(bench, 10 * turn + number)
                histories[number] = (*output.prompt_token_ids, *output.completions[0].token_ids)
        endless = SamplingParams(max_tokens=400, ignore_eos=True)
        bench.tell(Submit(99, "a", GenerationRequest((*histories[2], 9), endless, session_id="s2")))
        bench.heard(Outputs, lambda event: any(each.request_id == 99 and each.token_ids for each in event.outputs))
        bench.tell(Abort("a", (99,)))
        answer(bench, 99)
    return folder


def test_cached_answers_are_cached_again(folder: Path) -> None:
    trace = open_trace(folder)
    named: list[Named] = []
    hits: list[tuple[int, int]] = []
    for event in Playback(trace.entries()).play():
        if isinstance(event, AppliedCommand) and isinstance(event.command, Named):
            named.append(event.command)
        if isinstance(event, DecidedStep):
            hits += [(end.num_prompt_tokens, end.num_cached_tokens) for end in event.finished]
    assert [each.in_step for each in named].count(True) == 12
    assert len(hits) == 12
    assert [prompt - cached <= 17 for prompt, cached in hits].count(True) == 9, "all but the first turns"
    assert verify(trace).is_identical
    [execution] = execute(trace, SOURCE)
    assert execution.diverged is None, list(describe(execution))


def test_a_differing_number_of_answer_blocks_is_reported(folder: Path, tmp_path: Path) -> None:
    """The recording lacks blocks of an answer; everything else is equal."""
    [path] = files_of(folder)
    copied = tmp_path / path.name
    copied.write_bytes(path.read_bytes())

    def shorten(entries: list[Entry]) -> None:
        place = next(place for place, entry in enumerate(entries) if isinstance(entry, Named) and entry.seq_id == 2)
        entry = entries[place]
        assert isinstance(entry, Named)
        entries[place] = Named(entry.engine, entry.step, entry.seq_id, (*entry.runs[:1], 1), entry.in_step)

    rewrite_entries(copied, shorten)
    [execution] = execute(open_trace(copied), SOURCE)
    assert execution.diverged is not None
    assert "sequence 2's answer has 1 recorded blocks" in execution.diverged.what
