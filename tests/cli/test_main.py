"""The command line as a user meets it: a real process, one line per error, never a traceback unless asked."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from lockstep.cli.main import invoke
from lockstep.version import __version__
from tests.waiting import HANG_S

STUB = "stub://alpha"
Told = Callable[..., tuple[int, str, str]]
"""Exit code, standard output, standard error."""


def lockstep(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "lockstep", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=HANG_S, check=False)


def test_version() -> None:
    assert lockstep("--version").stdout == f"lockstep {__version__}\n"


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Told:
    """Runs a command in this process, for speed; the tests around it use real ones."""

    def call(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = invoke(list(arguments))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_without_arguments_help_is_printed() -> None:
    result = lockstep()
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("Usage: lockstep")


@pytest.mark.parametrize("arguments", [("models",), ("--help",), ("run", "--help"), ("pull", "--help")])
def test_help_is_printed(arguments: tuple[str, ...], told: Told) -> None:
    code, out, err = told(*arguments)
    assert (code, err) == (0, "")
    assert out.startswith("Usage: lockstep")


def test_a_prompt_is_answered_on_standard_output() -> None:
    result = lockstep("run", STUB, "-p", "hello", "--max-tokens", "50")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "[stub:alpha] ok len=5 max=50\n"


def test_a_prompt_from_standard_input_raw_and_templated(told: Told) -> None:
    assert "len=6 max" in told("run", STUB, "-p", "-", "--raw", stdin="hello\n")[1]
    assert "len=8 max" in told("run", STUB, "-p", "hello", "--system", "abc")[1]


def test_json_holds_text_usage_and_timings(told: Told) -> None:
    answer = json.loads(told("run", STUB, "-p", "hello", "--json", "--max-tokens", "4")[1])
    assert answer["text"] == "[stu"
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["usage"]["prompt_tokens"] == 8
    assert answer["timings"]["ttft_ms"] > 0


def test_sampling_flags_reach_the_engine(told: Told) -> None:
    _, out, err = told("run", STUB, "-p", "hello", "--stop", " ok", "--max-tokens", "50", "-v")
    assert out == "[stub:alpha]\n"
    assert "prompt tokens" in err


def test_a_chat_remembers_until_it_is_cleared() -> None:
    """Every turn's prompt holds the turns before it, so the stub counts more bytes."""
    result = lockstep("run", STUB, "--max-tokens", "40", stdin="abc\n\nabc\n/clear\nabc\n/exit\nnever\n")
    lines = result.stdout.splitlines()
    assert result.returncode == 0
    assert lines[0] == lines[2] == "[stub:alpha] ok len=3 max=40"
    assert lines[1] == f"[stub:alpha] ok len={6 + len(lines[0])} max=40"
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run",), "Missing argument 'model'"),
        (("bogus",), "No such command 'bogus'"),
        (("run", STUB, "--no-such-flag"), "--no-such-flag"),
        (("run", STUB, "-p", "x", "--temperature", "-1"), "temperature is -1.0"),
        (("run", STUB, "-p", "x", "--max-tokens", "0"), "max_tokens"),
        (("run", STUB, "--raw", "-p", ""), "the prompt is empty"),
        (("run", STUB, "-p", "x", "--max-model-len", "9000"), "max_model_len is 9000; the model allows 2 to 8192"),
        (("run", STUB, "-p", "x" * 70, "--max-model-len", "64"), "the prompt has 73 tokens"),
        (("run", STUB, "--json"), "--json requires a prompt"),
        (("run", STUB, "-p", "x", "--raw", "--system", "y"), "requires a chat template"),
        (("run", "stub://x?bad=1", "-p", "x"), "unknown stub option 'bad'"),
        (("run", "no/such/model.gguf", "-p", "x"), "no such file or directory"),
        (("run", STUB, "-p", "x", "--kv-cache-dtype", "u8"), "'--kv-cache-dtype': 'u8'"),
        (("models", "info", "stub://x"), "a stub is a fake model"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str, told: Told) -> None:
    code, out, err = told(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("lockstep: error: ")
    assert err.count("\n") == 1


def test_debug_shows_the_traceback() -> None:
    result = lockstep("run", "no/such/model.gguf", "-p", "x", "--debug")
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("lockstep: error: ")


def test_a_closed_pipe_ends_it_without_a_word() -> None:
    command = [sys.executable, "-m", "lockstep", "run", STUB, "-p", "x", "--ignore-eos", "--max-tokens", "4000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    process.wait(HANG_S)
    assert stderr == b""
