"""The first difference of two runs' inputs is described."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from lockstep.core.request import FinishReason, Request
from lockstep.replay.diff import differing_command, differing_request
from lockstep.replay.workload import PS_PER_MS, ArrivalUnit, WorkloadRequest
from lockstep.worker.flight.entries import Aborted, Added, CacheReset, Command, Named, Unpinned
from tests.replay.workloads import request

A = request("a", 10)
B = request("b", 10, arrival=20)


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        ([A, B], [A, B], ""),
        ([], [], ""),
        ([A, B], [A], "request 2 is b in A and missing in B"),
        ([A], [A, B], "request 2 is b in B and missing in A"),
        ([A, B], [B], "request 1 is a in A and b in B"),
        ([request("7", 10)], [request("7", 12)], "first in request 7: prompt tokens: 10 in A and 12 in B"),
        (
            [A],
            [request("a", 10, output=5)],
            "maximum output tokens: 4 in A and 5 in B; output tokens: 4 in A and 5 in B",
        ),
        ([A, B], [A, request("b", 10, arrival=30)], "it arrives at tick 20 in A and at tick 30 in B"),
        ([A], [request("a", 10, priority=1)], "priority: 0 in A and 1 in B"),
        ([A], [request("a", 10, contents=(1,))], "its prompt has different content"),
    ],
)
def test_the_first_request_that_differs(a: list[WorkloadRequest], b: list[WorkloadRequest], told: str) -> None:
    found = differing_request(a, b, ArrivalUnit.TICKS)
    assert found.endswith(told)
    assert bool(found) == bool(told)


def test_times_are_given_in_milliseconds() -> None:
    later = request("a", 10, arrival=3 * PS_PER_MS)
    assert "at 0.000 ms in A and at 3.000 ms in B" in differing_request([A], [later], ArrivalUnit.PS)


ADDED = Added(0, 3, 7, Request(40, allows_forced=False), 0, ())


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        ([ADDED], [ADDED], ""),
        (
            [ADDED],
            [replace(ADDED, step=5)],
            "in request 7 of 40 prompt tokens and as many output tokens as fit, priority 0, before step 3 in A and "
            "request 7 of 40 prompt tokens and as many output tokens as fit, priority 0, before step 5 in B",
        ),
        (
            [ADDED, CacheReset(0, 9)],
            [ADDED],
            "B ends, and A has a reset of the prefix cache before step 9",
        ),
        (
            [Named(0, 4, 7, (1, 2), True)],
            [],
            "B ends, and A has 2 blocks of the answer of request 7 to publish before step 4",
        ),
        (
            [Unpinned(0, 4, (1, 2))],
            [Aborted(0, 4, 7, FinishReason.ABORT, False)],
            "in 2 blocks of a session to release before step 4 in A and the end of request 7 (abort) before "
            "step 4 in B",
        ),
    ],
)
def test_the_first_command_that_differs(a: list[Command], b: list[Command], told: str) -> None:
    found = differing_command(a, b)
    assert found.endswith(told)
    assert bool(found) == bool(told)
