"""Routes are decided again from their recording; whatever was changed of it is found, and where."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cli.replay import verify_trace
from lockstep.cluster.route_recorder import ROUTE_SUFFIX
from lockstep.core.balancer import Balancer, RoutingChoice, RoutingPolicy
from lockstep.errors import TraceError
from lockstep.replay.recorded_routes import RoutesVerdict, facts, route_files, verify_routes
from lockstep.replay.trace_integrity import Kind
from tests.replay.routing import lines_in, recorded, write_lines

FIELDS = ("tag", "group", "contents", "num_blocks", "session", "replica", "why", "num_cached")
"""Of a route's line."""


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_routes_of_any_life_are_decided_again(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    folder = tmp_path_factory.mktemp("life")
    life = recorded(folder, seed)
    verdict = verify_routes(route_files(folder))
    assert verdict == RoutesVerdict(life.num_routes, None, ())


class Stubborn(Balancer):
    """One that always answers replica 0."""

    def choose(self, hashes: Sequence[bytes] = (), session: str | None = None) -> RoutingChoice | None:
        choice = super().choose(hashes, session)
        return None if choice is None else choice._replace(replica=0)


def test_another_balancer_is_caught_at_its_first_other_route(tmp_path: Path) -> None:
    recorded(tmp_path, seed=3, policy=RoutingPolicy.LEAST_LOADED)
    (path,) = route_files(tmp_path)
    verdict = verify_routes([path], Stubborn)
    assert verdict.divergence is not None
    line = verdict.divergence.line
    routes = [
        (number, json.loads(each)) for number, each in enumerate(lines_in(path), 1) if each.startswith('["chosen')
    ]
    first = next((number, route) for number, route in routes if route[5] > 0)
    assert line == first[0]
    group, recorded_route = verdict.divergence.group, f"replica {first[1][5]} (load)"
    assert str(verdict.divergence) == (
        f"{path}: line {line}, {group}: recorded {recorded_route}, decided replica 0 (load)"
    )
    assert facts(verdict)["parted"] == {
        "file": path.name,
        "line": line,
        "group": group,
        "recorded": recorded_route,
        "decided": "replica 0 (load)",
    }


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_one_changed_field_of_any_line_is_found(
    tmp_path_factory: pytest.TempPathFactory, seed: int, data: st.DataObject
) -> None:
    """At its mark; of a route whose mark was made again, at the line itself."""
    folder = tmp_path_factory.mktemp("changed")
    recorded(folder, seed, 60)
    (path,) = route_files(folder)
    lines = lines_in(path)
    at = data.draw(st.integers(1, len(lines) - 2))
    entry = json.loads(lines[at])
    place = data.draw(st.integers(1, len(entry) - 1))
    entry[place] = changed(entry[place])
    lines[at] = json.dumps(entry, separators=(",", ":"))
    write_lines(path, lines, with_marks=False)
    with pytest.raises(TraceError, match=r"lines? "):
        verify_routes([path])
    if entry[0] == "chosen" and place >= FIELDS.index("replica"):
        write_lines(path, lines)
        divergence = verify_routes([path]).divergence
        assert divergence is not None
        assert divergence.line == at + 1


def changed(value: object) -> object:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return f"{value}x"
        case None:
            return "somebody"
        case list():
            return [*value, [0, 1]] if not value or isinstance(value[0], list) else [*value, 9, 1]
    raise AssertionError(value)


def test_after_a_kill_what_reached_the_disk_is_verified(tmp_path: Path) -> None:
    life = recorded(tmp_path, seed=4)
    (path,) = route_files(tmp_path)
    path.write_bytes(path.read_bytes()[:-6])
    verdict = verify_routes([path])
    assert [each.kind for each in verdict.findings] == [Kind.OPEN]
    assert 0 < verdict.num_routes <= life.num_routes
    assert verdict.divergence is None


def test_a_file_that_begins_with_another_state_than_the_one_before_ended_with_is_found(tmp_path: Path) -> None:
    recorded(tmp_path, seed=5)
    (path,) = route_files(tmp_path)
    header = json.loads(lines_in(path)[0])
    run, number = path.stem.rsplit("-", 1)
    resumed = ["resumed", 1, "a", "prefix", 4, [0, 7], [0, 2], 1, [[], []], []]
    following = tmp_path / f"{run}-{int(number) + 1:06}{ROUTE_SUFFIX}"
    write_lines(following, [json.dumps({**header, "file": header["file"] + 1}), json.dumps(resumed)])
    verdict = verify_routes(route_files(tmp_path))
    assert verdict.divergence is not None
    assert (verdict.divergence.path, verdict.divergence.line) == (following, 2)
    assert verify_routes([following]).divergence is None, "by itself it is believed"


HEADER = b'{"schema":2,"lockstep":"0.1","run":"r","file":1}\n'


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b'{"schema":99,"lockstep":"9.0","run":"r","file":1}\n', "its schema is 99"),
        (HEADER + b'["routed",1]\n', "line 2 is no route"),
        (HEADER + b'["ended",1,0]\n', "line 2 cannot have happened"),
        (HEADER + b'["opened",1,"r0",0,"prefix",4]\n', "line 2 cannot have happened"),
        (HEADER + b'["opened",1,"r0",9999,"prefix",4]\n', "at most 1024 replicas"),
        (HEADER + b'["opened",1,"r0",2,"nearest",4]\n', "line 2 cannot have happened"),
        (HEADER + b'["opened",1,"r0",2,"prefix",4]\n["ended",1,-1]\n', "no replica -1"),
        (HEADER + b'["opened",1,"r0",2,"prefix",4]\n["learned",1,0,[[0,99999999999]]]\n', "line 3 cannot"),
        (HEADER + b'["resumed",1,"r0","prefix",4,[0],[0,1],3,[[]],[]]\n', "others than its 1 replicas"),
        (b'{"schema":1,"lockstep":"0.1","run":"r","file":1}\n', "its schema is 1"),
        (b"no json\n", "line 1"),
        (b"", "no recording of routes"),
    ],
)
def test_what_is_no_recording_of_routes_is_refused(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / f"x{ROUTE_SUFFIX}"
    write_lines(path, content.decode().splitlines())
    with pytest.raises(TraceError, match=what):
        verify_routes([path])


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ([HEADER.decode().rstrip(), '["mark","00"]'], "lines 1 to 2 are not as they were recorded"),
        ([HEADER.decode().rstrip(), '["ended",1,0]'], "lines 1 to 2 are not as they were recorded: no mark follows"),
    ],
)
def test_lines_without_their_mark_are_refused(tmp_path: Path, lines: list[str], what: str) -> None:
    path = tmp_path / f"x{ROUTE_SUFFIX}"
    write_lines(path, lines, with_marks=False)
    with pytest.raises(TraceError, match=what):
        verify_routes([path])


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
    (path,) = route_files(tmp_path)
    lines = lines_in(path)
    at = next(number for number, line in enumerate(lines) if line.startswith('["chosen"'))
    route = json.loads(lines[at])
    write_lines(path, [*lines[:at], json.dumps([*route[:5], 1 - route[5], *route[6:]]), *lines[at + 1 :]])
    assert verify_trace(path, as_json=False) == 1
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "routing: 1 routes, not identical"
    assert f"line {at + 1}, " in second
    assert third.startswith(f"{path.name} was ")
