"""Warnings report facts that do not decide: fields, partners and segments that totals hide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import EvidenceError
from lockstep.release.verdict import Decision
from tests.release.inputs import verdict_of, write_json
from tests.release.judging import judged, named, rows, signal, states, with_tokens, written

SEQUENTIAL: Any = {"mode": "sequential"}


def warned(verdict: Any) -> list[str]:
    return [each.name for each in verdict.warnings]


# -- fields -----------------------------------------------------------------------------------------------------------


def layouts(folder: Path, last: dict[str, Any]) -> dict[str, list[Path]]:
    """Files of both sides in each layout; the candidate's last record has further fields."""
    baseline, candidate = with_tokens(30), with_tokens(30)
    candidate[-1] |= last
    pairs = [
        {"request_id": b["request_id"], "baseline": b, "candidate": c} for b, c in zip(baseline, candidate, strict=True)
    ]
    for pair in pairs:
        pair["baseline"] = {name: value for name, value in pair["baseline"].items() if name != "request_id"}
    sides = [{**row, "side": side} for side, some in (("baseline", baseline), ("candidate", candidate)) for row in some]
    return {
        "files": [written(folder / "b.jsonl", baseline), written(folder / "c.jsonl", candidate)],
        "lists": [write_json(folder / "lists.json", {"baseline": baseline, "candidate": candidate})],
        "document of pairs": [write_json(folder / "pairs.json", {"pairs": pairs})],
        "lines of pairs": [written(folder / "pairs.jsonl", pairs)],
        "lines with sides": [written(folder / "sides.jsonl", sides)],
        "list with sides": [write_json(folder / "sides.json", sides)],
    }


LAYOUTS = ["files", "lists", "document of pairs", "lines of pairs", "lines with sides", "list with sides"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_field_that_is_unknown_in_any_record_is_a_warning(tmp_path: Path, layout: str) -> None:
    verdict = verdict_of(*layouts(tmp_path, {"status_code": 500})[layout])
    assert (verdict.decision, warned(verdict)) == (Decision.PROMOTE, ["unread-fields"])
    assert "status_code" in verdict.warnings[0].sentence


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_misspelt_field_in_any_record_is_refused(tmp_path: Path, layout: str) -> None:
    with pytest.raises(EvidenceError, match="'healthy' of an observation; did you mean 'health'"):
        verdict_of(*layouts(tmp_path, {"healthy": False})[layout])


def test_columns_of_a_table_that_are_not_read_are_a_warning(tmp_path: Path) -> None:
    lines = ["request_id,latency_ms,text,status_code", *(f"r{number},100,a{number},200" for number in range(30))]
    for side in ("b", "c"):
        (tmp_path / f"{side}.csv").write_text("\n".join(lines) + "\n")
    verdict = verdict_of(tmp_path / "b.csv", tmp_path / "c.csv")
    assert warned(verdict) == ["unread-fields"] * 2


# -- units ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.001, 1000])
def test_gaps_in_another_unit_are_refused(tmp_path: Path, factor: float) -> None:
    with pytest.raises(EvidenceError, match=r"token_latencies_ms is \S+ times the baseline's"):
        judged(
            tmp_path,
            with_tokens(30, token_latencies_ms=[200.0, 300.0]),
            with_tokens(30, token_latencies_ms=[200.0 * factor, 300.0 * factor]),
        )


def test_gaps_of_buffered_tokens_do_not_count_as_another_unit(tmp_path: Path) -> None:
    baseline = with_tokens(30, ttft_ms=20.0, token_latencies_ms=[40.0, 40.0])
    buffered = with_tokens(30, ttft_ms=99.0, token_latencies_ms=[0.01, 0.01])
    assert named(judged(tmp_path, baseline, buffered)) == {"ttft": "hold", "missing-metric": "hold"}


# -- records ----------------------------------------------------------------------------------------------------------


def test_missing_partners_are_a_warning_and_a_lost_third_holds(tmp_path: Path) -> None:
    def losing(every: int) -> Any:
        return judged(tmp_path, with_tokens(90), [row for number, row in enumerate(with_tokens(90)) if number % every])

    few = losing(45)
    assert few.decision is Decision.PROMOTE
    assert [(each.name, each.examples) for each in few.warnings] == [("missing-partners", ("r0", "r45"))]
    assert named(losing(3)) == {"missing-join": "hold"}


def test_retried_records_are_not_missing(tmp_path: Path) -> None:
    tried = [{**row, "ok": False, "ts": row["ts"] - 0.01} for row in with_tokens(30)[:15]]
    verdict = judged(tmp_path, [*tried, *with_tokens(30)], with_tokens(30))
    assert (verdict.decision, verdict.coverage["join_rate"], warned(verdict)) == (Decision.PROMOTE, 1.0, [])


# -- segments ---------------------------------------------------------------------------------------------------------


def sides(factor: float, count: int = 600) -> Any:
    """A segment of 3 % of the traffic that is slower on the candidate by a factor."""
    label: Any = {"segment": lambda number: "legal" if number % 33 == 0 else "rest"}
    latency = lambda number: (100.0 + number % 7) * (factor if number % 33 == 0 else 1)  # noqa: E731  # used once
    return with_tokens(count, latency_ms=lambda number: 100.0 + number % 7, **label), with_tokens(
        count, latency_ms=latency, **label
    )


@pytest.mark.parametrize("policy", [{}, SEQUENTIAL])
def test_a_slower_segment_hidden_in_all_pairs_is_a_warning(tmp_path: Path, policy: Any) -> None:
    verdict = judged(tmp_path, *sides(1.486), policy=policy)
    [found] = verdict.warnings
    assert (found.name, found.segment, found.examples[0]) == ("slower-segment", "legal", "r33")
    assert "latency is +48.6 % in the mean of 19 pairs, 3.17 % of all" in found.sentence
    assert judged(tmp_path, *sides(1.04), policy=policy).warnings == ()


def test_a_slower_segment_decides_where_segments_are_enforced(tmp_path: Path) -> None:
    verdict = judged(tmp_path, *sides(1.486), segments="enforce", min_pairs=15)
    assert [(each.name, each.segment) for each in verdict.signals] == [("latency", "legal")]
    assert verdict.warnings == ()


def test_noise_of_a_small_segment_gives_no_warning(tmp_path: Path) -> None:
    label: Any = {"segment": lambda number: "a" if number % 20 == 0 else "b"}
    first, second = (
        with_tokens(400, latency_ms=lambda number, step=step: 100.0 + (number * step) % 83, **label)
        for step in (37, 59)
    )
    assert "slower-segment" not in warned(judged(tmp_path, first, second, max_latency_p95_ratio=1.01))


def test_errors_of_a_segment_hidden_in_all_pairs_are_a_warning(tmp_path: Path) -> None:
    label: Any = {"segment": lambda number: "odd" if number % 4 == 1 else "even"}
    failing = with_tokens(100, ok=lambda number: number not in (1, 5), **label)
    verdict = judged(tmp_path, with_tokens(100, **label), failing, max_error_rate_increase=3)
    assert verdict.decision is Decision.PROMOTE
    assert [(each.name, each.segment, each.examples) for each in verdict.warnings] == [
        ("segment-outside", "odd", ("r1", "r5"))
    ]


# -- examples and advice ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "field", "fast", "slow"),
    [
        ("latency", "latency_ms", 100.0, 300.0),
        ("ttft", "ttft_ms", 10.0, 30.0),
        ("decode", "token_latencies_ms", [1.0, 1.0], [3.0, 3.0]),
        ("kv-pressure", "kv_used", 10.0, 90.0),
    ],
)
def test_signals_of_times_and_pressure_list_the_requests_with_the_largest_increase(
    tmp_path: Path, name: str, field: str, fast: Any, slow: Any
) -> None:
    first = with_tokens(40, kv_total=100.0, **{field: fast})
    second = with_tokens(40, kv_total=100.0, **{field: lambda number: slow if number in (7, 11, 23) else fast})
    assert signal(judged(tmp_path, first, second), name).examples == ("r7", "r11", "r23")


def test_signals_of_series_list_requests(tmp_path: Path) -> None:
    slower = judged(tmp_path, with_tokens(1200), with_tokens(1200, latency_ms=150.0), policy=SEQUENTIAL)
    assert states(slower)["latency"] == "outside"
    assert len(signal(slower, "latency").examples) == 5


def test_advice_names_a_second_baseline_where_engines_do_not_promise_equal_answers(tmp_path: Path) -> None:
    other: Any = {"token_ids": lambda number: [number, 9]}
    assert "--aa" in judged(tmp_path, with_tokens(30), with_tokens(30, **other)).reason
    promise: Any = {"deterministic": True}
    proof = judged(tmp_path, with_tokens(30, **promise), with_tokens(30, **promise, **other))
    assert "--aa" not in proof.reason


def test_advice_names_the_trace_key_where_no_answer_can_be_compared(tmp_path: Path) -> None:
    [item] = judged(tmp_path, rows(30), rows(30)).triage
    assert (item.signal, "--trace-key" in item.action) == ("no-output-evidence", True)


def test_warnings_are_part_of_the_verdict_as_json(tmp_path: Path) -> None:
    from lockstep.release.verdict import to_json

    verdict = judged(tmp_path, *sides(1.486))
    [found] = json.loads(to_json(verdict))["warnings"]
    assert set(found) == {"name", "segment", "sentence", "examples"}
