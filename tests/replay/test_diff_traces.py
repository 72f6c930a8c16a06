"""Diff of two recordings of live servers, with equal limits and with different ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.cli.main import invoke
from tests.server.process import IN_THREAD, serve


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same five requests, one after another, on a server that cuts prompts and on one that does not."""
    folders = []
    for name, limits in (("cut", ("--max-num-batched-tokens", "96")), ("whole", ())):
        folder = tmp_path_factory.mktemp(name) / "flight"
        with serve("stub://alpha", *IN_THREAD, *limits, "--max-num-seqs", "4", "--trace", str(folder)) as server:
            load = ("--random-input-len", "200", "--random-output-len", "4", "--num-prompts", "5", "--ignore-eos")
            where = ("--base-url", server.base_url, "--backend", "openai", "--max-concurrency", "1")
            assert invoke(["bench", "serve", *where, *load]) == 0
        folders.append(folder)
    return folders[0], folders[1]


def test_a_recording_is_identical_with_itself(
    recordings: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["diff", str(recordings[0]), str(recordings[0])]) == 0
    assert "engine 0 (alpha): identical" in capsys.readouterr().out


def test_recordings_diverge_at_a_shortened_chunk(
    recordings: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = map(str, recordings)

    assert invoke(["diff", a, b]) == 1
    out = capsys.readouterr().out
    assert "the configs differ in max_num_batched_tokens" in out
    assert "first difference (chunk):" in out
    assert "in A, the budget of 96 tokens is used up" in out

    assert invoke(["diff", a, b, "--json"]) == 1
    (engine,) = json.loads(capsys.readouterr().out)["engines"]
    assert engine["change"] == "chunk"


def test_diff_of_recordings_rejects_set(recordings: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["diff", *map(str, recordings), "--set", "max_num_seqs=3"]) == 2
    assert "--set does not apply to a comparison of two recordings" in capsys.readouterr().err
