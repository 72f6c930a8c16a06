"""Replays that are small enough to be derived by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from lockstep.core.prefix import HASH_BYTES
from lockstep.errors import UsageError
from lockstep.replay.configs import config_for
from lockstep.replay.cost import CostModel
from lockstep.replay.report import report_of
from lockstep.replay.simulator import Simulation
from lockstep.replay.timeline import Tick
from lockstep.replay.workload import PS_PER_MS, ArrivalUnit, content_hashes
from tests.replay.sample import config, request, workload

MS = PS_PER_MS


def test_a_single_request_takes_as_many_ticks_as_tokens() -> None:
    """Admission, the prompt and the first token take one tick; each further token takes one more."""
    replay = Simulation(workload(request("a", 20, 5)), config()).run()
    (outcome,) = replay.outcomes
    assert (outcome.arrival_tick, outcome.admitted_tick, outcome.first_token_tick, outcome.finished_tick) == (
        0,
        0,
        0,
        4,
    )
    assert (outcome.seq_id, outcome.num_output_tokens, outcome.num_cached_tokens) == (0, 5, 0)
    assert (replay.num_ticks, replay.num_reserved_blocks, replay.totals.max_used_blocks) == (5, 2, 2)


def test_slots_and_decode_width_are_shared_in_turns() -> None:
    """Three requests with 2 tokens and two places: the third is admitted at once and samples in the next tick."""
    three = workload(*(request(name, 16, 2) for name in "abc"))
    limits = config(max_num_seqs=3, max_num_decode_seqs=2, chunking=False)
    ticks: list[Tick] = []
    replay = Simulation(three, limits, watchers=(ticks.append,), run_lengths=False).run()
    assert [tick.num_decoded_tokens for tick in ticks] == [2, 2, 2]
    assert [each.first_token_tick for each in replay.outcomes] == [0, 0, 1]
    assert [each.finished_tick for each in replay.outcomes] == [1, 2, 2]


def test_queued_requests_are_counted_after_admission() -> None:
    """With one slot the second request waits for the three ticks of the first, and is then admitted."""
    replay = Simulation(workload(request("a", 16, 3), request("b", 16, 2)), config(max_num_seqs=1)).run()
    report = report_of(replay)
    assert [each.admitted_tick for each in replay.outcomes] == [0, 3]
    assert (report.total_ticks, report.queue_pressure_ticks, report.active_capacity_ticks) == (5, 3, 5)
    assert (report.max_queued, report.max_active, report.preemptions) == (1, 1, 0)
    assert report.latency_ticks.queue is not None
    assert report.latency_ticks.queue.mean == 1.5


def test_idle_ticks_count_if_arrivals_are_in_ticks() -> None:
    ticks: list[Tick] = []
    late = workload(request("a", 16, 2), request("b", 16, 2, arrival=10))
    replay = Simulation(late, config(), watchers=(ticks.append,)).run()
    assert [(tick.tick, tick.num_ticks, tick.plan is None) for tick in ticks] == [
        (0, 1, False),
        (1, 1, False),
        (2, 8, True),
        (10, 1, False),
        (11, 1, False),
    ]
    assert (replay.num_ticks, replay.totals.num_steps) == (12, 4)
    assert replay.duration_ps == 120 * MS
    assert report_of(replay).latency_ms is None, "the duration of a tick is unknown"


def test_idle_time_is_skipped_if_arrivals_are_in_time() -> None:
    """A request that arrives during a step joins before the next one."""
    cost = CostModel(constant_ps=10 * MS)
    timed = workload(
        request("a", 16, 2),
        request("b", 16, 1, arrival=15 * MS),
        request("c", 16, 1, arrival=1000 * MS),
        unit=ArrivalUnit.PS,
    )
    replay = Simulation(timed, config(), cost).run()
    a, b, c = replay.outcomes
    assert (a.first_token_ps, a.finished_ps) == (10 * MS, 20 * MS)
    assert (b.arrival_tick, b.admitted_ps, b.finished_ps) == (2, 20 * MS, 30 * MS)
    assert (c.arrival_tick, c.admitted_ps, c.finished_ps) == (3, 1000 * MS, 1010 * MS)
    assert (replay.num_ticks, replay.totals.busy_ps, replay.duration_ps) == (4, 40 * MS, 1010 * MS)


def test_a_step_is_priced_by_its_tokens() -> None:
    """Prompt of 20: 20 prompt tokens over 20 positions; then one token each over 21 and 22."""
    cost = CostModel(constant_ps=1000, prefill_token_ps=10, decode_seq_ps=100, context_token_ps=1)
    replay = Simulation(workload(request("a", 20, 3)), config(), cost).run()
    assert replay.duration_ps == (1000 + 200 + 20) + (1000 + 100 + 21) + (1000 + 100 + 22)
    assert replay.outcomes[0].first_token_ps == 1220


def test_a_request_may_end_before_its_limit() -> None:
    replay = Simulation(workload(request("a", 16, 3, most=9), request("b", 16, 5)), config()).run()
    assert [each.finished_tick for each in replay.outcomes] == [2, 4]
    finished = {reason.value: count for reason, count in replay.stats.num_finished if count}
    assert finished == {"stop": 1, "length": 1}


def test_unservable_requests_are_refused_and_others_continue() -> None:
    refusing = config(max_num_queued_reqs=1)
    crowd = workload(*(request(name, prompt, 2) for name, prompt in [("a", 16), ("b", 999), ("c", 16)]))
    simulation = Simulation(crowd, refusing)
    replay = simulation.run()
    assert [bool(each.refusal) for each in replay.outcomes] == [False, True, True]
    assert simulation.refusals == ["b", "c"]
    assert "999 tokens" in replay.outcomes[1].refusal
    assert "wait already" in replay.outcomes[2].refusal
    report = report_of(replay, {"ttft": 1000.0})
    assert (report.requests, report.requests_completed, report.requests_refused) == (3, 1, 2)
    assert report.goodput is not None
    assert report.goodput.ratio == 0.333333
    assert report.notes[0].startswith("2 requests were refused, first b: the prompt has 999 tokens")


def test_a_replay_with_only_refusals_has_no_ticks() -> None:
    late = workload(request("a", 999, 2, arrival=5 * MS), unit=ArrivalUnit.PS)
    report = report_of(Simulation(late, config()).run())
    assert (report.total_ticks, report.requests_refused, report.latency_ticks.ttft) == (0, 1, None)
    assert report.all_blocks_returned


def test_equal_contents_are_hit() -> None:
    """The second prompt shares 3 of its blocks; a hit leaves at least two tokens to compute, so 32 of 48 are cached."""
    shared = (7, 8, 9)
    pair = workload(
        request("a", 48, 2, contents=shared),
        request("b", 64, 2, arrival=4, contents=(*shared, 10)),
        request("c", 48, 2, arrival=8, contents=shared),
        content_size=16,
    )
    replay = Simulation(pair, config()).run()
    assert [each.num_cached_tokens for each in replay.outcomes] == [0, 48, 32]
    report = report_of(replay)
    assert (report.prefix_hit_tokens, report.prefix_queried_tokens, report.prefix_hit_rate) == (80, 160, 0.5)
    assert (report.prompt_tokens, report.prefill_tokens) == (160, 80)


def test_contents_that_are_not_multiples_of_blocks_are_dropped_with_a_warning() -> None:
    pair = workload(*(request(name, 48, 2, contents=(7, 8)) for name in "ab"), content_size=24)
    replay = Simulation(pair, config()).run()
    assert replay.stats.prefix_queries_tokens == 0
    assert replay.notes == ("contents are ignored, so nothing is shared: 24 tokens are no multiple of block_size 16",)


def test_a_content_stands_for_as_many_blocks_as_fit_into_it() -> None:
    hashes = content_hashes((5, 300), 32, 16, 63)
    assert hashes == tuple(
        content.to_bytes(12, "little") + place.to_bytes(4, "little") for content, place in [(5, 0), (5, 1), (300, 0)]
    )
    assert content_hashes((5, 300), 16, 16, 20) == ((5).to_bytes(HASH_BYTES, "little"),)


def test_unsorted_arrivals_are_refused() -> None:
    with pytest.raises(UsageError, match=r"trace:2: arrives before the request above it; sort the workload"):
        Simulation(workload(request("a", 16, 2, arrival=5), request("b", 16, 2, place="trace:2")), config()).run()


def test_a_replay_can_be_read_before_its_end() -> None:
    simulation = Simulation(workload(request("a", 16, 40), request("b", 16, 2, arrival=30)), config())
    first = simulation.step()
    assert first is not None
    outcome = simulation.replay().outcomes[0]
    assert (outcome.finished_tick, outcome.num_output_tokens) == (-1, first.num_decoded_tokens)
    assert simulation.run().fingerprint == Simulation(simulation.workload, config()).run().fingerprint


def test_an_intermediate_outcome_does_not_change_later() -> None:
    simulation = Simulation(workload(request("a", 16, 40)), config())
    simulation.step()
    (before,) = simulation.replay().outcomes
    num_before = before.num_output_tokens
    (after,) = simulation.run().outcomes
    assert (before.num_output_tokens, before.is_completed) == (num_before, False)
    assert (after.num_output_tokens, after.is_completed) == (40, True)


def test_phases_in_time_match_ticks_if_all_ticks_take_equally_long() -> None:
    """With one place the second request waits for the first. A refused request has no phases except its arrival."""
    three = workload(request("a", 16, 5), request("b", 16, 3, arrival=1), request("c", 999, 2, arrival=2))
    a, b, refused = Simulation(three, config(max_num_seqs=1), CostModel(10 * MS)).run().outcomes
    assert a.in_ticks == (0, 0, 1, 5, 5)
    assert b.in_ticks == (1, 5, 6, 8, 3)
    assert (b.in_ticks.ttft, b.in_ticks.e2e, b.in_ticks.tpot(), b.in_ticks.tpot(1000)) == (5, 7, 1, 1000)
    for outcome in (a, b):
        assert outcome.in_ps[:-1] == tuple(each * 10 * MS for each in outcome.in_ticks[:-1])
    assert refused.in_ticks == (2, -1, -1, -1, 0)


def test_ticks_have_no_gaps() -> None:
    """Ticks have no gaps in numbers and in time, including runs of several."""
    ticks: list[Tick] = []
    cost = CostModel(constant_ps=10, decode_seq_ps=3, context_token_ps=1)
    many = workload(*(request(str(index), 10 + index, 40 + index, arrival=7 * index) for index in range(5)))
    Simulation(many, config(), cost, watchers=(ticks.append,)).run()
    for before, after in pairwise(ticks):
        assert after.tick == before.tick + before.num_ticks
        assert after.start_ps == before.start_ps + before.duration_ps
    assert max(tick.num_ticks for tick in ticks) > 3


def test_the_defaults_for_a_workload_without_a_config_reject_no_request() -> None:
    big = workload(request("a", 500_000, 1), *(request(str(i), 10, 1) for i in range(2000)), unit=ArrivalUnit.PS)
    replay = Simulation(big, config_for(big)).run()
    assert not any(each.refusal for each in replay.outcomes)
