"""The chat at a real terminal: commands, several lines, history, and Ctrl-C wherever it comes."""

from __future__ import annotations

import json
import random
import signal
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cli.main import invoke
from lockstep.cli.terminal import MAX_HISTORY_BYTES, HistoryFile, WordWrap, is_open, unquoted
from tests.bench.standin import Behaviour
from tests.cli import checked
from tests.cli.person import CTRL_C, CTRL_D, Person, pause
from tests.processes import Piped, run
from tests.waiting import HANG_S, until

SLOW_STUB = "stub://alpha?step_ms=20"
ENDLESS = ("--ignore-eos", "--max-tokens", "2000")


def saved(person: Person, path: Path) -> list[dict[str, str]]:
    person.types(f"/save {path}")
    person.sees(f"messages to {path}")
    messages: list[dict[str, str]] = json.loads(path.read_text())
    return messages


def test_commands_are_obeyed_and_never_sent(tmp_path: Path, url: str, behaviour: Behaviour) -> None:
    file = tmp_path / "said.json"
    with Person(tmp_path, "chat", "--base-url", url, "--system", "be brief", "--max-tokens", "1") as person:
        person.types("/claer")
        person.sees(
            "error: there is no command /claer. did you mean /clear? To send a message that begins with it, type //"
        )
        person.types("/set temprature 1")
        person.sees("there is no parameter temprature. did you mean temperature?")
        person.types("/set temperature warm")
        person.sees("temperature is 'warm'; it must be a number, 0 to 1,000,000, or default")
        person.types("/set top_p 7")
        person.sees("top_p is 7.0; it must be a number above 0, at most 1")
        person.types("/set temperature 0.5")
        person.types('/set stop ["a", "b"]')
        person.types("/set parameter seed 7")
        person.types("/set temperature")
        person.sees("temperature         0.5")
        person.types("//bin is a folder")
        person.sees("word0")
        person.types("/system")
        person.sees("be brief\r\n")
        person.types("/system be loud")
        person.types("/set seed default")
        person.types('"""/two')
        person.types('lines"""')
        person.sees("word0")
        asked = {"role": "user", "content": "//bin is a folder"[1:]}, {"role": "user", "content": "/two\nlines"}
        said = {"role": "assistant", "content": "word0 "}
        system = {"role": "system", "content": "be loud"}
        assert saved(person, file) == [system, asked[0], said, asked[1], said]
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        person.types(f"/save {file}")
        person.sees(f"{file} exists; /save --force {file} replaces it")
        person.types("/clear")
        person.types("anew")
        person.sees("word0")
        person.types(f"/load {file}")
        person.sees("loaded 5 messages")
        person.types("on")
        person.sees("word0")
        person.types(f"/save --force {file}")
        person.sees("saved 7 messages to")
        assert person.leaves("/quit\r") == 0
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [file.name]
    first, second, third, fourth = behaviour.measured()
    assert first["messages"] == [{"role": "system", "content": "be brief"}, asked[0]]
    assert (first["temperature"], first["stop"], first["seed"]) == (0.5, ["a", "b"], 7)
    assert "seed" not in second
    assert third["messages"] == [system, {"role": "user", "content": "anew"}]
    assert len(fourth["messages"]) == 6


def test_help_names_every_command_and_parameter(tmp_path: Path) -> None:
    with Person(tmp_path, "run", "stub://alpha") as person:
        person.types("/?")
        shown = person.sees("ignore_eos.")
        assert person.leaves("/exit\r") == 0
    for word in ("/help", "/clear", "/system", "/set", "/save", "/load", "/bye", '"""', "//TEXT", "Ctrl-C", "top_p"):
        assert word in shown


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(tmp_path: Path) -> None:
    with Person(tmp_path, "run", SLOW_STUB, *ENDLESS, main=checked.main) as person:
        person.types("hello")
        person.sees("[stub:a")
        person.presses(CTRL_C)
        person.sees("(stopped)")
        person.types("/set max_tokens 4")
        person.types("go on")
        person.sees("[stu")
        user, answer, again, last = saved(person, tmp_path / "said.json")
        assert answer["role"] == "assistant"
        assert answer["content"].startswith("[stub:a")
        assert (user["content"], again["content"], last["content"]) == ("hello", "go on", "[stu")
        assert person.leaves() == 0
        assert "nothing is left" in person.has_seen


def test_an_answer_stopped_before_its_first_word_is_not_remembered(
    tmp_path: Path, url: str, behaviour: Behaviour
) -> None:
    behaviour.token_delay_s = HANG_S
    with Person(tmp_path, "chat", "--base-url", url, "--max-tokens", "1") as person:
        person.types("hello")
        until(lambda: behaviour.num_open == 1)
        person.presses(CTRL_C)
        person.sees("(stopped before the first word")
        until(lambda: behaviour.num_open == 0)
        behaviour.token_delay_s = 0.0
        person.types("again")
        person.sees("word0 \r\n")
        person.sees(">")  # the prompt: before it, a terminal means nothing by Ctrl-D
        assert person.leaves(CTRL_D) == 0
    assert [len(body["messages"]) for body in behaviour.measured()] == [1, 1]


def test_ctrl_c_at_the_prompt_takes_the_line_and_twice_leaves(tmp_path: Path) -> None:
    with Person(tmp_path, "run", "stub://alpha", main=checked.main) as person:
        person.presses("never sent")
        person.sees("never sent")
        person.presses(CTRL_C)
        person.sees("(to exit: Ctrl-C again within two seconds")
        person.types("sent")
        person.sees("[stub:alpha] ok len=4 max=")
        person.sees(">")
        person.presses(CTRL_C)
        person.sees("(to exit: Ctrl-C again within two seconds")
        assert person.leaves(CTRL_C) == 0
        assert "nothing is left" in person.has_seen
        assert "Traceback" not in person.has_seen


def test_typed_lines_are_in_the_history_of_the_next_chat(tmp_path: Path) -> None:
    for keys in ("remember me\r", "\x1b[A\x1b[A\r"):
        with Person(tmp_path, "run", "stub://alpha") as person:
            person.presses(keys)
            person.sees("[stub:alpha] ok len=11 ")
            assert person.leaves() == 0
    (history,) = tmp_path.rglob("chat_history*")
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert [json.loads(line) for line in history.read_text().splitlines()].count("remember me") == 2


def test_a_history_is_bounded_and_may_be_broken(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "history"
    history = HistoryFile(path)
    assert history.entries() == []
    for number in range(3):
        history.append(f"entry {number}")
        history.append(f"entry {number}")
    assert history.entries() == ["entry 0", "entry 1", "entry 2"]
    with path.open("a") as file:
        file.write('"half')
        file.write('\n{"no": "text"}\n')
        file.writelines(f'"{number:050}"\n' for number in range(MAX_HISTORY_BYTES // 40))
    assert HistoryFile(path).entries()[-1] == f"{MAX_HISTORY_BYTES // 40 - 1:050}"
    assert path.stat().st_size <= MAX_HISTORY_BYTES // 2
    history.append("x" * MAX_HISTORY_BYTES)
    assert "x" not in HistoryFile(path).entries()[-1]
    unwritable = HistoryFile(path / "no" / "folder")
    unwritable.append("lost")
    assert unwritable.entries() == []


@pytest.mark.parametrize(
    ("text", "opens"),
    [
        ('"""', True),
        ('"""a', True),
        ('"""a"""', False),
        ('a """', False),
        ('/system """a', True),
        ('/system a"""', False),
    ],
)
def test_three_quotes_open_and_close_multi_line_input(text: str, opens: bool) -> None:
    assert is_open(text) == opens


def test_quotes_are_taken_away_around_a_whole_text_only() -> None:
    assert unquoted('"""\na\n b\n"""') == "a\n b"
    assert unquoted('"""a""" and b') == '"""a""" and b'
    assert unquoted('"""""') == '"""""'


def test_a_pipe_is_read_by_lines_and_ends_at_its_first_error() -> None:
    result = run(
        "run", "stub://alpha", "--max-tokens", "2", stdin='/set max_tokens 3\nhello\n"""a\nb"""\n/nothing\nnever\n'
    )
    assert (result.returncode, result.stdout) == (2, "[st\n[st\n")
    assert result.stderr.startswith("lockstep: error: there is no command /nothing. /help lists all commands.")
    unended = run("run", "stub://alpha", stdin='"""a\nb')
    assert (unended.returncode, unended.stdout) == (2, "")
    assert "has no end" in unended.stderr


def test_commands_that_need_a_chat_template_are_rejected_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["run", "stub://alpha", "--raw", "--system", "x", "-p", "y"]) == 2
    assert "requires a chat template" in capsys.readouterr().err
    for command, message in (("/system x", "requires a chat template"), ("/save x", "/save requires a chat template")):
        result = run("run", "stub://alpha", "--raw", stdin=f"{command}\n")
        assert result.returncode == 2
        assert message in result.stderr


def test_ctrl_c_ends_a_single_answer_with_130_and_no_traceback() -> None:
    with Piped("run", SLOW_STUB, *ENDLESS, "-p", "hello") as process:
        assert process.stdout.read(7) == "[stub:a"
        process.program.send_signal(signal.SIGINT)
        code, _, err = process.communicate()
    assert (code, err) == (130, "")


@pytest.mark.parametrize("num_times", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_ctrl_c_at_random_moments_leaves_the_chat_usable(num_times: int, tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with Person(tmp_path, "run", "stub://alpha?step_ms=4", "--max-tokens", "30", main=checked.main) as person:
        for number in range(num_times):
            person.types(f"message {number}")
            pause(rng.random() * rng.choice((0.02, 0.2)))
            person.presses(CTRL_C)
            person.types(f"/nothing{number}")
            person.sees(f"there is no command /nothing{number}.")
        person.types("hello")
        person.sees("[stub:alpha] ok len=")
        messages = saved(person, tmp_path / "said.json")
        assert person.leaves() == 0
        assert "nothing is left" in person.has_seen
    assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
    assert messages[-2]["content"] == "hello"
    assert all(message["content"] for message in messages)


def wrapped(text: str, width: int, pieces: int = 1) -> list[str]:
    wrap = WordWrap(lambda: width)
    parts = [wrap.feed(text[at : at + pieces]) for at in range(0, len(text), pieces)]
    return ("".join(parts) + wrap.flush()).split("\n")


@pytest.mark.parametrize("pieces", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three", ["one two ", "three"]),
        ("exactly10! and", ["exactly10!", "and"]),
        ("ab\n\n  indented code", ["ab", "", "  indented", "code"]),
        ("a much_longer_word b", ["a ", "much_longe", "r_word b"]),
        ("你好世界你好", ["你好世界你", "好"]),
        ("", [""]),
    ],
)
def test_lines_break_between_words(text: str, lines: list[str], pieces: int) -> None:
    assert wrapped(text, 10, pieces) == lines


@given(st.text("ab \n", max_size=80), st.integers(1, 12))
def test_wrapping_changes_nothing_but_blanks_and_line_breaks(text: str, width: int) -> None:
    lines = wrapped(text, width)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert all(len(line) <= width for line in lines if len(max(line.split(), default="", key=len)) < width)


def test_an_answer_is_wrapped_at_a_terminal(tmp_path: Path) -> None:
    answer = "several words that are wider than forty cells when they stand on one line"
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"answer": answer}))
    with Person(tmp_path, "run", f"stub://alpha?answers={answers}", columns=40) as person:
        person.types("hello")
        person.sees("several words that are wider than forty \r\ncells when they stand on one line\r\n")
        assert person.leaves() == 0


def test_an_answer_in_a_pipe_is_not_wrapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"answer": "word " * 60 + "end"}))
    assert invoke(["run", f"stub://alpha?answers={answers}", "-p", "hello"]) == 0
    assert capsys.readouterr().out == "word " * 60 + "end\n"


def test_show_lists_the_model_and_the_parameters_in_force(tmp_path: Path) -> None:
    with Person(tmp_path, "run", "stub://alpha?max_model_len=512", "--temperature", "0.5") as person:
        assert "Chat with alpha." in person.greeting
        person.types("/help")
        assert "/show" in person.sees("ignore_eos.")
        person.types("/show")
        shown = person.sees("ignore_eos")
        for name, value in (
            ("model", "alpha"),
            ("source", "stub://alpha?max_model_len=512"),
            ("context", "512 tokens"),
            ("chat template", "the model's own"),
            ("temperature", "0.5"),
            ("top_p", "1.0 (default)"),
            ("seed", "default"),
        ):
            assert f"  {name:18}  {value}\r\n" in shown, shown
        person.types("/set top_p 0.9")
        person.types("/show")
        person.sees(f"  {'top_p':18}  0.9\r\n")
        assert person.leaves() == 0


def test_show_of_a_server_names_it_and_its_models_context(tmp_path: Path, url: str) -> None:
    with Person(tmp_path, "chat", "--base-url", url) as person:
        person.types("/show")
        shown = person.sees("ignore_eos")
        assert f"  {'server':18}  {url}" in shown
        assert f"  {'chat template':18}  the server's" in shown
        assert person.leaves() == 0


def test_show_works_in_a_pipe() -> None:
    done = run("run", "stub://alpha", stdin="/show\n")
    assert f"  {'model':18}  alpha\n" in done.stderr
    assert done.stdout == ""
