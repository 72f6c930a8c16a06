"""Cluster bench: the cost of routing and of many models, with models that cost nothing.

It measures the decision path alone, and complete calls of two hops through real engines with stub executors. The table
also has the published values of NRT, a router with specialists in Rust, whose manifests the suites use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lockstep.bench.runner import loop_factory
from lockstep.cluster.backend import Backend, served_by
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest import Manifest, ModelEntry, Tier
from lockstep.cluster.manifest_file import parse
from lockstep.cluster.planner import Observed, Phase, PlanPolicy, Replica, plan
from lockstep.cluster.routing import Router, addressed
from lockstep.cluster.sessions import ModelSessions, Sessions
from lockstep.cluster.snapshot import ClusterSnapshot
from lockstep.cluster.state import ClusterOptions
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.errors import UsageError
from lockstep.executors.sampling_params import SamplingParams
from lockstep.report.document import Table, numbers, words
from lockstep.report.text import to_lines
from lockstep.worker.link import WorkerOptions

OUTPUT_TOKENS = 8
"""Output tokens of the last hop."""
CONCURRENCY = 32
"""Number of concurrent calls in the concurrent run."""
NUM_WARMUPS = 8
"""Number of unmeasured calls, after which the models that routing warms are loaded."""
NUM_DECISIONS = 2_000
NUM_SESSIONS = 64
"""Number of sessions that alternate in the decision path."""
STREAM_INTERVAL_S = 0.02
"""Minimum seconds between chunks of a stream, as by default in `lockstep serve`."""
PERCENTILES = (50, 95, 99)
MS, US, MB = 1e3, 1e6, 1e6
Figure = str
"""Format string of a value of a result."""


@dataclass(frozen=True, slots=True)
class Suite:
    """An example manifest, and the expected counts after its boot."""

    name: str
    num_models: int
    num_resident: int
    num_standby: int
    resident_mb: int
    num_declared_warms: int
    """Number of models that the manifest declares to be warmed by requests of other models."""
    num_warms: int
    """Number of models that routed calls warm; resident models need no warming."""


SUITES = (
    Suite("customer-support", 5, 3, 1, 2_400, 2, 0),
    Suite("density-50", 51, 26, 25, 20_800, 0, 0),
    Suite("warming-heavy", 9, 1, 8, 800, 8, 8),
)
NRT: Mapping[str, Any] = {
    "num_calls": 200,
    "bootstrap_ms": (9, 88),
    "call_ms": {"p50": 4.6},
    "sequential_request_throughput": (208, 217),
}
"""Published values of NRT with its own stub, for sequential complete calls. Pairs are the minimum and maximum of its
three suites. Its counts are those of `SUITES`. Its machine was a MacBook of an unpublished model."""


@dataclass(frozen=True, slots=True)
class ClusterBenchOptions:
    """Options of the cluster bench."""

    examples: Path
    """Directory of the manifests."""
    num_calls: int = 200
    """Number of calls of the sequential run, and of the concurrent run."""
    worker: Literal["process", "thread"] = "process"


def run_cluster_bench(
    options: ClusterBenchOptions, report: Callable[[str], None] = lambda suite: None
) -> list[dict[str, Any]]:
    """Run all suites, one after the other; ``faults`` of a result lists its wrong counts.

    Args:
        report: called with the name of each suite when it begins.

    Raises:
        UsageError: a manifest cannot be read.
        LockstepError: a manifest cannot be served.
    """
    results = []
    for suite in SUITES:
        path = options.examples / f"{suite.name}.yaml"
        try:
            manifest = parse(path.read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({error}); give the manifests' directory as --examples") from None
        report(suite.name)
        with asyncio.Runner(loop_factory=loop_factory()) as loop:
            results.append(loop.run(_run(suite, manifest, options)))
    return results


async def _run(suite: Suite, manifest: Manifest, options: ClusterBenchOptions) -> dict[str, Any]:
    served = served_by(manifest, Backend.STUB)
    targets = routed_models(served)
    decision_us = await decisions(served, targets)
    cluster, bootstrap_s = await _boot(manifest, options.worker)
    try:
        booted = cluster.snapshot()
        await _calls(cluster, targets, NUM_WARMUPS, 1)
        single_s, alone_s = await _calls(cluster, targets, options.num_calls, 1)
        many_s, together_s = await _calls(cluster, targets, options.num_calls, CONCURRENCY)
        after = cluster.snapshot()
    finally:
        await cluster.close()
    in_thread, thread_bootstrap_s = await _boot(manifest, "thread")
    await in_thread.close()
    counts = counts_of(booted, after)
    return {
        "suite": suite.name,
        "worker": options.worker,
        "num_calls": options.num_calls,
        "bootstrap_ms": bootstrap_s * MS,
        "thread_bootstrap_ms": thread_bootstrap_s * MS,
        **counts,
        "used_bytes": {budget.name: budget.used_bytes for budget in booted.budgets},
        "decision_us": _percentiles(decision_us, US),
        "call_ms": _percentiles(single_s, MS),
        "loaded_call_ms": _percentiles(many_s, MS),
        "sequential_request_throughput": options.num_calls / alone_s,
        "concurrency": CONCURRENCY,
        "request_throughput": options.num_calls / together_s,
        "nrt": dict(NRT),
        "faults": faults_of(suite, counts),
    }


async def _boot(manifest: Manifest, kind: Literal["process", "thread"]) -> tuple[Cluster, float]:
    """Boot a cluster; returns it and the seconds until it could answer, including the start of its worker."""
    worker = WorkerOptions(kind, log_level="error", stream_interval_s=STREAM_INTERVAL_S)
    cluster = Cluster(manifest, ClusterOptions(backend=Backend.STUB, worker=worker))
    started_s = time.perf_counter()
    await cluster.start()
    return cluster, time.perf_counter() - started_s


def routed_models(manifest: Manifest) -> tuple[str, ...]:
    """Models that calls are routed to: the resident targets, or all targets if none is resident."""
    ids = manifest.targets
    resident = tuple(id_ for id_ in ids if manifest.entry(id_).tier is Tier.RESIDENT)
    return resident or ids


def counts_of(booted: ClusterSnapshot, after: ClusterSnapshot) -> dict[str, int]:
    """Counts of a cluster after its boot, and the number of models that calls have warmed."""
    tiers = [model.tier for model in booted.models]
    [used_bytes] = [budget.used_bytes for budget in booted.budgets if budget.name == "gpu_budget"]
    return {
        "num_models": len(booted.models),
        "num_resident": sum(model.state == "resident" for model in booted.models),
        "num_standby": tiers.count(Tier.STANDBY),
        "resident_mb": round(used_bytes / MB),
        "num_declared_warms": sum(bool(model.co_activation) for model in booted.models),
        "num_warms": after.counters.co_activation_warms,
    }


def faults_of(suite: Suite, counts: Mapping[str, int]) -> list[str]:
    """Messages about counts that differ from the suite's."""
    return [
        f"{suite.name}: {name} is {found}; it must be {getattr(suite, name)}"
        for name, found in counts.items()
        if found != getattr(suite, name)
    ]


async def decisions(manifest: Manifest, targets: Sequence[str]) -> list[float]:
    """Measure the decisions of routed calls; returns the seconds of each.

    A call's decisions are its session, two hops, the dispatch and plans over all replicas, without engine, tokenizer
    and queue.
    """
    routing = manifest.routing
    assert routing is not None, "the examples have routing"
    router = Router(manifest, routing)
    entries: Mapping[str, ModelEntry] = {entry.id: entry for entry in manifest.entries}
    observed = Observed(tuple(_replica(entry) for entry in manifest.entries), manifest.resources.gpu_budget_bytes)
    sessions, policy = Sessions(), PlanPolicy()
    model_sessions = {entry.id: ModelSessions(16, lambda session: None) for entry in manifest.entries}
    durations_s = []
    for index in range(NUM_DECISIONS):
        target = targets[index % len(targets)]
        call, answer, id_ = _call(target), f"{routing.rule.field_name}={target}", f"s{index % NUM_SESSIONS}"
        started_s = time.perf_counter()
        sessions.begin(id_, router.entry, started_s)
        await model_sessions[router.entry].enter(id_)
        addressed(router.question(call), entries[router.entry])
        plan(observed, started_s, policy)
        model_sessions[router.entry].leave(id_)
        decision = router.decide(answer)
        assert decision.target == target
        await model_sessions[target].enter(id_)
        addressed(call, entries[target])
        plan(observed, started_s, policy)
        model_sessions[target].leave(id_)
        sessions.end(id_, started_s)
        durations_s.append(time.perf_counter() - started_s)
    return durations_s


def _replica(entry: ModelEntry) -> Replica:
    phase = Phase.RESIDENT if entry.tier is Tier.RESIDENT else Phase.ABSENT
    return Replica(entry.id, phase, 800_000_000, priority=entry.priority, is_pinned=phase is Phase.RESIDENT)


def _call(target: str) -> GenerationRequest:
    """Request that a stub router sends to a model, because its message contains the model's id."""
    conversation = Conversation([{"role": "user", "content": f"A question about {target}"}])
    return GenerationRequest(conversation, SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True))


async def _calls(
    cluster: Cluster, targets: Sequence[str], num_calls: int, concurrency: int
) -> tuple[list[float], float]:
    """Run calls with a number of clients; returns the seconds of each call, and of all calls together."""
    waiting = iter([_call(targets[index % len(targets)]) for index in range(num_calls)])
    durations_s: list[float] = []

    async def client() -> None:
        for call in waiting:
            started_s = time.perf_counter()
            async with aclosing(cluster.stream(call)) as events:
                async for _ in events:
                    pass
            durations_s.append(time.perf_counter() - started_s)

    started_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return durations_s, time.perf_counter() - started_s


def _percentiles(values_s: Sequence[float], scale: float) -> dict[str, float]:
    values = np.percentile(values_s, PERCENTILES) * scale
    return {f"p{rank}": float(value) for rank, value in zip(PERCENTILES, values, strict=True)}


def text_of(results: Sequence[Mapping[str, Any]]) -> str:
    """Table of the results, with a column per suite and the published values of NRT in the last column."""
    single, rate = NRT["call_ms"], NRT["sequential_request_throughput"]
    rows: list[tuple[str, Figure, str]] = [
        ("calls, sequential and concurrent", "{num_calls}", f"{NRT['num_calls']} sequential"),
        ("boot, ms", "{bootstrap_ms:.0f}", _range(NRT["bootstrap_ms"])),
        ("boot with the worker in a thread, ms", "{thread_bootstrap_ms:.0f}", ""),
        ("models", "{num_models}", "the same"),
        ("resident / standby", "{num_resident} / {num_standby}", "the same"),
        ("VRAM, MB", "{resident_mb:,}", "the same"),
        ("bytes of gpu_budget", "{used_bytes[gpu_budget]:,}", ""),
        ("bytes of ram_budget", "{used_bytes[ram_budget]:,}", ""),
        ("co-activation warms, declared / done", "{num_declared_warms} / {num_warms}", ""),
        ("requests/s, sequential", "{sequential_request_throughput:,.0f}", _range(rate)),
        ("latency, sequential, ms: p50 p95 p99", _percentiles_text("call_ms", 2), f"p50 {single['p50']}"),
        (f"requests/s, {CONCURRENCY} concurrent", "{request_throughput:,.0f}", ""),
        (f"latency, {CONCURRENCY} concurrent, ms: p50 p95 p99", _percentiles_text("loaded_call_ms", 2), ""),
        ("decision path, us: p50 p95 p99", _percentiles_text("decision_us", 1), ""),
    ]
    table = Table("", (*words(""), *numbers(*(result["suite"] for result in results), "NRT, published")))
    table.rows += [(name, *(figure.format_map(result) for result in results), nrt) for name, figure, nrt in rows]
    return to_lines(table)


def _range(bounds: tuple[float, float]) -> str:
    return "..".join(f"{each:g}" for each in bounds)


def _percentiles_text(key: str, digits: int) -> Figure:
    return " ".join(f"{{{key}[p{rank}]:.{digits}f}}" for rank in PERCENTILES)
