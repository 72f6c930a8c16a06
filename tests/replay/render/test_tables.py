"""Tables of one report and of two: shown and omitted figures, and the differences of B."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.replay.latencies import Distribution, Latencies
from lockstep.replay.render.tables import (
    comparison_notes,
    difference,
    figure_comparison,
    figure_tables,
    latency_comparison,
    latency_strips,
    latency_tables,
    settings_table,
    tiles_of,
    twin_tiles,
)
from lockstep.replay.report import Goodput, Report
from lockstep.report.document import ABSENT, Number, Strip, Style, Table, cell_text
from tests.replay.shows import crowded, few

NO_TIMES = Latencies(None, None, None, None, None)


@pytest.fixture(scope="module")
def in_ticks() -> Report:
    return few()[1]


@pytest.fixture(scope="module")
def timed() -> Report:
    return crowded()[1]


def rows_of(table: Table) -> dict[str, list[str]]:
    return {cell_text(row[0]): [cell_text(cell) for cell in row[1:]] for row in table.rows}


def titles(tables: list[Table]) -> list[str]:
    return [table.title for table in tables]


def test_unused_features_have_no_table(in_ticks: Report, timed: Report) -> None:
    assert titles(figure_tables(in_ticks)) == ["Requests", "Tokens", "Load", "KV cache"]
    assert titles(figure_tables(timed)) == ["Requests", "Tokens", "Load", "KV cache", "Preemption"]
    met = Goodput({"ttft": 500.0, "tpot": 12.5}, 3, 0.75, 1.5)
    more = msgspec.structs.replace(in_ticks, tenants=2, fairness=0.9, prefix_queried_tokens=64, goodput=met)
    assert titles(figure_tables(more))[4:] == ["Prefix cache", "Tenants", "Goals"]
    goals = rows_of(figure_tables(more)[-1])
    assert goals["goals"] == ["ttft 500 ms, tpot 12.5 ms"]
    assert goals["goodput"] == ["1.5 requests per second"]


def test_speeds_are_shown_only_for_timed_replays(in_ticks: Report, timed: Report) -> None:
    requests, tokens, *_ = map(rows_of, figure_tables(in_ticks))
    assert not {"duration", "completed per second", "output tokens per second"} & {*requests, *tokens}
    requests, tokens, *_ = map(rows_of, figure_tables(timed))
    assert requests["duration"][0].endswith(" ms")
    assert "output tokens per second" in tokens
    assert latency_tables(timed)[0].columns[0].name == "latencies, ms"
    assert latency_tables(in_ticks)[0].columns[0].name == "latencies, ticks"


def test_a_figure_that_only_one_side_has_is_listed(in_ticks: Report, timed: Report) -> None:
    tables = figure_comparison(in_ticks, timed)
    assert tables[-1].title == "Only in B"
    only = rows_of(tables[-1])
    assert only["preemptions"] == [ABSENT, str(timed.preemptions), ABSENT, ABSENT]
    assert {"duration", "output tokens per second"} <= only.keys()
    back = {name: row for table in figure_comparison(timed, in_ticks) for name, row in rows_of(table).items()}
    assert back["preemptions"] == [str(timed.preemptions), ABSENT, ABSENT, ABSENT]


def test_differing_texts_are_marked(in_ticks: Report) -> None:
    lost = msgspec.structs.replace(in_ticks, all_blocks_returned=False)
    rows = {name: row for table in figure_comparison(in_ticks, lost) for name, row in rows_of(table).items()}
    assert rows["all returned"] == ["yes", "no", "differs", ""]
    assert rows["requests"][2:] == ["", ""]


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_difference_has_a_sign_and_a_percentage_of_a(before: int, after: int) -> None:
    change, percent = difference(before, after)
    if before == after:
        assert (change, percent) == ("", "")
    else:
        assert int(change.replace(",", "")) == after - before
        assert change[0] == ("+" if after > before else "-")
        assert percent == (ABSENT if before == 0 else f"{100 * (after - before) / before:+.1f} %")


def test_a_small_difference_is_not_a_rounding_error() -> None:
    assert difference(0.1 + 0.2, 0.4) == ("+0.1", "+33.3 %")
    assert difference(1000.0, 1000.4, Style.SHORT) == ("+0.4", "+0.0 %")


def test_compared_latencies_have_a_common_unit(in_ticks: Report, timed: Report) -> None:
    assert latency_comparison(timed, timed)[0].columns[0].name == "latencies, ms"
    assert latency_comparison(timed, in_ticks)[0].columns[0].name == "latencies, ticks"
    assert latency_strips(in_ticks, timed).columns[0].name == "ticks"
    empty = msgspec.structs.replace(in_ticks, latency_ticks=NO_TIMES)
    assert latency_comparison(in_ticks, empty) == latency_tables(empty) == []
    assert latency_strips(empty, in_ticks).rows == []


def test_compared_strips_have_a_common_scale(in_ticks: Report) -> None:
    slow = Distribution(4.0, 3.0, 6.0, 7.0, 8.0)
    fast = Distribution(1.0, 1.0, 1.5, 2.0, 2.0)
    one, other = (
        msgspec.structs.replace(in_ticks, latency_ticks=Latencies(each, None, None, None, None))
        for each in (slow, fast)
    )
    a, b, change = latency_strips(one, other).rows
    strips = [cell for row in (a, b) for cell in row if isinstance(cell, Strip)]
    assert [strip.whole for strip in strips] == [8.0, 8.0]
    assert [strip.side for strip in strips] == ["a", "b"]
    assert change[2] == "-75.0 %"
    assert a[2] == Number(4.0, Style.SHORT)


def test_settings_that_differ_are_listed_with_costs(in_ticks: Report, timed: Report) -> None:
    assert settings_table(in_ticks, in_ticks).rows == []
    rows = rows_of(settings_table(in_ticks, timed))
    assert rows["max_num_seqs"] == ["2", "16"]
    assert rows["cost: constant_ps"] == ["10,000,000,000", "2,000,000,000"]
    unset = msgspec.structs.replace(in_ticks, config={**in_ticks.config, "max_num_seqs": None})
    assert rows_of(settings_table(unset, in_ticks)) == {"max_num_seqs": [ABSENT, "2"]}


def test_a_note_of_one_side_names_that_side(in_ticks: Report) -> None:
    one, other = (msgspec.structs.replace(in_ticks, notes=notes) for notes in (("both", "mine"), ("yours", "both")))
    assert comparison_notes(one, other) == ["both", "A: mine", "B: yours"]


def test_compared_tiles_are_those_of_both_reports(in_ticks: Report, timed: Report) -> None:
    alone = {tile.label: tile for tile in tiles_of(timed).tiles}
    twins = {tile.label: tile for tile in twin_tiles(in_ticks, timed).tiles}
    assert "Preemptions" in alone.keys() - twins.keys()
    assert twins["Completed"].value == "4 of 4"
    assert twins["Completed"].other == (alone["Completed"].value, alone["Completed"].more)
    long = msgspec.structs.replace(timed, duration_ms=12_345.0)
    assert next(tile.value for tile in tiles_of(long).tiles if tile.label == "Duration") == "12.35 s"
