"""The timeline of one request has all data of its recording, independent of concurrent requests."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest

from lockstep.cli.main import invoke
from lockstep.core.request import Priority
from lockstep.engine.options import LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.errors import TraceError
from lockstep.executors.sampling_params import SamplingParams
from lockstep.replay.playback import Arrived, played
from lockstep.replay.request_timeline import RequestTimeline, SequenceTimeline
from lockstep.replay.rerun import DecidedStep
from lockstep.replay.trace import open_trace
from lockstep.replay.verify import verify
from lockstep.worker.flight.entries import OutputDigest, RequestDigest
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.messages import Submit
from tests.replay.recordings import POOL
from tests.replay.rotations import MAX_FILES, many_files
from tests.worker.support import running

NUM_REQUESTS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files of two engines under pressure, with content; every request has a name, and two share one."""
    folder = tmp_path_factory.mktemp("timelines")
    ask_everything(many_files(folder, MAX_FILES * 4096, has_content=True))
    return folder


def ask_everything(trace: TraceOptions) -> None:
    with running(trace=trace) as bench:
        bench.ready("a", "stub://alpha", LoadOptions(POOL))
        bench.ready("b", "stub://beta", LoadOptions(POOL), Priority.HIGH)
        for number in range(NUM_REQUESTS):
            params = SamplingParams(max_tokens=10 + number % 30, ignore_eos=True, n=1 + (number % 6 == 5))
            prompt = tuple(b"a beginning that all have"[: 5 + number % 20]) + (number % 250,) * (3 + number % 17)
            name = f"request-{number % 23}"
            request = GenerationRequest(prompt, params, priority=number % 3 - 1, external_id=name)
            bench.tell(Submit(number, "ab"[number % 2], request))
        for number in range(NUM_REQUESTS):
            bench.answer(number)


def timeline_of(folder: Path, name: str) -> RequestTimeline:
    timeline = RequestTimeline(name)
    assert verify(open_trace(folder), timeline=timeline).is_identical
    return timeline


def test_every_request_has_the_timeline_that_was_recorded(folder: Path) -> None:
    trace = open_trace(folder)
    assert len(trace.files) > 1
    entries = list(trace.entries())
    ends = {(e.engine, e.seq_id): e for e in entries if isinstance(e, OutputDigest)}
    named = [entry for entry in entries if isinstance(entry, RequestDigest)]
    assert len(named) == NUM_REQUESTS
    num_waits = num_preemptions = 0
    for name in {entry.external_id for entry in named}:
        told = timeline_of(folder, name).sequences
        firsts = {(entry.engine, entry.seq_id) for entry in named if entry.external_id == name}
        assert {(each.engine, each.sequence) for each in told if each.sibling_of is None} == firsts
        for each in told:
            end = ends[each.engine, each.sequence]
            assert (each.end, each.output_tokens) == (end.reason.value, end.num_tokens)
            assert each.tokens is not None
            assert len(each.tokens) == each.output_tokens == sum(part.num_sampled for part in each.steps)
            check_steps(each)
            num_waits += len(each.waits)
            num_preemptions += each.preemptions
    assert num_waits > 5, "the pools are small"
    assert num_preemptions


def check_steps(told: SequenceTimeline) -> None:
    """Steps are in order, and waits lie between the arrival and the end."""
    assert told.added_step is not None
    parts = told.steps
    assert all(before.last_step < after.first_step for before, after in itertools.pairwise(parts))
    assert told.added_step <= parts[0].first_step
    busy = {step for part in parts for step in range(part.first_step, part.last_step + 1)}
    for wait in told.waits:
        assert told.added_step <= wait.first_step <= wait.last_step <= parts[-1].last_step
        assert wait.num_steps <= wait.last_step - wait.first_step + 1
        assert wait.first_step not in busy
    assert told.queued_ms is not None
    assert told.first_token_ms is not None
    assert told.end_ms is not None
    assert told.queued_ms <= told.first_token_ms <= told.end_ms


def test_timeline_times_are_those_of_steps(folder: Path) -> None:
    name = f"request-{random.randrange(NUM_REQUESTS - 1)}"
    print(name)
    ends_us, arrivals_us = {}, {}
    for event in played(open_trace(folder)):
        if isinstance(event, DecidedStep) and event.events is not None:
            for finish in event.events.finished:
                ends_us[event.engine, finish.seq_id] = event.timing.start_us + event.timing.duration_us
        elif isinstance(event, Arrived):
            arrivals_us[event.came.engine, event.came.seq_id] = event.arrival_us
    for told in timeline_of(folder, name).sequences:
        key = told.engine, told.sequence
        assert told.end_ms == (ends_us[key] - arrivals_us[key]) / 1e3


def test_the_command_shows_one_request_and_rejects_unknown_ones(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["replay", "--verify", str(folder), "--request=request-7"]) == 0
    verdict, head, first, *rest = capsys.readouterr().out.splitlines()
    assert verdict.endswith("identical")
    assert head == "request request-7: 1 sequence"
    assert re.fullmatch(
        r"sequence 4 of engine [01] \(beta\): 22 prompt tokens( \(\d+ cached\))?; 17 output tokens; ended: length",
        first,
    )
    assert rest[-1].startswith("  tokens: ")
    assert invoke(["replay", "--execute", str(folder), "--model", "stub://beta", "--request", "request-7"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("execute")]
    assert re.fullmatch(
        r"execute: 17 tokens of request request-7 in \d+ steps of engine [01] \(beta\), every token equal", line
    )
    assert invoke(["replay", "--execute", str(folder), "--model", "stub://beta", "--request", "request-0"]) == 0
    assert "execute: 66 tokens of request request-0 in " in capsys.readouterr().out, "two choices of the second of it"
    assert invoke(["replay", "--execute", str(folder), "--model", "stub://alpha", "--request", "request-7"]) == 2
    assert "no request 'request-7' of this model" in capsys.readouterr().err
    assert invoke(["replay", "--verify", str(folder), "--request", "nobody-s"]) == 2
    assert "the recording has no request 'nobody-s'" in capsys.readouterr().err
    assert invoke(["replay", str(folder), "--request", "request-7"]) == 2
    assert "--request requires --verify TRACE or --execute TRACE" in capsys.readouterr().err


def test_without_content_a_timeline_has_no_tokens(tmp_path: Path) -> None:
    with running(trace=TraceOptions(str(tmp_path), 1 << 28)) as bench:
        bench.ready("a", "stub://alpha", LoadOptions(POOL))
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        bench.tell(Submit(0, "a", GenerationRequest((1, 2, 3), params, external_id="only")))
        bench.answer(0)
    [told] = timeline_of(tmp_path, "only").sequences
    assert (told.tokens, told.output_tokens) == (None, 4)
    with pytest.raises(TraceError, match="no request 'other'"):
        timeline_of(tmp_path, "other").check_found(open_trace(tmp_path))
