"""When a worker that ended is started again."""

from __future__ import annotations

from itertools import pairwise

from lockstep.worker.restarts import FIRST_DELAY_S, HEALTHY_S, MAX_DELAY_S, MIN_RETRY_AFTER_S, Restarts


def test_the_first_death_is_answered_at_once_and_each_that_follows_twice_as_late() -> None:
    restarts = Restarts()
    delays = [restarts.delay_s(now_s) for now_s in range(12)]
    assert delays[:2] == [0.0, FIRST_DELAY_S]
    assert all(after == min(2 * before, MAX_DELAY_S) for before, after in pairwise(delays[1:]))
    assert delays[-1] == MAX_DELAY_S


def test_a_short_life_does_not_excuse_the_deaths_before_it() -> None:
    restarts = Restarts()
    restarts.delay_s(0.0)
    restarts.up(1.0)
    assert restarts.delay_s(0.9 + HEALTHY_S) == FIRST_DELAY_S


def test_a_long_life_does() -> None:
    restarts = Restarts()
    for now_s in range(5):
        restarts.delay_s(now_s)
    restarts.up(10.0)
    restarts.up(9.0 + HEALTHY_S)
    assert restarts.delay_s(10.0 + HEALTHY_S) == 0.0
    assert restarts.delay_s(11.0 + HEALTHY_S) == FIRST_DELAY_S


def test_when_it_is_worth_asking_again_follows_from_the_next_start_and_the_last_loads() -> None:
    restarts = Restarts()
    assert restarts.retry_after_s(0.0) == MIN_RETRY_AFTER_S
    restarts.schedule(10.0, load_s=4.5)
    assert restarts.start_at_s == 10.0
    assert restarts.retry_after_s(10.0) == 6.0
    restarts.schedule(11.0, load_s=4.5)
    assert restarts.start_at_s == 11.0 + FIRST_DELAY_S
    assert restarts.retry_after_s(11.0) == 6.0
    assert restarts.retry_after_s(99.0) == MIN_RETRY_AFTER_S
