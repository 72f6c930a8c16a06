"""Events and requests as values, whatever a server sends."""

from __future__ import annotations

import msgspec

from lockstep.cli.top_client import decoded, events_in, transitions
from lockstep.cluster.events import ClusterEvent
from lockstep.cluster.snapshot import TransitionSnapshot
from lockstep.server.request_rows import RequestList
from tests.cli.views import request_of, snapshot_of


def test_events_are_read_and_invalid_lines_are_skipped() -> None:
    lines = [
        *(": watching", "", "id: 1", "event: hop", 'data: {"at_s":12.5,"model":"router","target":"a"}', ""),
        *("event: hop", "data: not JSON", "event: hop", "data: [1]", "event: hop", 'data: {"at_s":"now"}'),
        *("id: 2", "event: kv_rejected", 'data: {"at_s":13,"reason":"checksum"}'),
    ]
    assert list(events_in(lines)) == [
        ClusterEvent(1, 12.5, "hop", {"model": "router", "target": "a"}),
        ClusterEvent(2, 13, "kv_rejected", {"reason": "checksum"}),
    ]


def test_transitions_are_events_of_tiers() -> None:
    change = TransitionSnapshot(1.0, "legal", "standby", "loading", "on demand", 0.0)
    [event] = transitions(snapshot_of(transitions=(change,)))
    assert (event.at_s, event.type) == (1.0, "tier_changed")
    assert (event.fields["from"], event.fields["to"]) == ("standby", "loading")


def test_request_rows_with_unknown_members_are_read() -> None:
    row = request_of("a", "running", total_ms=4.5, prompt_tokens=3)
    data = [{**msgspec.to_builtins(row), "reasons": ["no block"]}]
    assert decoded(msgspec.json.encode({"object": "list", "data": data}).decode(), RequestList) == RequestList(
        "list", (row,)
    )


def test_a_server_that_does_not_list_requests_has_none() -> None:
    refusal = '{"error":{"message":"The path /v1/requests does not exist.","code":"unknown_path"}}'
    for text in (refusal, '{"object":"list","data":[{"state":7}]}', "<html>"):
        assert decoded(text, RequestList) is None
    assert decoded('{"object":"list","data":[]}', RequestList) == RequestList("list", ())
