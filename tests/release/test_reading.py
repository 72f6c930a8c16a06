"""The same observations in every layout give the same table; invalid data is refused."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest
import zstandard

from lockstep.errors import EvidenceError
from lockstep.release.observation import NAMES
from lockstep.release.reading import read
from lockstep.release.store import open_store
from tests.release.inputs import observations, write_json, write_lines

FULL: dict[str, Any] = {
    "request_id": "r-0",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "engine_id": "chatcmpl-1",
    "conversation_id": "c",
    "turn": 3,
    "index": 5,
    "prompt_digest": "p",
    "params_digest": "q",
    "seed": 2**62 + 1,
    "environment": "e",
    "prompt_tokens": 4,
    "output_tokens": 2,
    "ts": 1.25,
    "model": "m",
    "model_version": "v",
    "artifact": "f",
    "precision": "quantize int8",
    "deterministic": True,
    "backend": "vllm",
    "accelerator": "cpu",
    "route_id": "r",
    "replica_id": "s",
    "scheduler": "t",
    "segment": "u",
    "ok": True,
    "health": "ready",
    "error": "none",
    "latency_ms": 12.5,
    "ttft_ms": 2.5,
    "token_latencies_ms": [1.5, 2.5],
    "stream_events": [{"index": 0, "token_id": 7, "elapsed_ms": 2.5}],
    "queue_depth": 1.0,
    "kv_used": 3.0,
    "kv_total": 4.0,
    "token_trace_fingerprint": "w",
    "token_ids": [7, 8],
    "vector": [0.5, -1.0],
    "text": 'quoted "text", with a comma\nand a second line',
    "fingerprint": "0123456789abcdef",
    "logprobs": [-0.5],
}
SPARSE = {"request_id": "r-1", "ts": 2.0, "latency_ms": 3.0}


def to_csv(path: Path, records: list[dict[str, Any]]) -> Path:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for record in records for name in record)))
    writer.writeheader()
    for record in records:
        writer.writerow(
            {name: value if isinstance(value, str) else json.dumps(value) for name, value in record.items()}
        )
    path.write_text(text.getvalue())
    return path


def to_parquet(path: Path, records: list[dict[str, Any]]) -> Path:
    lines = write_lines(path.with_suffix(".lines"), records)
    duckdb.execute(
        f"COPY (SELECT * FROM read_json('{lines}', format = 'newline_delimited')) TO '{path}' (FORMAT parquet)"
    )
    return path


def to_list(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(records, indent=2))
    return path


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], Path]] = {
    "lines": write_lines,
    "list": to_list,
    "csv": to_csv,
    "parquet": to_parquet,
}


def test_the_full_observation_has_every_field() -> None:
    assert FULL.keys() | {"side"} == set(NAMES)


@pytest.mark.parametrize("writer", WRITERS)
def test_every_field_is_read_from_every_layout(tmp_path: Path, writer: str) -> None:
    assert observations(WRITERS[writer](tmp_path / "input", [FULL, SPARSE])) == [FULL, SPARSE]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_compressed_files_are_read(tmp_path: Path, writer: str, pack: Callable[[bytes], bytes]) -> None:
    plain = WRITERS[writer](tmp_path / "input", [FULL, SPARSE])
    packed = tmp_path / "packed"
    packed.write_bytes(pack(plain.read_bytes()))
    assert observations(packed) == [FULL, SPARSE]


@pytest.mark.parametrize("writer", WRITERS)
def test_one_file_may_have_both_sides_if_each_observation_names_one(tmp_path: Path, writer: str) -> None:
    both = [{**FULL, "side": "baseline"}, {**SPARSE, "side": "candidate"}]
    path = WRITERS[writer](tmp_path / "input", both)
    assert observations(path, None, of="baseline") == [{**FULL, "side": "baseline"}]
    assert observations(path, None, of="candidate") == [{**SPARSE, "side": "candidate"}]


def test_a_document_of_two_lists_and_its_policy(tmp_path: Path) -> None:
    path = write_json(tmp_path / "input", {"policy": {"min_pairs": 3}, "baseline": [FULL], "candidate": [SPARSE]})
    with open_store() as store:
        source, policy = read(store, path, None)
    assert (source.format, source.num_rows, policy) == ("gate", 2, {"min_pairs": 3})
    assert observations(path, None, of="candidate") == [SPARSE]


PAIR = {"model": "shared", "baseline": FULL, "candidate": SPARSE}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"pairs": [PAIR, {"baseline": SPARSE}]}, indent=1),
        json.dumps([PAIR, {"baseline": SPARSE, "candidate": None}]),
        json.dumps(PAIR) + "\n" + json.dumps({"baseline": SPARSE}),
        json.dumps({"policy": {"min_pairs": 3}}) + "\n" + json.dumps({"baseline": SPARSE}) + "\n" + json.dumps(PAIR),
    ],
    ids=["document", "list", "lines", "lines with a policy"],
)
def test_pairs_share_fields_outside_of_their_sides(tmp_path: Path, text: str) -> None:
    path = tmp_path / "input"
    path.write_text(text)
    assert observations(path, None, of="baseline") == [FULL, SPARSE]
    assert observations(path, None, of="candidate") == [{**SPARSE, "model": "shared"}]


def test_a_single_pair_on_a_line_is_a_pair(tmp_path: Path) -> None:
    assert observations(write_json(tmp_path / "input", PAIR), None, of="candidate") == [{**SPARSE, "model": "shared"}]


def test_the_policy_of_a_file_of_lines_is_a_separate_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "input", [{"policy": {"min_pairs": 3}}, PAIR])
    with open_store() as store:
        assert read(store, path, None)[1] == {"min_pairs": 3}


def test_unknown_members_are_reported_and_not_read(tmp_path: Path) -> None:
    with open_store() as store:
        source, _ = read(store, write_lines(tmp_path / "input", [{**SPARSE, "weather": 1}, SPARSE]), "baseline")
    assert source.unread == ("weather",)


def test_a_file_with_only_one_side_is_valid(tmp_path: Path) -> None:
    path = write_json(tmp_path / "input", {"baseline": [SPARSE]})
    assert observations(path, None, of="baseline") == [SPARSE]
    assert observations(path, None, of="candidate") == []


def refused(path: Path, message: str, side: Any = "baseline") -> None:
    with open_store() as store, pytest.raises(EvidenceError, match=message) as caught:
        read(store, path, side)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("latency_ms", "120 ms", "latency_ms .*(must be a number|DOUBLE)"),
        ("turn", "third", "turn .*(must be a whole number|BIGINT)"),
        ("ok", "perhaps", "ok .*(must be a truth value|BOOLEAN)"),
        ("token_ids", "seven", r"token_ids .*(must be a list of whole numbers|BIGINT\[\])"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_the_name_of_its_field(
    tmp_path: Path, writer: str, field: str, value: Any, message: str
) -> None:
    records = [SPARSE, {**SPARSE, "request_id": "r-2", field: value}]
    if writer == "parquet":
        records = [{**each, field: value} for each in records]
    refused(WRITERS[writer](tmp_path / "input", records), message)


def test_a_wrong_value_in_a_pair_is_refused_by_its_side_and_field(tmp_path: Path) -> None:
    wrong = {"baseline": SPARSE, "candidate": {**SPARSE, "ttft_ms": [3]}}
    refused(write_lines(tmp_path / "input", [PAIR, wrong]), "the candidate's ttft_ms must be a number", None)


def line_of(number: int) -> dict[str, Any]:
    return {"request_id": f"r{number}", "ts": float(number), "latency_ms": 1.0}


@pytest.mark.parametrize("num_lines", [1, 2, 3, 50])
@pytest.mark.parametrize("wrong", ['{"request_id": "cut", "latency_ms": 1', '{"latency_ms": "slow"}', "[1, 2]"])
def test_a_line_that_cannot_be_read_is_refused_by_its_number(tmp_path: Path, num_lines: int, wrong: str) -> None:
    """At any position, with blank lines before it; of several the first is named."""
    for place in sorted({0, 1, num_lines // 2, num_lines - 1, num_lines}):
        lines = [json.dumps(line_of(each)) for each in range(num_lines)]
        lines[place:place] = ["", wrong] if place else [wrong]
        lines += [json.dumps(line_of(99)), '{"latency_ms": "also wrong"}']
        path = tmp_path / "input"
        path.write_text("\n".join(lines) + "\n")
        if place:  # a first line that is no record is taken for the head of a log
            refused(path, rf"^{path}:{place + 2}: ")
        elif wrong.startswith('{"latency_ms"'):
            refused(path, rf"^{path}:1: latency_ms must be a number")


def test_a_line_is_named_by_its_number_in_what_was_compressed_in_logs_and_in_tables(tmp_path: Path) -> None:
    good, wrong = json.dumps(line_of(0)), '{"request_id": "r1", "latency_ms": "slow"}'
    packed, log, table = tmp_path / "packed.gz", tmp_path / "log", tmp_path / "table.csv"
    packed.write_bytes(gzip.compress(f"{good}\n{good}\n{wrong}\n".encode()))
    refused(packed, rf"^{packed}:3: latency_ms must be a number")
    table.write_text("request_id,latency_ms\na,1\nb,slow\n")
    refused(table, rf"^{table}:3: latency_ms must be a number")
    document = write_json(tmp_path / "document", {"baseline": [line_of(0), json.loads(wrong)], "candidate": []})
    refused(document, rf"^{document}: record 2: latency_ms must be a number", None)
    log.write_text(f"{json.dumps({**line_of(0), 'side': 'baseline'})}\n\n{good}\n")
    refused(log, rf"^{log}:3: 1 observations have no side", None)


def test_errors_in_a_copy_name_the_original_file(tmp_path: Path) -> None:
    copy, given = write_lines(tmp_path / "copy", [SPARSE, {**SPARSE, "latency_ms": "slow"}]), Path("mine.jsonl")
    with open_store() as store, pytest.raises(EvidenceError, match=r"^mine\.jsonl:2: ") as caught:
        read(store, copy, "baseline", given)
    assert str(tmp_path) not in str(caught.value)
    for content in (b"", b"PK\x03\x04", b"\x1f\x8bno", b"a,b\n", b'{"baseline": 3}', b'{"latency": 3}\n{}\n'):
        copy.write_bytes(content)
        with open_store() as store, pytest.raises(EvidenceError, match=r"^mine\.jsonl: ") as caught:
            read(store, copy, "baseline", given)
        assert str(tmp_path) not in str(caught.value)
    write_lines(copy, [SPARSE])
    with open_store() as store:
        assert read(store, copy, "baseline", given)[0].path == given


@pytest.mark.parametrize(
    ("records", "side", "message"),
    [
        (
            [{**SPARSE, "side": "candidate"}],
            "baseline",
            "1 observations have the side 'candidate'; the file was passed as",
        ),
        (
            [{**SPARSE, "side": "canary"}],
            None,
            "1 observations have the side 'canary'; the side must be baseline or candidate",
        ),
        ([{**SPARSE, "side": "baseline"}, SPARSE], None, "1 observations have no side"),
        (
            [{**SPARSE, "latency": 5}],
            "baseline",
            "unknown field 'latency' of an observation; did you mean 'latency_ms'",
        ),
        ([PAIR], "baseline", "contains both sides; pass it as the only file"),
        ([{"policy": 3}, PAIR], None, "policy must be a JSON object"),
    ],
)
def test_inconsistent_layouts_are_refused(tmp_path: Path, records: list[Any], side: Any, message: str) -> None:
    refused(write_lines(tmp_path / "input", records), message, side)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("request_id,latency_ms\na,1\nb\n", "Expected Number of Columns: 2"),
        ('request_id,latency_ms\na,"1\n', "not whole|unterminated|quote"),
        ("name,size\na,1\n", "begins with 'name,size', which is not a CSV header"),
        ("request_id,latency_ms\n", "contains no observations"),
        ('{"baseline": [], "candidate": []}', "contains no observations"),
        ('{"pairs": []}', "contains no observations"),
        ('{"pairs": 5}', "pairs is not a list"),
        ('{"baseline": [5]}', "Expected OBJECT"),
        ('{"request_id": "a"}\n{"request_id": "b"', "invalid or truncated JSON"),
        ('{"request_id": "a"}\nplain text\n', "invalid or truncated JSON"),
        ('{"request_id": "a", x}\n{"request_id": "b"}\n', "invalid or truncated JSON"),
        ('{"request_id": "a"}\n5\n', "Expected OBJECT"),
    ],
)
def test_truncated_text_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "input"
    path.write_text(text)
    refused(path, message, None if "{" in text and "request_id" not in text else "baseline")


@pytest.mark.parametrize(
    "data",
    [
        b'{"resourceSpans": [{"resource": {"\x80": 1}, "scopeSpans": [{"spans": []}]}]}',
        b'{"policy": {"\x80": 1}, "baseline": [{"request_id": "a"}], "candidate": []}',
    ],
)
def test_a_document_whose_text_is_not_utf_8_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "input"
    path.write_bytes(data)
    refused(path, "'utf-8' codec can't decode byte 0x80", None)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.99])
def test_a_cut_parquet_file_is_refused(tmp_path: Path, part: float) -> None:
    data = to_parquet(tmp_path / "whole", [FULL, SPARSE]).read_bytes()
    path = tmp_path / "input"
    path.write_bytes(data[: int(len(data) * part)])
    refused(path, "incomplete or damaged")


class Trap:
    """An object whose pickle runs code when it is opened."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, ("opened",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "requests.pkl"
    path.write_bytes(pickle.dumps(Trap(), protocol=protocol))
    refused(path, "pickles are|CSV|not JSON")
    assert not Path("opened").exists()
