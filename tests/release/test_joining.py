"""Each record is in a pair, or unjoined with a reason; keys are tried from the strongest to the weakest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.release.joining import KEYS, Joining, join
from lockstep.release.observation import SIDES, LeftOutReason, Side
from lockstep.release.store import open_store
from tests.release.inputs import Record, pair_file, read_into, write_lines

TRACE = "00-{:032x}-b7ad6b7169203331-01"


def joined(path: Path) -> tuple[Joining, list[tuple[str, float, float]]]:
    """Account of the pairing, and the key and both latencies of each pair, which identify it."""
    with open_store() as store:
        read_into(store, [path])
        joining, _ = join(store)
        rows = store.rows(
            "SELECT key_name, x.latency_ms, y.latency_ms FROM pairs p JOIN baseline x ON p.b = x.row"
            " JOIN candidate y ON p.c = y.row ORDER BY ALL"
        )
    return joining, [(str(name), float(b), float(c)) for name, b, c in rows]


def notes_of(path: Path) -> list[str]:
    with open_store() as store:
        read_into(store, [path])
        return join(store)[1]


def join_of(tmp_path: Path, baseline: Sequence[Any], candidate: Sequence[Any]) -> tuple[Joining, list[Any]]:
    """Observations whose latency is their index on their side."""
    sides = [[{"latency_ms": float(at), **each} for at, each in enumerate(side)] for side in (baseline, candidate)]
    return joined(pair_file(tmp_path / "input.json", *sides))


def reasons(joining: Joining) -> dict[tuple[Side, LeftOutReason], tuple[int, tuple[str, ...]]]:
    return {(each.side, each.reason): (each.count, each.examples) for each in joining.unjoined}


KEY_VALUES: dict[str, tuple[Record, Record]] = {
    "traceparent": ({"traceparent": TRACE.format(1)}, {"traceparent": TRACE.format(2)}),
    "request_id": ({"request_id": "a"}, {"request_id": "b"}),
    "engine_id": ({"engine_id": "chatcmpl-a"}, {"engine_id": "chatcmpl-b"}),
    "conversation": ({"conversation_id": "c", "turn": 0}, {"conversation_id": "c", "turn": 1}),
    "index": ({"index": 0}, {"index": 1}),
    "prompt": ({"prompt_digest": "p", "ts": 5.0}, {"prompt_digest": "q", "ts": 5.0}),
}


@pytest.mark.parametrize("key", KEY_VALUES)
def test_each_key_pairs_alone(tmp_path: Path, key: str) -> None:
    first, second = KEY_VALUES[key]
    joining, pairs = join_of(tmp_path, [first, second], [second, first])
    assert pairs == [(key, 0.0, 1.0), (key, 1.0, 0.0)]
    assert joining.by_key == {key: 2}
    assert not joining.unjoined


def test_every_key_has_its_test() -> None:
    assert {key.name for key in KEYS} == {*KEY_VALUES, "pair"}


def test_a_stronger_key_precedes_a_weaker_one(tmp_path: Path) -> None:
    """The keys of the records contradict each other; if places and prompts do, places are ignored."""
    for better, weaker in pairwise(name for name in KEY_VALUES if name != "prompt"):
        (b0, b1), (w0, w1) = KEY_VALUES[better], KEY_VALUES[weaker]
        _, pairs = join_of(tmp_path, [{**b0, **w0}, {**b1, **w1}], [{**b0, **w1}, {**b1, **w0}])
        assert pairs == [(better, 0.0, 0.0), (better, 1.0, 1.0)], (better, weaker)


@pytest.mark.parametrize(
    ("baseline", "candidate"),
    [
        ({"traceparent": TRACE.format(7)}, {"traceparent": f"{7:032x}"}),
        ({"request_id": "abc"}, {"engine_id": "chatcmpl-abc"}),
        ({"request_id": "abc"}, {"engine_id": "cmpl-abc-0"}),
        ({"engine_id": "cmpl-abc-0"}, {"engine_id": "chatcmpl-abc"}),
    ],
)
def test_prefixes_suffixes_and_parents_do_not_count(tmp_path: Path, baseline: Record, candidate: Record) -> None:
    assert len(join_of(tmp_path, [baseline], [candidate])[1]) == 1


@pytest.mark.parametrize(
    ("baseline", "candidate"),
    [
        ({"request_id": "run-1"}, {"request_id": "run-2"}),
        ({"engine_id": "cmpl-abc-0"}, {"engine_id": "cmpl-abc-1"}),
        ({"conversation_id": "c", "turn": 1}, {"conversation_id": "c", "turn": 2}),
        ({"conversation_id": "c"}, {"conversation_id": "c"}),
    ],
)
def test_similar_values_do_not_pair(tmp_path: Path, baseline: Record, candidate: Record) -> None:
    joining, pairs = join_of(tmp_path, [baseline], [candidate])
    assert pairs == []
    assert [(each.side, each.count) for each in joining.unjoined] == [("baseline", 1), ("candidate", 1)]


def test_requests_of_one_trace_pair_by_their_ids(tmp_path: Path) -> None:
    records = [{"traceparent": TRACE.format(1), "request_id": each} for each in "ab"]
    joining, pairs = join_of(tmp_path, records, records[::-1])
    assert joining.by_key == {"request_id": 2}
    assert [pair[1:] for pair in pairs] == [(0.0, 1.0), (1.0, 0.0)]


def test_orphans_duplicates_and_records_without_a_key_have_their_reasons(tmp_path: Path) -> None:
    baseline = [{"request_id": each} for each in ("both", "twice", "twice", "alone")] + [{"model": "m"}]
    joining, pairs = join_of(tmp_path, baseline, [{"request_id": "both"}, {"request_id": "twice"}])
    assert len(pairs) == 1
    assert reasons(joining) == {
        ("baseline", LeftOutReason.DUPLICATE): (2, ("twice", "twice")),
        ("baseline", LeftOutReason.NO_ID): (1, ("?",)),
        ("baseline", LeftOutReason.NO_PARTNER): (1, ("alone",)),
        ("candidate", LeftOutReason.NO_PARTNER): (1, ("twice",)),
    }


@pytest.mark.parametrize(
    "key", [{"request_id": "a"}, {"engine_id": "chatcmpl-a"}, {"conversation_id": "c", "turn": 0}], ids=str
)
def test_a_failed_attempt_before_a_later_one_is_a_retry(tmp_path: Path, key: Record) -> None:
    tries = [{**key, "ts": 1.0, "error": "timeout"}, {**key, "ts": 2.0, "error": "timeout"}, {**key, "ts": 3.0}]
    joining, pairs = join_of(tmp_path, tries, [{**key, "ts": 1.0}])
    assert [pair[1:] for pair in pairs] == [(2.0, 0.0)]
    assert [(each.reason, each.count) for each in joining.unjoined] == [(LeftOutReason.RETRIED, 2)]


def test_the_last_attempt_counts_even_if_it_failed(tmp_path: Path) -> None:
    tries = [{"request_id": "a", "ts": 1.0, "error": "timeout"}, {"request_id": "a", "ts": 2.0, "error": "timeout"}]
    _, pairs = join_of(tmp_path, tries, [{"request_id": "a", "ts": 1.0}])
    assert [pair[1:] for pair in pairs] == [(1.0, 0.0)]


def test_two_answers_with_one_id_are_duplicates_in_any_order(tmp_path: Path) -> None:
    answers = [{"request_id": "a", "ts": 1.0}, {"request_id": "a", "ts": 2.0, "error": "cancelled"}]
    joining, pairs = join_of(tmp_path, answers, [{"request_id": "a"}])
    assert pairs == []
    assert reasons(joining)[("baseline", LeftOutReason.DUPLICATE)][0] == 2


def test_a_failure_is_not_a_retry_of_another_request_in_its_trace(tmp_path: Path) -> None:
    trace = {"traceparent": TRACE.format(1)}
    baseline = [{**trace, "request_id": "a", "ts": 1.0, "error": "boom"}, {**trace, "request_id": "b", "ts": 2.0}]
    joining, pairs = join_of(tmp_path, baseline, [{"request_id": "a"}, {"request_id": "b"}])
    assert len(pairs) == 2
    assert not joining.unjoined


@pytest.mark.parametrize(
    ("candidate", "note"),
    [
        ([{"index": 0}], "2 and 1 requests were not sent from one data set"),
        ([{"index": 0}, {"index": 0}], "some requests of a side have the same one"),
        ([{"index": 0, "prompt_tokens": 6}, {"index": 1}], "1 prompts are unlike"),
        ([{"index": 0, "prompt_digest": "q"}, {"index": 1}], "1 prompts are unlike"),
    ],
)
def test_places_in_different_data_sets_do_not_pair(tmp_path: Path, candidate: list[Record], note: str) -> None:
    baseline = [{"index": 0, "prompt_tokens": 5, "prompt_digest": "p"}, {"index": 1}]
    joining, pairs = join_of(tmp_path, baseline, candidate)
    assert pairs == []
    assert note in notes_of(tmp_path / "input.json")[0]
    assert {each.reason for each in joining.unjoined} == {LeftOutReason.UNLIKE_DATA_SETS}
    assert [each.count for each in joining.unjoined if each.side == "baseline"] == [2]


def test_token_counts_of_failed_requests_do_not_distinguish_data_sets(tmp_path: Path) -> None:
    failed = {"index": 0, "prompt_tokens": 6, "error": "boom"}
    assert len(join_of(tmp_path, [{"index": 0, "prompt_tokens": 5}], [failed])[1]) == 1


def test_equal_prompts_pair_only_within_the_window_with_a_warning(tmp_path: Path) -> None:
    """Arrivals count from the first one of each side."""
    baseline = [
        {"prompt_digest": "p", "ts": 100.0},
        {"prompt_digest": "q", "ts": 110.0},
        {"prompt_digest": "r", "ts": 120.0},
    ]
    candidate = [
        {"prompt_digest": "p", "ts": 7.0},
        {"prompt_digest": "q", "ts": 17.9},
        {"prompt_digest": "r", "ts": 28.5},
    ]
    _, pairs = join_of(tmp_path, baseline, candidate)
    assert pairs == [("prompt", 0.0, 0.0), ("prompt", 1.0, 1.0)]
    assert "weak" in notes_of(tmp_path / "input.json")[0]


def test_equal_prompts_close_in_time_do_not_pair(tmp_path: Path) -> None:
    burst = [{"prompt_digest": "p", "ts": at} for at in (0.0, 0.5, 10.0)]
    assert join_of(tmp_path, burst, burst)[1] == [("prompt", 2.0, 2.0)]


def test_pairs_given_by_a_file_need_no_key(tmp_path: Path) -> None:
    pairs = [{"baseline": {"latency_ms": at}, "candidate": {"latency_ms": at + 0.5}} for at in (1.0, 2.0)]
    joining, found = joined(write_lines(tmp_path / "pairs.jsonl", [*pairs, {"baseline": {"latency_ms": 9.0}}]))
    assert found == [("pair", 1.0, 1.5), ("pair", 2.0, 2.5)]
    assert reasons(joining) == {("baseline", LeftOutReason.NO_ID): (1, ("?",))}


def test_pairs_given_by_a_file_stay_pairs_with_any_ids(tmp_path: Path) -> None:
    pair = {
        "baseline": {"latency_ms": 1.0, "engine_id": "chatcmpl-a", "request_id": "x"},
        "candidate": {"latency_ms": 2.0, "engine_id": "cmpl-b", "request_id": "y"},
    }
    assert joined(write_lines(tmp_path / "pairs.jsonl", [pair]))[1] == [("pair", 1.0, 2.0)]


def test_a_pair_that_is_in_a_file_twice_is_a_duplicate(tmp_path: Path) -> None:
    pair = {"request_id": "a", "baseline": {"latency_ms": 1.0}, "candidate": {"latency_ms": 2.0}}
    joining, found = joined(write_lines(tmp_path / "pairs.jsonl", [pair, pair]))
    assert found == []
    assert reasons(joining)[("candidate", LeftOutReason.DUPLICATE)][0] == 2


def test_sides_whose_ids_never_match_are_all_orphans(tmp_path: Path) -> None:
    sides = [[{"request_id": f"{side}-{at}"} for at in range(30)] for side in "bc"]
    joining, pairs = join_of(tmp_path, *sides)
    assert pairs == []
    assert reasons(joining)[("baseline", LeftOutReason.NO_PARTNER)] == (30, ("b-0", "b-1", "b-10", "b-11", "b-12"))


RECORDS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "request_id": st.sampled_from("abcd"),
            "engine_id": st.sampled_from(["chatcmpl-a", "cmpl-b-0", "x"]),
            "traceparent": st.sampled_from([TRACE.format(1), TRACE.format(2)]),
            "conversation_id": st.sampled_from("cd"),
            "turn": st.integers(0, 1),
            "index": st.integers(0, 3),
            "prompt_digest": st.sampled_from("pq"),
            "ts": st.sampled_from([0.0, 0.5, 3.0, 9.0]),
            "error": st.sampled_from(["", "boom"]),
        },
    ),
    max_size=6,
)


BOTH = (RECORDS, RECORDS.filter(bool), st.randoms(use_true_random=False))


@settings(max_examples=8)
@given(*BOTH)
def test_every_record_is_in_one_pair_or_unjoined_in_any_order_of_rows(
    tmp_path_factory: pytest.TempPathFactory, baseline: list[Record], candidate: list[Record], random: Any
) -> None:
    check_account(tmp_path_factory.mktemp("joining"), baseline, candidate, random)


@pytest.mark.slow
@settings(max_examples=200)
@given(*BOTH)
def test_every_record_is_accounted_for_in_any_order_of_rows(
    tmp_path_factory: pytest.TempPathFactory, baseline: list[Record], candidate: list[Record], random: Any
) -> None:
    check_account(tmp_path_factory.mktemp("joining"), baseline, candidate, random)


def check_account(path: Path, baseline: list[Record], candidate: list[Record], random: Any) -> None:
    sides = [[{"latency_ms": float(at), **each} for at, each in enumerate(side)] for side in (baseline, candidate)]
    joining, pairs = joined(pair_file(path / "a.json", *sides))
    for place, side in enumerate(SIDES):
        assert len({pair[place + 1] for pair in pairs}) == len(pairs)
        assert joining.records[side] == len(pairs) + sum(each.count for each in joining.unjoined if each.side == side)
    for records in sides:
        random.shuffle(records)
    assert joined(pair_file(path / "b.json", *sides)) == (joining, pairs)
