"""`lockstep diff`, `bisect` and `sweep` as a user meets them: files in, words, tables, JSON and exit codes out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.cli.main import invoke
from tests.waiting import HANG_S, until

Call = Callable[..., tuple[int, str, str]]
"""For a process that has to start others; far above what it takes."""


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*words: str | Path) -> tuple[int, str, str]:
        code = invoke([str(word) for word in words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Forty requests, four at a time, of three prompts."""
    return write_workload(tmp_path / "w.json", 40)


def cells_of(line: str) -> list[str]:
    """Of a row of a table in Markdown."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def write_workload(path: Path, count: int) -> Path:
    requests: list[dict[str, Any]] = [
        {
            "id": f"r{number}",
            "prompt_tokens": 14,
            "max_output_tokens": 6,
            "arrival_ms": 25 * (number // 4),
            "prefix_hashes": [number % 3, 7, 8],
        }
        for number in range(count)
    ]
    config = {"block_size": 4, "num_blocks": 60, "max_model_len": 64, "max_num_seqs": 6}
    path.write_text(json.dumps({"config": config, "requests": requests}))
    return path


def test_diff_reports_the_step_and_reason_and_a_working_reproducer(call: Call, file: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.json"

    code, out, err = call("diff", file, "--set-b", "max_num_seqs=5", "--reproducer", small)

    assert code == 1
    assert "A and B differ in max_num_seqs: 6 and 5" in out
    assert "first difference (admission)" in out
    assert "waits: 5 of 5 sequences run" in out
    assert "decided by max_num_seqs: with max_num_seqs = 5 instead of 6, A decides this step like B" in out
    assert "6 of the first " in out
    assert f"lockstep diff {small} --set-b max_num_seqs=5" in err

    code, again, _ = call("diff", small, "--set-b", "max_num_seqs=5")

    assert code == 1
    assert "small.json: 6 requests" in again
    assert "waits: 5 of 5 sequences run" in again


def test_diff_of_configs_with_equal_decisions_reports_identical(call: Call, file: Path) -> None:
    code, out, _ = call("diff", file, "--set-b", "max_num_seqs=40", "--set", "max_num_seqs=41")

    assert code == 0
    assert "identical: all" in out
    assert json.loads(call("diff", file, "--set-b", "max_num_seqs=6", "--json")[1])["identical"] is True


def test_diff_of_config_files_yaml_and_json(call: Call, file: Path, tmp_path: Path) -> None:
    a, b = tmp_path / "a.yaml", tmp_path / "b.json"
    a.write_text("max_num_seqs: 6\nchunking: on\n")
    b.write_text('{"max-num-seqs": 5, "chunking": true}')

    code, out, _ = call("diff", a, b, "--workload", file, "--json")

    assert code == 1
    told = json.loads(out)
    assert told["fields"] == {"max_num_seqs": [6, 5]}
    assert told["decided_by"] == {"alone": ["max_num_seqs"], "together": []}
    assert len(told["reproducer"]["requests"]) == 6


def test_diff_of_two_workloads(call: Call, file: Path, tmp_path: Path) -> None:
    other = write_workload(tmp_path / "other.json", 41)

    code, out, _ = call("diff", file, other)

    assert code == 1
    assert "admits r40" in out or "has nothing to do" in out
    assert call("diff", file, file)[0] == 0
    assert "requires one workload for both sides" in call("diff", file, other, "--reproducer", tmp_path / "x.json")[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seq: 4", "line 1: max_num_seq is an unknown key; did you mean 'max-num-seqs'?"),
        ("zzz: 4", "keys are a scheduler's fields: max_num_seqs"),
        ("\nmax_num_seqs: many", "a.yaml: max_num_seqs is 'many'; it must be"),
        ("max_num_seqs: 0", "a.yaml: max_num_seqs is 0; it must be"),
        ("max_num_seqs: [4]", "line 1: max_num_seqs is [4]"),
        ("order: lifo", "'lifo'"),
        ("- 4", "is a list"),
        ("a: [", "is not YAML"),
    ],
)
def test_an_invalid_config_file_is_reported_in_one_line(
    call: Call, file: Path, tmp_path: Path, text: str, message: str
) -> None:
    faulty, empty = tmp_path / "a.yaml", tmp_path / "b.yaml"
    faulty.write_text(text)
    empty.write_text("")

    code, _, err = call("bisect", file, "--from", faulty, "--to", empty)

    assert code == 2
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("diff", "w.json"), "nothing to be compared with"),
        (("diff", "a.yaml", "--workload", "w.json"), "requires two configs"),
        (("diff", "w.json", "--set-b", "max_num_sequences=3"), "did you mean max_num_seqs"),
        (("sweep", "w.json"), "no grid to sweep"),
        (("sweep", "w.json", "--grid", "max_num_seqs=1,2", "--set", "max_num_seqs=3"), "in --set and in --grid"),
        (("sweep", "w.json", "--grid", "max_num_seqs=1", "--slo", "speed:3"), "write ttft:500,tpot:50"),
        (("sweep", "w.json", "--grid", "max_num_seqs=1", "--objective", "ttft"), "no report has a metric 'ttft'"),
    ],
)
def test_a_wrong_command_line_is_rejected_with_a_hint(
    call: Call, file: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(file.parent)

    code, _, err = call(*words)

    assert code == 2
    assert message in err


def test_bisect_prints_the_effect_of_each_field_on_the_metric(call: Call, file: Path, tmp_path: Path) -> None:
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    a.write_text("max_num_seqs: 6\nmax_skips: 9\n")
    b.write_text("max_num_seqs: 1\nmax_skips: 8\n")

    code, out, _ = call("bisect", file, "--from", a, "--to", b, "--metric", "ttft_p99")

    assert code == 0
    assert "max_num_seqs explains ttft_p99: with it alone, A reaches B's value" in out
    rows = {cells[0]: cells for line in out.splitlines() if len(cells := cells_of(line)) == 7}
    assert rows["max_num_seqs"][4] == "100%"
    assert rows["max_skips"][4] == "0%"
    told = json.loads(call("bisect", file, "--from", a, "--to", b, "--metric", "preemptions", "--json")[1])
    assert (told["a"], told["b"]) == (0, 0)
    assert "no cause to find" in told["conclusion"]


def test_sweep_prints_rows_the_front_and_the_cheapest(call: Call, file: Path, tmp_path: Path) -> None:
    output = tmp_path / "sweep.json"
    words = ("sweep", file, "--grid", "max_num_seqs=0,1,6,7", "--grid", "num_blocks=60,80")

    code, out, _ = call(*words, "--slo", "ttft:150", "--jobs", "1", "--output", output)

    assert code == 0
    assert "max_num_seqs=0, num_blocks=60 is invalid: max_num_seqs is 0; it must be" in out
    assert "cheapest that meets ttft of 150 ms: max_num_seqs=6, num_blocks=60 (100 % of the requests meet it)" in out
    told = json.loads(output.read_text())
    assert told["cheapest"] == {"max_num_seqs": "6", "num_blocks": "60"}
    assert [row["is_on_front"] for row in told["rows"]][:4] == [False] * 4
    assert json.loads(call(*words, "--slo", "ttft:150", "--jobs", "1", "--json")[1]) == told

    code, out, _ = call(*words, "--slo", "ttft:1", "--jobs", "1")

    assert code == 1
    assert "no config meets ttft of 1 ms for 99 % of the requests" in out


def test_the_same_bytes_under_every_hash_seed(file: Path, tmp_path: Path) -> None:
    """Nothing that is told depends on the order of a set."""
    told = set()
    for seed in ("0", "1", "77"):
        small = tmp_path / f"{seed}.json"
        command = [sys.executable, "-m", "lockstep", "diff", str(file), "--json", "--reproducer", str(small)]
        command += ["--set-b", "max_num_seqs=5,max_num_batched_tokens=48,order=fair,num_blocks=50"]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, capture_output=True, env=environment, timeout=HANG_S, check=False)
        assert done.returncode == 1, done.stderr
        told.add((done.stdout, small.read_bytes()))

    assert len(told) == 1


@pytest.fixture
def long_sweep(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A sweep of two processes that goes on for minutes."""
    big = write_workload(tmp_path / "big.json", 4_000)
    grid = f"max_num_batched_tokens={','.join(map(str, range(32, 232)))}"
    command = [sys.executable, "-m", "lockstep", "sweep", str(big), "--grid", grid, "--jobs", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def family(process: subprocess.Popen[str], size: int) -> list[psutil.Process]:
    """Its children as soon as there are so many: a tracker, and one after the other."""
    parent = psutil.Process(process.pid)
    until(lambda: len(parent.children(recursive=True)) >= size, f"{size} processes")
    return parent.children(recursive=True)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ctrl_c_ends_all_processes_of_a_sweep(long_sweep: subprocess.Popen[str], size: int) -> None:
    children = family(long_sweep, size)

    os.kill(long_sweep.pid, signal.SIGINT)
    _, err = long_sweep.communicate(timeout=HANG_S)  # until nobody holds its output

    assert long_sweep.returncode == 130
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(children, timeout=HANG_S)
    assert not alive


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_sweep_that_is_killed_leaves_no_process_behind(long_sweep: subprocess.Popen[str]) -> None:
    children = family(long_sweep, 3)

    long_sweep.kill()

    _, alive = psutil.wait_procs(children, timeout=HANG_S)
    assert not alive


def test_a_sweep_reports_a_process_that_was_killed(long_sweep: subprocess.Popen[str]) -> None:
    children = family(long_sweep, 3)
    worker = next(each for each in children if "spawn_main" in "".join(each.cmdline()))

    worker.kill()
    _, err = long_sweep.communicate(timeout=HANG_S)

    assert long_sweep.returncode == 2
    assert "a process of the sweep was killed" in err
    assert "Traceback" not in err
