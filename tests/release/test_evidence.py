"""Evidence is columns of pairs in the order of time, and a verdict's bytes do not depend on the order of rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.release.evidence import MAX_SEGMENTS, TrafficSegment, gather
from lockstep.release.observation import SIDES
from lockstep.release.store import open_store
from lockstep.release.verdict import to_json
from tests.release.inputs import Record, pair_file, read_into, verdict_of, write_json, write_lines
from tests.release.test_reading import to_csv, to_list, to_parquet


def test_pairs_are_ordered_by_time_then_key(tmp_path: Path) -> None:
    baseline = [
        {"request_id": "c", "ts": 2.0, "latency_ms": 3.0},
        {"request_id": "b", "ts": 1.0, "latency_ms": 2.0},
        {"request_id": "a", "ts": 1.0, "latency_ms": 1.0},
    ]
    candidate = [{"request_id": each["request_id"], "latency_ms": 9.0, "ts": 7.0} for each in baseline]
    with open_store() as store:
        read_into(store, [pair_file(tmp_path / "input", baseline, candidate)])
        evidence = gather(store)
        keys = evidence.keys(np.arange(3))
    assert keys == ["a", "b", "c"]
    assert evidence.pairs.metrics["latency_ms"][0].tolist() == [1.0, 2.0, 3.0]
    assert evidence.pairs.ts.tolist() == [1.0, 1.0, 2.0]
    assert evidence.pairs.is_timed


def test_a_pair_has_the_time_of_either_side_or_none(tmp_path: Path) -> None:
    baseline = [{"request_id": "a"}, {"request_id": "b"}]
    candidate = [{"request_id": "a", "ts": 5.0}, {"request_id": "b"}]
    with open_store() as store:
        read_into(store, [pair_file(tmp_path / "input", baseline, candidate)])
        pairs = gather(store).pairs
    assert pairs.ts[0] == 5.0
    assert math.isnan(pairs.ts[1])
    assert not pairs.is_timed


def test_missing_values_are_not_numbers(tmp_path: Path) -> None:
    baseline = {"request_id": "a", "latency_ms": 5.0, "kv_used": 1.0, "kv_total": 4.0, "token_latencies_ms": [2.0, 4.0]}
    candidate = {"request_id": "a", "ttft_ms": 3.0, "queue_depth": 2.0, "error": "boom"}
    with open_store() as store:
        read_into(store, [pair_file(tmp_path / "input", [baseline], [candidate])])
        pairs = gather(store).pairs
    values = {name: [None if math.isnan(side[0]) else side[0] for side in both] for name, both in pairs.metrics.items()}
    assert values == {
        "latency_ms": [5.0, None],
        "ttft_ms": [None, 3.0],
        "decode_ms": [3.0, None],
        "kv_pressure": [0.25, None],
        "queue_depth": [None, 2.0],
        "num_tokens": [None, None],
    }
    assert (pairs.ok[0].tolist(), pairs.ok[1].tolist(), pairs.healthy.tolist()) == ([True], [False], [False])


def test_segments_are_cut_by_model_backends_accelerator_and_label(tmp_path: Path) -> None:
    baseline = [
        {"request_id": "a", "model": "m", "backend": "vllm", "accelerator": "x", "segment": "chat"},
        {"request_id": "b", "model": "m", "backend": "vllm"},
        {"request_id": "c"},
    ]
    candidate = [
        {"request_id": "a", "backend": "sglang", "accelerator": "y"},
        {"request_id": "b", "model": "n", "backend": "vllm"},
        {"request_id": "c", "segment": "code"},
    ]
    with open_store() as store:
        read_into(store, [pair_file(tmp_path / "input", baseline, candidate)])
        pairs = gather(store).pairs
    assert {pairs.segments[number] for number in pairs.segment} == {
        TrafficSegment("m", "vllm", "sglang", "y", "chat"),
        TrafficSegment("n", "vllm", "vllm", None, None),
        TrafficSegment(None, None, None, None, "code"),
    }
    assert {each.name for each in pairs.segments} == {"m, vllm -> sglang, y, chat", "n, vllm -> vllm", "code"}


def test_only_the_largest_segments_have_figures(tmp_path: Path) -> None:
    labels = [*(f"s{number:03}" for number in range(MAX_SEGMENTS)), *("s000", "s001"), "rare-1", "rare-2"]
    labels += [f"s{number:03}" for number in range(MAX_SEGMENTS)]
    records = [{"request_id": str(place), "segment": label} for place, label in enumerate(labels)]
    with open_store() as store:
        read_into(store, [pair_file(tmp_path / "input", records, records)])
        pairs = gather(store).pairs
    assert len(pairs.segments) == MAX_SEGMENTS
    assert int((pairs.segment == -1).sum()) == 2


def test_records_without_a_partner_are_placed_between_the_pairs(tmp_path: Path) -> None:
    baseline = [{"request_id": name, "ts": ts} for name, ts in (("a", 1.0), ("lost", 2.0), ("b", 3.0), ("late", 9.0))]
    candidate = [{"request_id": name, "ts": ts} for name, ts in (("a", 1.0), ("b", 3.0), ("more", 0.5))]
    with open_store() as store:
        read_into(store, [pair_file(tmp_path / "input", baseline, candidate)])
        pairs = gather(store).pairs
    assert list(zip(pairs.missing_at.tolist(), pairs.missing.tolist(), strict=True)) == [(0, -1.0), (1, 1.0), (2, 1.0)]


def test_token_traces_are_compared_if_both_sides_have_one(tmp_path: Path) -> None:
    given = [{"token_trace_fingerprint": each} for each in "xy"]
    tokens = [{"token_ids": each} for each in ([1, 2], [1, 3])]
    pairs: list[tuple[Record, Record]] = [
        (given[0], given[0]),
        (given[0], given[1]),
        (tokens[0], tokens[0]),
        (tokens[0], tokens[1]),
        (tokens[1], {**tokens[1], "token_trace_fingerprint": "z"}),
        (given[0], {}),
        (given[0], {**given[0], "error": "boom"}),
    ]
    sides = [[{"request_id": str(place), **pair[side]} for place, pair in enumerate(pairs)] for side in (0, 1)]
    with open_store() as store:
        read_into(store, [pair_file(tmp_path / "input", *sides)])
        assert gather(store).traces == (3, 2)


# -- bytes ------------------------------------------------------------------------------------------------------------


def records_of(draw: Any, num: int, side: int) -> list[Record]:
    """Observations with all deciding fields, with repeated and missing ids."""
    found: list[Record] = []
    for place in range(num):
        record: dict[str, Any] = {
            "request_id": f"r-{draw(st.integers(0, num))}",
            "ts": draw(st.sampled_from([0.0, 1.0, 1.5, 2.0])),
            "latency_ms": draw(st.floats(1.0, 1e4)),
            "ttft_ms": draw(st.floats(0.5, 1.0)),
            "token_latencies_ms": draw(st.lists(st.floats(0.0, 1e3), max_size=4)),
            "token_ids": draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)),
            "segment": draw(st.sampled_from(["a", "b"])),
            "route_id": draw(st.sampled_from(["x", "y"])),
            "error": draw(st.sampled_from(["", "", "boom"])),
            "model_version": f"v{side}",
        }
        if draw(st.booleans()):
            del record["request_id"]
            record["conversation_id"], record["turn"] = draw(st.sampled_from("cd")), place
        found.append(record)
    return found


@st.composite
def both_sides(draw: Any) -> list[list[Record]]:
    num = draw(st.integers(1, 8))
    return [records_of(draw, num, side) for side in (0, 1)]


def one_file(write: Callable[[Path, list[dict[str, Any]]], Path]) -> Callable[[Path, list[list[Record]]], Path]:
    def written(path: Path, sides: list[list[Record]]) -> Path:
        return write(path, [{**each, "side": name} for name, side in zip(SIDES, sides, strict=True) for each in side])

    return written


def as_pairs(path: Path, sides: list[list[Record]]) -> Path:
    """Each observation alone in a pair; the keys determine which belong together."""
    return write_lines(path, [{name: each} for name, side in zip(SIDES, sides, strict=True) for each in side])


LAYOUTS: dict[str, Callable[[Path, list[list[Record]]], Path]] = {
    "gate": lambda path, sides: pair_file(path, *sides),
    "pair lines": as_pairs,
    "pairs": lambda path, sides: write_json(
        path, {"pairs": [{"baseline": b} for b in sides[0]] + [{"candidate": c} for c in sides[1]]}
    ),
    "lines": one_file(write_lines),
    "list": one_file(to_list),
    "csv": one_file(to_csv),
    "parquet": one_file(to_parquet),
}


def without_inputs(verdict: bytes) -> bytes:
    before, _, rest = verdict.partition(b'"inputs"')
    return before + rest.partition(b"]")[2]


MODES = st.sampled_from(["threshold", "sequential"])


@settings(max_examples=2)
@given(both_sides(), MODES, st.randoms(use_true_random=False))
def test_a_verdict_has_the_same_bytes_in_any_layout_and_order_of_rows(
    tmp_path_factory: pytest.TempPathFactory, sides: list[list[Record]], mode: str, random: Any
) -> None:
    check_layouts(tmp_path_factory.mktemp("layouts"), sides, mode, random, random.sample(sorted(LAYOUTS), 3))


@pytest.mark.slow
@settings(max_examples=20)
@given(both_sides(), MODES, st.randoms(use_true_random=False))
def test_a_verdict_has_the_same_bytes_in_every_layout_and_order_of_rows(
    tmp_path_factory: pytest.TempPathFactory, sides: list[list[Record]], mode: str, random: Any
) -> None:
    check_layouts(tmp_path_factory.mktemp("layouts"), sides, mode, random, list(LAYOUTS))


def check_layouts(folder: Path, sides: list[list[Record]], mode: str, random: Any, layouts: list[str]) -> None:
    first = pair_file(folder / "first", *sides)
    verdict = to_json(verdict_of(first, mode=mode))
    assert to_json(verdict_of(first, mode=mode)) == verdict
    for name in layouts:
        for side in sides:
            random.shuffle(side)
        path = LAYOUTS[name](folder / name.replace(" ", "-"), sides)
        assert without_inputs(to_json(verdict_of(path, mode=mode))) == without_inputs(verdict), name


def test_pairs_without_an_id_are_named_by_their_content(tmp_path: Path) -> None:
    pairs = [{"baseline": {"token_ids": [place]}, "candidate": {"token_ids": [place, 1]}} for place in range(30)]
    verdicts = {to_json(verdict_of(write_lines(tmp_path / "input", order))) for order in (pairs, pairs[::-1])}
    assert len(verdicts) == 1
    assert b"unnamed " in verdicts.pop()


def test_the_same_pair_twice_changes_nothing_but_counts(tmp_path: Path) -> None:
    pair = {"baseline": {"token_ids": [1]}, "candidate": {"token_ids": [1]}}
    verdict = verdict_of(write_lines(tmp_path / "input", [pair, pair, pair]))
    assert (verdict.summary.pairs, verdict.summary.same) == (3, 3)
