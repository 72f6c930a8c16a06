"""Sweep page in a real browser: labelled points, the Pareto front, a sortable table."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from playwright.sync_api import Page

from lockstep.core.policy import SchedulerConfig
from lockstep.replay.configs import Settings
from lockstep.replay.render.sweep import (
    SweepResult,
    facts,
    metrics_shown,
    sweep_notes,
    sweep_page,
    sweep_table,
    verdict,
)
from lockstep.replay.sweep import SweepOutcome, cheapest, front
from lockstep.report.document import cell_text
from tests.replay.shows import HOSTILE_NAMES
from tests.visits import Visit

TTFT, SPEED = "latency_ms.ttft.p99", "output_tokens_per_s"
POINTS = ((100.0, 50.0, 0.5), (200.0, 90.0, 1.0), (300.0, 80.0, 0.995), (400.0, 120.0, 1.0))
"""Time to first token, speed, and the share of requests that meet the goals; the second point dominates the third."""


def outcome(number: int, figures: tuple[float, ...] | None, settings: Settings | None = None) -> SweepOutcome:
    config = SchedulerConfig(block_size=16, num_blocks=100 - number, max_model_len=512, max_num_seqs=8)
    settings = settings or {"max_num_seqs": str(8 * (number + 1)), "order": "fair" if number % 2 else "fcfs"}
    if figures is None:
        return SweepOutcome(settings, None, {}, "max_num_seqs is 0; at least 1 is needed")
    names = (TTFT, SPEED, "goodput.ratio")
    return SweepOutcome(settings, config, {**dict(zip(names, figures, strict=True)), "kv_capacity": 5.0})


def sweep_result(*more: SweepOutcome, name: str = "w.json", goals: bool = True) -> SweepResult:
    outcomes = (*(outcome(number, figures) for number, figures in enumerate(POINTS)), *more)
    objectives = (TTFT, SPEED)
    return SweepResult(
        name=name,
        outcomes=outcomes,
        objectives=objectives,
        is_on_front=front(outcomes, objectives),
        goals_ms={"ttft": 250.0} if goals else {},
        percent=99.0,
        best=cheapest(outcomes, 0.99) if goals else None,
        common={"block_size": "16"},
    )


@pytest.fixture
def page(visit: Visit, tmp_path: Path) -> Page:
    path = tmp_path / "sweep.html"
    path.write_text(sweep_page(sweep_result(outcome(4, None))))
    opened = visit.open(path)
    opened.wait_for_selector("#plot circle")
    assert visit.requests == [path.as_uri()]
    return opened


def test_every_valid_config_is_a_point_and_the_front_is_joined(page: Page) -> None:
    assert page.locator("#plot circle.point").count() == 4
    assert page.locator("#plot circle.point.front").count() == 3
    assert page.locator("#plot circle.ring").count() == 1
    line = page.locator("#plot path.front-line").get_attribute("d") or ""
    assert [line.count(each) for each in "MHV"] == [1, 2, 2]
    assert page.locator("#plot circle title").all_text_contents()[0].startswith("max_num_seqs=8, order=fcfs\n")


def test_points_are_positioned_by_their_figures(page: Page) -> None:
    places = page.locator("#plot circle.point").evaluate_all(
        "points => points.map(point => [Number(point.getAttribute('cx')), Number(point.getAttribute('cy'))])"
    )
    xs, ys = zip(*places, strict=True)
    assert list(xs) == sorted(xs)
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.01)
    assert ys[3] < ys[1] < ys[2] < ys[0], "more is higher up"


def test_the_table_has_all_configs_and_marks_the_front_and_the_cheapest(page: Page) -> None:
    rows = [row.split("\t") for row in page.locator("#configs tbody tr").all_inner_texts()]
    assert len(rows) == 5
    assert ["★" in row[0] for row in rows] == [True, True, False, True, False]
    assert ["cheapest" in row[0] for row in rows] == [False, False, False, True, False]
    assert rows[4][-1] == "invalid: max_num_seqs is 0; at least 1 is needed"
    assert "Cheapest that meets ttft of 250 ms: max_num_seqs=32, order=fair" in page.locator("header").inner_text()


def test_headings_sort_both_ways_with_missing_figures_last(page: Page) -> None:
    head = page.get_by_role("button", name="output_tokens_per_s")
    order = "rows => rows.map(row => row.dataset.row)"
    head.click()
    assert page.locator("#configs tbody tr").evaluate_all(order) == ["0", "2", "1", "3", "4"]
    assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    head.click()
    assert page.locator("#configs tbody tr").evaluate_all(order) == ["3", "1", "2", "0", "4"]
    page.get_by_role("button", name="order").click()
    assert page.locator("#configs tbody tr").evaluate_all(order)[:2] == ["1", "3"]


def test_keys_move_between_points_and_describe_each(page: Page) -> None:
    told = page.locator("#told")
    page.locator("#plot").focus()
    texts = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home"):
        page.keyboard.press(key)
        texts.append(told.inner_text())
    first, second, back, last, home = texts
    assert first == back == home == "max_num_seqs=8, order=fcfs: ttft_p99, ms 100, output_tokens_per_s 50"
    assert second.startswith("max_num_seqs=16, order=fair: ")
    assert last.startswith("max_num_seqs=32, order=fair: ")
    assert page.locator("#configs tr.chosen").get_attribute("data-row") == "0"


def test_other_figures_can_be_plotted_with_their_front(page: Page) -> None:
    assert "kv_capacity" not in page.locator("#axis-x").inner_text(), "what is the same everywhere shows nothing"
    page.locator("#axis-x").select_option("goodput.ratio")
    names = page.locator("#plot text.name").all_text_contents()
    assert names == ["goodput.ratio, more is better", "output_tokens_per_s, more is better"]
    assert page.locator("#plot circle.point.front").count() == 1


def test_hostile_values_are_escaped(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "sweep.html"
    hostile = outcome(4, POINTS[0], {"max_num_seqs": HOSTILE_NAMES[0], "order": HOSTILE_NAMES[1]})
    path.write_text(sweep_page(sweep_result(hostile, name=HOSTILE_NAMES[1])))
    page = visit.open(path)
    assert page.locator("img").count() == 0
    assert HOSTILE_NAMES[0] in page.locator("#configs").inner_text()
    assert page.title() == f"Sweep of {HOSTILE_NAMES[1]}"


def test_a_sweep_without_valid_configs_has_a_page(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "sweep.html"
    nothing = SweepResult("w.json", (outcome(0, None), outcome(1, None)), (), (False, False), {}, 99.0, None, {})
    path.write_text(sweep_page(nothing))
    page = visit.open(path)
    assert page.locator("#plot").count() == 0
    assert page.locator("#configs tbody tr").count() == 2


def test_a_sweep_is_shown_as_text_and_as_an_object_with_equal_content() -> None:
    sweep = sweep_result(outcome(4, None), goals=False)
    assert metrics_shown(sweep) == [TTFT, SPEED, "goodput.ratio"]
    assert [cell_text(row[0]) for row in sweep_table(sweep).rows] == ["*", "*", "", "*", ""]
    unit, _, *rest = sweep_notes(sweep)
    assert unit == "times in ms"
    assert rest == ["max_num_seqs=40, order=fcfs is invalid: max_num_seqs is 0; at least 1 is needed"]
    assert verdict(sweep) == ""
    assert facts(sweep)["objectives"] == [{"name": TTFT, "better": "less"}, {"name": SPEED, "better": "more"}]
    assert facts(sweep)["common"] == {"block_size": "16"}


def test_figures_of_many_magnitudes_use_logarithmic_axes(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "sweep.html"
    far = outcome(4, (10_000.0, 130.0, 1.0))
    path.write_text(sweep_page(sweep_result(far)))
    page = visit.open(path)
    page.wait_for_selector("#plot circle")
    places = page.locator("#plot circle.point").evaluate_all("points => points.map(p => Number(p.getAttribute('cx')))")
    first, second, *_, before, last = places
    assert last - before == pytest.approx((second - first) * math.log(25) / math.log(2), rel=1e-3)
    assert page.locator("#plot text.name").first.text_content() == "ttft_p99, ms, less is better (logarithmic)"
