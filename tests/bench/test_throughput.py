"""`lockstep bench throughput`: the engine in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.cli.main import invoke

SMALL = ("--num-prompts", "5", "--input-len", "10", "--output-len", "4", "--concurrency", "2")


def test_every_token_is_counted_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert invoke(["bench", "throughput", "stub://alpha", *SMALL, "--json", "--result-filename", str(path)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(path.read_text())
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (50, 20)
    assert result["request_throughput"] == pytest.approx(5 / result["duration"])
    assert result["output_throughput"] == pytest.approx(20 / result["duration"])
    assert result["total_token_throughput"] == pytest.approx(70 / result["duration"])
    assert result["cpu_s_per_token"] > 0


def test_concurrency_shortens_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of 5 ms: four at once need a quarter of the steps of one after another."""
    durations = []
    for concurrency in ("1", "4"):
        load = ("--num-prompts", "4", "--input-len", "4", "--output-len", "4", "--concurrency", concurrency)
        assert invoke(["bench", "throughput", "stub://alpha?step_ms=5", *load, "--json"]) == 0
        durations.append(json.loads(capsys.readouterr().out)["duration"])
    assert durations[1] < durations[0] / 2


def test_a_request_that_fails_ends_the_run_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["bench", "throughput", "stub://alpha?nan_every=7", *SMALL]) == 2
    assert "NaN" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--output-len", "0"), "--output-len is 0"),
        (("--input-len", "9000"), "8192"),
        (("--num-warmups", "-1"), "must not be negative"),
    ],
)
def test_a_wrong_flag_is_one_line(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["bench", "throughput", "stub://alpha", *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
