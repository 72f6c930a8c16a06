"""Lockstep's workload files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.request import Priority
from lockstep.errors import TraceError, UsageError
from lockstep.replay.configs import config_for
from lockstep.replay.readers import read_workload
from lockstep.replay.readers.document import members
from lockstep.replay.readers.workload_json import KEYS, read_workload_file
from lockstep.replay.workload import PS_PER_MS, ArrivalUnit, Workload, WorkloadRequest
from tests.replay.readers.files import WORKLOAD, written

ONE = '{"id": 1, "prompt_tokens": 40, "max_output_tokens": 2%s}'


def test_every_field_of_a_request_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    """Without ``output_tokens`` a request generates its maximum; names of hashes become dense ids; places are lines."""
    assert read_workload(written(tmp_path, WORKLOAD)) == Workload(
        "file",
        (
            WorkloadRequest("2", 16, 3, 3, 0, 3, contents=(0,), place="file:6"),
            WorkloadRequest("late", 40, 9, 4, 7, Priority.CRITICAL, "shop", (0, 1), "file:4"),
        ),
        ArrivalUnit.TICKS,
        16,
        {"block_size": 16, "num_blocks": 20, "chunking": False},
    )


def test_the_config_of_a_file_creates_a_scheduler(tmp_path: Path) -> None:
    config = config_for(read_workload(written(tmp_path, WORKLOAD)))
    assert (config.block_size, config.num_blocks, config.chunking) == (16, 20, False)


def test_fractional_milliseconds_are_exact(tmp_path: Path) -> None:
    """0.1 ms is an exact tenth and not the nearest binary number; digits below a picosecond are dropped."""
    requests = ", ".join(
        f'{{"id": {index}, "prompt_tokens": 1, "max_output_tokens": 1, "arrival_ms": {written_ms}}}'
        for index, written_ms in enumerate(("0", "0.1", "0.30", "1e2", "100.0000000019"))
    )
    workload = read_workload(written(tmp_path, f'{{"requests": [{requests}]}}'))
    assert workload.unit is ArrivalUnit.PS
    arrivals = [request.arrival for request in workload.requests]
    assert arrivals == [0, PS_PER_MS // 10, 3 * PS_PER_MS // 10, 100 * PS_PER_MS, 100 * PS_PER_MS + 1]


@settings(max_examples=60)
@given(
    arrivals=st.lists(st.integers(0, 5), min_size=1, max_size=20),
    indent=st.sampled_from([None, 0, 1, "\t"]),
    newline=st.sampled_from(["\n", "\r\n"]),
    first=st.booleans(),
)
def test_any_json_layout_is_read_with_line_numbers(
    arrivals: list[int], indent: int | str | None, newline: str, first: bool
) -> None:
    """Requests of one tick stay in the order of the file, and each place is the line where the request begins."""
    requests: list[dict[str, Any]] = [
        {"id": f"r{index}", "prompt_tokens": index + 1, "max_output_tokens": 5, "arrival_tick": tick}
        for index, tick in enumerate(arrivals)
    ]
    pairs: list[tuple[str, object]] = [("config", {"max_num_seqs": 3}), ("requests", requests)]
    text = json.dumps(dict(pairs if first else pairs[::-1]), indent=indent).replace("\n", newline)
    file = read_workload_file(members(text, "f", exact=KEYS, itemised="requests"), "f")
    assert [request.name for request in file.requests] == [
        request["id"] for request in sorted(requests, key=lambda request: request["arrival_tick"])
    ]
    lines = text.split("\n")
    for request in file.requests:
        line = int(request.place.removeprefix("f:")) - 1
        assert sum(text.count('"id"') for text in lines[:line]) <= request.num_prompt_tokens - 1
        assert f'"{request.name}"' in "".join(lines[line : line + 2])


@pytest.mark.parametrize(
    ("request_text", "message"),
    [
        ("3", "a request must be an object, not 3"),
        ('{"id": 1}', "missing prompt_tokens and max_output_tokens"),
        (ONE % ', "promt": 1', "unknown key 'promt'; the keys are id, prompt_tokens"),
        (ONE % ', "id": 2', "'id' appears twice"),
        (ONE % ', "output_tokens": 3', "output_tokens is 3; it must be a whole number from 1 to 2"),
        (ONE % ', "output_tokens": true', "output_tokens is True"),
        (ONE % ', "output_tokens": 1.5', "output_tokens is 1.5"),
        (ONE % ', "output_tokens": null', "output_tokens is None"),
        (ONE % ', "output_tokens": 1e999999999', "output_tokens is 1E"),
        (ONE % ', "output_tokens": NaN', "NaN is not a number"),
        (ONE % ', "arrival_ms": Infinity', "Infinity is not a number"),
        (ONE % ', "arrival_ms": -0.5', "arrival_ms is -0.5; it must be a number from 0"),
        (ONE % ', "arrival_ms": "5"', "arrival_ms is '5'"),
        (ONE % ', "arrival_ms": 1e300', "arrival_ms is 1E"),
        (ONE % ', "arrival_ms": 1e99999999999999999999', "a number is too large"),
        (ONE % f', "arrival_ms": {"9" * 5000}', "not JSON"),
        (ONE % ', "arrival_tick": -1', "arrival_tick is -1"),
        (ONE % ', "arrival_tick": 1, "arrival_ms": 1', "this file has both"),
        (ONE % ', "priority": "urgent"', "priority is 'urgent'; it must be one of critical, high, normal, low"),
        (ONE % ', "priority": 0.5', "priority is 0.5"),
        (ONE % ', "tenant": 7', "tenant is 7; it must be text"),
        (ONE % ', "tenant": "a\\nb"', r"tenant is 'a\\nb'; it must be text"),
        (ONE % ', "prefix_hashes": "a"', "prefix_hashes is 'a'; it must be a list"),
        (ONE % ', "prefix_hashes": ["a", "b", "c", "d"]', "4 prefix_hashes for 40 tokens, 3 blocks of 16"),
        (ONE % ', "prefix_hashes": [-1]', "a prefix hash is -1"),
        (ONE % ', "prefix_hashes": [[]]', r"a prefix hash is \[\]"),
        ('{"id": true, "prompt_tokens": 1, "max_output_tokens": 1}', "id is True"),
        ('{"id": "a", "prompt_tokens": 0, "max_output_tokens": 1}', "prompt_tokens is 0"),
        ('{"id": "a", "prompt_tokens": 1, "max_output_tokens": 0}', "max_output_tokens is 0"),
        ('{"id": "\\ud800", "prompt_tokens": 1, "max_output_tokens": 1}', "id is"),
        ('{"id": "first", "prompt_tokens": 1, "max_output_tokens": 1}', "'first' is already used at file:2"),
        ('{"id": "a", "prompt_tokens": 1 "max', "not JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_an_invalid_request_is_refused_with_its_line(tmp_path: Path, request_text: str, message: str) -> None:
    first = '{"id": "first", "prompt_tokens": 1, "max_output_tokens": 1}'
    text = f'{{"config": {{"block_size": 16}}, "requests": [\n{first},\n{request_text}\n]}}'
    with pytest.raises(TraceError, match=f"^file:3: .*{message}") as refused:
        read_workload(written(tmp_path, text))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"config": {}}', "file: missing requests"),
        ('{"config": 5, "requests": []}', "file:1: config is 5; it must be an object"),
        ('{"requests": []}', "file has no requests"),
        ('{"requests": {}}', r"file:1: requests is \{\}; it must be a list"),
        ('{"requests": [], "note": ""}', "file: unknown key 'note'; the keys are config, requests"),
        ('{"requests": [],\n"requests": []}', "file:2: .*'requests' appears twice"),
        ('{"requests": [],\n}', "file:2: .*a key expected after the comma"),
        ('{"requests": [\n1,\n]}', "file:3: .*a value expected after the comma"),
        ('{"requests": [] "config": {}}', "file:1: .*',' expected"),
        ('{"requests" []}', "file:1: .*':' expected"),
        ('{"requests": []} {}', "file:1: .*text after the end"),
        ('{"requests": [', r"file:1: .*not JSON"),
        ('{"requests": [1', r"file:1: .*it ends where ',' is expected"),
        ('{"requests": [], 5: 1}', "file:1: .*a key in quotes expected"),
        ('{"config": {"block_size": 0}, "requests": []}', "file:1: config: block_size is 0"),
        ('{"config": {"block_size": NaN}, "requests": []}', "file:1: .*NaN is not a number"),
        (
            '{"requests": [{"id": 1, "prompt_tokens": 1, "max_output_tokens": 1, "prefix_hashes": [1]}]}',
            "prefix_hashes need config.block_size",
        ),
        (
            '{"requests": [{"id": 1, "prompt_tokens": 1, "max_output_tokens": 1, "arrival_tick": 1},\n'
            '{"id": 2, "prompt_tokens": 1, "max_output_tokens": 1, "arrival_ms": 1}]}',
            "file:2: arrivals are either all arrival_tick or all arrival_ms",
        ),
    ],
)
def test_an_invalid_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message) as refused:
        read_workload(written(tmp_path, text))
    assert "\n" not in str(refused.value)


def test_a_config_with_an_unknown_field_is_rejected_when_it_is_used(tmp_path: Path) -> None:
    workload = read_workload(written(tmp_path, WORKLOAD.replace("num_blocks", "num_block")))
    with pytest.raises(UsageError, match="did you mean num_blocks"):
        config_for(workload)
