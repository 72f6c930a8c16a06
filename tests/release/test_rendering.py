"""Reports of verdicts: contents, pages without external requests, plots with their bounds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from lockstep.cli.main import invoke
from tests.visits import Visit

SLOWER, PAIRS, SEED = 1.3, 400, 5


def pairs(path: Path) -> Path:
    """A candidate that is certainly slower, in one of two segments more than in the other."""
    random_ = random.Random(SEED)
    with path.open("w") as file:
        for index in range(PAIRS):
            segment = random_.choice(("chat", "code"))
            took_ms = random_.lognormvariate(4, 0.3)
            sides = {
                side: {
                    "ts": index,
                    "latency_ms": took_ms * by,
                    "ttft_ms": took_ms / 5 * by,
                    "token_ids": [index],
                }
                for side, by in (("baseline", 1.0), ("candidate", SLOWER if segment == "code" else SLOWER - 0.1))
            }
            file.write(json.dumps({"request_id": f"<b>{index}</b>", "segment": segment, **sides}) + "\n")
    return path


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Page of a sequential verdict."""
    found = tmp_path / "gate.html"
    settings = ["--set", "mode=sequential", "--set", "warmup_pairs=0"]
    assert invoke(["gate", str(pairs(tmp_path / "pairs.jsonl")), *settings, "--html", str(found)]) == 1
    return found


def test_a_page_makes_no_requests_and_fits_a_phone(page: Path, visit: Visit) -> None:
    tab = visit.open(page)
    tab.set_viewport_size({"width": 400, "height": 800})
    assert visit.requests == [page.as_uri()]
    assert tab.evaluate("document.documentElement.scrollWidth") == 400
    sizes = tab.locator(".plot text").evaluate_all("all => all.map(each => each.getBoundingClientRect().height)")
    assert min(sizes) >= 9, "words of plots are not shrunk to nothing"


def test_both_sides_are_distinguishable_without_colour(page: Path, visit: Visit) -> None:
    tab = visit.open(page)
    dashes = "element => getComputedStyle(element).strokeDasharray"
    for place in ("#distributions polyline", "#distributions .key line"):
        assert tab.locator(f"{place}.line-a").first.evaluate(dashes) == "none"
        assert tab.locator(f"{place}.line-b").first.evaluate(dashes) != "none"


def test_each_series_is_plotted_against_its_bound(page: Path, visit: Visit) -> None:
    tab = visit.open(page)
    plots = tab.locator("#evidence-over-time .plot")
    heads = [text.removeprefix("Evidence on ") for text in plots.locator("h3").all_inner_texts()]
    assert heads[:2] == ["latency", "time to the first token"]
    assert "the error rate" in heads
    for number in range(plots.count()):
        assert "bound +" in str(plots.nth(number).locator("svg[role=img]").text_content())


def test_a_finding_outside_its_limit_is_printed_with_its_owner_and_action(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = ["--set", "min_pairs=5", "--set", "owners={latency: '@anna'}"]
    assert invoke(["gate", str(pairs(tmp_path / "pairs.jsonl")), *policy]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("hold: p95 ")
    item = next(number for number, line in enumerate(lines[1:], 1) if line.startswith("hold: p95 latency is "))
    assert lines[item + 2].startswith("- for @anna: ")
    assert f"{PAIRS} pairs, {PAIRS} of them answered by both sides; answers: {PAIRS} same" in lines


def test_findings_on_times_alone_are_marked_as_possible_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(pairs(tmp_path / "pairs.jsonl"))
    assert invoke(["gate", path]) == 2
    assert "Note: only times are outside" in capsys.readouterr().out
    assert invoke(["gate", path, "--set", "min_pairs=1000"]) == 2
    assert "only times are outside" not in capsys.readouterr().out


def test_ids_of_requests_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = pairs(tmp_path / "pairs.jsonl")
    path.write_text(path.read_text().replace('"token_ids": [7]', '"token_ids": [8]', 1))
    assert invoke(["gate", str(path), "--set", "min_pairs=5"]) == 1
    assert "- requests: \\<b>7\\</b>" in capsys.readouterr().out
