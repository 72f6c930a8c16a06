"""Templates, their variables and thoughts on the command line."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from lockstep.cli.main import invoke
from lockstep.cli.terminal import AnswerWriter, Piece
from tests.terminals import Terminal

THINKING = "stub://a?field=%3Cthink%3Ewhy%3C/think%3Eroute"
TEMPLATE = "{% for m in messages %}<|user|>{{ greeting }}{{ m.content.split('</think>')[-1] }}{% endfor %}<|assistant|>"


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


def test_thoughts_are_apart_in_json_and_absent_in_a_pipe(template: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", THINKING, "-p", "hello", "--chat-template", template]
    assert invoke([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["reasoning_content"]) == ("route=none", "why")
    assert invoke(arguments) == 0
    assert capsys.readouterr().out == "route=none\n"
    assert invoke([*arguments, "--reasoning", "off"]) == 0
    assert capsys.readouterr().out == "<think>why</think>route=none\n"


def test_variables_reach_the_template(template: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "stub://a", "-p", "hello", "--chat-template", template, "--json"]
    assert invoke([*arguments, "--chat-template-kwargs", '{"greeting": "12345"}']) == 0
    assert "len=10 " in json.loads(capsys.readouterr().out)["text"]


def test_thoughts_are_dim_on_a_terminal() -> None:
    with contextlib.redirect_stdout(Terminal()) as terminal:
        writer = AnswerWriter()
        for piece in (Piece("", "why"), Piece("", " not"), Piece("so"), Piece(" be it")):
            writer.write(piece)
        writer.end()
    assert terminal.getvalue() == "\x1b[2mwhy not\x1b[0m\n\nso be it"
    with contextlib.redirect_stdout(Terminal()) as terminal:
        unfinished = AnswerWriter()
        unfinished.write(Piece("", "why"))
        unfinished.end()
    assert terminal.getvalue() == "\x1b[2mwhy\x1b[0m", "the terminal is left as it was"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--chat-template", "absent.jinja"), "--chat-template absent.jinja cannot be read"),
        (("--chat-template-kwargs", "[1]"), "it must be a JSON object"),
        (("--chat-template-kwargs", "{"), "it must be a JSON object"),
        (("--chat-template-kwargs", '{"messages": []}'), "cannot set 'messages'"),
        (("--reasoning", "maybe"), "'auto', 'off'"),
    ],
)
def test_invalid_arguments_are_reported_in_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["run", "stub://a", "-p", "x", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("verb", [("run", "stub://a"), ("chat", "--base-url", "http://127.0.0.1:9", "--model", "m")])
@pytest.mark.parametrize(("flag", "what"), [("-p", "the prompt"), ("--system", "--system")])
def test_text_that_is_not_utf_8_is_rejected_with_its_position(
    verb: tuple[str, ...], flag: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an argument holds a byte that was not UTF-8."""
    assert invoke([*verb, *(() if flag == "-p" else ("-p", "x")), flag, "a\udcff"]) == 2
    assert f"{what} is not UTF-8 at character 1 ('\\udcff'); write it in UTF-8" in capsys.readouterr().err


def test_an_invalid_chat_template_is_reported_at_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.jinja"
    path.write_text("{% for m in messages %}\n{{ m.content }}\n{% endif %}")
    assert invoke(["run", "stub://a", "--raw", "-p", "x", "--chat-template", str(path)]) == 2
    error = capsys.readouterr().err
    assert "chat template cannot be read" in error
    assert "(line 3)" in error
