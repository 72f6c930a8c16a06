"""Causes follow from all figures together, and causes precede the signals that they lead to."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.release.causes import kind_of_difference
from tests.release.planting import Observation, Pair, judged

POLICY = {"max_latency_p95_ratio": 1.1, "max_ttft_p95_ratio": 1.1, "max_decode_p95_ratio": 1.1, "outputs": "ignore"}
TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


def observation(number: int, **changes: Any) -> Observation:
    """Answer of 11 tokens: 100 ms to the first, 10 ms to each other one."""
    first, gap, tokens = changes.pop("first", 100.0), changes.pop("gap", 10.0), changes.pop("tokens", 11)
    return {
        "request_id": f"r{number}",
        "ts": number,
        "latency_ms": first + gap * (tokens - 1),
        "ttft_ms": first,
        "token_latencies_ms": [gap] * (tokens - 1),
        "output_tokens": tokens,
        "queue_depth": 0,
        "kv_used": 10,
        "kv_total": 100,
        **changes,
    }


def first_of(tmp_path: Path, policy: dict[str, Any] | None = None, **changes: Any) -> tuple[str, str]:
    """Signal and cause of the first item if all answers of the candidate have these changes."""
    pairs: list[Pair] = [
        {"baseline": observation(number), "candidate": observation(number, **copy.deepcopy(changes))}
        for number in range(40)
    ]
    [first, *_] = judged(pairs, tmp_path, {**POLICY, **(policy or {})})["triage"]
    return first["signal"], first["cause"]


@pytest.mark.parametrize(
    ("changes", "signal", "cause"),
    [
        ({"gap": 30.0}, "decode", "decode"),
        ({"first": 900.0}, "ttft", "prefill"),
        ({"first": 900.0, "queue_depth": 9}, "ttft", "queueing"),
        ({"first": 900.0, "queue_depth": None}, "ttft", ""),
        ({"first": 900.0, "gap": 12.0}, "ttft", "prefill"),
        ({"first": 900.0, "gap": 30.0, "queue_depth": 9}, "decode", "decode"),
        ({"tokens": 60}, "latency", "longer-answers"),
        ({"tokens": 60, "gap": 11.5}, "latency", "longer-answers"),
        ({"first": 900.0, "queue_depth": 9, "kv_used": 50, "kv_total": 50}, "kv-pressure", "smaller-pool"),
        ({"first": 900.0, "queue_depth": 9, "kv_used": 15, "kv_total": 50}, "ttft", "queueing"),
        ({"kv_used": 90}, "kv-pressure", "more-in-use"),
        ({"gap": 30.0, "kv_used": 90}, "decode", "decode"),
        ({"first": 199.0, "gap": 0.1}, "ttft", "buffering"),
    ],
)
def test_causes_of_late_answers_are_distinguished(
    changes: dict[str, Any], signal: str, cause: str, tmp_path: Path
) -> None:
    assert first_of(tmp_path, **changes) == (signal, cause)


def test_a_slow_prefill_is_distinguished_from_a_queue_by_requests_that_found_no_queue(tmp_path: Path) -> None:
    pairs: list[Pair] = []
    for number in range(40):
        is_alone = number % 2 == 0
        candidate = observation(number, first=900.0, queue_depth=0 if is_alone else 6, kv_used=0 if is_alone else 10)
        pairs.append({"baseline": observation(number, kv_used=0), "candidate": candidate})
    [first, *_] = judged(pairs, tmp_path, POLICY)["triage"]
    assert (first["signal"], first["cause"]) == ("ttft", "prefill")


def test_a_pool_that_is_too_small_is_named_before_the_rollback_that_follows_from_it(tmp_path: Path) -> None:
    changes = {"first": 900.0, "queue_depth": 9, "kv_used": 50, "kv_total": 50}
    pairs: list[Pair] = [
        {"baseline": observation(number), "candidate": observation(number, **changes)} for number in range(150)
    ]
    verdict = judged(pairs, tmp_path, {**POLICY, "mode": "sequential", "warmup_pairs": 0})
    first, second, *_ = verdict["triage"]
    assert (first["signal"], first["cause"], first["severity"]) == ("kv-pressure", "smaller-pool", "warning")
    assert (second["signal"], second["cause"], second["severity"]) == ("ttft", "queueing", "critical")
    assert (verdict["decision"], verdict["reason"] in second["evidence"]) == ("rollback", True)


def test_answers_that_were_cut_off_are_named_before_the_times_that_this_changes(tmp_path: Path) -> None:
    pairs: list[Pair] = [
        {
            "baseline": observation(number, token_ids=[1, 2, 3, 4]),
            "candidate": observation(number, token_ids=[1, 2], gap=12.0),
        }
        for number in range(150)
    ]
    first, second, *_ = judged(
        pairs, tmp_path, {**POLICY, "outputs": "exact", "mode": "sequential", "warmup_pairs": 0}
    )["triage"]
    assert (first["signal"], first["cause"], first["severity"]) == ("output-mismatch", "truncated", "warning")
    assert (second["signal"], second["severity"]) == ("decode", "critical")


def test_a_differing_answer_rolls_back_and_precedes_late_ones(tmp_path: Path) -> None:
    pairs: list[Pair] = [
        {
            "baseline": observation(number, token_ids=[1, 2, 3]),
            "candidate": observation(number, token_ids=[1, 2, 4], gap=30.0),
        }
        for number in range(40)
    ]
    triage = judged(pairs, tmp_path, {**POLICY, "outputs": "exact"})["triage"]
    assert [(item["severity"], item["signal"]) for item in triage][:2] == [
        ("critical", "output-mismatch"),
        ("warning", "decode"),
    ]


def test_a_segment_that_explains_a_signal_is_named_once_where_segments_decide_too(tmp_path: Path) -> None:
    pairs: list[Pair] = []
    for number in range(80):
        segment = ("chat", "mail")[number % 2]
        candidate = observation(number, segment=segment, gap=30.0 if segment == "mail" else 10.0)
        pairs.append({"baseline": observation(number, segment=segment), "candidate": candidate})
    triage = judged(pairs, tmp_path, {**POLICY, "segments": "enforce"})["triage"]
    assert [item["segment"] for item in triage if item["signal"] == "decode"] == ["mail"]


def test_owners_are_matched_by_the_place_that_explains_a_signal(tmp_path: Path) -> None:
    pairs: list[Pair] = []
    for number in range(80):
        replica = f"r{number % 4}"
        candidate = observation(number, replica_id=replica, gap=30.0 if replica == "r2" else 10.0)
        pairs.append({"baseline": observation(number), "candidate": candidate})
    owners = {"decode": "@all", "decode/*replica_id r2*": "@two", "decode/*replica_id r3*": "@three"}
    [first, *_] = judged(pairs, tmp_path, {**POLICY, "owners": owners})["triage"]
    assert (first["signal"], first["segment"], first["owner"]) == ("decode", "replica_id r2", "@two")


@pytest.mark.parametrize(
    ("candidate", "kind"),
    [
        ("abc", "truncated"),
        ("", "truncated"),
        ("abcdef", "longer-answers"),
        ("aabcde", "doubled-tokens"),
        ("aabcd", "doubled-tokens"),
        ("abde", "dropped-tokens"),
        ("bcde", "dropped-tokens"),
        ("abxde", "diverging"),
        ("xyz", "diverging"),
    ],
)
def test_kinds_of_differing_answers_are_distinguished(candidate: str, kind: str) -> None:
    assert kind_of_difference("abcde", candidate) == kind


@given(TOKENS, st.integers(0, 11))
def test_a_missing_token_is_at_the_end_or_inside(answer: list[int], place: int) -> None:
    place %= len(answer)
    thinned = answer[:place] + answer[place + 1 :]
    assert kind_of_difference(answer, thinned) in ("truncated", "dropped-tokens")


@given(TOKENS, st.integers(0, 11))
def test_a_doubled_token_is_at_the_end_or_inside(answer: list[int], place: int) -> None:
    place %= len(answer)
    doubled = answer[: place + 1] + answer[place:]
    assert kind_of_difference(answer, doubled) in ("longer-answers", "doubled-tokens")


def test_the_verdict_has_the_cause_with_its_evidence_and_an_action(tmp_path: Path) -> None:
    pairs: list[Pair] = [
        {"baseline": observation(number), "candidate": observation(number, first=900.0, queue_depth=9)}
        for number in range(40)
    ]
    [first, *_] = judged(pairs, tmp_path, POLICY)["triage"]
    assert "0 requests waited before it on the baseline, 9 on the candidate" in first["evidence"]
    assert "limits of sequences" in first["action"]
    assert json.dumps(first)


def test_a_failure_is_not_also_missing_streaming_evidence(tmp_path: Path) -> None:
    pairs: list[Pair] = []
    for number in range(40):
        failed = {"request_id": f"r{number}", "ts": number, "ok": False, "error": "full"}
        pairs.append({"baseline": observation(number), "candidate": failed if number % 8 == 0 else observation(number)})
    policy = {**POLICY, "min_candidate_streaming_trace_rate": 1.0}
    assert [item["signal"] for item in judged(pairs, tmp_path, policy)["triage"]] == ["errors"]
