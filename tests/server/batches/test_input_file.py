"""Input files: what is read is what was written, and every fault is told with its line."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.server.batches import input_file
from lockstep.server.batches.input_file import (
    BatchRequest,
    checked_input,
    numbered_lines,
    read_request,
    window_s,
)
from tests.server.batches.inputs import CHAT, jsonl, line

MOST = 4_096


def faults_of(content: bytes, endpoint: str | None = CHAT) -> list[tuple[str, int | None]]:
    return [(fault.code, fault.line) for fault in checked_input(io.BytesIO(content), endpoint, MOST).faults]


@given(
    ids=st.lists(st.text(min_size=1, max_size=20), unique=True, min_size=1, max_size=8),
    texts=st.lists(st.text(max_size=20), min_size=8, max_size=8),
    end=st.sampled_from(["\n", "\r\n", "\n\n", "\n \n"]),
    is_ended=st.booleans(),
)
def test_requests_are_read_as_they_were_written(ids: list[str], texts: list[str], end: str, is_ended: bool) -> None:
    ids = [each.encode(errors="replace").decode() for each in ids]
    ids = list(dict.fromkeys(ids))
    bodies = [{"model": "m", "prompt": text.encode(errors="replace").decode()} for text in texts[: len(ids)]]
    lines = [
        json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": body}, ensure_ascii=False)
        for name, body in zip(ids, bodies, strict=True)
    ]
    file = io.BytesIO((end.join(lines) + (end if is_ended else "")).encode())
    checked = checked_input(file, CHAT, MOST)
    assert not checked.faults
    read = []
    for offset in checked.offsets:
        file.seek(offset)
        found = read_request(file.readline().strip(), CHAT)
        assert isinstance(found, BatchRequest)
        read.append((found.custom_id, json.loads(found.body)))
    assert read == list(zip(ids, bodies, strict=True))
    assert checked.models == {"m": 1}


@given(content=st.binary(max_size=300), most=st.integers(1, 40))
def test_any_bytes_are_requests_or_faults_with_their_lines(content: bytes, most: int) -> None:
    checked = checked_input(io.BytesIO(content), CHAT, most)
    assert checked.faults, "nothing so short is a request"
    whole = content.count(b"\n") + 1
    assert all(fault.line is None or 1 <= fault.line <= whole for fault in checked.faults)


@given(parts=st.lists(st.binary(max_size=30).map(lambda part: part.replace(b"\n", b"")), max_size=10))
def test_lines_have_their_numbers_and_offsets(parts: list[bytes]) -> None:
    content = b"\n".join(parts)
    seen = {number: (offset, found) for number, offset, found in numbered_lines(io.BytesIO(content), 10)}
    for number, part in enumerate(parts, 1):
        stripped = part.strip()
        if number in seen:
            offset, found = seen[number]
            assert content[offset : offset + len(part)] == part
            assert found == stripped or (found is None and len(part) > 10)
        else:
            assert not stripped


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"method": "GET"}, "invalid_method"),
        ({"method": 5}, "invalid_method"),
        ({"url": "/v1/embeddings"}, "invalid_url"),
        ({"url": "/v1/files"}, "invalid_url"),
        ({"custom_id": ""}, "invalid_custom_id"),
        ({"custom_id": 7}, "invalid_custom_id"),
        ({"custom_id": "x" * 513}, "invalid_custom_id"),
        ({"body": [1]}, "invalid_body"),
        ({"body": {"stream": True}}, "invalid_body"),
        ({"boby": {}}, "unknown_parameter"),
    ],
)
def test_a_fault_reports_its_line(changed: dict[str, Any], code: str) -> None:
    assert faults_of(jsonl([line(0), {**line(1), **changed}, line(2)])) == [(code, 2)]


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "body"])
def test_a_missing_member_is_named(name: str) -> None:
    wrong = line(1)
    del wrong[name]
    [fault] = checked_input(io.BytesIO(jsonl([line(0), wrong])), CHAT, MOST).faults
    assert (fault.code, fault.param, fault.line) == ("missing_required_parameter", name, 2)


def test_each_broken_line_is_reported_with_its_number() -> None:
    content = jsonl([line(0)]) + b"{oops\n\n[1]\n\xff\n" + jsonl([line(0)])
    assert faults_of(content) == [*(("invalid_json_line", number) for number in (2, 4, 5)), ("duplicate_custom_id", 6)]
    assert "line 1" in checked_input(io.BytesIO(content), CHAT, MOST).faults[-1].message


def test_a_line_that_is_too_long_is_a_fault_and_the_next_is_read() -> None:
    content = jsonl([line(0, user="x" * MOST), line(1)])
    checked = checked_input(io.BytesIO(content), CHAT, MOST)
    assert [(fault.code, fault.line) for fault in checked.faults] == [("line_too_long", 1)]
    assert len(checked.offsets) == 1


def test_a_file_without_requests_is_a_fault() -> None:
    assert faults_of(b"") == faults_of(b"\n \n") == [("empty_file", None)]


def test_requests_and_faults_of_an_input_file_are_limited_in_number() -> None:
    checked = checked_input(io.BytesIO(jsonl([line(index) for index in range(5)])), CHAT, MOST, max_requests=2)
    assert [(fault.code, fault.line) for fault in checked.faults] == [("too_many_requests", 3)]
    assert len(faults_of(b"{\n" * 300)) == input_file.MAX_FAULTS


def test_without_an_endpoint_every_known_url_is_taken() -> None:
    assert not faults_of(jsonl([line(0), line(1, url="/v1/completions")]), None)
    assert faults_of(jsonl([line(0, url="/v1/nothing")]), None) == [("invalid_url", 1)]


def test_a_byte_order_mark_is_passed_over() -> None:
    assert not faults_of(b"\xef\xbb\xbf" + jsonl([line(0)]))


@pytest.mark.parametrize(("text", "seconds"), [("24h", 86_400), ("90s", 90), ("5m", 300), ("30d", 2_592_000)])
def test_windows_are_numbers_with_a_unit(text: str, seconds: int) -> None:
    assert window_s(text) == seconds


@pytest.mark.parametrize("text", ["", "24", "0h", "31d", "1w", "-1h", "24 h", "24h "])
def test_invalid_completion_window_is_none(text: str) -> None:
    assert window_s(text) is None
