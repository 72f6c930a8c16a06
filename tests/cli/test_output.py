"""Output that nobody reads, or that cannot be written: no traceback, and an exit code that means what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKLOAD = Path(__file__).resolve().parents[2] / "examples" / "workload_pressure.json"
DIFF = ("diff", str(WORKLOAD), "--set-b", "max_num_seqs=2")
FULL = Path("/dev/full")
LIMIT_S = 120


def run(words: tuple[str, ...], redirected: str, *, is_buffered: bool) -> subprocess.CompletedProcess[str]:
    """A process of its own under a shell's redirection."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if is_buffered else "1"}
    command = [sys.executable, "-m", "lockstep", *words]
    script = f'"$@" {redirected}'
    return subprocess.run(
        ["sh", "-c", script, "sh", *command],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize("is_buffered", [True, False])
def test_a_full_disk_under_the_output_is_one_line(is_buffered: bool) -> None:
    if not FULL.exists():
        pytest.skip("this system has no /dev/full")
    ended = run(DIFF, f">{FULL}", is_buffered=is_buffered)
    assert ended.returncode == 2
    assert ended.stderr == "lockstep: error: the output cannot be written: No space left on device\n"


def test_a_closed_output_changes_no_exit_code() -> None:
    ended = run(DIFF, ">&-", is_buffered=True)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_a_reader_that_leaves_changes_no_exit_code() -> None:
    """What diff found is its exit code, also where nobody read it."""
    command = [sys.executable, "-m", "lockstep", *DIFF]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONUNBUFFERED": ""}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (1, b"")
