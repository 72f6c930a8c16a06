"""Two answers are equal, differ, are tolerated or are incomparable, by the best material of both sides."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.release.evidence import gather
from lockstep.release.outputs import Output, Tolerance, fingerprints_of, first_difference, fnv, rule_for
from lockstep.release.policy import Policy
from lockstep.release.store import open_store
from tests.release.inputs import Record, pair_file, read_into

SAME, DIFFERS, TOLERATED, DRIFTED = Output.SAME, Output.DIFFERS, Output.TOLERATED, Output.DRIFTED
INCOMPARABLE, NO_MATERIAL, FAILED = Output.INCOMPARABLE, Output.NO_MATERIAL, Output.FAILED


def fnv_1a(data: bytes) -> int:
    """Reference implementation of RFC 9923, octet by octet."""
    digest = 0xCBF29CE484222325
    for octet in data:
        digest = (digest ^ octet) * 0x100000001B3 % 2**64
    return digest


def fingerprint(tokens: list[int]) -> str:
    return f"{fnv_1a(struct.pack(f'<{len(tokens)}I', *tokens)):016x}"


def compared(
    tmp_path: Path, pairs: Sequence[Any], *tolerances: Tolerance
) -> tuple[list[Output], dict[str, int], float]:
    """Comparison of the pairs, reasons of incomparable ones, and the largest drift."""
    sides = [[{"request_id": f"{at:03}", **pair[side]} for at, pair in enumerate(pairs)] for side in (0, 1)]
    with open_store() as store:
        read_into(store, [pair_file(tmp_path / "input.json", *sides)])
        evidence = gather(store, Policy(numeric_tolerances=tolerances))
        return [Output(each) for each in evidence.pairs.output], dict(evidence.incomparable), evidence.max_drift


def one(tmp_path: Path, baseline: Record, candidate: Record, *tolerances: Tolerance) -> Output:
    [found], _, _ = compared(tmp_path, [(baseline, candidate)], *tolerances)
    return found


def events(*tokens: int) -> dict[str, Any]:
    return {"stream_events": [{"index": at, "token_id": token, "elapsed_ms": at} for at, token in enumerate(tokens)]}


# -- fingerprints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "digest"), [(b"", 0xCBF29CE484222325), (b"a", 0xAF63DC4C8601EC8C), (b"foobar", 0x85944171F73967E8)]
)
def test_the_reference_gives_the_published_vectors(data: bytes, digest: int) -> None:
    assert fnv_1a(data) == digest


@pytest.mark.parametrize(
    ("tokens", "digest"),
    [
        ([], "cbf29ce484222325"),
        ([0], "4d25767f9dce13f5"),
        ([1, 2, 3], fingerprint([1, 2, 3])),
        ([0x6F6F66, 2**32 - 1], fingerprint([0x6F6F66, 2**32 - 1])),
    ],
)
def test_fingerprints_of_tokens_are_of_32_bits_little_endian(tokens: list[int], digest: str) -> None:
    assert fingerprints_of([(tokens, None)]) == [digest]


def test_fingerprints_of_vectors_are_of_binary64_little_endian() -> None:
    vector = [0.5, -1.25e300, 3.0]
    assert fingerprints_of([(None, vector)]) == [f"{fnv_1a(struct.pack('<3d', *vector)):016x}"]
    assert fingerprints_of([(None, None)]) == [None]


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=9), max_size=9))
def test_many_rows_are_digested_as_each_alone(rows: list[list[int]]) -> None:
    assert [f"{int(each):016x}" for each in fnv(rows, "<u4")] == [fingerprint(row) for row in rows]


# -- materials --------------------------------------------------------------------------------------------------------

TOKENS, OTHER_TOKENS = {"token_ids": [1, 2, 3]}, {"token_ids": [1, 2, 4]}
VECTOR, OTHER_VECTOR = {"vector": [0.5, 1.0]}, {"vector": [0.5, 1.5]}
TEXT, OTHER_TEXT = {"text": "abc"}, {"text": "abd"}
PRINT, OTHER_PRINT = {"fingerprint": fingerprint([1, 2, 3])}, {"fingerprint": fingerprint([9])}


MATERIALS: list[tuple[Record, Record, Output]] = [
    (TOKENS, TOKENS, SAME),
    (TOKENS, OTHER_TOKENS, DIFFERS),
    (TOKENS, {"token_ids": [1, 2]}, DIFFERS),
    (TOKENS, events(1, 2, 3), SAME),
    (events(1, 2, 4), events(1, 2, 3), DIFFERS),
    (VECTOR, VECTOR, SAME),
    (VECTOR, OTHER_VECTOR, DIFFERS),
    (TEXT, TEXT, SAME),
    (TEXT, OTHER_TEXT, DIFFERS),
    (PRINT, PRINT, SAME),
    (PRINT, OTHER_PRINT, DIFFERS),
    (PRINT, TOKENS, SAME),
    (OTHER_TOKENS, PRINT, DIFFERS),
    (PRINT, events(1, 2, 3), SAME),
    ({"fingerprint": f"{fnv_1a(struct.pack('<2d', 0.5, 1.0)):016x}"}, VECTOR, SAME),
    ({"fingerprint": "sha256:abc"}, TOKENS, INCOMPARABLE),
    ({"fingerprint": "sha256:abc"}, {"fingerprint": "sha256:abc"}, SAME),
    (TOKENS, TEXT, INCOMPARABLE),
    (TOKENS, VECTOR, INCOMPARABLE),
    (PRINT, TEXT, INCOMPARABLE),
    (TEXT, {}, INCOMPARABLE),
    ({}, {}, NO_MATERIAL),
]


def test_different_materials_are_incomparable_and_equal_ones_are_compared(tmp_path: Path) -> None:
    outputs, _, _ = compared(tmp_path, [(baseline, candidate) for baseline, candidate, _ in MATERIALS])
    assert list(zip(MATERIALS, outputs, strict=True)) == [(each, each[2]) for each in MATERIALS]


def test_the_material_that_is_trusted_more_decides(tmp_path: Path) -> None:
    lesser: dict[str, tuple[Any, Any]] = {
        "vector": (VECTOR, OTHER_VECTOR),
        "text": (TEXT, OTHER_TEXT),
        "fingerprint": (PRINT, OTHER_PRINT),
    }
    order: list[tuple[Record, str]] = [
        (TOKENS, "vector"),
        (TOKENS, "text"),
        (TOKENS, "fingerprint"),
        (events(1, 2, 3), "text"),
        (VECTOR, "text"),
        (TEXT, "fingerprint"),
    ]
    pairs = [({**more, **lesser[less][0]}, {**more, **lesser[less][1]}) for more, less in order]
    assert compared(tmp_path, pairs)[0] == [SAME] * len(order)


def test_given_token_ids_are_trusted_more_than_those_of_events(tmp_path: Path) -> None:
    assert one(tmp_path, {**TOKENS, **events(7)}, {**TOKENS, **events(8)}) is SAME


def test_events_without_tokens_are_not_compared(tmp_path: Path) -> None:
    times = {"stream_events": [{"index": 0, "elapsed_ms": 1.0}, {"index": 1, "elapsed_ms": 2.0}]}
    assert one(tmp_path, times, times) is NO_MATERIAL


def test_two_empty_answers_are_no_evidence_unless_they_have_no_tokens(tmp_path: Path) -> None:
    empty: list[Record] = [{"text": ""}, {"vector": []}]
    pairs = [({**each, **tokens}, {**each, **tokens}) for tokens in ({}, {"output_tokens": 5}) for each in empty]
    pairs.append(({"token_ids": [], "output_tokens": 5}, {"token_ids": [], "output_tokens": 5}))
    assert set(compared(tmp_path, pairs)[0]) == {NO_MATERIAL}


def test_an_answer_of_0_tokens_is_a_failure(tmp_path: Path) -> None:
    empty: list[Record] = [{"token_ids": []}, {"output_tokens": 0}, {"output_tokens": 0, "text": ""}]
    pairs = [(other, each) for each in empty for other in (TOKENS, each)]
    assert compared(tmp_path, pairs)[0] == [FAILED] * len(pairs)
    holding: list[Record] = [VECTOR, TEXT, PRINT]
    pairs = [({**each, "output_tokens": 0}, {**each, "output_tokens": 0}) for each in holding]
    assert compared(tmp_path, pairs)[0] == [SAME] * 3, "a count of 0 does not empty an answer that is there"


def test_an_answer_whose_text_or_vector_has_become_empty_differs(tmp_path: Path) -> None:
    pairs = [(TEXT, {"text": ""}), (VECTOR, {"vector": []})]
    assert compared(tmp_path, pairs)[0] == [DIFFERS] * 2


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("prompt_digest", "unlike prompt"),
        ("params_digest", "unlike parameters"),
        ("seed", "unlike seed"),
        ("environment", "unlike environment"),
    ],
)
def test_different_questions_are_incomparable_and_not_a_mismatch(tmp_path: Path, field: str, reason: str) -> None:
    values: tuple[Any, Any] = (1, 2) if field == "seed" else ("p", "q")
    pairs = [({**TOKENS, field: values[0]}, {**other, field: values[1]}) for other in (TOKENS, OTHER_TOKENS)]
    unknown = ({**TOKENS, field: values[0]}, TOKENS)
    outputs, reasons, drift = compared(tmp_path, [*pairs, unknown])
    assert (outputs, reasons) == ([INCOMPARABLE, INCOMPARABLE, SAME], {reason: 2})
    assert math.isnan(drift)


def test_different_materials_have_a_reason(tmp_path: Path) -> None:
    assert compared(tmp_path, [(TOKENS, TEXT)])[1] == {"unlike materials": 1}


def test_a_failed_answer_is_not_evidence_of_outputs(tmp_path: Path) -> None:
    failures: list[Record] = [{"ok": False}, {"error": "boom"}, {"health": "down"}]
    one_side = [({**TOKENS, **failure}, OTHER_TOKENS) for failure in failures]
    both = [({**TOKENS, **failure}, {**OTHER_TOKENS, **failure}) for failure in failures]
    assert set(compared(tmp_path, [*one_side, *both, *((c, b) for b, c in one_side)])[0]) == {FAILED}


def test_an_answer_counts_unless_its_record_marks_a_failure(tmp_path: Path) -> None:
    states: list[Record] = [{"health": "ready"}, {"health": "degraded"}, {"error": ""}, {"ok": True}]
    assert compared(tmp_path, [({**TOKENS, **state}, TOKENS) for state in states])[0] == [SAME] * 4


# -- tolerances -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "baseline", "candidate", "output"),
    [
        (Tolerance(absolute=0.5), [1.0, 2.0], [1.5, 1.5], TOLERATED),
        (Tolerance(absolute=0.5), [1.0, 2.0], [1.5, 2.6], DRIFTED),
        (Tolerance(relative=0.25), [1.0, 4.0], [1.25, 5.0], TOLERATED),
        (Tolerance(relative=0.25), [4.0], [5.5], DRIFTED),
        (Tolerance(relative=0.25), [-4.0], [-5.0], TOLERATED),
        (Tolerance(absolute=0.5, relative=0.25), [0.0, 8.0], [0.5, 10.0], TOLERATED),
        (Tolerance(absolute=0.5), [1.0], [1.0, 1.0], DIFFERS),
        (Tolerance(), [1.0], [1.5], DRIFTED),
    ],
)
def test_either_bound_suffices_number_by_number(
    tmp_path: Path, rule: Tolerance, baseline: list[float], candidate: list[float], output: Output
) -> None:
    assert one(tmp_path, {"vector": baseline}, {"vector": candidate}, rule) is output


def test_equal_vectors_need_no_tolerance_and_are_not_counted_as_tolerated(tmp_path: Path) -> None:
    assert one(tmp_path, VECTOR, VECTOR, Tolerance(absolute=1.0)) is SAME


def test_the_largest_drift_is_that_of_vectors_with_a_rule(tmp_path: Path) -> None:
    rule = Tolerance(absolute=0.5, model="a")
    pairs = [
        ({"model": "a", "vector": [1.0]}, {"model": "a", "vector": [1.25]}),
        ({"model": "a", "vector": [1.0]}, {"model": "a", "vector": [3.0]}),
        ({"model": "b", "vector": [1.0]}, {"model": "b", "vector": [9.0]}),
    ]
    assert compared(tmp_path, pairs, rule) == ([TOLERATED, DRIFTED, DIFFERS], {}, 2.0)


def test_the_most_specific_rule_wins_and_then_the_first() -> None:
    rules = [
        Tolerance(absolute=1),
        Tolerance(absolute=2, model="m"),
        Tolerance(absolute=3, backend="b"),
        Tolerance(absolute=4, model="m", backend="b"),
        Tolerance(absolute=5, model="m", accelerator="a"),
        Tolerance(absolute=6, model="m", backend="b", accelerator="a"),
    ]

    def found(*segment: str | None) -> float:
        rule = rule_for(rules, *segment)
        return math.nan if rule is None else rule.absolute

    assert [found("m", "b", "a"), found("m", "b", "x"), found("m", "x", "a"), found("m", "x", None)] == [6, 4, 5, 2]
    assert [found("x", "b", "a"), found(None, None, None)] == [3, 1]
    assert rule_for(rules[1:], "x", "y", None) is None


def test_rules_match_the_candidates_backend_and_accelerator(tmp_path: Path) -> None:
    rule = Tolerance(absolute=1, model="m", backend="b", accelerator="a")
    baseline = {"vector": [1.0], "model": "m", "backend": "x", "accelerator": "x"}
    candidate = {"vector": [1.5], "backend": "b", "accelerator": "a"}
    assert one(tmp_path, baseline, candidate, rule) is TOLERATED
    assert one(tmp_path, {**baseline, "backend": "b"}, {**candidate, "backend": "x"}, rule) is DIFFERS


@pytest.mark.parametrize("bound", [-1.0, math.nan, math.inf])
def test_a_tolerance_is_finite_and_not_negative(bound: float) -> None:
    with pytest.raises(ValueError, match="must be finite and at least 0"):
        Tolerance(absolute=bound)
    with pytest.raises(ValueError, match="must be finite and at least 0"):
        Tolerance(relative=bound)


PAIRS_OF_NUMBERS = st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=20)


@settings(max_examples=3)
@given(st.lists(PAIRS_OF_NUMBERS, min_size=10, max_size=50))
def test_vectors_compare_as_numpy_compares_them(
    tmp_path_factory: pytest.TempPathFactory, many: list[list[tuple[float, float]]]
) -> None:
    rule = Tolerance(absolute=10.0, relative=0.5)

    def expected(numbers: list[tuple[float, float]]) -> Output:
        baseline, candidate = (np.array(side) for side in zip(*numbers, strict=True))
        differences = np.abs(candidate - baseline)
        is_within = (differences <= rule.absolute) | (differences <= rule.relative * np.abs(baseline))
        return SAME if (baseline == candidate).all() else TOLERATED if is_within.all() else DRIFTED

    pairs = [({"vector": [b for b, _ in numbers]}, {"vector": [c for _, c in numbers]}) for numbers in many]
    outputs, _, _ = compared(tmp_path_factory.mktemp("vectors"), pairs, rule)
    assert outputs == [expected(numbers) for numbers in many]


def numeric(tmp_path: Path, baseline: Record, candidate: Record, *tolerances: Tolerance) -> Output:
    sides = [[{"request_id": "a", **each}] for each in (baseline, candidate)]
    with open_store() as store:
        read_into(store, [pair_file(tmp_path / "input.json", *sides)])
        evidence = gather(store, Policy(outputs="numeric", numeric_tolerances=tolerances))
        return Output(evidence.pairs.output[0])


@pytest.mark.parametrize(
    ("baseline", "candidate", "output"),
    [
        ({**TOKENS, "vector": [1.0, 2.0]}, {**TOKENS, "vector": [9.0, -3.0]}, DRIFTED),
        ({**TOKENS, "vector": [1.0, 2.0]}, {**OTHER_TOKENS, "vector": [1.005, 2.0]}, TOLERATED),
        ({**TOKENS, **VECTOR}, {**OTHER_TOKENS, **VECTOR}, SAME),
        ({**TOKENS, **VECTOR}, OTHER_TOKENS, DIFFERS),
        (TOKENS, TOKENS, SAME),
        (TEXT, OTHER_TEXT, DIFFERS),
    ],
)
def test_numeric_outputs_are_decided_by_vectors_if_both_sides_have_them(
    tmp_path: Path, baseline: Record, candidate: Record, output: Output
) -> None:
    assert numeric(tmp_path, baseline, candidate, Tolerance(absolute=0.01)) is output


def test_numeric_outputs_take_the_most_specific_rule_of_model_candidate_backend_and_accelerator(tmp_path: Path) -> None:
    rules = (Tolerance(absolute=0.01), Tolerance(absolute=1, model="m", backend="new", accelerator="cuda"))
    baseline = {**TOKENS, "vector": [1.0], "model": "m", "backend": "old", "accelerator": "cuda"}
    candidate = {**TOKENS, "vector": [1.5], "backend": "new"}
    assert numeric(tmp_path, baseline, candidate, *rules) is TOLERATED
    assert numeric(tmp_path, {**baseline, "backend": "new"}, {**candidate, "backend": "old"}, *rules) is DRIFTED


# -- first difference -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("baseline", "candidate", "expected"),
    [
        ([1, 2, 3], [1, 5, 3], (1, 2, 5)),
        ([1, 2], [1, 2, 3], (2, None, 3)),
        ([1, 2, 3], [1, 2], (2, 3, None)),
    ],
)
def test_the_first_differing_token_is_named(
    tmp_path: Path, baseline: list[int], candidate: list[int], expected: tuple[int, int | None, int | None]
) -> None:
    pair = [{"request_id": "a", "token_ids": tokens} for tokens in (baseline, candidate)]
    with open_store() as store:
        read_into(store, [pair_file(tmp_path / "input.json", [pair[0]], [pair[1]])])
        gather(store)
        found = first_difference(store, 0)
    assert found == {
        "token_index": expected[0],
        "baseline_token": expected[1],
        "candidate_token": expected[2],
        "baseline_fingerprint": fingerprint(baseline),
        "candidate_fingerprint": fingerprint(candidate),
    }


@pytest.mark.parametrize(
    ("baseline", "candidate", "expected"),
    [
        (TEXT, OTHER_TEXT, {"character_index": 2}),
        (VECTOR, OTHER_VECTOR, {"vector_index": 1}),
        ({**TOKENS, **VECTOR}, {**TOKENS, **OTHER_VECTOR}, {"vector_index": 1}),
        (PRINT, OTHER_PRINT, None),
    ],
)
def test_first_difference_names_the_character_of_texts_and_the_number_of_vectors(
    tmp_path: Path, baseline: Record, candidate: Record, expected: Any
) -> None:
    sides = [[{"request_id": "a", **each}] for each in (baseline, candidate)]
    with open_store() as store:
        read_into(store, [pair_file(tmp_path / "input.json", *sides)])
        gather(store)
        assert first_difference(store, 0) == expected
