"""Whether a worker gets on, judged from what it says, and when one that ended is started again."""

from __future__ import annotations

from itertools import pairwise

from lockstep.worker.health import (
    FIRST_DELAY_S,
    HEALTHY_S,
    MAX_DELAY_S,
    MAX_STEP_S,
    MIN_RETRY_AFTER_S,
    HealthLimits,
    Pulse,
    Restarts,
    backoff_s,
    trouble,
)
from lockstep.worker.messages import HealthReport

LIMITS = HealthLimits(step_s=30.0, answer_s=10.0)


def test_an_idle_worker_may_be_silent_between_two_questions() -> None:
    assert trouble(LIMITS, None, 0.5) == ""
    assert trouble(LIMITS, HealthReport(0.0, 0, 0), 9.0) == ""


def test_a_worker_that_does_not_answer_is_not_ready() -> None:
    assert "not answered for 11 s" in trouble(LIMITS, HealthReport(0.0, 0, 0), 11.0)
    assert "not answered for 11 s" in trouble(LIMITS, None, 11.0)


def test_a_step_that_takes_too_long_while_requests_wait_is_not_ready() -> None:
    assert trouble(LIMITS, HealthReport(29.0, 1, 0), 0.5) == ""
    assert "no step was completed for 31 s" in trouble(LIMITS, HealthReport(29.0, 1, 0), 2.0)


def hang_of(pulse: Pulse) -> str:
    return pulse.hang(is_loading=False)


def silent(pulse: Pulse, num_questions: int) -> Pulse:
    for _ in range(num_questions):
        pulse.count_check()
    return pulse


def test_too_many_unanswered_health_requests_are_a_hang_regardless_of_the_clock() -> None:
    pulse = Pulse(HealthLimits(silence_s=60.0), 0.0)
    pulse.count_message()
    assert hang_of(silent(pulse, 59)) == ""
    assert hang_of(silent(pulse, 1)) == "60 s without a message"
    pulse.count_message()
    assert hang_of(pulse) == "", "any word of it is a sign of life"
    pulse.reported(HealthReport(0.0, 0, 0), 1e9)
    assert hang_of(pulse) == ""


def test_starting_or_loading_worker_has_a_longer_silence_limit() -> None:
    pulse = Pulse(HealthLimits(silence_s=60.0, load_s=600.0), 0.0)
    assert hang_of(silent(pulse, 599)) == ""
    assert hang_of(silent(pulse, 1)) == "600 s without a message since its start"
    pulse.count_message()
    assert silent(pulse, 599).hang(is_loading=True) == ""
    assert silent(pulse, 1).hang(is_loading=True) == "600 s without a message"
    assert hang_of(silent(Pulse(HealthLimits(silence_s=900.0), 0.0), 899)) == "", "who is patient is so from the start"


def test_a_health_request_just_sent_does_not_count_as_unanswered() -> None:
    pulse = Pulse(HealthLimits(silence_s=0.1), 0.0)
    pulse.count_message()
    assert hang_of(silent(pulse, 1)) == ""
    assert hang_of(silent(pulse, 1)) == "2 s without a message"


def test_a_step_without_end_is_a_hang_though_questions_are_answered() -> None:
    """A pause of the whole machine makes one report of a long step, and not many."""
    pulse, num_reports = Pulse(LIMITS, 0.0), int(MAX_STEP_S - LIMITS.step_s)
    for _ in range(num_reports):
        pulse.count_message()
        pulse.reported(HealthReport(1000.0, 1, 0), 0.0)
    assert hang_of(pulse) == ""
    pulse.reported(HealthReport(1001.0, 1, 0), 0.0)
    assert hang_of(pulse) == "601 s within one step"
    assert pulse.last_report == "it last reported 1 running and 0 waiting requests, no step completed for 1001.0 s"
    pulse.reported(HealthReport(0.1, 1, 0), 0.0)
    assert hang_of(pulse) == ""


def test_a_silence_limit_of_zero_detects_no_hang() -> None:
    pulse = silent(Pulse(HealthLimits(silence_s=0.0), 0.0), 100_000)
    for _ in range(1000):
        pulse.reported(HealthReport(1000.0, 1, 0), 0.0)
    assert hang_of(pulse) == ""


def test_first_restart_is_immediate_and_later_delays_double() -> None:
    restarts = Restarts()
    delays = [restarts.delay_s(now_s) for now_s in range(12)]
    assert delays[:2] == [0.0, FIRST_DELAY_S]
    assert all(after == min(2 * before, MAX_DELAY_S) for before, after in pairwise(delays[1:]))
    assert delays[-1] == MAX_DELAY_S


def test_short_lived_worker_does_not_reset_the_backoff() -> None:
    restarts = Restarts()
    restarts.delay_s(0.0)
    restarts.record_up(1.0)
    assert restarts.delay_s(0.9 + HEALTHY_S) == FIRST_DELAY_S


def test_long_lived_worker_resets_the_backoff() -> None:
    restarts = Restarts()
    for now_s in range(5):
        restarts.delay_s(now_s)
    restarts.record_up(10.0)
    restarts.record_up(9.0 + HEALTHY_S)
    assert restarts.delay_s(10.0 + HEALTHY_S) == 0.0
    assert restarts.delay_s(11.0 + HEALTHY_S) == FIRST_DELAY_S


def test_retry_time_follows_from_the_next_start_and_the_last_load_times() -> None:
    restarts = Restarts()
    assert restarts.retry_after_s(0.0) == MIN_RETRY_AFTER_S
    restarts.schedule(10.0, load_s=4.5)
    assert restarts.start_at_s == 10.0
    assert restarts.retry_after_s(10.0) == 6.0
    restarts.schedule(11.0, load_s=4.5)
    assert restarts.start_at_s == 11.0 + FIRST_DELAY_S
    assert restarts.retry_after_s(11.0) == 6.0
    assert restarts.retry_after_s(99.0) == MIN_RETRY_AFTER_S


def test_a_back_off_doubles_up_to_its_bound_and_stays_there_for_ever() -> None:
    assert [backoff_s(number, 1.0, 60.0) for number in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert backoff_s(10**9, 1.0, 60.0) == 60.0
