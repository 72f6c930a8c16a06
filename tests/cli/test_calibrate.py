"""`lockstep calibrate`: from a real worker's recording to prices that a simulation takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.cli.main import invoke
from lockstep.executors.sampling_params import SamplingParams
from lockstep.replay.configs import config_for
from lockstep.replay.cost_file import read_priced
from lockstep.replay.live import workload_of
from lockstep.replay.simulator import Simulation
from lockstep.replay.trace import open_trace
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.messages import Submit
from tests.worker.support import ask, running

NUM_REQUESTS = 60


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a stub whose steps take 1 ms and 20 us for each token; three requests at a time."""
    directory = tmp_path_factory.mktemp("flight")
    with running(trace=TraceOptions(str(directory))) as bench:
        bench.ready("a", "stub://alpha?step_ms=1&token_us=20")
        for number in range(NUM_REQUESTS):
            text = "".join(chr(97 + (number * 7 + place) % 26) for place in range(10 + number * 29 % 90))
            params = SamplingParams(max_tokens=3 + number % 11, ignore_eos=True)
            bench.tell(Submit(number, "a", ask(text, params)))
            if number >= 3:
                bench.answer(number - 3)
        for number in range(NUM_REQUESTS):
            bench.answer(number)
    return directory


def test_a_recording_becomes_prices_that_a_simulation_takes(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "cost.json"
    assert invoke(["calibrate", str(recording), "-o", str(output)]) == 0
    assert "| each prompt token " in capsys.readouterr().out
    file = json.loads(output.read_text())
    assert file["made_on"]["model"] == "alpha"
    assert file["constant_ps"] > 5e8, "a step sleeps a millisecond"
    assert file["ranges"]["decoding sequences"][1] >= 2
    workload, cost = workload_of(open_trace(recording)), read_priced(output).model
    replay = Simulation(workload, config_for(workload), cost).run()
    assert len(replay.outcomes) == NUM_REQUESTS
    assert replay.cost.constant_ps == file["constant_ps"]


def test_an_unknown_engine_is_rejected_with_the_recorded_ones(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["calibrate", str(recording), "--engine", "3"]) == 2
    assert "has no engine 3; its engines are 0 (alpha)" in capsys.readouterr().err


def test_path_without_a_recording_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["calibrate", str(tmp_path)]) == 2
    assert "no recording found" in capsys.readouterr().err
    (tmp_path / "x.lstrace").write_bytes(b"nothing")
    assert invoke(["calibrate", str(tmp_path / "x.lstrace")]) == 2
    assert capsys.readouterr().err.startswith("lockstep: error: ")


def test_an_output_file_that_cannot_be_written_is_reported(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["calibrate", str(recording), "-o", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err
