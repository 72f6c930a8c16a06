"""Routing policies on traces, and the cost of one gateway's routing by the number of replicas.

    python -m benchmarks.routing study --mooncake FILE --azure FILE [--replicas 1 4 16 64 1000] [--policies ...]
    python -m benchmarks.routing costs [--replicas 1 16 1000]
    python -m benchmarks.routing links

``study`` replays each trace on N schedulers behind the serving balancer, on a logical clock. The load of a replica is
the same for every N: with N replicas requests arrive N times as fast as with one. Beyond `MAX_SPEEDUP` times the trace
is not accelerated further but merged with copies of itself, each with different contents, so that each replica still
gets many requests. Figures of a run are the same on every machine, except those of decisions, which are the processor
time of `Balancer.choose`.

``costs`` uses neither traces nor schedulers. It measures choices for prompts of 256 blocks, the first half of which the
replicas hold; one item of content news; plans for that many models; and the controller's state for that many replicas
and hosts. ``links`` measures idle links from the maximum number of gateways of a worker, for 20 seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import random
import resource
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from heapq import merge
from operator import attrgetter
from pathlib import Path

from lockstep.cluster.controller_state import ControllerState, GatewayDemand, GatewayReport, merged_view
from lockstep.cluster.planner import Observed, Phase, PlanPolicy, Replica, plan
from lockstep.core.balancer import Balancer, RoutingChoice, RoutingPolicy
from lockstep.core.prefix import ContentNews, block_hashes
from lockstep.engine.options import LoadOptions
from lockstep.hosts.values import Demand, Host, ReplicaPhase, ReplicaStatus
from lockstep.replay.configs import config_for
from lockstep.replay.cost import CostModel
from lockstep.replay.fleet import Fleet
from lockstep.replay.readers import ReadOptions, read_workload
from lockstep.replay.workload import PS_PER_MS, PS_PER_US, Workload, WorkloadRequest
from lockstep.worker.link import WorkerOptions
from lockstep.worker.messages import ContentsChanged
from lockstep.worker.network import WorkerAddress
from lockstep.worker.remote_clients import MAX_CLIENTS, ListenOptions
from lockstep.worker.supervised import SupervisedWorker
from lockstep.worker.wire import event_decoder, event_encoder

COST = CostModel(10 * PS_PER_MS, 40 * PS_PER_US, 50 * PS_PER_US)
"""Step prices: 10 ms, 40 us per prompt token, 50 us per decoding sequence; about those of a model with 8e9
parameters."""
SPEEDS = {"mooncake": 0.25, "azure": 1.0}
"""Speed of each trace for one replica, which then computes prompts for a quarter to half of its time."""
MAX_SPEEDUP = 256
SEED = 1
"""Seed for spreading arrivals with the same timestamp; each copy uses the next seed."""
NUM_DECISIONS = 3000
PROMPT_BLOCKS, HELD_BLOCKS = 256, 128
HELD_PER_REPLICA = 2000


class TimedBalancer(Balancer):
    """A balancer that measures its choices and counts content news."""

    def __init__(self, num_replicas: int, policy: RoutingPolicy, max_imbalance: int) -> None:
        super().__init__(num_replicas, policy, max_imbalance)
        self.choices_ns: list[int] = []
        self.num_news = 0
        self.learning_ns = 0

    def choose(self, hashes: Sequence[bytes] = (), session: str | None = None) -> RoutingChoice | None:
        begun_ns = time.thread_time_ns()
        choice = super().choose(hashes, session)
        self.choices_ns.append(time.thread_time_ns() - begun_ns)
        return choice

    def learn(self, replica: int, news: Iterable[ContentNews]) -> None:
        those = tuple(news)
        self.num_news += len(those)
        begun_ns = time.thread_time_ns()
        super().learn(replica, those)
        self.learning_ns += time.thread_time_ns() - begun_ns


def at_load_of(path: Path, name: str, num_replicas: int, limit: int | None) -> tuple[Workload, int]:
    """Workload of a trace for ``num_replicas`` replicas, and the number of its copies."""
    copies = -(-num_replicas // MAX_SPEEDUP)
    speed = SPEEDS[name] * num_replicas / copies
    work: Workload | None = None
    parts: list[list[WorkloadRequest]] = []
    for copy in range(copies):
        work = read_workload(path, ReadOptions(speed=speed, limit=limit, dequantize_seed=SEED + copy))
        offset = copy << 40
        parts.append([_renamed(each, copy, offset) for each in work.requests])
    assert work is not None, "there is at least one copy"
    return replace(work, requests=tuple(merge(*parts, key=attrgetter("arrival")))), copies


def _renamed(request: WorkloadRequest, copy: int, offset: int) -> WorkloadRequest:
    return WorkloadRequest(
        f"{copy}-{request.name}",
        request.num_prompt_tokens,
        request.max_output_tokens,
        request.num_output_tokens,
        request.arrival,
        contents=tuple([offset + content for content in request.contents]),
        place=request.place,
    )


def study(paths: dict[str, Path], sizes: Sequence[int], policies: Sequence[RoutingPolicy], limit: int | None) -> None:
    for name, path in paths.items():
        for num_replicas in sizes:
            work, copies = at_load_of(path, name, num_replicas, limit)
            for policy in policies:
                _run(name, work, copies, num_replicas, policy)


def _run(name: str, work: Workload, copies: int, num_replicas: int, policy: RoutingPolicy) -> None:
    balancer = TimedBalancer(num_replicas, policy, 4)
    before_s = time.process_time()
    report = Fleet(work, config_for(work), balancer, COST).run()
    ttft, e2e = report.latency_ms.ttft, report.latency_ms.e2e
    assert ttft is not None
    assert e2e is not None
    taken = sorted(balancer.choices_ns)
    row = {
        "trace": name,
        "replicas": num_replicas,
        "copies": copies,
        "policy": policy.value,
        "requests": report.requests_completed,
        "hit_rate": report.prefix_hit_rate,
        "ttft_p50_ms": ttft.p50,
        "ttft_p99_ms": ttft.p99,
        "e2e_p50_ms": e2e.p50,
        "requests_least": report.requests_least,
        "requests_most": report.requests_most,
        "spread": report.requests_spread,
        "busy_least": report.busy_least,
        "busy_most": report.busy_most,
        "news_per_s_and_replica": round(balancer.num_news / (report.duration_ms / 1e3) / num_replicas, 2),
        "us_per_news": round(balancer.learning_ns / 1e3 / max(1, balancer.num_news), 3),
        "decision_p50_us": taken[len(taken) // 2] / 1e3,
        "decision_p99_us": taken[len(taken) * 99 // 100] / 1e3,
        "fingerprint": report.fingerprint,
        "cpu_s": round(time.process_time() - before_s, 1),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(json.dumps(row), flush=True)


def contents_of(number: int, count: int) -> tuple[bytes, ...]:
    return tuple([(number << 32 | place).to_bytes(16, "little") for place in range(count)])


def filled(num_replicas: int) -> Balancer:
    """A balancer with contents for every replica: 128 common blocks and as many individual ones as fit."""
    balancer = Balancer(num_replicas)
    shared = [(each, True) for each in contents_of(0, HELD_BLOCKS)]
    for replica in range(num_replicas):
        balancer.learn(replica, shared)
        own = contents_of(replica + 1, HELD_PER_REPLICA - HELD_BLOCKS)
        balancer.learn(replica, [(each, True) for each in own])
    return balancer


def costs(sizes: Sequence[int]) -> None:
    for num_replicas in sizes:
        row: dict[str, object] = {"replicas": num_replicas}
        tracemalloc.start()
        first = filled(num_replicas)
        held_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        state = first.state()
        for policy in RoutingPolicy:
            balancer = Balancer(num_replicas, policy)
            balancer.restore(state)
            row[f"{policy.value}_us"] = _decisions(balancer, num_replicas)
        num_contents = HELD_BLOCKS + num_replicas * (HELD_PER_REPLICA - HELD_BLOCKS)
        row["contents"], row["bytes_per_content"] = num_contents, round(held_bytes / num_contents)
        row["news_us"] = _news(balancer, num_replicas)
        row["plan_ms"] = _plans(num_replicas)
        row["word_bytes"], row["word_ms"] = _state(num_replicas)
        print(json.dumps(row), flush=True)
    prompt, news = tuple(range(12_000)), [(os.urandom(16), True) for _ in range(512)]
    encoded, decode = event_encoder().encode(ContentsChanged("r0", news)), event_decoder().decode
    row = {
        "hashes_ms_of_12000_tokens": round(_least(lambda: block_hashes(b"", prompt, 32)) * 1e3, 3),
        "bytes_per_news": round(len(encoded) / len(news), 1),
        "decode_us_per_news": round(_least(lambda: decode(encoded)) / len(news) * 1e6, 3),
        "merge_ms": {num: _merge(num) for num in (1, 8, 64)},
    }
    print(json.dumps(row), flush=True)


def _state(num_replicas: int) -> tuple[int, float]:
    """Bytes of the controller's state, and milliseconds of encoding it for one gateway."""
    each = range(num_replicas)
    places = [
        ReplicaStatus(f"r{n % 50}", n // 50, ReplicaPhase.READY, "", f"host-{n}", "a" * 56, "10.0.0.1", 41000, 9, 8)
        for n in each
    ]
    room = {"CPU": 16.0, "memory": 1e11}
    hosts = [Host(f"host-{number}", "a" * 56, "10.0.0.1", True, dict(room), dict(room)) for number in each]
    word = ControllerState(1, "m" * 5000, 1, {}, {}, {}, tuple(places), tuple(hosts), 64)
    return len(pickle.dumps(word)), round(_least(lambda: pickle.dumps(word)) * 1e3, 3)


def _merge(num_gateways: int) -> float:
    """Milliseconds of merging the reports of gateways, each with 50 models."""
    resident = Replica("r", Phase.RESIDENT, 800, 1, 0, None, 9.5, 1.25, 0.1, 0, False, 0.0, True, 60.0, None)
    names = [f"r{number}" for number in range(50)]
    demands = tuple(
        [GatewayDemand(Demand(name, "stub://a", LoadOptions()), replace(resident, key=name)) for name in names]
    )
    reports = [GatewayReport(10.0, demands, None, PlanPolicy()) for _ in range(num_gateways)]
    return round(_least(lambda: merged_view({}, reports, 10.0)) * 1e3, 3)


async def links(idle_s: float = 20.0) -> None:
    """Processor time at both ends of links that carry only health checks."""
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_text("0123456789abcdef" * 4)
        listen = ListenOptions("127.0.0.1", 0, str(secret))
        worker = SupervisedWorker(WorkerOptions("process", listen=listen), lambda _: None)
        await worker.start()
        while worker.listening is None:
            await asyncio.sleep(0.01)
        address = WorkerAddress("127.0.0.1", worker.listening.port, str(secret))
        guests = [
            SupervisedWorker(WorkerOptions("network", address=address), lambda _: None) for _ in range(MAX_CLIENTS)
        ]
        for guest in guests:
            await guest.start()
        assert worker.pid is not None
        before = time.process_time(), _cpu_s(worker.pid)
        await asyncio.sleep(idle_s)
        here, there = time.process_time() - before[0], _cpu_s(worker.pid) - before[1]
        each = 1e3 / idle_s / len(guests)
        print(json.dumps({"links": len(guests), "gateway_ms_per_s": here * each, "worker_ms_per_s": there * each}))
        for guest in guests:
            await guest.close()
        await worker.close()


def _cpu_s(pid: int) -> float:
    import psutil

    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _decisions(balancer: Balancer, num_replicas: int) -> float:
    """Median processor time of a choice in microseconds, with about two open requests per replica."""
    draw = random.Random(SEED)
    prompt = (*contents_of(0, HELD_BLOCKS), *contents_of(1 << 40, PROMPT_BLOCKS - HELD_BLOCKS))
    opened: list[int] = []
    taken: list[int] = []
    for number in range(2 * num_replicas + NUM_DECISIONS):
        if number >= 2 * num_replicas:
            balancer.ended(opened.pop(draw.randrange(len(opened))))
        begun_ns = time.thread_time_ns()
        choice = balancer.choose(prompt, f"session {draw.randrange(10**6)}")
        if number >= 2 * num_replicas:
            taken.append(time.thread_time_ns() - begun_ns)
        assert choice is not None
        opened.append(choice.replica)
    return round(statistics.median(taken) / 1e3, 2)


def _news(balancer: Balancer, num_replicas: int) -> float:
    """Microseconds per item of news: a block that a replica has evicted or added."""
    own = contents_of(num_replicas, 1000)
    news = [(each, is_held) for is_held in (False, True) for each in own]
    return round(_least(lambda: balancer.learn(num_replicas - 1, news)) / len(news) * 1e6, 3)


def _plans(num_replicas: int) -> float:
    """Milliseconds of a plan in which one waiting model has to be loaded and no model is idle."""
    policy = PlanPolicy()
    resident = [
        Replica(f"r{number}", Phase.RESIDENT, 800, 1, 0, None, 9.5, 1.25, 0.1, 0, False, 0.0, True, 60.0, None)
        for number in range(num_replicas - 1)
    ]
    waits = Replica("waits", Phase.ABSENT, 700, 0, 3, 1.5, 0.0, 0.0, 0.3, 0)
    observed = Observed((*resident, waits), 1000 * num_replicas)
    return round(_least(lambda: plan(observed, 10.1, policy)) * 1e3, 4)


def _least(work: Callable[[], object], rounds: int = 9) -> float:
    """Minimum processor time of one call, in seconds."""
    found = []
    for _ in range(rounds):
        begun_s = time.thread_time()
        work()
        found.append(time.thread_time() - begun_s)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("study", "costs", "links"))
    parser.add_argument("--mooncake", type=Path)
    parser.add_argument("--azure", type=Path)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 4, 16, 64, 1000])
    parser.add_argument("--policies", nargs="+", default=[policy.value for policy in RoutingPolicy])
    parser.add_argument("--limit", type=int)
    given = parser.parse_args()
    if given.what == "costs":
        costs(given.replicas)
        return
    if given.what == "links":
        asyncio.run(links())
        return
    paths = {name: path for name in SPEEDS if (path := getattr(given, name)) is not None}
    study(paths, given.replicas, [RoutingPolicy(name) for name in given.policies], given.limit)


if __name__ == "__main__":
    main()
