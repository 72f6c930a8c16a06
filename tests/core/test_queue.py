"""The queue is bounded, its orders are total, and tenants are served equally."""

from __future__ import annotations

import pytest

from lockstep.core.queue import TenantLedger, WaitingQueue
from lockstep.core.request import Request
from lockstep.core.sequence import Sequence
from lockstep.errors import QueueFullError
from tests.core.drive import config


class Line:
    """A queue with requests, shown as ids."""

    def __init__(self, **limits: object) -> None:
        self.ledger = TenantLedger(3)
        self.queue = WaitingQueue(config(**limits), self.ledger)
        self.seqs: list[Sequence] = []

    def add(self, priority: int = 0, tenant: str = "", arrival_step: int = 0, *, is_bulk: bool = False) -> Sequence:
        request = Request(5, 1, priority=priority, tenant=tenant, is_bulk=is_bulk)
        seq = Sequence(len(self.seqs), request, 1, arrival_step)
        self.seqs.append(seq)
        self.ledger.arrive(tenant)
        self.queue.add(seq)
        return seq

    def ids(self, step: int = 0, *, is_bulk: bool = False) -> list[int]:
        return [seq.seq_id for seq in self.queue.in_order(step, is_bulk=is_bulk)]


def test_fcfs_is_by_arrival_independent_of_priority() -> None:
    line = Line(order="fcfs")
    for priority in (1, -2, 0):
        line.add(priority)
    assert line.ids() == [0, 1, 2]
    line.queue.remove(line.seqs[1])
    assert line.ids() == [0, 2]


def test_bulk_requests_have_a_separate_queue_in_the_same_order() -> None:
    line = Line(order="priority")
    for priority, is_bulk in ((1, True), (0, False), (-2, True), (1, False)):
        line.add(priority, is_bulk=is_bulk)
    assert (line.ids(), line.ids(is_bulk=True)) == ([1, 3], [2, 0])
    assert (len(line.queue), line.queue.num_bulk) == (4, 2)
    line.queue.remove(line.seqs[0])
    assert (line.ids(is_bulk=True), line.queue.num_bulk) == ([2], 1)


def test_priority_order_is_by_priority_then_arrival() -> None:
    line = Line(order="priority")
    for priority in (1, 0, -2, 0, -2, 1, 7):
        line.add(priority)
    assert line.ids() == [2, 4, 1, 3, 0, 5, 6]
    assert len(line.queue) == 7


def test_aging_raises_the_priority_by_one_per_interval() -> None:
    line = Line(order="priority", priority_aging_steps=10)
    line.add(2, arrival_step=0)
    line.add(0, arrival_step=19)
    assert line.ids(step=19) == [1, 0]
    assert line.ids(step=20) == [0, 1], "equal priorities now, and it came first"
    assert line.queue.effective_priority(line.seqs[0], 35) == -1
    assert Line(order="fcfs", priority_aging_steps=10).queue.effective_priority(line.seqs[0], 35) == 2


def test_fair_admits_the_least_served_tenant_first_with_current_counts() -> None:
    line = Line(order="fair")
    for tenant in "aaab":
        line.add(tenant=tenant)
    order = []
    for seq in line.queue.in_order(0, is_bulk=False):
        order.append(seq.seq_id)
        line.ledger.charge(seq.request.tenant, 10)
    assert order == [0, 3, 1, 2]


def test_a_new_or_returning_tenant_starts_at_the_least_active_count() -> None:
    ledger = TenantLedger(10)
    ledger.arrive("a")
    ledger.charge("a", 100)
    ledger.arrive("b")
    assert ledger.served("b") == 100
    ledger.charge("b", 50)
    ledger.leave("a")
    ledger.charge("b", 50)
    ledger.arrive("a")
    assert ledger.served("a") == 200, "it gained nothing by staying away"
    ledger.charge("a", 500)
    ledger.leave("a")
    ledger.arrive("a")
    assert ledger.served("a") == 700, "and lost no debt"


def test_the_number_of_remembered_tenants_is_bounded() -> None:
    ledger = TenantLedger(3)
    for index in range(100):
        ledger.arrive(str(index))
        ledger.arrive(str(index))
        ledger.leave(str(index))
        assert len(ledger) <= 4
        ledger.leave(str(index))
    assert len(ledger) == 3
    ledger.arrive("97")
    ledger.arrive("x")
    ledger.leave("x")
    assert len(ledger) == 4


def test_the_queue_refuses_to_grow_beyond_its_bounds() -> None:
    line = Line(max_num_queued_reqs=2, max_num_queued_tokens=10)
    line.queue.check_room(99)
    line.add()
    line.queue.check_room(5)
    with pytest.raises(QueueFullError, match="5 prompt tokens wait already and this request has 6, but at most 10"):
        line.queue.check_room(6)
    line.add()
    with pytest.raises(QueueFullError, match="2 requests wait"):
        line.queue.check_room(1)
    assert line.queue.num_tokens == 10
    line.queue.remove(line.seqs[0])
    line.queue.check_room(5)
    assert line.queue.num_tokens == 5
