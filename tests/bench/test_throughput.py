"""`lockstep bench throughput`: the engine in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.bench.throughput import ThroughputOptions, run_throughput
from lockstep.cli.main import invoke
from lockstep.engine.llm import LLM

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


@pytest.mark.parametrize(("concurrency", "num_steps"), [(1, 16), (2, 8), (4, 4)])
def test_so_many_requests_share_each_step(concurrency: int, num_steps: int) -> None:
    options = ThroughputOptions(4, 4, 4, concurrency, num_warmups=0)
    with LLM("stub://alpha") as llm:
        assert run_throughput(llm, options)["total_output_tokens"] == 16
        assert llm.engine.metrics().counters["num_steps"] == num_steps


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
