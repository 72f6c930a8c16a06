"""`lockstep chat` against a server whose behaviour is known."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from lockstep.cli.main import invoke
from tests.bench.standin import Behaviour
from tests.cli.person import Person
from tests.processes import Piped, run
from tests.waiting import until


def chat(url: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run("chat", "--base-url", url, *arguments, stdin=stdin)


def test_a_prompt_is_answered_on_standard_output(
    url: str, behaviour: Behaviour, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--max-tokens", "3", "--temperature", "0", "--seed", "1", "--system", "be brief", "-v")
    assert invoke(["chat", "--base-url", url + "/v1", "-p", "hi", *options, "--extra-body", '{"top_k": 2}']) == 0
    printed = capsys.readouterr()
    assert printed.out == "word0 word1 word2 \n"
    assert "6 prompt tokens, 3 new, " in printed.err
    assert "ended by length" in printed.err
    body = behaviour.measured()[0]
    assert body["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert (body["max_tokens"], body["temperature"], body["seed"], body["top_k"]) == (3, 0.0, 1, 2)


def test_raw_completes_a_prompt_as_it_is(url: str, behaviour: Behaviour) -> None:
    result = chat(url, "--raw", "-p", "-", "--max-tokens", "2", stdin="once upon")
    assert (result.returncode, result.stdout) == (0, "word0 word1 \n")
    assert behaviour.measured()[0]["prompt"] == "once upon"


def test_a_conversation_remembers_until_it_is_cleared(url: str, behaviour: Behaviour) -> None:
    result = chat(url, "--max-tokens", "1", stdin="a\nb\n/clear\n\nc\n/exit\nnever\n")
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "word0 \n" * 3)
    roles = [[message["content"] for message in body["messages"]] for body in behaviour.measured()]
    assert roles == [["a"], ["a", "word0 ", "b"], ["c"]]


def test_a_pipe_gets_no_thoughts(url: str, behaviour: Behaviour) -> None:
    behaviour.sends_thoughts = True
    assert chat(url, "-p", "x", "--max-tokens", "4").stdout == "word2 word3 \n"


def test_a_terminal_shows_thoughts_dimmed_and_lives_through_errors(
    url: str, behaviour: Behaviour, tmp_path: Path
) -> None:
    """On a real terminal: thoughts between escapes; a refused message is a line, and the next one is answered."""
    behaviour.sends_thoughts = True
    behaviour.fail_every = 2
    with Person(tmp_path, "chat", "--base-url", url, "--max-tokens", "3") as person:
        for message in "abc":
            person.types(message)
            person.sees("the queue is full" if message == "b" else "\x1b[2mword0 word1 \x1b[0m\r\n\r\nword2 ")
        assert person.leaves() == 0
    assert [len(body["messages"]) for body in behaviour.measured()] == [1, 3, 3]


def test_ctrl_c_stops_the_answer_and_the_servers_generation(url: str, behaviour: Behaviour) -> None:
    behaviour.hang_after = 0
    with Piped("chat", "--base-url", url, "--max-tokens", "2", "-p", "x") as process:
        assert process.stdout.read(12) == "word0 word1 "
        process.program.send_signal(signal.SIGINT)
        assert process.communicate() == (130, "", "")
    until(lambda: behaviour.num_left == 1)


@pytest.mark.parametrize(
    ("arguments", "behaves", "message"),
    [
        (("--model", "beta"), {}, "answered 404: The model `beta` does not exist."),
        ((), {"api_key": "secret"}, "answered 401: the key is missing or wrong; set the server's key with --api-key"),
        (("--api-key", "wrong"), {"api_key": "secret"}, "answered 401"),
        ((), {"break_every": 1}, "ended the answer: the worker was lost"),
        (("--raw", "--system", "x"), {}, "--system does not apply to --raw"),
        (("--extra-body", "x"), {}, "--extra-body is 'x'; it must be a JSON object"),
    ],
)
def test_an_error_is_one_line_with_its_cause(
    arguments: tuple[str, ...],
    behaves: dict[str, object],
    message: str,
    url: str,
    behaviour: Behaviour,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in behaves.items():
        setattr(behaviour, name, value)
    assert invoke(["chat", "--base-url", url, "-p", "x", "--max-tokens", "2", *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_the_right_key_is_accepted(url: str, behaviour: Behaviour, capsys: pytest.CaptureFixture[str]) -> None:
    behaviour.api_key = "secret"
    assert invoke(["chat", "--base-url", url, "-p", "x", "--max-tokens", "1", "--api-key", "secret"]) == 0
    assert capsys.readouterr().out == "word0 \n"


def test_a_refused_connection_is_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["chat", "--base-url", "http://127.0.0.1:9", "-p", "x"]) == 2
    printed = capsys.readouterr().err
    assert "cannot connect to http://127.0.0.1:9" in printed
    assert "is the server running? `lockstep serve` starts one" in printed
    assert printed.count("\n") == 1
