"""Two flight recordings are evidence: requests are paired, and answers are compared where possible."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from lockstep.cli.main import invoke
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.errors import EvidenceError
from lockstep.executors.options import ExecutorOptions
from lockstep.executors.sampling_params import SamplingParams
from lockstep.release.observation import SIDES
from lockstep.release.recordings import is_recording, read_recordings
from lockstep.release.store import open_store
from lockstep.release.verdict import Decision
from lockstep.replay.live import live_requests
from lockstep.replay.trace import open_trace
from lockstep.worker.flight.entries import SUFFIX, EngineEntry, Entry, OutputDigest, RequestDigest
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.messages import Abort, Submit
from tests.release.recording import (
    ONLY_OUTPUTS,
    SMALL,
    generation_requests,
    judged,
    load,
    recorded,
    recorded_in_process,
)
from tests.replay.recordings import relist, rewrite_entries
from tests.worker.support import ENDLESS, running
from tools.random_models import write_gguf

SECRET = "a secret of the operator's, long enough"
PLAIN = SamplingParams(max_tokens=24, ignore_eos=True, seed=3, temperature=1.0)
ASKED = GenerationRequest(prompt="what is asked", params=PLAIN, external_id="one")


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_text(SECRET)
    return str(path)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, key: str) -> tuple[Path, Path]:
    """The same requests on the embedded model, with default settings and with tight ones under other load."""
    folder = tmp_path_factory.mktemp("settings")
    requests, others = load(24, seed=1), load(8, seed=2)
    mixed = [each for pair in zip(requests[:8], others, strict=True) for each in pair] + requests[8:]
    baseline = recorded(folder / "a", "pocket://", "--trace-key", key, requests=requests)
    tight = ("--max-num-seqs", "3", "--max-chunk-tokens", "16", "--no-enable-prefix-caching")
    candidate = recorded(folder / "b", "pocket://", "--trace-key", key, *tight, requests=mixed, at_once=11)
    return baseline, candidate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, and the same with one changed bit of a weight."""
    folder = tmp_path_factory.mktemp("flipped")
    whole = write_gguf(folder / "whole.gguf", "tiny-llama", "F32", seed=5)
    other = folder / "other.gguf"
    other.write_bytes(whole.read_bytes())
    flip_sign(other, "output_norm.weight", 7)
    return folder


def answered(model: Path, name: str, options: LoadOptions) -> Path:
    """Recording with content of a model with the same requests as all others."""
    requests = generation_requests(load(12, seed=1))
    return recorded_in_process(model.parent / name, requests, has_content=True, source=str(model), options=options)


@pytest.fixture(scope="module")
def flipped(folder: Path) -> tuple[Path, Path]:
    """Recordings of the same requests on both models."""
    return answered(folder / "whole.gguf", "whole", SMALL), answered(folder / "other.gguf", "other", SMALL)


def flip_sign(path: Path, tensor: str, index: int) -> None:
    """Change one bit of a file: the sign of one number in a tensor of 32-bit floats."""
    [found] = [each for each in gguf.GGUFReader(path).tensors if each.name == tensor]
    data = bytearray(path.read_bytes())
    data[found.data_offset + 4 * index + 3] ^= 0x80
    path.write_bytes(data)


def test_one_bit_of_the_file_is_flipped(flipped: tuple[Path, Path]) -> None:
    folder = flipped[0].parent
    whole, other = (np.fromfile(folder / name, np.uint8) for name in ("whole.gguf", "other.gguf"))
    assert int(np.unpackbits(whole ^ other).sum()) == 1


# -- equality ---------------------------------------------------------------------------------------------------------


def test_equal_weights_answer_the_same_under_other_settings_and_batch_compositions(
    settings: tuple[Path, Path],
) -> None:
    verdict = judged(*settings)
    assert verdict.decision is Decision.PROMOTE, verdict.reason
    assert (verdict.summary.pairs, verdict.summary.same, verdict.summary.differing) == (24, 24, 0)
    assert verdict.evidence.startswith(
        "equality: the weights are the same, and the answers of baseline and candidate are both independent of"
    )
    [lonely] = verdict.joining.unjoined
    assert (lonely.side, lonely.reason.value, lonely.count) == ("candidate", "no-partner", 8)


def test_a_flipped_bit_of_a_weight_is_rolled_back_with_the_first_differing_request_and_token(
    flipped: tuple[Path, Path],
) -> None:
    verdict = judged(*flipped, outputs="exact")
    assert verdict.decision is Decision.ROLLBACK
    assert verdict.signals[0].name == "output-mismatch"
    first = verdict.first_mismatch
    assert first is not None
    assert first["request"] == verdict.signals[0].examples[0]
    tokens = tokens_of(*flipped)
    answers = [side[first["request"]] for side in tokens]
    at = next(at for at, (a, b) in enumerate(zip(*answers, strict=True)) if a != b)
    assert (first["token_index"], first["baseline_token"], first["candidate_token"]) == (
        at,
        answers[0][at],
        answers[1][at],
    )
    assert first["baseline_fingerprint"] != first["candidate_fingerprint"]
    arrivals = dict(observations(*flipped, "ts")[0])
    earlier = [name for name in arrivals if arrivals[name] < arrivals[first["request"]]]
    assert [tokens[0][name] for name in earlier] == [tokens[1][name] for name in earlier]


def test_another_precision_counts_as_other_weights(folder: Path, flipped: tuple[Path, Path]) -> None:
    rounded = answered(
        folder / "whole.gguf", "rounded", dataclasses.replace(SMALL, executor=ExecutorOptions(quantize="int8"))
    )
    unsaid, exact = judged(flipped[0], rounded), judged(flipped[0], rounded, outputs="exact")
    assert {each.name for each in unsaid.signals} == {"outputs-policy"}
    assert "quantize none" in unsaid.reason
    assert "quantize int8" in unsaid.reason
    for verdict in (unsaid, exact):
        assert (verdict.summary.pairs, verdict.summary.incomparable) == (12, 0)
        assert not verdict.evidence.startswith("equality")
    assert exact.decision is (Decision.ROLLBACK if exact.summary.differing else Decision.PROMOTE)


def test_other_weights_need_an_outputs_policy(flipped: tuple[Path, Path]) -> None:
    assert "outputs-policy" in {each.name for each in judged(*flipped).signals}
    assert not judged(*flipped).evidence.startswith("equality")


def test_a_differing_answer_of_equal_weights_rolls_back_at_any_allowed_rate(
    settings: tuple[Path, Path], tmp_path: Path
) -> None:
    changed = with_other_answer(settings[1], tmp_path)
    verdict = judged(settings[0], changed, max_mismatch_rate=0.5)
    assert verdict.decision is Decision.ROLLBACK
    assert verdict.summary.differing == 1
    assert verdict.first_mismatch == {"request": verdict.signals[0].examples[0]}


def with_other_answer(recording: Path, folder: Path) -> Path:
    """Recording with a different digest of one answer that both sides have."""

    def change(entries: list[Entry]) -> None:
        names = {(each.engine, each.seq_id): each.external_id for each in entries if isinstance(each, RequestDigest)}
        ends = [at for at, each in enumerate(entries) if isinstance(each, OutputDigest)]
        ends = [at for at in ends if names[entries[at].engine, entries[at].seq_id].startswith("1.")]  # type: ignore[union-attr]  # they are outputs
        entries[ends[3]] = replace(entries[ends[3]], output=bytes(8))

    return changed(recording, folder, change)


def file_of(recording: Path) -> Path:
    """Only file of a recording."""
    [path] = recording.glob(f"*{SUFFIX}")
    return path


def changed(recording: Path, folder: Path, change: Callable[[list[Entry]], None]) -> Path:
    """Copy of a recording of one file, with changed entries."""
    path = file_of(recording)
    shutil.copy(path, folder)
    rewrite_entries(folder / path.name, change)
    relist(folder / path.name)
    return folder


# -- incomparable -----------------------------------------------------------------------------------------------------


UNLIKE = {
    "prompt": replace(ASKED, prompt="something else"),
    "parameters": replace(ASKED, params=replace(PLAIN, top_p=0.5)),
    "seed": replace(ASKED, params=replace(PLAIN, seed=4)),
}


@pytest.mark.parametrize("what", UNLIKE)
@pytest.mark.parametrize("has_content", [False, True], ids=["by digest", "by content"])
def test_answers_to_different_questions_are_incomparable(
    tmp_path: Path, key: str, what: str, has_content: bool
) -> None:
    common = replace(ASKED, external_id="two")
    sides = [
        recorded_in_process(
            tmp_path / side, [asked, common], key_file="" if has_content else key, has_content=has_content
        )
        for side, asked in (("a", ASKED), ("b", UNLIKE[what]))
    ]
    verdict = judged(*sides, min_comparable_rate=0.5)
    summary = verdict.summary
    assert (summary.pairs, summary.same, summary.differing, summary.incomparable) == (2, 1, 0, 1)
    assert f"1 pairs were not compared: unlike {what}" in verdict.notes
    assert verdict.decision is Decision.PROMOTE


def test_answers_of_different_environments_are_incomparable(tmp_path: Path, key: str) -> None:
    baseline = recorded_in_process(tmp_path / "a", [ASKED], key_file=key)

    def change(entries: list[Entry]) -> None:
        for at, entry in enumerate(entries):
            if isinstance(entry, EngineEntry):
                entries[at] = replace(entry, environment={**entry.environment, "threads": "96"})

    (tmp_path / "b").mkdir()
    verdict = judged(baseline, changed(baseline, tmp_path / "b", change))
    assert verdict.summary.incomparable == 1
    assert "1 pairs were not compared: unlike environment" in verdict.notes
    assert [each.name for each in verdict.signals] == ["no-output-evidence", "missing-comparable"]


def test_the_seed_of_a_greedy_request_does_not_matter(tmp_path: Path, key: str) -> None:
    greedy = replace(PLAIN, temperature=0.0)
    sides = [
        recorded_in_process(tmp_path / side, [replace(ASKED, params=replace(greedy, seed=seed))], key_file=key)
        for side, seed in (("a", 1), ("b", None))
    ]
    assert judged(*sides).summary.same == 1


def test_recordings_with_different_keys_are_evidence_of_latency_only(tmp_path: Path) -> None:
    verdict = judged(*(recorded_in_process(tmp_path / side, [ASKED]) for side in "ab"))
    assert verdict.decision is Decision.HOLD
    assert [each.name for each in verdict.signals] == ["no-output-evidence"]
    assert any("pass one --trace-key to both servers" in note for note in verdict.notes)
    assert verdict.summary.figures["latency_p95_ms"].baseline is not None


# -- observations -----------------------------------------------------------------------------------------------------


def observations(baseline: Path, candidate: Path, columns: str) -> list[list[tuple[Any, ...]]]:
    """Columns of both sides, in the order of their ids."""
    with open_store() as store:
        read_recordings(store, [baseline, candidate])
        return [store.rows(f"SELECT request_id, {columns} FROM {side} ORDER BY request_id") for side in SIDES]


def tokens_of(baseline: Path, candidate: Path) -> list[dict[str, list[int]]]:
    return [dict(rows) for rows in observations(baseline, candidate, "token_ids")]


def test_recorded_tokens_are_those_of_the_answer(tmp_path: Path, key: str) -> None:
    several = replace(ASKED, params=replace(PLAIN, n=3), external_id="several")
    stopped = replace(ASKED, params=replace(PLAIN, ignore_eos=False, max_tokens=40), external_id="stopped")
    path = recorded_in_process(tmp_path, [ASKED, several, stopped], key_file=key, has_content=True)
    secret = blake2b(SECRET.encode(), digest_size=32).digest()
    found = observations(path, path, "token_ids, fingerprint")[0]
    assert [name for name, _, _ in found] == ["one", "several", "several.1", "several.2", "stopped"]
    for _, tokens, fingerprint in found:
        packed = struct.pack(f"<{len(tokens)}I", *tokens)
        assert fingerprint == blake2b(packed, digest_size=8, key=secret, person=b"tokens").hexdigest()


def test_each_request_of_one_name_has_a_number_and_each_sibling_its_seed(tmp_path: Path, key: str) -> None:
    several = replace(ASKED, params=replace(PLAIN, n=2))
    path = recorded_in_process(tmp_path, [ASKED, several, ASKED], key_file=key)
    assert observations(path, path, "seed")[0] == [("one", 3), ("one#2", 3), ("one#2.1", 4), ("one#3", 3)]


def test_requests_with_only_a_server_id_are_joined_by_content(tmp_path: Path, key: str) -> None:
    sides = [
        recorded_in_process(tmp_path / side, [replace(ASKED, external_id=f"req-{side * 32}")] * 2, key_file=key)
        for side in "ab"
    ]
    verdict = judged(*sides)
    assert (verdict.summary.pairs, verdict.summary.same) == (2, 2)


def test_times_of_a_recording_are_those_of_its_steps(settings: tuple[Path, Path]) -> None:
    rows = observations(*settings, "ttft_ms, latency_ms, token_latencies_ms, output_tokens, kv_used, kv_total")[0]
    lives = {str(each.seq_id): each for each in live_requests(open_trace(settings[0]))}
    assert len(rows) == len(lives) == 24
    latencies = sorted(each.in_ps.e2e / 1e9 for each in lives.values())
    assert sorted(latency for _, _, latency, *_ in rows) == pytest.approx(latencies)
    for _, ttft, latency, gaps, num_tokens, used, total in rows:
        assert len(gaps) == num_tokens - 1
        assert ttft + sum(gaps) == pytest.approx(latency)
        assert 0 <= used <= total


def test_an_answer_that_was_cut_short_is_not_compared(tmp_path: Path, key: str) -> None:
    with running(trace=TraceOptions(str(tmp_path), key_file=key)) as bench:
        bench.ready("a", "stub://alpha", LoadOptions(EngineOptions(num_blocks=512)))
        bench.tell(Submit(0, "a", replace(ASKED, params=ENDLESS)), Submit(1, "a", replace(ASKED, external_id="two")))
        bench.answer(1)
        bench.tell(Abort("a", (0,)))
        bench.answer(0)
    rows = observations(tmp_path, tmp_path, "ok, latency_ms, fingerprint IS NULL, output_tokens")[0]
    assert rows[0] == ("one", True, None, True, None)
    assert rows[1][1] is True
    assert rows[1][3] is False


def test_answers_of_recordings_with_other_decisions_are_compared_without_times(
    settings: tuple[Path, Path], tmp_path: Path
) -> None:
    def change(entries: list[Entry]) -> None:
        for at, entry in enumerate(entries):
            if isinstance(entry, EngineEntry):
                entries[at] = replace(entry, config=dataclasses.replace(entry.config, max_chunk_tokens=16))

    verdict = judged(settings[0], changed(settings[0], tmp_path, change))
    assert (verdict.decision, verdict.summary.same, verdict.summary.differing) == (Decision.PROMOTE, 24, 0)
    assert verdict.summary.figures["latency_p95_ms"].candidate is None
    assert any("decisions differ" in note and "24 answers have no times" in note for note in verdict.notes)
    assert verdict.decisions is not None
    assert "unknown" in verdict.decisions["engines"][0]["difference"]


# -- input ------------------------------------------------------------------------------------------------------------


def test_a_damaged_recording_is_refused(settings: tuple[Path, Path], tmp_path: Path) -> None:
    path = file_of(settings[1])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / path.name).write_bytes(data)
    with open_store() as store, pytest.raises(EvidenceError, match="damaged"):
        read_recordings(store, [settings[0], tmp_path])


def test_a_folder_of_two_runs_is_refused(settings: tuple[Path, Path], tmp_path: Path) -> None:
    for recording in settings:
        path = file_of(recording)
        shutil.copy(path, tmp_path)
    with open_store() as store, pytest.raises(EvidenceError, match="contains 2 runs; pass the files of one"):
        read_recordings(store, [settings[0], tmp_path])


def test_a_recording_in_which_nothing_ended_is_refused(tmp_path: Path, settings: tuple[Path, Path]) -> None:
    recorded_in_process(tmp_path, [])
    with open_store() as store, pytest.raises(EvidenceError):
        read_recordings(store, [tmp_path, settings[0]])


def test_only_folders_and_recordings_are_recordings(settings: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"request_id": "one"}\n')
    assert is_recording(settings[0])
    assert is_recording(file_of(settings[0]))
    assert not is_recording(tmp_path / "rows.jsonl")
    assert not is_recording(tmp_path / "missing.json")


def test_a_recording_is_judged_against_another_file_by_its_times(settings: tuple[Path, Path], tmp_path: Path) -> None:
    rows = [{"request_id": name, "latency_ms": 100.0, "token_ids": [1, 2]} for name, _ in load(24, seed=1)]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    verdict = judged(settings[0], tmp_path / "rows.jsonl")
    assert verdict.summary.pairs == 24
    assert verdict.summary.differing == 0
    assert verdict.decisions is None
    assert any("only one side is a recording" in note for note in verdict.notes)


def test_the_command_judges_two_recordings_with_stable_bytes(
    settings: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loose = [f"--set={name}={json.dumps(value)}" for name, value in ONLY_OUTPUTS.items()]
    for name in ("one", "two"):
        assert invoke(["gate", *map(str, settings), *loose, "--output", str(tmp_path / name)]) == 0
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    verdict = json.loads((tmp_path / "one").read_bytes())
    assert verdict["decision"] == "promote"
    assert [each["format"] for each in verdict["inputs"]] == ["lockstep recording"] * 2
    assert set(verdict["decisions"]["engines"][0]["settings"]) >= {"max_num_seqs", "max_chunk_tokens"}
    assert "engine 0 (pocket)" in capsys.readouterr().out


def test_the_command_requires_a_recording_of_each_side(
    settings: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["gate", str(settings[0])]) == 3
    assert "a folder or recording has one side only; pass two: BASELINE CANDIDATE" in capsys.readouterr().err
