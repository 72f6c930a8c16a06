"""Recordings with speculative decoding: decided and computed again, and compared with plain decoding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.executors.sampling_params import SamplingParams
from lockstep.release.decisions import decisions_of
from lockstep.release.verdict import Decision
from lockstep.replay.diff import diff_traces
from lockstep.replay.execute import execute
from lockstep.replay.execution import describe
from lockstep.replay.playback import Playback
from lockstep.replay.render.difference import engine_facts, finding_of_engine
from lockstep.replay.rerun import DecidedStep
from lockstep.replay.trace import open_trace
from lockstep.replay.verify import verify
from lockstep.worker.flight.entries import Command, EngineEntry, Entry, Filled, Named, Proposed, runs_of
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.messages import Submit
from tests.release.recording import judged, recorded_in_process
from tests.replay.recordings import entries_in, files_of, rewrite_entries
from tests.worker.support import running

SUFFIX = '{"method": "suffix", "num_speculative_tokens": 4}'


def options(text: str | None) -> LoadOptions:
    return LoadOptions(EngineOptions(num_blocks=24, max_num_seqs=4, speculative_config=text))


def request(number: int) -> GenerationRequest:
    params = SamplingParams(
        max_tokens=20 + number % 5, temperature=0.9 * (number % 2), seed=number, ignore_eos=True, n=1 + number % 3 // 2
    )
    text = f"case {number % 3}: refund invoice, refund invoice, refund invoice, refund"
    return GenerationRequest(text, params, external_id=f"r{number}", cache_salt="own" * (number % 4 == 3))


def record(folder: Path, text: str | None, key_file: str = "", *, has_content: bool = True) -> Path:
    """Record requests that are served a few at a time."""
    trace = TraceOptions(str(folder), has_content=has_content, key_file=key_file, max_bytes=1 << 28)
    with running(trace=trace) as bench:
        bench.ready("a", "pocket://", options(text))
        for first in range(0, 18, 3):
            for number in range(first, first + 3):
                bench.tell(Submit(number, "a", request(number)))
            for number in range(first, first + 3):
                assert bench.answer(number).error is None
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Recordings of the same requests with plain and with speculative decoding."""
    folder = tmp_path_factory.mktemp("speculation")
    key = folder / "key"
    key.write_text("0123456789abcdef" * 4)
    return record(folder / "plain", None, str(key)), record(folder / "suffix", SUFFIX, str(key))


def test_steps_with_drafts_are_decided_again_and_computed_again(folders: tuple[Path, Path]) -> None:
    trace = open_trace(folders[1])
    steps = [event for event in Playback(trace.entries()).play() if isinstance(event, DecidedStep)]
    assert sum(sum(step.plan.drafts) for step in steps) > 0
    assert verify(trace).is_identical
    [execution] = execute(trace, "pocket://")
    assert execution.diverged is None, list(describe(execution))
    assert execution.num_requests == 18


def test_drafts_are_recorded_with_the_prices_and_with_tokens_only_with_content(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    [path] = files_of(folders[1])
    proposed = [entry for entry in entries_in(path) if isinstance(entry, Proposed)]
    assert proposed
    assert all([count for _, count in each.drafts] == [*map(len, each.tokens)] for each in proposed)
    [engine] = [entry for entry in entries_in(path) if isinstance(entry, EngineEntry)]
    facts = json.loads(engine.speculation)
    assert facts["config"]["method"] == "suffix"
    assert facts["step_us"][0][0] == 1
    bare = record(tmp_path, SUFFIX, has_content=False)
    [path] = files_of(bare)
    without = [entry for entry in entries_in(path) if isinstance(entry, Proposed)]
    assert without
    assert not any(each.tokens for each in without)
    assert verify(open_trace(bare)).is_identical


def test_the_gate_reports_the_configuration_of_drafts_as_a_setting(folders: tuple[Path, Path]) -> None:
    plain, suffix = map(open_trace, folders)
    [engine] = decisions_of(plain, suffix)["engines"]
    assert list(engine["settings"]) == ["speculative_config"]
    off, config = engine["settings"]["speculative_config"]
    assert (off, json.loads(config)["method"]) == ("off", "suffix")
    [engine] = decisions_of(suffix, suffix)["engines"]
    assert engine["settings"] == {}


def rewritten(folder: Path, to: Path, change: Callable[[list[Entry]], None]) -> Path:
    """A copy of the folder's only file with changed entries."""
    [path] = files_of(folder)
    copied = to / path.name
    copied.write_bytes(path.read_bytes())
    rewrite_entries(copied, change)
    return copied


def first_proposed(entries: list[Entry]) -> tuple[int, Proposed]:
    """The first entry with drafts, and its place."""
    return next((place, entry) for place, entry in enumerate(entries) if isinstance(entry, Proposed))


def test_a_changed_number_of_drafts_is_a_difference(folders: tuple[Path, Path], tmp_path: Path) -> None:
    def change(entries: list[Entry]) -> None:
        place, entry = first_proposed(entries)
        (seq_id, count), *rest = entry.drafts
        entries[place] = Proposed(entry.engine, entry.step, ((seq_id, count + 1), *rest), entry.tokens)

    copied = rewritten(folders[1], tmp_path, change)
    verification = verify(open_trace(copied))
    assert not verification.is_identical


@pytest.mark.parametrize("kind", [Proposed, Filled, Named])
def test_a_command_that_the_scheduler_never_accepts_is_a_difference(
    folders: tuple[Path, Path], tmp_path: Path, kind: type[Command]
) -> None:
    """No drafts; a KV group that the model does not have; more blocks than the sequence can get."""

    def change(entries: list[Entry]) -> None:
        place, entry = first_proposed(entries)
        engine, step, seq_id = entry.engine, entry.step, entry.drafts[0][0]
        commands: tuple[Command, ...] = (
            Proposed(engine, step, ((seq_id, 0),)),
            Filled(engine, step, runs_of((1, 2)), 0, 7),
            Named(engine, step, seq_id, runs_of(range(9000)), False),
        )
        entries.insert(place, next(command for command in commands if isinstance(command, kind)))

    copied = rewritten(folders[1], tmp_path, change)
    assert not verify(open_trace(copied)).is_identical


def test_a_wrong_recorded_draft_is_a_difference_for_execution(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Drafts are decided again."""

    def change(entries: list[Entry]) -> None:
        for place, entry in enumerate(entries):
            if isinstance(entry, Proposed):
                tokens = tuple([(each[0] + 1, *each[1:]) for each in entry.tokens])
                entries[place] = Proposed(entry.engine, entry.step, entry.drafts, tokens)

    copied = rewritten(folders[1], tmp_path, change)
    [execution] = execute(open_trace(copied), "pocket://")
    assert execution.diverged is not None
    assert "drafts" in execution.diverged.what


def test_the_difference_to_plain_decoding_is_in_steps_and_in_no_token(folders: tuple[Path, Path]) -> None:
    [found] = diff_traces(open_trace(folders[0]), open_trace(folders[1]))
    assert found.diff.divergence is not None
    answers = found.answers
    assert answers is not None
    assert answers.num_compared == 18 + 6
    assert answers.num_tokens == sum((20 + number % 5) * (1 + number % 3 // 2) for number in range(18))
    assert answers.differing == ()
    assert answers.a.num_drafts == 0 < answers.b.num_accepted <= answers.b.num_drafts
    assert answers.b.num_steps < answers.a.num_steps
    assert engine_facts(found)["answers"]["differing"] == ()
    rest = finding_of_engine(found).rest
    assert any("no token differs" in line for line in rest)


def test_answers_without_content_are_compared_by_digests(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """And answers whose digests have different keys are not compared."""
    key = str(folders[0].parent / "key")
    bare = record(tmp_path / "bare", SUFFIX, key, has_content=False)
    [found] = diff_traces(open_trace(folders[0]), open_trace(bare))
    assert found.answers is not None
    assert (found.answers.num_compared, found.answers.differing) == (24, ())
    other = record(tmp_path / "other", None, has_content=False)
    [found] = diff_traces(open_trace(other), open_trace(bare))
    assert found.answers is not None
    assert found.answers.num_compared == 0


def test_the_gate_promotes_speculation_by_equality(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef" * 4)
    requests = [request(number) for number in range(24)]
    sides = [
        recorded_in_process(
            tmp_path / name,
            requests,
            key_file=str(key),
            has_content=True,
            source="pocket://",
            options=options(text),
        )
        for name, text in (("plain", None), ("suffix", SUFFIX))
    ]
    for verdict in (judged(*sides), judged(*sides[::-1])):
        assert verdict.decision is Decision.PROMOTE
        assert verdict.evidence.startswith("equality")
        assert verdict.summary.same == verdict.summary.pairs > 0
