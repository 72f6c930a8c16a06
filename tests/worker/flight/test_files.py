"""A recording's files: bounded, readable after anything, and never a request's trouble."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from lockstep.engine.options import LoadOptions
from lockstep.replay.trace import STEPS, open_trace, read_frames
from lockstep.replay.trace_integrity import Kind
from lockstep.replay.verify import verify
from lockstep.worker.flight.chunks import ChunkReader
from lockstep.worker.flight.entries import Header
from lockstep.worker.flight.recorder import DEFECT
from lockstep.worker.messages import AskHealth, AskMetrics, HealthReport, MetricsReport
from tests.replay.recordings import POOL, files_of, options, record, submit
from tests.waiting import HANG_S
from tests.worker.support import Bench, running

MAX_BATCHES = 40


def lost_of(bench: Bench) -> dict[str, int]:
    report = bench.ask(AskMetrics(), MetricsReport)
    counters = report.replicas["a"].counters
    return {name: counters[name] for name in ("trace_lost_steps", "trace_gaps")}


def recording_of(bench: Bench) -> tuple[float, str]:
    """The gauge of a replica, and why its device records nothing."""
    report, health = bench.ask(AskMetrics(), MetricsReport), bench.ask(AskHealth(), HealthReport)
    return report.replicas["a"].gauges["trace_recording"], health.recording_fault


def test_remaining_files_verify_singly_and_together_after_rotation(tmp_path: Path) -> None:
    """With files of some kilobytes: a few remain, the first one is gone, and each begins with all that it needs."""
    most = 40_000
    with running(trace=options(tmp_path, most, flush_interval_s=0.02)) as bench:
        bench.ready("a", "stub://alpha", LoadOptions(POOL))
        bench.ready("b", "stub://beta", LoadOptions(POOL))
        for batch in range(MAX_BATCHES):
            submit(bench, 40, batch * 100)
            bench.events.clear()
            if files_of(tmp_path)[0].name[-len("000001.lstrace") :] != "000001.lstrace":
                break
    kept = files_of(tmp_path)
    assert len(kept) >= 3
    assert sum(path.stat().st_size for path in kept) <= most + most // 4, "beyond the bound is one chunk at most"
    assert not kept[0].name.endswith("-000001.lstrace")
    together = verify(open_trace(tmp_path))
    assert together.is_identical, together.diverged
    assert together.findings == (), "the oldest files are gone, and that is normal"
    alone = [verify(open_trace(path)) for path in kept]
    assert all(each.is_identical for each in alone)
    assert sum(each.counts["steps"] for each in alone) == together.counts["steps"] > 20


def test_a_directory_that_cannot_be_written_is_a_warning_and_a_counter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    with running(trace=options(blocked / "below")) as bench:
        bench.ready("a", "stub://alpha")
        bench.ready("b", "stub://beta")
        submit(bench, 12)
        lost = lost_of(bench)
        assert recording_of(bench) == (0.0, "Not a directory")
    assert lost["trace_lost_steps"] > 5
    assert lost["trace_gaps"] == 1
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [warning.message.count("gap") for warning in warnings] == [1]
    assert blocked.read_text() == "no directory"


FULL = """
import resource, signal, sys, time
from lockstep.replay.trace import open_trace
from lockstep.replay.verify import verify
from tests.replay.recordings import options, submit
from tests.worker.support import running

folder = sys.argv[1]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
with running(trace=options(folder, retry_s=0.01, flush_interval_s=0.01)) as bench:
    bench.ready("a", "stub://alpha")
    bench.ready("b", "stub://beta")
    submit(bench, 12)
    report, number = bench.worker._recorder.report, 100
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, hard))
    while not report().num_gaps:
        submit(bench, 60, number)
        number += 60
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    written = report().num_bytes
    while report().num_bytes == written:
        submit(bench, 12, number)
        number += 12
    gaps, fault = report().num_gaps, report().fault
found = verify(open_trace(folder))
kinds = {each.kind.value for each in found.findings}
print(gaps > 0, found.is_in_order(False), kinds, found.counts["steps"] > 0, found.diverged, fault)
"""


def test_a_full_disk_ends_a_file_and_the_next_begins_with_a_checkpoint(tmp_path: Path) -> None:
    """A process of its own, whose files may not grow for a while; all its requests are answered."""
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True, cwd=root)
    assert ended.stdout == "True True {'gap'} True None \n", "and in the end it is recorded again"
    assert ended.stderr.count("has a gap") == 1


def test_a_writer_that_lags_loses_chunks_and_not_requests(tmp_path: Path) -> None:
    with running(trace=options(tmp_path, max_queued_bytes=60, flush_interval_s=0.01)) as bench:
        bench.ready("a", "stub://alpha")
        bench.ready("b", "stub://beta")
        submit(bench, 24)
        assert lost_of(bench)["trace_gaps"] > 0


def test_a_gap_keeps_file_numbers_consecutive_and_states_its_reason(tmp_path: Path) -> None:
    """The queue is too short for a while, in the middle of a file or where one would begin, again and again."""
    wanted = options(tmp_path, retry_s=0.0, flush_interval_s=0.0)
    changing: Any = SimpleNamespace(**structs.asdict(wanted), secret=wanted.secret)
    with running(trace=changing) as bench:
        bench.ready("a", "stub://alpha")
        bench.ready("b", "stub://beta")
        for batch in range(6):
            submit(bench, 6, 200 * batch)
            changing.max_queued_bytes = (0, 200)[batch % 2]
            submit(bench, 6, 200 * batch + 100)
            changing.max_queued_bytes = wanted.max_queued_bytes
    paths = files_of(tmp_path)
    assert [int(path.stem[-6:]) for path in paths] == list(range(1, len(paths) + 1))
    found = verify(open_trace(tmp_path))
    assert found.is_in_order(allows_gaps=False), found
    gaps = [each for each in found.findings if each.kind is Kind.GAP]
    assert len(gaps) >= 3
    assert all("the recorder could not write (the disk does not keep up)" in each.what for each in gaps)
    assert any(each.loss is not None and each.loss.num_turns for each in gaps)


def test_a_file_that_cannot_be_begun_gives_its_number_back(tmp_path: Path) -> None:
    """The directory comes later; nothing is missing before the first file but what it says."""
    folder = tmp_path / "flight"
    folder.write_text("no directory")
    with running(trace=options(folder, retry_s=0.0)) as bench:
        bench.ready("a", "stub://alpha")
        bench.ready("b", "stub://beta")
        submit(bench, 12)
        folder.unlink()
        submit(bench, 12, 100)
    [path] = files_of(folder)
    assert path.name.endswith("-000001.lstrace")
    found = verify(open_trace(folder))
    assert found.is_in_order(allows_gaps=False), found
    [finding] = found.findings
    assert finding.what.endswith("the recorder could not write (File exists)"), finding
    assert finding.loss is not None
    assert finding.loss.num_turns > 0


def test_a_defect_of_the_recorder_ends_the_recording_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*values: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("lockstep.worker.flight.recorder.Added.of", broken)
    with running(trace=options(tmp_path)) as bench:
        bench.ready("a", "stub://alpha")
        bench.ready("b", "stub://beta")
        submit(bench, 12)
        assert lost_of(bench)["trace_lost_steps"] > 5
        assert recording_of(bench) == (0.0, DEFECT)
    assert [record.message.count("the recording ends here") for record in caplog.records] == [1]


def test_ids_are_bounded_by_beginning_another_file(tmp_path: Path) -> None:
    record(tmp_path, 60, max_contents=20, flush_interval_s=0.01)
    assert len(files_of(tmp_path)) > 2
    found = verify(open_trace(tmp_path))
    assert found.is_identical, found.diverged


def test_neither_hashes_nor_tenants_nor_tokens_are_written(tmp_path: Path) -> None:
    record(tmp_path, 24)
    held = b"".join(frame.data for path in files_of(tmp_path) for frame in read_frames(path))
    assert b"secret" not in held
    assert b"a beginning" not in held
    assert b"a beginning"[2:9] not in held


def test_the_header_of_a_file_has_the_run_and_number_of_its_name(tmp_path: Path) -> None:
    record(tmp_path, 6)
    [path] = files_of(tmp_path)
    [frame] = read_frames(path)
    first = next(ChunkReader(STEPS).read(frame.data))
    assert isinstance(first, Header)
    assert first.schema == 14
    assert path.name == f"{first.run}-{first.file:06}.lstrace"


def test_steps_recorded_a_second_ago_survive_a_kill(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from tests.replay.recordings import options, submit\nfrom tests.worker.support import running\n"
        "with running(trace=options(sys.argv[1])) as bench:\n"
        "    bench.ready('a', 'stub://alpha?step_ms=1')\n    bench.ready('b', 'stub://beta?step_ms=1')\n"
        "    submit(bench, 24)\n    recorder = bench.worker._recorder\n"
        "    while recorder.chunk.num_bytes or recorder.report().num_queued_bytes:\n        time.sleep(0.01)\n"
        "    print('done', flush=True)\n    time.sleep(3600)\n"
    )
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=root, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        os.kill(process.pid, signal.SIGKILL)
    found = verify(open_trace(tmp_path))
    assert found.is_identical, found.diverged
    [path] = files_of(tmp_path)
    [finding] = found.findings
    assert (finding.kind, finding.file, finding.byte) == (Kind.OPEN, path.name, path.stat().st_size)
    assert found.counts["steps"] > 50
    assert found.counts["unchecked_steps"] < 40, "only records that were open are missing"
