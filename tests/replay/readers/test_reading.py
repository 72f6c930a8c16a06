"""Formats are detected from the content; any file is read or refused with one line and in bounded memory."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.errors import TraceError
from lockstep.replay.readers import ReadOptions, read_workload
from lockstep.replay.readers.source import MAX_LINE_BYTES
from tests.replay.readers.files import (
    AIPERF,
    FORMATS,
    MOONCAKE,
    WORKLOAD,
    aiperf_record,
    requests_in,
    written,
)

FRESH_FILE = settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # each example overwrites the one file


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "dress",
    [
        lambda content: content.replace(b"\n", b"\r\n"),
        lambda content: b"\xef\xbb\xbf" + content,
        lambda content: content.rstrip(b"\n"),
        lambda content: content + b"\n\n",
        zstandard.compress,
        lambda content: zstandard.compress(b"\xef\xbb\xbf" + content[:40]) + zstandard.compress(content[40:]),
    ],
    ids=["CRLF", "BOM", "no last newline", "empty lines", "zstd", "zstd in two frames"],
)
def test_formats_are_detected_in_any_encoding(tmp_path: Path, kind: str, dress: object) -> None:
    content = FORMATS[kind].encode()
    plain = requests_in(tmp_path, content)
    assert len(plain) > 1
    assert callable(dress)
    assert requests_in(tmp_path, dress(content)) == plain


@pytest.mark.parametrize("kind", FORMATS)
def test_requests_can_be_iterated_repeatedly(tmp_path: Path, kind: str) -> None:
    workload = read_workload(written(tmp_path, FORMATS[kind]), ReadOptions(speed=3.0, dequantize_seed=5))
    assert list(workload.requests) == list(workload.requests)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_limit_takes_the_first_to_arrive(tmp_path: Path, kind: str) -> None:
    assert requests_in(tmp_path, FORMATS[kind], limit=1) == requests_in(tmp_path, FORMATS[kind])[:1]


def test_the_keys_of_a_line_may_come_in_any_order(tmp_path: Path) -> None:
    row = {"hash_ids": [4], "output_length": 2, "input_length": 5, "timestamp": 0}
    assert requests_in(tmp_path, json.dumps(row))[0].contents == (4,)
    record = aiperf_record(1, input_sequence_length=2)
    assert requests_in(tmp_path, json.dumps(dict(reversed(record.items()))))[0].num_prompt_tokens == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "file is empty; supported are a recording"),
        (b"\xef\xbb\xbf \n\n", "file is empty"),
        (b"hello", "file:1: unknown format; supported are a recording"),
        (b"[1, 2]", "file:1: unknown format"),
        (b'{"hello": 1}', "file:1: unknown format"),
        (
            b'{"hello": 1, "b": 2}\n{"hello": 2}',
            'file:1: unknown format of JSON lines, with the keys "hello", "b"; supported',
        ),
        (b"{}\n{}\n", "file:1: unknown format of JSON lines, with no key; supported are a recording"),
        (b'{"requests": []}\n{}', "file:2: not JSON .there is text after the end of the document"),
        (b"{", "file:1: not JSON"),
        (bytes(range(256)) * 10, "file:1: unknown format"),
        (b"\xff\xfe{\x00", "file is neither UTF-8 text nor zstd"),
        (gzip.compress(MOONCAKE.encode()), "file is gzip data; decompress it, or compress it with zstd"),
        (zstandard.compress(b""), "file is empty"),
        (b"\x28\xb5\x2f\xfd", "file ends in the middle of its zstd data"),
        (b"\x28\xb5\x2f\xfd" + b"junk" * 9, "file is damaged zstd data"),
        (zstandard.compress(MOONCAKE.encode()) + b"junk", "file is damaged zstd data"),
        (MOONCAKE.encode() + b"\xff\n", "file:4: not UTF-8"),
        (WORKLOAD.replace("shop", "sh\0op").encode(), "file:5: not JSON"),
        (WORKLOAD.encode().replace(b"shop", b"sh\xffop"), "file:5: not UTF-8"),
        (b'{"num_prompts": 5}', "input_lens and output_lens and start_times missing"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "file has no requests"),
    ],
)
def test_unknown_formats_are_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(TraceError, match=message) as refused:
        requests_in(tmp_path, content)
    assert "\n" not in str(refused.value)


def test_invalid_utf_8_in_a_long_document_is_refused_with_its_line(tmp_path: Path) -> None:
    text = WORKLOAD.replace("[", "[" + "\n" * 70_000, 1).encode().replace(b"shop", b"sh\xffop")
    with pytest.raises(TraceError, match="file:70005: not UTF-8"):
        requests_in(tmp_path, text)


@pytest.mark.parametrize("place", ["", "gone"])
def test_a_path_that_is_not_a_file_is_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(TraceError, match=r"no recording found|cannot read .*gone \(No such file"):
        read_workload(tmp_path / place)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="is not a regular file; a pipe cannot be used"):
        read_workload(tmp_path / "pipe")


def test_zstd_cut_at_any_byte_is_detected(tmp_path: Path) -> None:
    content = zstandard.compress(MOONCAKE.encode())
    for size in range(4, len(content)):
        with pytest.raises(TraceError, match=r"ends in the middle of its zstd data"):
            requests_in(tmp_path, content[:size])


def refusal(folder: Path, content: bytes) -> str:
    """Message of the refusal; empty if the file can be read."""
    try:
        requests_in(folder, content, dequantize_seed=1)
    except TraceError as error:
        return str(error)
    return ""


@FRESH_FILE
@given(kind=st.sampled_from(sorted(FORMATS)), data=st.data())
def test_damaged_files_are_read_or_refused_in_one_line(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    """Files with changed, removed or inserted bytes are read, or refused with one line."""
    content = bytearray(FORMATS[kind].encode())
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(begin, min(begin + 9, len(content))))
        pieces = st.sampled_from([b"", b"\0", b"-", b"9" * 30, b"NaN", b"{", b'"', b",", b"]", b"1e9", b"\n", b"null"])
        content[begin:end] = data.draw(pieces | st.binary(max_size=5))
    assert "\n" not in refusal(tmp_path, bytes(content))


@FRESH_FILE
@given(st.binary(max_size=60), st.sampled_from([b"", b"{", b"\x28\xb5\x2f\xfd", b'{"requests":[', b"TIMESTAMP,"]))
def test_junk_is_refused(tmp_path: Path, junk: bytes, start: bytes) -> None:
    with pytest.raises(TraceError):
        requests_in(tmp_path, start + junk)


@pytest.mark.parametrize("brackets", ["[]", '{"a":1}'])
@pytest.mark.parametrize(
    "text",
    [
        '{"timestamp": %s, "input_length": 1, "output_length": 1}',
        '{"requests": [%s]}',
        '{"config": %s, "requests": []}',
        '{"input_lens": %s, "output_lens": [1], "start_times": [1]}',
        '{"metadata": {"request_start_ns": %s}, "metrics": {"error_isl": 1}}',
    ],
)
def test_any_nesting_depth_is_refused_in_one_line(tmp_path: Path, text: str, brackets: str) -> None:
    """Deep nesting is refused or shown safely, whether the parser accepts it or not."""
    opening, closing = brackets[:-1].rstrip("1"), brackets[-1]
    for depth in (2, 30, *range(850, 1000, 3), 100_000):
        with pytest.raises(TraceError) as refused:
            requests_in(tmp_path, text % (opening * depth + "1" + closing * depth))
        assert len(str(refused.value)) < 400


def mooncake_lines(count: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    for index in range(count):
        num_blocks = rng.randint(1, 40)
        ids = [rng.randrange(1 << 40) for _ in range(num_blocks)]
        row = {"timestamp": index, "input_length": num_blocks * 512, "output_length": 9, "hash_ids": ids}
        yield json.dumps(row) + "\n"


def peak_bytes(path: Path, options: ReadOptions) -> tuple[int, int]:
    """Number of requests in a file, and peak memory of reading them."""
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_workload(path, options).requests)
        return count, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_streaming_needs_memory_for_one_line(tmp_path: Path) -> None:
    path = written(tmp_path, "".join(mooncake_lines(5_000, seed=1)))
    packed = tmp_path / "packed"
    packed.write_bytes(zstandard.compress(path.read_bytes()))
    assert path.stat().st_size > 1 << 20
    for each, options in ((path, ReadOptions()), (packed, ReadOptions(dequantize_seed=1))):
        count, peak = peak_bytes(each, options)
        assert count == 5_000
        assert peak < path.stat().st_size // 2


def test_a_line_without_end_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE)
    with path.open("ab") as file:
        file.truncate(4 * MAX_LINE_BYTES)  # a hole: zeros without a newline
    with pytest.raises(TraceError, match="file:4: not a trace: a line is longer than 16 MiB"):
        peak_bytes(path, ReadOptions())


def test_a_document_without_end_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, '{"requests": [')
    with path.open("ab") as file:
        file.truncate(1 << 30)
    with pytest.raises(TraceError, match="file is a JSON document of more than 64 MiB"):
        read_workload(path)


def test_a_small_file_that_unpacks_to_gigabytes_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    bomb = zstandard.ZstdCompressor().compressobj()
    with (tmp_path / "bomb").open("wb") as file:
        file.write(bomb.compress(MOONCAKE.encode()))
        for _ in range(64):
            file.write(bomb.compress(bytes(16 << 20)))
        file.write(bomb.flush())
    assert (tmp_path / "bomb").stat().st_size < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match="bomb:4: not a trace: a line is longer than 16 MiB"):
            list(read_workload(tmp_path / "bomb").requests)
        assert tracemalloc.get_traced_memory()[1] < 128 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_a_gigabyte_is_streamed(tmp_path: Path) -> None:
    """Reading a gigabyte needs no more memory than reading its first request."""
    ids = list(range(1 << 40, (1 << 40) + 250))
    row = json.dumps({"timestamp": 5, "input_length": 250 * 512, "output_length": 9, "hash_ids": ids}) + "\n"
    num_rows = -(-(1 << 30) // len(row))
    with (tmp_path / "big").open("w") as file:
        for _ in range(num_rows):
            file.write(row)
    one, small_peak = peak_of_process(tmp_path / "big", limit=1)
    count, peak = peak_of_process(tmp_path / "big", limit=None)
    assert (one, count) == (1, num_rows)
    assert peak < small_peak + (8 << 20)


def peak_of_process(path: Path, limit: int | None) -> tuple[int, int]:
    """Number of requests that a separate process read, and its peak memory in bytes."""
    code = f"""
import resource
from lockstep.replay.readers import ReadOptions, read_workload
print(sum(1 for _ in read_workload({str(path)!r}, ReadOptions(limit={limit})).requests))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    count, peak_kib = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    return int(count), int(peak_kib) << 10


def test_aiperf_is_sorted_within_its_bound(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="file:2: more than 1 requests in unsorted lines"):
        requests_in(tmp_path, AIPERF, max_unsorted=1)
