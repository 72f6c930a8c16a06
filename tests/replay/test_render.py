"""Output for terminals and Perfetto, and timelines of replays in bounded memory."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lockstep.errors import UsageError
from lockstep.replay.render.perfetto import PerfettoWriter, phases
from lockstep.replay.render.side import QUANTITIES, TimelineSampler
from lockstep.replay.render.tables import comparison_document, figure_tables, latency_tables, report_document
from lockstep.replay.timeline import Tick
from lockstep.report.document import Style, format_number
from lockstep.report.text import show
from tests.replay.shows import HOSTILE_NAMES, crowded, few


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def idle(tick: int, num_ticks: int) -> Tick:
    return Tick(tick, num_ticks, tick * 10, num_ticks * 10, None, None, 0, 0, tick % 7, 3, 5)


def ticks_of(num_requests: int = 40) -> list[Tick]:
    ticks: list[Tick] = []
    crowded([ticks.append], num_requests)
    return ticks


def test_a_short_replay_is_sampled_tick_by_tick() -> None:
    sampler = TimelineSampler()
    ticks: list[Tick] = []
    replay, _ = few([sampler, ticks.append])
    assert sampler.width == 1
    assert sampler.num_ticks == replay.num_ticks
    singles = [tick for tick in ticks for _ in range(tick.num_ticks)]
    assert [bucket.means[QUANTITIES.index("running")] for bucket in sampler.buckets] == [t.num_active for t in singles]
    assert [bucket.sums[QUANTITIES.index("prefill")] for bucket in sampler.buckets] == [
        t.num_prefill_tokens for t in singles
    ]


@pytest.mark.parametrize("most", [4, 32, 256])
def test_a_long_replay_keeps_extremes_and_sums_in_bounded_memory(most: int) -> None:
    sampler, ticks = TimelineSampler(most), ticks_of()
    for tick in ticks:
        sampler(tick)
    assert len(sampler.buckets) <= most
    assert sampler.width & (sampler.width - 1) == 0
    blocks = QUANTITIES.index("blocks")
    assert sum(bucket.sums[blocks] for bucket in sampler.buckets) == sum(t.num_used_blocks * t.num_ticks for t in ticks)
    assert max(bucket.highs[blocks] for bucket in sampler.buckets) == max(t.num_used_blocks for t in ticks)
    assert sum(bucket.num_preempted for bucket in sampler.buckets) == sum(
        len(t.plan.preempted) for t in ticks if t.plan is not None
    )
    starts = [bucket.tick for bucket in sampler.buckets]
    assert all(start % sampler.width == 0 for start in starts)
    assert starts == sorted(set(starts))
    assert sampler.buckets[-1].end_ps == ticks[-1].start_ps + ticks[-1].duration_ps


def test_a_run_of_ticks_is_sampled_like_single_ticks() -> None:
    at_once, one_by_one = TimelineSampler(8), TimelineSampler(8)
    at_once(idle(0, 1)._replace(num_queued=4))
    at_once(idle(1, 1000)._replace(num_queued=2))
    one_by_one(idle(0, 1)._replace(num_queued=4))
    for tick in range(1, 1001):
        one_by_one(idle(tick, 1)._replace(num_queued=2))
    assert at_once.buckets == one_by_one.buckets


def test_a_report_is_markdown_without_a_terminal() -> None:
    out = io.StringIO()
    _, report = crowded()
    show(report_document(report), out)
    text = out.getvalue()
    assert text.startswith(f"crowded.json: fingerprint {report.fingerprint}\n")
    assert "\x1b" not in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in lines)
    cells = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in lines}
    assert cells["completed"] == str(report.requests_completed)
    assert cells["preemptions"] == str(report.preemptions) != "0"
    assert report.latency_ms is not None
    assert report.latency_ms.e2e is not None
    assert f"{format_number(report.latency_ms.e2e.p99, Style.SHORT)} |" in text


def test_a_report_is_drawn_on_a_terminal_with_the_same_figures() -> None:
    out = Terminal()
    _, report = crowded()
    show(report_document(report), out)
    drawn = " ".join(out.getvalue().split())
    assert "─" in drawn
    for table in (*figure_tables(report), *latency_tables(report)):
        assert all(" ".join(str(row[0]).split()) in drawn for row in table.rows)


def test_a_comparison_shows_differences() -> None:
    (_, one), (_, other) = crowded(num_requests=20), crowded(num_requests=30)
    out = io.StringIO()
    show(comparison_document(one, other), out)
    text = out.getvalue()
    assert "decisions differ" in text
    row = next(line for line in text.splitlines() if line.startswith("| requests ") and " 20 " in line)
    assert [cell.strip() for cell in row.split("|")[2:6]] == ["20", "30", "+10", "+50.0 %"]


def test_equal_reports_differ_in_nothing() -> None:
    _, report = few()
    out = io.StringIO()
    show(comparison_document(report, report), out)
    assert "identical decisions" in out.getvalue()
    assert "%" not in "".join(line.split("|")[-2] for line in out.getvalue().splitlines() if line.startswith("|"))


def test_a_comparison_has_settings_and_figures_of_one_side() -> None:
    (_, one), (_, other) = few(), crowded()
    for first, second in ((one, other), (other, one)):
        out = io.StringIO()
        show(comparison_document(first, second), out)
        assert "| max_num_seqs " in out.getvalue()
        assert "| cost: constant_ps" in out.getvalue()
        assert "latencies, ticks" in out.getvalue(), "milliseconds are not those of both"


def test_names_cannot_control_the_terminal_or_break_a_table() -> None:
    _, report = few()
    hostile = msgspec.structs.replace(report, name="\x1b[2J[red]x|\n" + report.name, notes=("a\nb|c\x07",))
    for out in (io.StringIO(), Terminal()):
        show(report_document(hostile), out)
        text = out.getvalue()
        assert "\x1b[2J" not in text
        assert "\x07" not in text
        assert "[red]" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234567, "1,234,567"), (0.595062, "0.595062"), (86.666667, "86.666667"), (50.0, "50")],
)
def test_figures_are_formatted_like_reports(value: float, text: str) -> None:
    assert format_number(value) == text


def trace_events(path: Path) -> list[dict[str, Any]]:
    content = json.loads(path.read_text())
    assert content["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = content["traceEvents"]
    return events


def test_perfetto_gets_steps_counters_and_every_request(tmp_path: Path) -> None:
    path, ticks = tmp_path / "trace.json", list[Tick]()
    with PerfettoWriter(path, "crowded.json") as writer:
        replay, _ = crowded([writer, ticks.append])
        writer.add_requests(replay.outcomes)
    events = trace_events(path)
    for event in events:
        assert event["ph"] in "XCMsf"
        assert {"name", "pid", "tid"} <= event.keys()
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
    steps = [event for event in events if event.get("cat") == "step"]
    assert len(steps) == sum(tick.plan is not None for tick in ticks)
    assert sum(step["args"]["output tokens"] for step in steps) == replay.totals.num_decoded_tokens
    assert {event["name"] for event in events if event["ph"] == "C"} == {"requests", "KV blocks", "batch tokens"}
    wholes = [event for event in events if event.get("cat") == "request" and "args" in event]
    assert sorted(event["name"] for event in wholes) == sorted(outcome.name for outcome in replay.outcomes)
    assert Counter(event["ph"] for event in events if event.get("cat") == "admission") == {"s": 40, "f": 40}


def test_perfetto_requests_do_not_overlap_in_lanes_and_counters_are_constant_while_idle(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    ticks: list[Tick] = []
    with PerfettoWriter(path, "crowded.json") as writer:
        replay, _ = crowded([writer, ticks.append])
        writer.add_requests(replay.outcomes)
    events = trace_events(path)
    lanes: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") == "request" and "args" in event:
            lanes.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(lanes) < len(replay.outcomes)
    for spans in lanes.values():
        ordered = sorted(spans)
        assert all(before[1] <= after[0] for before, after in pairwise(ordered))
    counters = [event for event in events if event["ph"] == "C" and event["name"] == "requests"]
    resting = [event["ts"] for event in counters if event["args"] == {"queued": 0, "running": 0}]
    ends = [tick.start_ps + tick.duration_ps for tick in ticks]
    pauses = [end for end, after in zip(ends, ticks[1:], strict=False) if end < after.start_ps]
    assert len(pauses) > 1
    assert resting == [end_ps / 1e6 for end_ps in (*pauses, ends[-1])]
    assert [event["ts"] for event in counters] == sorted(event["ts"] for event in counters)


def test_perfetto_has_only_reached_phases() -> None:
    replay, _ = few()
    outcome = replay.outcomes[0]
    names = [name for name, _, _ in phases(outcome)]
    assert names == ["prefill", "decode"]
    refused = replace(outcome, admitted_ps=-1, first_token_ps=-1, finished_ps=-1)
    assert list(phases(refused)) == [], "nothing has an end"


def test_hostile_names_are_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with PerfettoWriter(path, "few.json") as writer:
        replay, _ = few([writer], HOSTILE_NAMES)
        writer.add_requests(replay.outcomes)
    names = {event["name"] for event in trace_events(path)}
    assert set(HOSTILE_NAMES) <= names


def test_a_trace_that_cannot_be_written_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write the trace"):
        PerfettoWriter(tmp_path / "absent" / "trace.json", "few.json")
