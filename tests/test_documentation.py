"""The Python in the documentation runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "python.md"


def snippet(title: str) -> dict[str, Any]:
    """The names that the code below a title leaves behind."""
    text = PAGE.read_text()
    (section,) = [
        section for section in re.split(r"^## ", text, flags=re.MULTILINE) if section.startswith(f"{title}\n")
    ]
    (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    line = text[: text.index(code)].count("\n")
    names: dict[str, Any] = {"__name__": "snippet"}
    exec(compile("\n" * line + code, str(PAGE), "exec"), names)
    return names


def test_an_engine_with_a_callback(capsys: pytest.CaptureFixture[str]) -> None:
    names = snippet("With a callback")
    assert re.fullmatch(r"(?s).*\nrequest 0: FinishReason.\w+, \d+ tokens\n", capsys.readouterr().out)
    assert names["engine"].num_open == 0


def test_an_engine_by_polling(capsys: pytest.CaptureFixture[str]) -> None:
    names = snippet("By polling")
    lines = capsys.readouterr().out.splitlines()
    assert sum("FinishReason" in line for line in lines) == 3 + 1, "three ends, and the answer to the first"
    assert not names["engine"].has_work
    assert names["engine"].drain_finished() == ()


def test_an_engine_with_a_thread(capsys: pytest.CaptureFixture[str]) -> None:
    names = snippet("With a thread")
    assert re.search(r"FinishReason\.\w+\n$", capsys.readouterr().out)
    assert not names["thread"].is_alive()
    assert names["engine"].is_stopped


def test_a_scheduler_alone(capsys: pytest.CaptureFixture[str]) -> None:
    names = snippet("The scheduler alone")
    assert capsys.readouterr().out.endswith("1 FinishReason.LENGTH 3\n0 FinishReason.STOP 3\n")
    names["scheduler"].check()


def test_what_is_told_of_engines_is_there() -> None:
    """Each name of the table of counts and commands."""
    from lockstep import Engine

    table = PAGE.read_text().split("## Counts and commands")[1].split("## ")[0]
    names = re.findall(r"`(\w+)(?:\([^)`]*\))?`", "".join(re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)))
    assert len(names) >= 15
    assert [name for name in names if not hasattr(Engine, name)] == []


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/decisions.md"])
def test_files_that_are_named_exist(page: str) -> None:
    """By their path from the repository, from the package, or from the folder of either's rooms."""
    root = PAGE.parent.parent
    named = set(re.findall(r"`([\w/]+/[\w/]*\.py)`", (root / page).read_text()))
    assert [
        name for name in sorted(named) if not any((base / name).exists() for base in (root, root / "src" / "lockstep"))
    ] == []
