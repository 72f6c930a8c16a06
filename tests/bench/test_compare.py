"""Two results side by side: what counts as moved, what is read, and what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.bench.compare import Change, Figure, Verdict, changes, figures_of, text_of
from lockstep.cli.main import invoke


def change(before: tuple[float, ...], after: tuple[float, ...], *, is_more_better: bool = True) -> Change:
    return Change("speed", Figure(before, is_more_better), Figure(after, is_more_better))


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((10, 11, 12), (13, 14, 15), "better"),
        ((13, 14, 15), (10, 11, 12), "worse"),
        ((10, 11, 12), (12, 14, 15), "same"),  # they touch
        ((10, 10, 10), (10.2, 10.2, 10.2), "same"),  # apart, and not worth a line
        ((10, 10, 10), (10.4, 10.4, 10.4), "better"),
        ((10, 11), (13, 14, 15), "unknown"),
        ((0, 0, 0), (1, 1, 1), "same"),  # no ratio
    ],
)
def test_moved_is_beyond_the_noise_of_both_sides(
    before: tuple[float, ...], after: tuple[float, ...], verdict: Verdict
) -> None:
    assert change(before, after).verdict == verdict
    opposite: dict[Verdict, Verdict] = {"better": "worse", "worse": "better"}
    assert change(before, after, is_more_better=False).verdict == opposite.get(verdict, verdict)


def test_figures_are_named_or_the_rates_and_latencies_of_a_flat_result() -> None:
    named = {"figures": {"a": {"values": [1, 2], "better": "less"}, "none": {"values": [], "better": "more"}}}
    assert figures_of(named) == {"a": Figure((1.0, 2.0), is_more_better=False)}
    flat = {"output_throughput": 7, "mean_ttft_ms": 3.5, "num_prompts": 4, "model_id": "x"}
    assert figures_of(flat) == {
        "output_throughput": Figure((7.0,), is_more_better=True),
        "mean_ttft_ms": Figure((3.5,), is_more_better=False),
    }


def test_only_common_figures_are_compared_and_a_changed_machine_is_reported() -> None:
    slow, fast = Figure((1, 1, 1), is_more_better=True), Figure((2, 2, 2), is_more_better=True)
    found = changes({"machine copy": slow, "gone": slow, "same": slow}, {"same": slow, "machine copy": fast})
    assert [each.name for each in found] == ["machine copy", "same"]
    assert "The speed of the machine changed" in text_of(found)
    assert "The speed of the machine changed" not in text_of(found[1:])


def written(path: Path, values: list[float]) -> str:
    content: dict[str, Any] = {"figures": {"x1 tok/s": {"values": values, "better": "more"}}}
    path.write_text(json.dumps(content))
    return str(path)


def test_the_verb_fails_where_something_is_worse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = written(tmp_path / "slow.json", [10, 11, 12]), written(tmp_path / "fast.json", [20, 21, 22])
    assert invoke(["bench", "compare", slow, fast]) == 0
    assert "1 better, 0 worse, of 1 metrics" in capsys.readouterr().out
    assert invoke(["bench", "compare", fast, slow, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == [
        {"figure": "x1 tok/s", "before": 21.0, "after": 11.0, "ratio": 11 / 21, "verdict": "worse"}
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no JSON", "cannot be read as a result"),
        ("[]", "has no metrics"),
        ('{"mean_ttft_ms": 3}', "have no metric in common: x1 tok/s and mean_ttft_ms"),
    ],
)
def test_invalid_result_file_is_reported_in_one_line(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text(content)
    assert invoke(["bench", "compare", written(tmp_path / "a.json", [1]), str(other)]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
