"""Recorded routes hold all that decides them and nothing that says who asked, or what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.cluster.route_recorder import (
    DEFECT,
    ROUTE_SUFFIX,
    TOO_LARGE,
    Chosen,
    Learned,
    Opened,
    Resumed,
    RouteRecorder,
)
from lockstep.core.balancer import Balancer, RoutingChoice, RoutingPolicy, Why
from lockstep.replay.recorded_routes import verify_routes
from lockstep.replay.trace import files_in, read_frames
from lockstep.worker.flight.options import TraceOptions
from tests.replay.routing import History, chain, entries_in
from tests.waiting import until


def of_one_session(folder: Path, session: str, options: TraceOptions) -> list[Any]:
    recorder = RouteRecorder(options)
    recorder.opened("r0", 2, RoutingPolicy.PREFIX, 4)
    recorder.learned("r0", 1, [(each, True) for each in chain(1, 2, 3)])
    recorder.chosen("r0", chain(1, 2, 4), session, RoutingChoice(1, Why.PREFIX, 2))
    recorder.close()
    (path,) = files_in(folder, ROUTE_SUFFIX)
    return entries_in(path)


def test_a_route_has_numbers_for_contents_and_a_digest_for_its_session(tmp_path: Path) -> None:
    header, opened, learned, chosen, end = of_one_session(tmp_path, "anna", TraceOptions(str(tmp_path)))
    assert (header.file, header.gap, end.goes_on) == (1, "", False)
    assert opened == Opened(1, "r0", 2, "prefix", 4)
    assert learned == Learned(1, 1, ((0, 3),))
    assert chosen == Chosen(1, (0, 2), 3, chosen.session, 1, "prefix", 2)
    assert bytes.fromhex(chosen.session)
    (path,) = files_in(tmp_path, ROUTE_SUFFIX)
    held = b"".join(frame.data for frame in read_frames(path))
    assert b"anna" not in held
    assert not any(each in held or each.hex().encode() in held for each in chain(1, 2, 3))


def test_digests_of_sessions_compare_under_one_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef")
    sessions = []
    for name in ("a", "b", "c"):
        options = TraceOptions(str(tmp_path / name), key_file="" if name == "c" else str(key))
        sessions.append(of_one_session(tmp_path / name, "anna", options)[3].session)
    assert sessions[0] == sessions[1] != sessions[2]


def test_session_id_may_contain_any_text(tmp_path: Path) -> None:
    of_one_session(tmp_path, "half of one \ud83d", TraceOptions(str(tmp_path), has_content=True))
    verdict = verify_routes(tmp_path)
    assert (verdict.counts, verdict.diverged, verdict.findings) == ({"routes": 1}, None, ())


def test_each_file_begins_with_the_state_of_every_group(tmp_path: Path) -> None:
    """Written into files of some kilobytes, of which the oldest go; what is left is decided again."""
    life = History(RouteRecorder(TraceOptions(str(tmp_path), 4 << 17)), seed=1, policy=RoutingPolicy.PREFIX)
    while len(files_in(tmp_path, ROUTE_SUFFIX)) < 6:
        life.live(50)
        until(lambda: not life.recorder.report().num_queued_bytes)
    life.recorder.close()
    first, *_, last = files_in(tmp_path, ROUTE_SUFFIX)
    assert verify_routes(tmp_path).diverged is None
    for path in (first, last):
        assert verify_routes(path).diverged is None
    header, *resumed = entries_in(last)[:3]
    assert header.file >= 6
    assert [type(each) for each in resumed] == [Resumed, Resumed]
    first.unlink()
    verdict = verify_routes(tmp_path)
    assert (verdict.diverged, verdict.findings) == (None, ()), "the oldest may have been deleted"


def test_full_disk_causes_a_gap_and_the_next_file_is_readable_without_the_lost_part(tmp_path: Path) -> None:
    life = History(RouteRecorder(TraceOptions(str(tmp_path), retry_s=0.0)), seed=2)
    life.live(100)
    life.recorder._files._break("No space left on device", 0)
    assert life.recorder.fault == "No space left on device"
    until(lambda: not life.recorder.report().num_queued_bytes)
    life.live(100)
    life.recorder.close()
    verdict = verify_routes(tmp_path)
    assert verdict.diverged is None
    assert [each.kind.value for each in verdict.findings] == ["gap"]
    assert verdict.is_in_order(allows_gaps=False), "a gap is nobody's fault"


def test_balancers_with_too_many_contents_are_not_recorded_and_a_warning_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each file is full at once, so that each entry but those of a refused file begins another."""
    recorder = RouteRecorder(TraceOptions(str(tmp_path), num_files=1 << 30, max_contents=1))
    balancer = Balancer(2)
    recorder.opened("r0", 2, balancer.policy, balancer.max_imbalance)

    def learn(*news: tuple[bytes, bool]) -> None:
        balancer.learn(0, news)
        recorder.learned("r0", 0, news)

    def choose() -> None:
        recorder.chosen("r0", chain(1), None, balancer.choose(chain(1)))

    learn(*((each, True) for each in chain(1, 2, 3)))
    until(lambda: not recorder.report().num_queued_bytes)
    choose()
    choose()
    assert recorder.fault == TOO_LARGE.format(2)
    assert caplog.text.count("no routes are recorded") == 1
    learn(*((each, False) for each in chain(1, 2, 3)))
    choose()
    assert recorder.fault == ""
    recorder.close()
    verdict = verify_routes(tmp_path)
    assert (verdict.counts["routes"], verdict.diverged) == (1, None)
    assert TOO_LARGE.format(2) in str(verdict.findings[0])


def test_a_defect_of_the_recorder_costs_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = RouteRecorder(TraceOptions(str(tmp_path)))
    recorder.ended("nobody", 0)
    assert recorder.fault == DEFECT
    recorder.opened("r0", 2, RoutingPolicy.PREFIX, 4)
    recorder.ended("r0", 7)
    assert caplog.text.count("no routes are recorded from here on") == 1
    recorder.close()
