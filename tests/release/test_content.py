"""The type of a file follows from its bytes, not its name; incomplete files and files that can run code are refused."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
import zstandard

from lockstep.errors import EvidenceError
from lockstep.release.content import Content, ContentLimits, content_of

LINES = b'{"request_id": "a", "latency_ms": 1}\n{"request_id": "b", "latency_ms": 2}\n'


def looked_at(tmp_path: Path, data: bytes, name: str = "input", **limits: int) -> Content:
    path = tmp_path / name
    path.write_bytes(data)
    return content_of(path, tmp_path / "plain", limits=ContentLimits(**limits))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (LINES, "lines"),
        (b"\n\n" + LINES, "lines"),
        (LINES.splitlines()[0], "document"),
        (b'{"policy": {},\n "baseline": []}', "document"),
        (b'[{"request_id": "a"},\n {"request_id": "b"}]', "list"),
        (b"request_id,latency_ms\na,1\n", "csv"),
    ],
)
def test_the_kind_of_a_text_is_detected_by_its_beginning(tmp_path: Path, data: bytes, kind: str) -> None:
    assert looked_at(tmp_path, data, "names.do.not.count.parquet").kind == kind


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress, lambda data: b"\xef\xbb\xbf" + data])
def test_packed_lines_and_byte_order_marks_are_unpacked(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    found = looked_at(tmp_path, pack(LINES))
    assert found.kind == "lines"
    assert found.path.read_bytes() == LINES


def test_several_frames_of_zstd_are_one_file(tmp_path: Path) -> None:
    found = looked_at(tmp_path, b"".join(zstandard.compress(line) for line in LINES.splitlines(keepends=True)))
    assert found.path.read_bytes() == LINES


def test_parquet_is_detected_by_its_magic_also_when_compressed(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    duckdb.execute(f"COPY (SELECT 'a' AS request_id, 1.5::DOUBLE AS latency_ms) TO '{path}'")
    found = looked_at(tmp_path, gzip.compress(path.read_bytes()))
    assert (found.kind, found.path.read_bytes()) == ("parquet", path.read_bytes())


def big_lines() -> bytes:
    return b"".join(b'{"request_id": "%d", "latency_ms": %d.5}\n' % (i, i) for i in range(5000))


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
@pytest.mark.parametrize("part", [0.3, 0.9, 0.999])
def test_a_truncated_compressed_file_is_refused(tmp_path: Path, pack: Callable[[bytes], bytes], part: float) -> None:
    data = pack(big_lines())
    with pytest.raises(EvidenceError, match=r"input: incomplete or damaged"):
        looked_at(tmp_path, data[: int(len(data) * part)])


def test_a_compressed_file_with_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(big_lines()))
    data[-6] ^= 0xFF
    with pytest.raises(EvidenceError, match=r"input: incomplete or damaged: CRC"):
        looked_at(tmp_path, bytes(data))


def test_a_file_that_decompresses_beyond_the_free_space_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=r"input: more than .* when decompressed"):
        looked_at(tmp_path, zstandard.compress(bytes((1 << 20) + 1)), max_unpacked_bytes=1 << 20)


def test_a_document_that_is_too_large_is_refused_with_an_alternative(tmp_path: Path) -> None:
    document = json.dumps({"baseline": [{"request_id": str(i)} for i in range(60_000)]}, indent=1).encode()
    with pytest.raises(EvidenceError, match=r"JSON document of more than 1 MiB; write one observation per line"):
        looked_at(tmp_path, document, max_document_bytes=1 << 20)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_refused_by_name(tmp_path: Path, protocol: int) -> None:
    with pytest.raises(EvidenceError, match="pickles are not supported, since loading one can run code"):
        looked_at(tmp_path, pickle.dumps([{"rid": "a"}], protocol=protocol))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b" \n\n", "contains only whitespace"),
        (b"PK\x03\x04zip", "zip archives are not supported; unpack it"),
        (b"\x00\x01\x02\xff", "not JSON, CSV or Parquet"),
        (b"[1, 2]", "neither an object nor a list of objects"),
        (b"[]", "neither an object nor a list of objects"),
        (b"[[", "invalid or truncated JSON: Expecting value: line 1 column 3"),
        (b'{"request_id": "a", "latency_ms": NaN}', "latency_ms is NaN, which is not a JSON number"),
        (b'{"baseline": [{"latency_ms": 1}, {"ttft_ms": -Infinity}]}', r"baseline\.1\.ttft_ms is -Infinity"),
        (b'{"request_id": "a", "latency_ms": 1', "invalid or truncated JSON"),
        (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "JSON that is nested too deeply"),
    ],
)
def test_unreadable_files_are_refused_with_a_reason(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(EvidenceError, match=f"input: .*{message}"):
        looked_at(tmp_path, data)


def test_paths_that_are_not_files_are_refused_without_waiting(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="nothing: cannot be read: No such file"):
        content_of(tmp_path / "nothing", tmp_path / "plain")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(EvidenceError, match=f"{path}: not a regular file"):
            content_of(path, tmp_path / "plain")


def test_file_names_with_pattern_characters_are_literal(tmp_path: Path) -> None:
    assert looked_at(tmp_path, LINES, "what [is] this*?.jsonl").kind == "lines"
