"""Routes are decided again from their recording, and any change of the recording is located."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import zstandard
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from lockstep.cli.replay import verify_trace
from lockstep.cluster.route_recorder import (
    ROUTE_SUFFIX,
    Chosen,
    Ended,
    Learned,
    Opened,
    Resumed,
)
from lockstep.core.balancer import Balancer, RoutingChoice, RoutingPolicy
from lockstep.errors import TraceError
from lockstep.replay.recorded_routes import verify_routes
from lockstep.replay.trace import files_in
from lockstep.replay.trace_integrity import Kind
from lockstep.worker.flight.entries import SCHEMA_VERSION, End, EntryStruct, Header
from tests.replay.recordings import write_whole
from tests.replay.routing import entries_in, recorded


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1))
def test_routes_of_any_history_are_decided_again(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    folder = tmp_path_factory.mktemp("life")
    life = recorded(folder, seed)
    verdict = verify_routes(folder)
    assert (verdict.counts, verdict.diverged, verdict.findings) == ({"routes": life.num_routes}, None, ())


class Stubborn(Balancer):
    """A balancer that always chooses replica 0."""

    def choose(self, hashes: Sequence[bytes] = (), session: str | None = None) -> RoutingChoice | None:
        choice = super().choose(hashes, session)
        return None if choice is None else choice._replace(replica=0)


def test_a_different_balancer_is_detected_at_its_first_differing_route(tmp_path: Path) -> None:
    recorded(tmp_path, seed=3, policy=RoutingPolicy.LEAST_LOADED)
    (path,) = files_in(tmp_path, ROUTE_SUFFIX)
    verdict = verify_routes(path, Stubborn)
    assert verdict.diverged is not None
    number, group = verdict.diverged.number, verdict.diverged.group
    routes = [(at, entry) for at, entry in enumerate(entries_in(path), 1) if isinstance(entry, Chosen)]
    first, route = next((at, entry) for at, entry in routes if entry.replica > 0)
    assert number == first
    assert [*verdict.lines()][-1] == (
        f"{path}: entry {number}, {group}: recorded replica {route.replica} (load), decided replica 0 (load)"
    )
    assert verdict.facts()["parted"] == {
        "file": path.name,
        "entry": number,
        "group": group,
        "recorded": f"replica {route.replica} (load)",
        "decided": "replica 0 (load)",
    }


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_a_change_of_any_field_of_a_route_is_detected(
    tmp_path_factory: pytest.TempPathFactory, seed: int, data: st.DataObject
) -> None:
    """The file's chain is recomputed, since manifest and chain detect every other change."""
    folder = tmp_path_factory.mktemp("changed")
    recorded(folder, seed, 60)
    (path,) = files_in(folder, ROUTE_SUFFIX)
    entries = entries_in(path)
    routes = [at for at, entry in enumerate(entries) if isinstance(entry, Chosen)]
    assume(routes)
    at = data.draw(st.sampled_from(routes))
    name = data.draw(st.sampled_from(("replica", "why", "num_cached")))
    entries[at] = replace(entries[at], **{name: changed(getattr(entries[at], name))})
    write_whole(path, entries)
    diverged = verify_routes(path).diverged
    assert diverged is not None
    assert diverged.number == at + 1


def changed(value: int | str) -> int | str:
    return value + 1 if isinstance(value, int) else f"{value}x"


def test_data_written_before_a_kill_is_verified(tmp_path: Path) -> None:
    life = recorded(tmp_path, seed=4)
    (path,) = files_in(tmp_path, ROUTE_SUFFIX)
    path.write_bytes(path.read_bytes()[:-6])
    verdict = verify_routes(path)
    assert [each.kind for each in verdict.findings] == [Kind.OPEN]
    assert 0 < verdict.counts["routes"] <= life.num_routes
    assert verdict.diverged is None


def test_a_file_that_begins_with_another_state_is_detected(tmp_path: Path) -> None:
    recorded(tmp_path, seed=5)
    (path,) = files_in(tmp_path, ROUTE_SUFFIX)
    header = entries_in(path)[0]
    run, number = path.stem.rsplit("-", 1)
    resumed = Resumed(1, "a", "prefix", 4, (0, 7), (0, 2), 1, ((), ()), ())
    following = tmp_path / f"{run}-{int(number) + 1:06}{ROUTE_SUFFIX}"
    write_whole(following, [replace(header, file=header.file + 1), resumed, END])
    verdict = verify_routes(tmp_path)
    assert verdict.diverged is not None
    assert (verdict.diverged.path, verdict.diverged.number) == (following, 2)
    assert verify_routes(following).diverged is None, "by itself it is believed"


HEADER, END = Header(SCHEMA_VERSION, "0.1", "r", 1), End((), goes_on=False)
OPENED = Opened(1, "r0", 2, "prefix", 4)


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ([replace(HEADER, schema=99)], "its schema is 99"),
        ([HEADER, Ended(1, 0)], "entry 2 is impossible"),
        ([HEADER, replace(OPENED, num=0)], "entry 2 is impossible"),
        ([HEADER, replace(OPENED, num=9999)], "at most 1024 replicas"),
        ([HEADER, replace(OPENED, policy="nearest")], "entry 2 is impossible"),
        ([HEADER, OPENED, Ended(1, -1)], "unknown replica -1"),
        ([HEADER, OPENED, Learned(1, 0, ((0, 99999999999),))], "entry 3 is impossible"),
        ([HEADER, Resumed(1, "r0", "prefix", 4, (0,), (0, 1), 3, ((),), ())], "replicas outside of its 1"),
    ],
)
def test_impossible_entries_are_refused(tmp_path: Path, entries: list[EntryStruct], what: str) -> None:
    path = tmp_path / f"x{ROUTE_SUFFIX}"
    write_whole(path, [*entries, END])
    with pytest.raises(TraceError, match=what):
        verify_routes(path)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b'{"schema":2,"lockstep":"0.8.0","run":"r","file":1,"gap":""}\n', "its schema is 2, .* with lockstep 0.8.0"),
        (b"no entries at all", "is not an entry of a recording"),
        (b"", "ends before the first entry"),
    ],
)
def test_a_file_that_is_not_a_recording_of_routes_is_refused(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / f"x{ROUTE_SUFFIX}"
    path.write_bytes(zstandard.compress(content) if content else b"")
    with pytest.raises(TraceError, match=what):
        verify_routes(path)


def test_a_gateways_directory_is_verified_by_its_routes_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    life = recorded(tmp_path, seed=6)
    assert verify_trace(tmp_path, as_json=False) == 0
    assert capsys.readouterr().out == f"routing: {life.num_routes} routes, identical\n"
    assert verify_trace(tmp_path, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["routing"] == {
        "identical": True,
        "routes": life.num_routes,
        "whole": True,
        "findings": [],
        "parted": None,
    }
    (path,) = files_in(tmp_path, ROUTE_SUFFIX)
    entries = entries_in(path)
    at = next(number for number, entry in enumerate(entries) if isinstance(entry, Chosen))
    entries[at] = replace(entries[at], replica=1 - entries[at].replica)
    write_whole(path, entries)
    assert verify_trace(path, as_json=False) == 1
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "routing: 1 routes, not identical"
    assert f"entry {at + 1}, " in second
    assert third.startswith(f"{path.name} was ")
