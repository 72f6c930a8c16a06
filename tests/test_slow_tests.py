"""The ratchet of the suite's speed reads a report, and names who is over the limit and who no longer is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.slow_tests import KNOWN, LIMIT_S, ROOT, lines_about, main, seconds_by_file

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_tidy" name="a" time="1.5"/>
<testcase classname="tests.test_tidy" name="b" time="7.0"/>
<testcase classname="tests.core.test_step.TestPlan" name="c" time="0.25"/>
<testcase classname="tests.gone" name="d" time="0.5"/>
</testsuite></testsuites>"""


@pytest.fixture
def report(tmp_path: Path) -> Path:
    for name in ("tests/test_tidy.py", "tests/core/test_step.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    return path


def test_seconds_are_added_up_by_file_longest_first(report: Path, tmp_path: Path) -> None:
    assert list(seconds_by_file(report, tmp_path).items()) == [
        ("tests/test_tidy.py", 8.5),
        ("tests.gone", 0.5),
        ("tests/core/test_step.py", 0.25),
    ]


def test_a_new_slow_file_fails_and_a_listed_file_within_the_limit_is_reported() -> None:
    seconds = {"new": LIMIT_S + 1, "old": LIMIT_S + 2, "better": LIMIT_S - 1, "fast": 0.1}
    lines, is_wrong = lines_about(seconds, frozenset({"old", "better", "renamed"}))
    assert is_wrong
    assert [line.split()[2] for line in lines] == ["new", "old", "better", "renamed"]
    assert "over the limit" in lines[0]
    assert "remove it from KNOWN" in lines[2]
    assert "renamed" in lines[3]
    assert not lines_about({"old": LIMIT_S + 2}, frozenset({"old"}))[1]


def test_files_that_are_known_to_take_long_are_there() -> None:
    """They come first, which one that has another name does not."""
    assert [name for name in sorted(KNOWN) if not (ROOT / name).is_file()] == []


def test_the_exit_code_tells(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(report)]) == 1
    assert "tests/test_tidy.py  over the limit" in capsys.readouterr().out
    assert main([]) == 2
