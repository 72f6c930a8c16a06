"""The feed: events and requests as values, whatever a server sends."""

from __future__ import annotations

import json

from lockstep.cli.top_client import Event, RequestRow, events_in, requests_in, transitions
from lockstep.cluster.snapshot import TransitionSnapshot
from tests.cli.views import snapshot_of


def test_events_are_read_and_what_is_none_is_passed_over() -> None:
    lines = [
        *(": watching", "", "id: 1", "event: hop", 'data: {"at_s":12.5,"model":"router","target":"a"}', ""),
        *("event: hop", "data: not JSON", "event: hop", "data: [1]", "event: hop", 'data: {"at_s":"now"}'),
        *("event: kv_rejected", 'data: {"at_s":13,"reason":"checksum"}'),
    ]
    assert list(events_in(lines)) == [
        Event(12.5, "hop", {"model": "router", "target": "a"}),
        Event(13, "kv_rejected", {"reason": "checksum"}),
    ]


def test_transitions_are_events_of_tiers() -> None:
    change = TransitionSnapshot(1.0, "legal", "standby", "loading", "on demand", 0.0)
    [event] = transitions(snapshot_of(transitions=(change,)))
    assert (event.at_s, event.type) == (1.0, "tier_changed")
    assert (event.fields["from"], event.fields["to"]) == ("standby", "loading")


def test_requests_are_read_whatever_else_a_row_has() -> None:
    row = {"id": "a", "state": "running", "total_ms": 4.5, "prompt_tokens": 3, "number": 7, "reasons": ["no block"]}
    text = json.dumps({"object": "list", "data": [row]})
    assert requests_in(text) == (RequestRow("a", "running", total_ms=4.5, prompt_tokens=3),)


def test_a_server_that_does_not_list_requests_has_none() -> None:
    assert requests_in('{"error":{"message":"The path /v1/requests does not exist.","code":"unknown_path"}}') is None
    assert requests_in('{"object":"list","data":[{"state":7}]}') is None
    assert requests_in("<html>") is None
    assert requests_in('{"object":"list","data":[]}') == ()
