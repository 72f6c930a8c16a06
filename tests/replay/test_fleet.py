"""A fleet decides like its schedulers alone, reports results in time, and is deterministic."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.balancer import Balancer, RoutingPolicy
from lockstep.core.policy import SchedulerConfig
from lockstep.errors import UsageError
from lockstep.replay.cost import CostModel
from lockstep.replay.fleet import Fleet, policies_of, run_fleets, to_json
from lockstep.replay.simulator import Simulation
from lockstep.replay.workload import PS_PER_MS, ArrivalUnit, Workload, WorkloadRequest

CONFIG = SchedulerConfig(
    num_blocks=64, block_size=16, max_num_seqs=4, max_num_batched_tokens=64, max_chunk_tokens=64, max_model_len=1024
)
COST = CostModel(5 * PS_PER_MS, PS_PER_MS // 10, PS_PER_MS // 2, 1000)


def workload(seed: int, num_requests: int, num_contents: int, gap_ms: int) -> Workload:
    """Prompts with a few common prefixes, some of which are refused as too long."""
    draw = random.Random(seed)
    now_ps, requests = 0, list[WorkloadRequest]()
    for number in range(num_requests):
        now_ps += draw.randrange(gap_ms * PS_PER_MS + 1)
        beginning = draw.randrange(num_contents)
        contents = tuple(beginning * 100 + place for place in range(draw.randrange(1, 12)))
        prompt = 16 * len(contents) + draw.randrange(16) if draw.random() < 0.97 else 2000
        output = draw.randrange(1, 30)
        requests.append(WorkloadRequest(f"r{number}", prompt, output, output, now_ps, contents=contents))
    return Workload(f"seed {seed}", tuple(requests), ArrivalUnit.PS, 16)


works = st.builds(
    workload,
    st.integers(0, 2**32 - 1),
    st.integers(1, 60),
    st.integers(1, 5),
    st.sampled_from((0, 2, 20, 200)),
)


@settings(max_examples=60)
@given(work=works, policy=st.sampled_from(RoutingPolicy))
def test_a_fleet_of_one_decides_like_a_replay(work: Workload, policy: RoutingPolicy) -> None:
    alone = Simulation(work, CONFIG, COST).run()
    fleet = Fleet(work, CONFIG, Balancer(1, policy), COST)
    report = fleet.run()
    only = fleet.replicas[0].replay()
    assert only.fingerprint == alone.fingerprint
    assert only.outcomes == alone.outcomes
    assert only.duration_ps == alone.duration_ps
    assert report.prefix_hit_tokens == alone.stats.prefix_hits_tokens
    assert report.requests_refused == sum(bool(each.refusal) for each in alone.outcomes)


@settings(max_examples=60)
@given(work=works, policy=st.sampled_from(RoutingPolicy), num_replicas=st.integers(2, 7))
def test_each_replica_decides_like_a_replay_of_its_requests(
    work: Workload, policy: RoutingPolicy, num_replicas: int
) -> None:
    """The fleet's clock therefore delays no arrival, and puts none before a step that had begun."""
    fleet = Fleet(work, CONFIG, Balancer(num_replicas, policy), COST)
    report = fleet.run()
    for number, each in enumerate(fleet.replicas):
        given = [request for request, route in zip(work.requests, fleet.routes, strict=True) if route == number]
        alone = Simulation(replace(work, requests=tuple(given)), CONFIG, COST).run()
        assert each.fingerprint == alone.fingerprint
        assert [outcome.in_ps for outcome in each.replay().outcomes] == [outcome.in_ps for outcome in alone.outcomes]
    assert report.requests_completed + report.requests_refused == report.requests == len(fleet.routes)


@settings(max_examples=60)
@given(work=works, policy=st.sampled_from(RoutingPolicy), num_replicas=st.integers(1, 7))
def test_after_a_run_the_balancer_has_the_contents_of_every_replica(
    work: Workload, policy: RoutingPolicy, num_replicas: int
) -> None:
    fleet = Fleet(work, CONFIG, Balancer(num_replicas, policy), COST)
    fleet.run()
    known: list[dict[bytes, None]] = [{} for _ in range(num_replicas)]
    for content, holders in fleet.balancer.state().holders.items():
        for number in range(num_replicas):
            if holders >> number & 1:
                known[number][content] = None
    for number, each in enumerate(fleet.replicas):
        assert fleet.balancer.load(number) == 0
        held = each.scheduler.state()
        contents = [held.contents[content] for _, content, _ in held.kv.published]
        assert dict.fromkeys(sorted(contents)) == dict.fromkeys(sorted(known[number]))


def test_equal_fleets_give_equal_bytes_and_another_policy_different_routes() -> None:
    work = workload(7, 60, 4, 20)
    both = RoutingPolicy.PREFIX, RoutingPolicy.ROUND_ROBIN
    first = to_json(run_fleets(work, CONFIG, 3, both, COST))
    assert first == to_json(run_fleets(work, CONFIG, 3, both, COST))
    prefix, in_turn = json.loads(first)
    assert prefix["fingerprint"] != in_turn["fingerprint"]
    assert prefix["prefix_hit_rate"] > in_turn["prefix_hit_rate"]
    assert sum(prefix["routed_by"].values()) == prefix["requests"] == 60


def test_invalid_fleets_are_refused() -> None:
    work = workload(7, 3, 1, 20)
    with pytest.raises(UsageError, match="the policies are prefix, session, least_loaded and round_robin"):
        policies_of("prefix,zzz")
    with pytest.raises(UsageError, match="--routing has 'round-robin'; did you mean 'round_robin'\\?"):
        policies_of("prefix,round-robin")
    with pytest.raises(UsageError, match="each policy once"):
        policies_of("prefix,prefix")
    with pytest.raises(UsageError, match="1 to 1024"):
        run_fleets(work, CONFIG, 1025, policies_of("prefix"))
    with pytest.raises(UsageError, match="arrive in ticks"):
        Fleet(replace(work, unit=ArrivalUnit.TICKS), CONFIG, Balancer(2))
