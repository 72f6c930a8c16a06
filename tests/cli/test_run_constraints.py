"""The constraint flags: each says one thing, together they are refused, and what they say holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.cli.main import invoke
from lockstep.cli.run import ConstraintFlags
from lockstep.errors import UsageError
from lockstep.executors.constraint import Constraint

SCHEMA = '{"type":"object","properties":{"ok":{"type":"boolean"}},"required":["ok"],"additionalProperties":false}'


def test_no_flag_is_no_constraint() -> None:
    assert ConstraintFlags().constraint() is None
    assert ConstraintFlags(None, None, [], None).constraint() is None


def test_each_flag_is_its_constraint(tmp_path: Path) -> None:
    grammar = tmp_path / "answer.lark"
    grammar.write_text('start: "ja" | "nein"')
    schema = tmp_path / "schema.json"
    schema.write_text(SCHEMA)
    assert ConstraintFlags(SCHEMA, None, None, None).constraint() == Constraint.json_schema(SCHEMA)
    assert ConstraintFlags(str(schema)).constraint() == Constraint.json_schema(SCHEMA)
    assert ConstraintFlags(None, "[0-9]", None, None).constraint() == Constraint.regex("[0-9]")
    assert ConstraintFlags(None, None, ["a", "b"], None).constraint() == Constraint.choice(["a", "b"])
    assert ConstraintFlags(None, None, None, grammar).constraint() == Constraint.lark('start: "ja" | "nein"')


def test_two_flags_and_missing_files_are_refused() -> None:
    with pytest.raises(UsageError, match="--regex and --choice are given"):
        ConstraintFlags(None, "a", ["b"], None).constraint()
    with pytest.raises(UsageError, match=r"--json-schema: nowhere\.json cannot be read"):
        ConstraintFlags("nowhere.json", None, None, None).constraint()


@pytest.mark.parametrize(
    ("flags", "answers"),
    [
        (["--choice", "billing", "--choice", "none"], ("billing", "none")),
        (["--regex", "(ab){2}"], ("abab",)),
        (["--json-schema", SCHEMA], ('{"ok":true}', '{"ok":false}')),
    ],
)
def test_the_answer_obeys(capsys: pytest.CaptureFixture[str], flags: list[str], answers: tuple[str, ...]) -> None:
    assert invoke(["run", "stub://alpha", "-p", "hello", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["text"] in answers


def test_a_wrong_pattern_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["run", "stub://alpha", "-p", "hello", "--regex", "(["]) != 0
    error = capsys.readouterr().err
    assert "unclosed character class" in error
    assert "Traceback" not in error
