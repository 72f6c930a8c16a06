"""A workload that is written and read again gives the same replay."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.replay.configs import config_for
from lockstep.replay.readers import read_workload
from lockstep.replay.readers.workload_json import dump_workload
from lockstep.replay.simulator import Simulation
from lockstep.replay.workload import ArrivalUnit
from tests.replay.workloads import config, request, workload

rows = st.fixed_dictionaries(
    {
        "prompt": st.integers(1, 60),
        "output": st.integers(3, 9),
        "gets": st.integers(1, 3),
        "priority": st.integers(-2, 3),
        "tenant": st.sampled_from(["", "é", 'a"b']),
        "contents": st.lists(st.integers(0, 5), max_size=4).map(tuple),
    }
)


@settings(max_examples=50)
@given(
    st.lists(rows, min_size=1, max_size=10),
    st.lists(st.integers(0, 30_000_000_001), min_size=10, max_size=10),
    st.sampled_from(list(ArrivalUnit)),
    st.sampled_from([4, 8]),
    st.sampled_from(["fcfs", "priority", "fair"]),
)
def test_a_workload_replays_equally_after_writing_and_reading(
    tmp_path_factory: pytest.TempPathFactory,
    made: list[dict[str, Any]],
    gaps: list[int],
    unit: ArrivalUnit,
    block_size: int,
    order: str,
) -> None:
    arrivals = [sum(gaps[: number + 1]) >> (32 if unit is ArrivalUnit.TICKS else 0) for number in range(len(made))]
    first = workload(
        *(request(f"r{number}", arrival=arrivals[number], **each) for number, each in enumerate(made)),
        unit=unit,
        content_size=16,
    )
    limits = config(block_size=block_size, num_blocks=400 // block_size, max_model_len=80, max_num_seqs=3, order=order)
    path = tmp_path_factory.mktemp("written") / "workload.json"
    path.write_bytes(dump_workload(first, limits))

    again = read_workload(path)

    assert config_for(again) == limits
    assert [each.arrival for each in again.requests] == arrivals
    ran, reran = Simulation(first, limits).run(), Simulation(again, config_for(again)).run()
    assert reran.fingerprint == ran.fingerprint
    assert [each.num_cached_tokens for each in reran.outcomes] == [each.num_cached_tokens for each in ran.outcomes]


def test_contents_that_are_not_multiples_of_blocks_are_omitted() -> None:
    document = dump_workload(workload(request("r", 9, contents=(1,)), content_size=6), config(block_size=4))

    assert b"prefix_hashes" not in document
