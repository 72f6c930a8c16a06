"""Recordings of live servers, and results of their load generator, as workloads."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli.main import invoke
from lockstep.errors import TraceError, UsageError
from lockstep.replay.configs import config_for
from lockstep.replay.readers import ReadOptions, read_workload
from lockstep.replay.simulator import Simulation
from lockstep.worker.flight.entries import SUFFIX
from tests.server.process import IN_THREAD, serve


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``flight/``, a recording of six requests, and ``result.json``, the result of `bench serve` for five of them (the
    first one measures prompt lengths)."""
    folder = tmp_path_factory.mktemp("recorded")
    with serve("stub://alpha", *IN_THREAD, "--trace", str(folder / "flight")) as server:
        load = ("--random-input-len", "40", "--random-output-len", "6", "--num-prompts", "5", "--ignore-eos")
        where = ("--base-url", server.base_url, "--backend", "openai")
        saved = ("--save-result", "--save-detailed", "--result-filename", str(folder / "result.json"))
        assert invoke(["bench", "serve", *where, *load, *saved]) == 0
    return folder


def test_a_recording_is_read_as_its_engines_workload(folder: Path) -> None:
    workload = read_workload(folder / "flight")
    requests = list(workload.requests)[-5:]
    assert [(each.num_prompt_tokens, each.num_output_tokens) for each in requests] == [(40, 6)] * 5
    replay = Simulation(workload, config_for(workload)).run()
    assert replay.config.block_size == workload.content_size
    assert all(outcome.finished_tick >= 0 for outcome in replay.outcomes)


def test_a_single_recording_file_of_any_name_can_be_read(folder: Path, tmp_path: Path) -> None:
    (file,) = (folder / "flight").glob(f"*{SUFFIX}")
    other = tmp_path / "renamed"
    other.write_bytes(file.read_bytes())
    whole = list(read_workload(file).requests)
    assert list(read_workload(other).requests) == whole
    assert list(read_workload(other, ReadOptions(limit=2)).requests) == whole[:2]


def test_an_unknown_engine_is_refused(folder: Path) -> None:
    with pytest.raises(TraceError, match="has no engine 3"):
        read_workload(folder / "flight", ReadOptions(engine=3))
    with pytest.raises(UsageError, match=r"result\.json is not a recording"):
        read_workload(folder / "result.json", ReadOptions(engine=0))


def test_a_bench_result_is_read_as_the_workload_that_it_sent(folder: Path) -> None:
    requests = list(read_workload(folder / "result.json").requests)
    assert [(each.num_prompt_tokens, each.num_output_tokens) for each in requests] == [(40, 6)] * 5
    assert requests[0].arrival == 0
