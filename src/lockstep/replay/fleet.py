"""Fleet: simulates a workload on several replicas of one model, with the serving scheduler and balancer.

All replicas share one logical clock. When a request arrives, every replica has begun all steps that begin before the
arrival, and the balancer has the results of all steps that have ended. The balancer therefore decides like a gateway
whose replicas report without delay.
"""

from __future__ import annotations

import heapq
import statistics
from array import array
from dataclasses import asdict, replace
from hashlib import blake2b
from typing import Any

import msgspec

from lockstep.core.balancer import Balancer, RoutingPolicy, Why
from lockstep.core.policy import SchedulerConfig
from lockstep.core.prefix import ContentNews
from lockstep.errors import UsageError
from lockstep.replay.cost import CostModel
from lockstep.replay.latencies import Latencies, latencies_in_ms, ratio
from lockstep.replay.progress import Gaps
from lockstep.replay.simulator import Replay, Simulation
from lockstep.replay.timeline import RequestOutcome
from lockstep.replay.workload import PS_PER_MS, ArrivalUnit, Workload
from lockstep.spelling import did_you_mean, listed

MAX_REPLICAS = 1024
VERSION = 1
"""Version of the report's form; it increases when a field is removed or changes its meaning."""
_END_OF_TIME_PS = 1 << 62
_PS_PER_S = 1000 * PS_PER_MS


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a fleet under one policy. Ratios and times have 6 decimals."""

    version: int = VERSION
    name: str
    replicas: int
    routing: str
    max_imbalance: int
    config: dict[str, Any]
    """Scheduler config of each replica."""
    cost_ps: dict[str, int]
    requests: int
    requests_completed: int
    requests_refused: int
    duration_ms: float
    requests_per_s: float
    """Completed requests per second of logical time."""
    output_tokens_per_s: float
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    prefix_hit_rate: float
    latency_ms: Latencies
    routed_by: dict[str, int]
    """Number of requests by the reason for the choice of their replica."""
    requests_least: int
    """Number of requests of the replica with the fewest."""
    requests_most: int
    requests_spread: float
    """Standard deviation over replicas divided by the mean; 0: evenly distributed."""
    busy_least: float
    """Share of the time in which the least busy replica computed."""
    busy_most: float
    fingerprint: str
    """Digest of all routes and of all replicas' decisions."""
    notes: tuple[str, ...]


class Fleet:
    """One run of a workload on several replicas.

    Args:
        cost: step prices; None: 10 ms per step.

    Raises:
        UsageError: arrivals in ticks, which have no common meaning for several replicas.
    """

    def __init__(
        self, workload: Workload, config: SchedulerConfig, balancer: Balancer, cost: CostModel | None = None
    ) -> None:
        if workload.unit is not ArrivalUnit.PS:
            raise UsageError(f"{workload.name}: its requests arrive in ticks; a fleet needs arrivals in time")
        self.workload = workload
        self.balancer = balancer
        alone = replace(workload, requests=())
        self.replicas = [Simulation(alone, config, cost) for _ in range(balancer.num_replicas)]
        """The simulation of each replica; `Simulation.replay` gives its results."""
        for each in self.replicas:
            each.scheduler.follow_contents()
        self._outcomes: list[RequestOutcome] = []
        self.routes = array("H")
        """Number of the replica of each request so far, in the workload's order."""
        self._why = dict.fromkeys(Why, 0)
        self._busy: list[tuple[int, int]] = []
        """Heap of the begin of each busy replica's next step."""
        self._ended: list[tuple[int, int, int, tuple[ContentNews, ...]]] = []
        """Heap of reports to the balancer: end of a step, its replica, number of ended requests, content changes."""

    def run(self) -> FleetReport:
        """Run to the end of the workload."""
        now_ps = 0
        for request in self.workload.requests:
            if request.arrival < now_ps:
                raise UsageError(
                    f"{request.place or request.name}: arrives before the request above it; sort the workload"
                )
            now_ps = request.arrival
            self._advance(now_ps)
            hashes = self.replicas[0].hashes_of(request)
            choice = self.balancer.choose(hashes)
            assert choice is not None, "a simulated fleet never withdraws a replica"
            replica = self.replicas[choice.replica]
            was_idle = not replica.scheduler.has_work
            outcome = replica.arrive(request, hashes)
            self._outcomes.append(outcome)
            self.routes.append(choice.replica)
            self._why[choice.why] += 1
            if outcome.refusal:
                self.balancer.ended(choice.replica)
            elif was_idle:
                heapq.heappush(self._busy, (replica.now_ps, choice.replica))
        self._advance(_END_OF_TIME_PS)
        return self._report([each.replay() for each in self.replicas])

    def _advance(self, until_ps: int) -> None:
        """Begin all steps that begin before a time, and report the steps that ended by then to the balancer."""
        busy, ended = self._busy, self._ended
        while busy and busy[0][0] < until_ps:
            _, number = busy[0]
            replica = self.replicas[number]
            tick = replica.advance(until_ps)
            assert tick is not None, "a busy replica has work"
            num_ended = 0 if tick.events is None else len(tick.events.finished)
            news = replica.scheduler.drain_contents()
            if num_ended or news:
                heapq.heappush(ended, (replica.now_ps, number, num_ended, news))
            if replica.scheduler.has_work:
                heapq.heapreplace(busy, (replica.now_ps, number))
            else:
                heapq.heappop(busy)
        while ended and ended[0][0] <= until_ps:
            _, number, num_ended, news = heapq.heappop(ended)
            self.balancer.learn(number, news)
            for _ in range(num_ended):
                self.balancer.ended(number)

    def _report(self, replays: list[Replay]) -> FleetReport:
        first = replays[0]
        done = [each for each in self._outcomes if each.is_completed]
        gaps = Gaps()
        digest = blake2b(self.routes.tobytes(), digest_size=8)
        for each in replays:
            gaps.by_us.update(each.gaps.by_us)
            digest.update(bytes.fromhex(each.fingerprint))
        duration_ps = max(each.duration_ps for each in replays)
        queried = sum(each.stats.prefix_queries_tokens for each in replays)
        hit = sum(each.stats.prefix_hits_tokens for each in replays)
        counts = [len(each.outcomes) for each in replays]
        busy = [ratio(each.totals.busy_ps, duration_ps) for each in replays]
        mean = statistics.fmean(counts)
        return FleetReport(
            name=self.workload.name,
            replicas=len(replays),
            routing=self.balancer.policy.value,
            max_imbalance=self.balancer.max_imbalance,
            config=asdict(first.config),
            cost_ps=asdict(first.cost),
            requests=len(self._outcomes),
            requests_completed=len(done),
            requests_refused=sum(bool(each.refusal) for each in self._outcomes),
            duration_ms=ratio(duration_ps, PS_PER_MS),
            requests_per_s=ratio(len(done) * _PS_PER_S, duration_ps),
            output_tokens_per_s=ratio(sum(each.num_output_tokens for each in done) * _PS_PER_S, duration_ps),
            prefix_queried_tokens=queried,
            prefix_hit_tokens=hit,
            prefix_hit_rate=ratio(hit, queried),
            latency_ms=latencies_in_ms(done, gaps),
            routed_by={why.value: count for why, count in self._why.items() if count},
            requests_least=min(counts),
            requests_most=max(counts),
            requests_spread=ratio(statistics.pstdev(counts), mean),
            busy_least=min(busy),
            busy_most=max(busy),
            fingerprint=digest.hexdigest(),
            notes=first.notes,
        )


def run_fleets(
    workload: Workload,
    config: SchedulerConfig,
    num_replicas: int,
    policies: tuple[RoutingPolicy, ...],
    cost: CostModel | None = None,
    max_imbalance: int = 4,
) -> tuple[FleetReport, ...]:
    """Run the same workload with each routing policy."""
    if not 1 <= num_replicas <= MAX_REPLICAS:
        raise UsageError(f"--replicas is {num_replicas}; a fleet has 1 to {MAX_REPLICAS}")
    kept = replace(workload, requests=tuple(workload.requests))
    return tuple(
        [Fleet(kept, config, Balancer(num_replicas, policy, max_imbalance), cost).run() for policy in policies]
    )


def policies_of(text: str) -> tuple[RoutingPolicy, ...]:
    """Parse routing policies, such as ``prefix,round_robin``.

    Raises:
        UsageError: a policy is unknown or named twice.
    """
    names = text.replace(",", " ").split()
    known = [policy.value for policy in RoutingPolicy]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise UsageError(f"--routing has {name!r}; {hint or f'the policies are {listed(known)}'}")
    if not names or len(dict.fromkeys(names)) < len(names):
        raise UsageError(f"--routing is {text!r}; name each policy once, such as prefix,round_robin")
    return tuple([RoutingPolicy(name) for name in names])


def to_json(reports: tuple[FleetReport, ...]) -> bytes:
    """Indented JSON list with a final newline."""
    return msgspec.json.format(msgspec.json.encode(reports), indent=2) + b"\n"
