"""The same input gives the same bytes in any process, and no clock is read."""

from __future__ import annotations

import datetime
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lockstep.replay.configs import config_for
from lockstep.replay.cost import CostModel
from lockstep.replay.report import Report, report_of, to_json
from lockstep.replay.simulator import Simulation
from lockstep.replay.timeline import TickRecorder
from lockstep.replay.workload import PS_PER_MS, ArrivalUnit, Workload
from tests.replay.sample import request, workload
from tests.waiting import HANG_S

CLOCKS = (
    "time",
    "time_ns",
    "monotonic",
    "monotonic_ns",
    "perf_counter",
    "perf_counter_ns",
    "process_time",
    "thread_time",
)
SCRIPT = "import sys; from tests.replay.test_determinism import pressed; sys.stdout.buffer.write(pressed() + pressed())"


def crowded() -> Workload:
    """Workload with swaps, hits, priorities and tenants."""
    rng = random.Random(5)
    requests = [
        request(
            f"r{index}",
            prompt := rng.randrange(1, 200),
            rng.randrange(1, 40),
            index // 4 * 20 * PS_PER_MS,
            tenant=rng.choice("abc"),
            priority=rng.choice([-2, 0, 1]),
            contents=tuple(range(-(-prompt // 16))),
        )
        for index in range(80)
    ]
    return workload(*requests, unit=ArrivalUnit.PS, content_size=16)


def pressed() -> bytes:
    """Report of it as bytes, including all ticks."""
    load = crowded()
    limits = {"num_blocks": "40", "num_host_blocks": "9", "max_num_seqs": "12", "order": "fair"}
    recorder = TickRecorder()
    replay = Simulation(load, config_for(load, limits), CostModel(context_token_ps=7), watchers=(recorder,)).run()
    assert replay.stats.num_preemptions > 0
    assert replay.stats.prefix_hits_tokens > 0
    return to_json(report_of(replay, {"ttft": 100.0}, recorder))


def test_ten_runs_under_five_hash_seeds_give_the_same_bytes() -> None:
    """The other processes have no compiled modules even if this one has, and the bytes are equal."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root / "src"), str(root)])
    expected = pressed()
    for seed in (0, 1, 2, 4096, 4294967295):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": path}
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, check=True, timeout=HANG_S
        )
        assert run.stdout == expected * 2


def test_different_inputs_give_different_bytes() -> None:
    """Negative counterpart of the test above."""
    load = crowded()
    prints = [
        Simulation(load, config_for(load, {"num_blocks": "40", "max_num_seqs": number})).run().fingerprint
        for number in ("11", "12")
    ]
    assert prints[0] != prints[1]


def test_no_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this thread is checked, because other tests keep servers running in this process."""
    expected = pressed()
    replaying = threading.get_ident()

    def refusing(clock: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            if threading.get_ident() == replaying:
                raise AssertionError("a replay asked what time it is")
            return clock(*arguments)

        return ask

    now = {name: refusing(getattr(datetime.datetime, name)) for name in ("now", "utcnow", "today")}
    no_now = type("datetime", (datetime.datetime,), {name: staticmethod(ask) for name, ask in now.items()})
    with monkeypatch.context() as patch:
        for name in CLOCKS:
            patch.setattr(time, name, refusing(getattr(time, name)))
        patch.setattr(datetime, "datetime", no_now)
        with pytest.raises(AssertionError, match="what time it is"):
            time.monotonic()
        data = pressed()
    assert data == expected


def test_a_report_can_be_decoded_from_its_bytes() -> None:
    data = pressed()
    report = msgspec.json.decode(data, type=Report)
    assert to_json(report) == data
    assert report.ticks is not None
    assert report.outcomes is not None
    assert sum(len(tick.admitted) for tick in report.ticks) == len(report.outcomes) == report.requests
    assert sum(len(tick.completed) for tick in report.ticks) == report.requests_completed
    assert sum(tick.decoded_tokens for tick in report.ticks) == report.decode_tokens
    assert sum(tick.prefill_tokens for tick in report.ticks) == report.prefill_tokens
    assert sum(len(tick.preempted) for tick in report.ticks) == report.preemptions
    assert sum(tick.swapped_out_blocks for tick in report.ticks) == report.swapped_out_blocks > 0
    assert max(tick.used_blocks for tick in report.ticks) == report.peak_blocks


def test_records_are_bounded_and_state_the_number_of_omitted_ticks() -> None:
    load = crowded()
    recorder = TickRecorder(most=3)
    report = report_of(Simulation(load, config_for(load), watchers=(recorder,)).run(), recorder=recorder)
    assert report.ticks is not None
    assert len(report.ticks) == 3
    assert report.notes[-1] == f"ticks has the first 3; {report.total_ticks - 3} are omitted"
