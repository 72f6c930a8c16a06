"""The breaker's decisions, with times that the tests make up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.cluster.breaker import Admission, Breaker, BreakerOptions, BreakerState

OPTIONS = BreakerOptions(num_failures=3, rest_s=1.0, max_rest_s=4.0)


def opened(now_s: float = 0.0) -> Breaker:
    breaker = Breaker(OPTIONS)
    for _ in range(OPTIONS.num_failures):
        breaker.failed(admitted(breaker, now_s), now_s)
    assert breaker.state is BreakerState.OPEN
    return breaker


def admitted(breaker: Breaker, now_s: float) -> Admission:
    admission = breaker.admit(now_s)
    assert admission is not None
    return admission


def test_only_consecutive_failures_open_the_breaker() -> None:
    breaker = Breaker(OPTIONS)
    for _ in range(5):
        breaker.failed(admitted(breaker, 0.0), 0.0)
        breaker.failed(admitted(breaker, 0.0), 0.0)
        breaker.succeeded(admitted(breaker, 0.0))
    assert breaker.state is BreakerState.CLOSED
    assert breaker.wait_s(0.0) == 0.0


def test_an_open_breaker_admits_no_call_until_its_rest_is_over_and_then_one() -> None:
    breaker = opened()
    assert breaker.admit(0.99) is None
    assert breaker.wait_s(0.25) == 0.75
    admitted(breaker, 1.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.admit(1.0) is None
    assert breaker.wait_s(1.0) > 0


def test_first_byte_of_the_trial_request_closes_the_breaker() -> None:
    breaker = opened()
    trial = breaker.began(admitted(breaker, 1.0))
    assert breaker.state is BreakerState.CLOSED
    admitted(breaker, 1.0)
    breaker.succeeded(trial)
    for _ in range(OPTIONS.num_failures - 1):
        breaker.failed(admitted(breaker, 2.0), 2.0)
    assert breaker.state is BreakerState.CLOSED


def test_answer_that_only_began_does_not_reset_the_breaker() -> None:
    breaker = opened()
    trial = breaker.began(admitted(breaker, 1.0))
    breaker.failed(trial, 1.0)
    assert breaker.state is BreakerState.OPEN
    assert breaker.wait_s(1.0) == 2.0


def test_rests_double_up_to_a_bound_until_an_answer_is_whole() -> None:
    breaker, now_s, rests_s = opened(), 0.0, []
    for _ in range(4):
        rests_s.append(breaker.wait_s(now_s))
        now_s += rests_s[-1]
        breaker.failed(admitted(breaker, now_s), now_s)
    assert rests_s == [1.0, 2.0, 4.0, 4.0]
    now_s += breaker.wait_s(now_s)
    breaker.succeeded(admitted(breaker, now_s))
    for _ in range(OPTIONS.num_failures):
        breaker.failed(admitted(breaker, now_s), now_s)
    assert breaker.wait_s(now_s) == OPTIONS.rest_s


def test_trial_whose_client_disconnects_admits_another_trial() -> None:
    breaker = opened()
    breaker.left(admitted(breaker, 1.0))
    admitted(breaker, 1.0)
    assert breaker.state is BreakerState.HALF_OPEN


def test_news_of_before_it_opened_changes_nothing() -> None:
    breaker = Breaker(OPTIONS)
    old = admitted(breaker, 0.0)
    for _ in range(OPTIONS.num_failures):
        breaker.failed(admitted(breaker, 0.0), 0.0)
    breaker.succeeded(old)
    assert breaker.admit(0.0) is None
    trial = admitted(breaker, 1.0)
    breaker.failed(old, 1.0)
    breaker.left(old)
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.succeeded(trial)
    admitted(breaker, 1.0)
    admitted(breaker, 1.0)


@given(st.lists(st.tuples(st.sampled_from(["admit", "began", "ok", "fail", "leave"]), st.integers(0, 7)), max_size=60))
def test_any_sequence_of_events_admits_at_most_one_trial_and_never_locks_the_breaker(
    events: list[tuple[str, int]],
) -> None:
    breaker, now_s, held = Breaker(OPTIONS), 0.0, list[Admission]()
    for what, number in events:
        now_s += number / 4
        if what == "admit":
            admission = breaker.admit(now_s)
            held += [] if admission is None else [admission]
            if breaker.state is BreakerState.HALF_OPEN:
                assert breaker.admit(now_s) is None
            continue
        if not held:
            continue
        admission = held.pop(number % len(held))
        if what == "began":
            held.append(breaker.began(admission))
        elif what == "ok":
            breaker.succeeded(admission)
        elif what == "fail":
            breaker.failed(admission, now_s)
        else:
            breaker.left(admission)
        assert breaker.wait_s(now_s) <= OPTIONS.max_rest_s
    for admission in held:
        breaker.left(admission)
    admitted(breaker, now_s + OPTIONS.max_rest_s)
