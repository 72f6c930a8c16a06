"""Facts of observations: derived from stream events, with refused numbers and digests independent of order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import EvidenceError
from lockstep.release.evidence import gather
from lockstep.release.facts import compute_facts, digest_of, event_faults, is_deterministic, names_of
from lockstep.release.observation import NAMES, LeftOutReason
from lockstep.release.reading import read
from lockstep.release.store import open_store
from tests.release.inputs import Record, pair_file, read_into, write_lines
from tests.release.test_reading import FULL


def facts_of(tmp_path: Path, record: Record, columns: str) -> tuple[Any, ...]:
    with open_store() as store:
        read(store, write_lines(tmp_path / "input", [record]), "baseline")
        compute_facts(store, "baseline")
        [row] = store.rows(f"SELECT {columns} FROM facts_baseline")
    return row


def events(*found: tuple[int | None, int | None, float]) -> Record:
    names = ("index", "token_id", "elapsed_ms")
    return {"stream_events": [dict(zip(names, each, strict=True)) for each in found]}


def test_first_token_and_gaps_follow_from_events_in_the_order_of_their_indices(tmp_path: Path) -> None:
    record = events((2, 9, 35.0), (0, 7, 10.0), (1, 8, 15.0))
    assert facts_of(tmp_path, record, "ttft_ms, decode_ms, num_gaps, streamed, doubled, falling") == (
        10.0,
        12.5,
        2,
        True,
        False,
        False,
    )


def test_given_values_precede_those_of_events(tmp_path: Path) -> None:
    record = {**events((0, 7, 10.0), (1, 8, 15.0)), "ttft_ms": 9.0, "token_latencies_ms": [4.0, 6.0, 8.0]}
    assert facts_of(tmp_path, record, "ttft_ms, decode_ms, num_gaps") == (9.0, 6.0, 3)


@pytest.mark.parametrize(
    ("record", "doubled", "falling"),
    [
        (events((0, 7, 10.0), (0, 8, 15.0)), True, False),
        (events((0, 7, 10.0), (None, 8, 15.0)), True, False),
        (events((0, 7, 10.0), (1, 8, 9.0)), False, True),
    ],
)
def test_faulty_events_are_omitted_and_counted(tmp_path: Path, record: Record, doubled: bool, falling: bool) -> None:
    columns = "doubled, falling, ttft_ms, decode_ms, num_gaps, streamed"
    assert facts_of(tmp_path, record, columns) == (doubled, falling, None, None, 0, False)


def test_tokens_of_events_with_falling_stamps_still_count(tmp_path: Path) -> None:
    """The indices give the order; only the times are uncertain."""
    assert facts_of(tmp_path, events((0, 7, 10.0), (1, 8, 9.0)), "tokens_hash IS NOT NULL") == (True,)
    assert facts_of(tmp_path, events((0, 7, 10.0), (0, 8, 9.0)), "tokens_hash IS NOT NULL") == (False,)


def test_a_single_event_is_a_trace_of_its_stream(tmp_path: Path) -> None:
    assert facts_of(tmp_path, events((0, 7, 10.0)), "streamed, num_gaps, ttft_ms") == (True, 0, 10.0)
    assert facts_of(tmp_path, {"token_latencies_ms": []}, "streamed") == (False,)


@pytest.mark.parametrize(
    ("record", "routed"),
    [({"route_id": "a", "scheduler": "b"}, True), ({"route_id": "a"}, False), ({"scheduler": "b"}, False)],
)
def test_provenance_is_route_and_scheduler(tmp_path: Path, record: Record, routed: bool) -> None:
    assert facts_of(tmp_path, record, "routed") == (routed,)


def test_pressure_is_the_used_share_of_the_cache(tmp_path: Path) -> None:
    assert facts_of(tmp_path, {"kv_used": 3, "kv_total": 4}, "kv_pressure") == (0.75,)
    assert facts_of(tmp_path, {"kv_used": 0, "kv_total": 0}, "kv_pressure") == (None,)


@pytest.mark.parametrize(
    ("field", "value", "right"),
    [
        ("latency_ms", -1, "must be a finite number, 0 or above"),
        ("latency_ms", "NaN", "must be a finite number, 0 or above"),
        ("ttft_ms", "Infinity", "must be a finite number, 0 or above"),
        ("queue_depth", -1, "must be a finite number, 0 or above"),
        ("kv_used", -1, "must be a finite number, 0 or above"),
        ("ts", "NaN", "must be a finite number"),
        ("token_latencies_ms", "[1.0, -1.0]", "must be finite numbers, 0 or above"),
        ("token_latencies_ms", "[1.0, NaN]", "must be finite numbers, 0 or above"),
        ("stream_events", '[{"index": 0, "elapsed_ms": -1.0}]', "has an elapsed_ms that is negative or not finite"),
        ("vector", "[NaN]", "must be finite numbers"),
        ("vector", "[-Infinity, 1.0]", "must be finite numbers"),
        ("logprobs", "[NaN]", "must be finite numbers"),
        ("health", '"tired"', "must be ready, degraded or down"),
        ("kv_total", '1, "kv_used": 2', "is less than kv_used; both must have the same unit"),
        ("ttft_ms", '43.0, "latency_ms": 0.2', "is more than ten times latency_ms; both must be in milliseconds"),
    ],
)
def test_an_impossible_number_is_refused_by_file_field_and_request(
    tmp_path: Path, field: str, value: Any, right: str
) -> None:
    """Also NaN, which DuckDB accepts although JSON does not have it."""
    path = tmp_path / "input"
    path.write_text(json.dumps({"request_id": "good"}) + f'\n{{"request_id": "bad", "{field}": {value}}}\n')
    with open_store() as store:
        read(store, path, "candidate")
        with pytest.raises(EvidenceError) as caught:
            compute_facts(store, "candidate")
    assert str(caught.value).startswith(f"{path}: the candidate's {field} of request bad {right}")


def test_the_digest_does_not_depend_on_the_order_of_observations(tmp_path: Path) -> None:
    records = [{"request_id": str(place), "latency_ms": place} for place in range(50)]

    def digest(*of: Record) -> str:
        with open_store() as store:
            read(store, write_lines(tmp_path / "input", of), "baseline")
            compute_facts(store, "baseline")
            return digest_of(store, "baseline")

    assert digest(*records) == digest(*records[::-1]) != digest(*records[1:])
    assert len(digest(*records)) == 16


OTHER: dict[str, Any] = {
    "turn": 4,
    "index": 6,
    "seed": 1,
    "prompt_tokens": 5,
    "output_tokens": 3,
    "ts": 2.5,
    "deterministic": False,
    "ok": False,
    "latency_ms": 12.25,
    "ttft_ms": 2.25,
    "token_latencies_ms": [1.5],
    "queue_depth": 2.0,
    "kv_used": 2.0,
    "kv_total": 8.0,
    "token_ids": [7],
    "vector": [0.5],
    "fingerprint": "another",
    "error": "another",
    "health": "degraded",
}
NOT_DIGESTED = {"side", "logprobs", "health", "stream_events"}
"""Fields that decide nothing, or only through other fields: ok, tokens, times."""


def test_the_digest_depends_on_every_field_that_decides(tmp_path: Path) -> None:
    fields = [name for name in NAMES if name not in NOT_DIGESTED]
    records = [FULL, *({**FULL, name: OTHER.get(name, "another")} for name in fields)]
    with open_store() as store:
        read(store, write_lines(tmp_path / "input", records), "baseline")
        compute_facts(store, "baseline")
        num_digests = store.number("SELECT count(DISTINCT digest) FROM facts_baseline")
    assert num_digests == len(records)


def test_names_and_promises_of_a_side(tmp_path: Path) -> None:
    records = [{"model": "b", "deterministic": True}, {"model": "a", "deterministic": True}, {"model": "b"}]
    with open_store() as store:
        read_into(store, [pair_file(tmp_path / "input", records, records[:2])])
        for side in ("baseline", "candidate"):
            compute_facts(store, side)
        assert names_of(store, "baseline", "model", 100) == ("a", "b")
        assert names_of(store, "baseline", "model", 1) == ("a",)
        assert (is_deterministic(store, "baseline"), is_deterministic(store, "candidate")) == (False, True)


def test_faults_of_events_are_part_of_the_evidence(tmp_path: Path) -> None:
    faulty = [
        {"request_id": "a", **events((0, 7, 10.0), (0, 8, 11.0))},
        {"request_id": "b", **events((0, 1, 5.0), (1, 2, 4.0))},
    ]
    fine = [{"request_id": "a"}, {"request_id": "b"}]
    with open_store() as store:
        read_into(store, [pair_file(tmp_path / "input", fine, faulty)])
        evidence = gather(store)
        assert event_faults(store, "baseline") == []
    assert set(evidence.faults) == {
        ("candidate", LeftOutReason.DOUBLED_INDEX, 1),
        ("candidate", LeftOutReason.FALLING_STAMPS, 1),
    }
