"""Shell completion, by the protocol that the scripts speak and, where it exists, by the shell itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from lockstep.cli.main import COMPLETION_VARIABLE, invoke
from tests.waiting import HANG_S


def asked(**environment: str) -> str:
    command = [sys.executable, "-m", "lockstep"]
    result = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=HANG_S, check=True
    )
    assert result.stderr == ""
    return result.stdout


@pytest.mark.parametrize(
    ("words", "position", "expected"),
    [
        ("lockstep be", 1, ["bench"]),
        ("lockstep bench ", 2, ["serve", "throughput", "embed", "cluster", "replay", "peers", "compare"]),
        ("lockstep bench serve --random-p", 3, ["--random-prefix-len"]),
        ("lockstep completion ", 2, ["bash", "zsh", "fish"]),
    ],
)
def test_bash_completes_the_next_word(words: str, position: int, expected: list[str]) -> None:
    answer = asked(**{COMPLETION_VARIABLE: "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(position)})
    assert answer.split() == expected


def test_zsh_and_fish_completions_include_help() -> None:
    zsh = asked(**{COMPLETION_VARIABLE: "complete_zsh", "_TYPER_COMPLETE_ARGS": "lockstep col"})
    assert '"collect-env":"Print versions' in zsh
    fish = asked(
        **{
            COMPLETION_VARIABLE: "complete_fish",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            "_TYPER_COMPLETE_ARGS": "lockstep cha",
        }
    )
    assert fish.startswith("chat\t")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_names_the_program_and_the_variable(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"{COMPLETION_VARIABLE}=complete_{shell}" in script
    assert "lockstep completion" in script.splitlines()[-1]
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=HANG_S)


def test_an_unknown_shell_is_refused_with_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["completion", "tcsh"]) == 2
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err
