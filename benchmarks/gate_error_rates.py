"""Error rates of the sequential gate by simulation, compared with other tests on the same streams.

    python -m benchmarks.gate_error_rates --output docs/gate-error-rates.md
    python -m benchmarks.gate_error_rates --canaries 200 --only latency

A *canary* is a stream of pairs with a known truth, judged by the gate's own series and decisions at 100 looks. It
counts as rolled back, or promoted, if the gate decides so at any look. Without an effect each rollback is an error; at
an effect of exactly the bound each rollback and each promotion is. Rates have Clopper and Pearson's bounds (97.5 %).
The same seed gives the same figures, independent of the number of processes. With ``--sums FILE`` a run can be stopped
and continued.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.gate_rivals import RIVALS
from benchmarks.gate_streams import (
    LATENCIES,
    SLOW,
    Bools,
    Draw,
    Floats,
    autoregressive,
    exceedances,
    excess_failures,
    independent,
)
from benchmarks.gate_tables import TABLES, table, with_tables
from lockstep.release.evidence import Pairs
from lockstep.release.observation import METRICS
from lockstep.release.policy import Policy
from lockstep.release.sequential import Findings, follow
from lockstep.release.series import Series, series_of
from lockstep.release.statistics import MIN_PAIRS, Looks
from lockstep.release.verdict import Decision

POLICY = Policy(mode="sequential", outputs="ignore", min_pairs=1)
LONG = replace(POLICY, warmup_pairs=2_500)
"""Policy for latency that stays at one level for longer than the default covers."""
MARGIN = math.log1p(POLICY.margin)
CHUNK = 50
"""Number of canaries per chunk; each chunk has its own seed."""
BATCH = 8
"""Number of chunks between two checks of the time limit."""
NUM_METRICS, NUM_SEGMENTS = 20, 10
Counts = Mapping[str, float]
Job = Callable[[np.random.Generator, int, "Size"], Counts]


@dataclass(frozen=True, slots=True)
class Size:
    """Length of canaries."""

    pairs: int
    looks: int

    @property
    def at(self) -> Looks:
        """Number of pairs at each look, evenly spaced."""
        return np.unique(np.linspace(MIN_PAIRS, self.pairs, self.looks).astype(np.int64))


# -- jobs: decisions on a chunk of canaries --------------------------------------------------------------------------


def latency(draw: Draw, rng: np.random.Generator, count: int, size: Size) -> Counts:
    """One series of latency ratios, without an effect and at the margin."""
    baseline, candidate = draw(rng, count, size.pairs)
    none, margin = (_followed([_ratio(candidate - baseline + effect)], size) for effect in (0.0, MARGIN))
    return {
        **_decision_counts(none, "none"),
        **_decision_counts(margin, "margin"),
        "judged": float(_is_judged(margin).sum()),
    }


def rivals(draw: Draw, rng: np.random.Generator, count: int, size: Size) -> Counts:
    """Decisions of other tests on the same streams."""
    baseline, candidate = draw(rng, count, size.pairs)
    return {name: float(rival(baseline, candidate, size.at).any(axis=1).sum()) for name, rival in RIVALS.items()}


def tail(phi: float, rng: np.random.Generator, count: int, size: Size) -> Counts:
    """Answers beyond a fixed latency, 5 % of the baseline's, without an effect and at the bound."""
    bound = POLICY.tail_margin / 100
    found: dict[str, float] = {}
    for share, name in ((0.05, "none"), (0.05 + bound, "margin")):
        values = exceedances(phi, (0.05, share), rng, count, size.pairs)
        series = Series("latency-tail", "all", "points", values, np.arange(size.pairs), bound, is_event=True)
        found |= _decision_counts(_followed([series], size), name)
    return found


def events(
    draw_none: Callable[[np.random.Generator, int, int], Floats],
    draw_margin: Callable[[np.random.Generator, int, int], Floats],
    bound: float,
    rng: np.random.Generator,
    count: int,
    size: Size,
) -> Counts:
    """One series of events, candidate minus baseline, without an effect and at the bound."""
    series = [[_event(draw(rng, count, size.pairs), bound)] for draw in (draw_none, draw_margin)]
    none, margin = (_followed(each, size) for each in series)
    return {
        **_decision_counts(none, "none"),
        **_decision_counts(margin, "margin"),
        "judged": float(_is_judged(margin).sum()),
    }


def slow(draw: Draw, policy: Policy, rng: np.random.Generator, count: int, size: Size) -> Counts:
    """Whole decisions (latency, its tail, errors, missing pairs) on latency that changes slowly."""
    baseline, candidate = draw(rng, count, size.pairs)
    none, margin = (
        follow(policy, _whole(policy, baseline, candidate + effect), size.pairs, size.at) for effect in (0.0, MARGIN)
    )
    return {
        **_decision_counts(none, "none"),
        **_decision_counts(margin, "margin"),
        "hold at none": float(_is_held(none).sum()),
    }


def _whole(policy: Policy, baseline: Floats, candidate: Floats) -> list[Series]:
    """Series of whole decisions on canaries without errors and missing pairs."""
    rest = max(MIN_PAIRS, policy.warmup_pairs)
    limit = np.partition(baseline[:, :rest], math.ceil(0.95 * rest) - 1, axis=1)[:, math.ceil(0.95 * rest) - 1, None]
    tail = (candidate[:, rest:] > limit).astype(np.float64) - (baseline[:, rest:] > limit)
    places = np.arange(baseline.shape[1])
    nothing = np.zeros(baseline.shape)
    missing = Series("missing-pairs", "all", "points", nothing, places, 0.01, True, Decision.HOLD)
    tails = Series("latency-tail", "all", "points", tail, places[rest:], policy.tail_margin / 100, True)
    return [_ratio(candidate - baseline), tails, _event(nothing, policy.error_margin / 100), missing]


def _is_held(findings: Findings) -> Bools:
    """True if the last look decides hold."""
    found: Bools = ~(findings.is_rolled_back[..., -1] | findings.is_promoted[..., -1])
    return found


def missing(
    lose: Callable[[np.random.Generator, Floats, Floats], tuple[Bools, Bools]],
    rng: np.random.Generator,
    count: int,
    size: Size,
) -> Counts:
    """Whole decisions on pairs with a lost record on either side: latency, its tail, errors, missing pairs."""
    found: dict[str, float] = {"judged": 0.0}
    for effect, name in ((0.0, "none"), (MARGIN, "margin")):
        baseline, candidate = independent(rng, count, size.pairs)
        lost = lose(rng, baseline, candidate + effect)
        for canary in range(count):
            pairs = pairs_of(baseline[canary], candidate[canary] + effect, lost[0][canary], lost[1][canary])
            looks = np.minimum(size.at, len(pairs))
            for key, value in _decision_counts(
                follow(POLICY, series_of(POLICY, pairs), len(pairs), looks), name
            ).items():
                found[key] = found.get(key, 0.0) + value
            found["judged"] += name == "margin"
    return found


def family(draw: Draw, effects: str, rng: np.random.Generator, count: int, size: Size) -> Counts:
    """20 metrics of 10 segments; half of the noise is common to the metrics of a request.

    Args:
        effects: none, margin (all at the margin), one (one at the margin, the others far below) or half (half of them
            15 % slower).
    """
    each = size.pairs // NUM_SEGMENTS
    others = {"none": 0.0, "margin": MARGIN, "one": math.log(0.8), "half": MARGIN}[effects]
    true = np.full(NUM_METRICS * NUM_SEGMENTS, others)
    if effects == "one":
        true[0] = MARGIN
    if effects == "half":
        true[::2] = math.log(1.15)
    shared = _noise(draw, rng, count * NUM_SEGMENTS, each).reshape(count, NUM_SEGMENTS, 1, each)
    own = _noise(draw, rng, count * len(true), each).reshape(count, NUM_SEGMENTS, NUM_METRICS, each)
    values = ((shared + own) / math.sqrt(2)).reshape(count, len(true), each) + true[:, None]
    series = [_ratio(values[:, at], f"segment-{at // NUM_METRICS}", stride=NUM_SEGMENTS) for at in range(len(true))]
    found = _followed(series, size)
    counts = dict(_decision_counts(found, "any"))
    if effects == "half":
        at_first = found.is_rolled_back.argmax(axis=-1)
        rejected = np.take_along_axis(found.rejected, at_first[:, None, None], axis=2)[..., 0]
        for name, named in (("first", rejected), ("last", found.rejected[..., -1])):
            number = np.maximum(named.sum(axis=1), 1)
            counts[f"false discoveries, {name}"] = float((named[:, 1::2].sum(axis=1) / number).sum())
            counts[f"discoveries, {name}"] = float((named[:, ::2].mean(axis=1)).sum())
    return counts


def power(draw: Draw, policy: Policy, rng: np.random.Generator, count: int, size: Size) -> Counts:
    """One series of latency ratios with a tenth above 1, whole decisions, and other tests on the same stream."""
    baseline, candidate = draw(rng, count, size.pairs)
    candidate = candidate + math.log(1.1)
    found, whole = (
        follow(policy, series, size.pairs, size.at)
        for series in ([_ratio(candidate - baseline)], _whole(policy, baseline, candidate))
    )
    others = {name: float(rival(baseline, candidate, size.at).any(axis=1).sum()) for name, rival in RIVALS.items()}
    counts = {**_decision_counts(found, "caught"), **_decision_counts(whole, "caught by whole decisions")}
    return {**counts, "pairs": _median_pairs(found, size) * count, **(others if size.pairs < 2_000 else {})}


def _median_pairs(findings: Findings, size: Size) -> float:
    """Number of pairs after which half of the canaries are rolled back."""
    is_ever, first = findings.is_rolled_back.any(axis=-1), findings.is_rolled_back.argmax(axis=-1)
    return float(np.median(np.where(is_ever, size.at[first], size.pairs)))


def family_power(correlation: float, policy: Policy, rng: np.random.Generator, count: int, size: Size) -> Counts:
    """20 metrics, each over all pairs and over 10 segments, all of them a tenth above 1."""
    draw = partial(independent, correlation=correlation)
    shared = _noise(draw, rng, count, size.pairs)[:, None]
    own = _noise(draw, rng, count * NUM_METRICS, size.pairs).reshape(count, NUM_METRICS, size.pairs)
    values = (shared + own) / math.sqrt(2) + math.log(1.1)
    series = [_ratio(values[:, metric]) for metric in range(NUM_METRICS)]
    for segment in range(NUM_SEGMENTS):
        part = values[:, :, segment::NUM_SEGMENTS]
        series += [_ratio(part[:, at], f"{segment}", stride=NUM_SEGMENTS, start=segment) for at in range(NUM_METRICS)]
    found = follow(policy, series, size.pairs, size.at)
    return {**_decision_counts(found, "caught"), "pairs": _median_pairs(found, size) * count}


def promotion(draw: Draw, rng: np.random.Generator, count: int, size: Size) -> Counts:
    """An equal candidate: number of pairs until latency alone passes, and until the whole decision promotes."""
    baseline, candidate = draw(rng, count, size.pairs)
    found = {}
    for name, series in (
        ("latency", [_ratio(candidate - baseline)]),
        ("whole", _whole(POLICY, baseline, candidate)),
    ):
        is_promoted = _followed(series, size).is_promoted
        is_ever = is_promoted.any(axis=-1)
        found[name] = float(is_ever.sum())
        found[f"{name} pairs"] = float(np.where(is_ever, size.at[is_promoted.argmax(axis=-1)], size.pairs).sum())
        found[f"{name} at the end"] = float(is_promoted[..., -1].sum())
    return found


def _noise(draw: Draw, rng: np.random.Generator, count: int, pairs: int) -> Floats:
    baseline, candidate = draw(rng, count, pairs)
    return candidate - baseline


def _ratio(values: Floats, segment: str = "all", stride: int = 1, start: int = 0) -> Series:
    places = start + stride * np.arange(values.shape[-1])
    return Series("latency", segment, "ratio", values, places, MARGIN)


def _event(values: Floats, bound: float) -> Series:
    return Series("errors", "all", "points", values, np.arange(values.shape[-1]), bound, is_event=True)


def _followed(series: Sequence[Series], size: Size) -> Findings:
    return follow(POLICY, series, size.pairs, size.at)


def _decision_counts(findings: Findings, name: str) -> Counts:
    rolled_back, promoted = (each.any(axis=-1) for each in (findings.is_rolled_back, findings.is_promoted))
    return {f"rollback at {name}": float(rolled_back.sum()), f"promotion at {name}": float(promoted.sum())}


def _is_judged(findings: Findings) -> Floats:
    return np.isfinite(findings.tracks[0].upper[..., -1]).astype(np.float64)


def pairs_of(baseline: Floats, candidate: Floats, lost_baseline: Bools, lost_candidate: Bools) -> Pairs:
    """Columns of pairs of latencies with some lost records.

    Args:
        baseline, candidate: logarithms of latency of all requests.
        lost_baseline, lost_candidate: True for lost records.
    """
    there = ~(lost_baseline | lost_candidate)
    num = int(there.sum())
    nothing = np.full(num, math.nan)
    one_sided = np.flatnonzero(lost_baseline ^ lost_candidate)
    metrics = dict.fromkeys((each.name for each in METRICS), (nothing, nothing))
    metrics["latency_ms"] = (np.exp(baseline[there]), np.exp(candidate[there]))
    everywhere = np.ones(num, np.bool_)
    return Pairs(
        ts=np.flatnonzero(there).astype(np.float64),
        is_timed=True,
        ok=(everywhere, everywhere),
        metrics=metrics,
        output=np.zeros(num, np.int8),
        segment=np.zeros(num, np.int32),
        segments=(),
        routed=(everywhere, everywhere),
        streamed=(everywhere, everywhere),
        missing_at=np.cumsum(there, dtype=np.int64)[one_sided],
        missing=np.where(lost_candidate[one_sided], 1.0, -1.0),
    )


def _lose_at_random(rng: np.random.Generator, baseline: Floats, candidate: Floats) -> tuple[Bools, Bools]:
    return rng.random(baseline.shape) < 0.05, rng.random(baseline.shape) < 0.05


def _lose_slow_candidates(rng: np.random.Generator, baseline: Floats, candidate: Floats) -> tuple[Bools, Bools]:
    """The slowest 5 % of the candidate's answers time out; none of the baseline's do."""
    limit: Floats = np.quantile(candidate, 0.95, axis=1, keepdims=True)
    return np.zeros(baseline.shape, np.bool_), candidate > limit


def _lose_slow_answers(rng: np.random.Generator, baseline: Floats, candidate: Floats) -> tuple[Bools, Bools]:
    """One time-out for both sides, which 5 % of the candidate's answers exceed."""
    limit: Floats = np.quantile(candidate, 0.95, axis=1, keepdims=True)
    return baseline > limit, candidate > limit


# -- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scenario:
    """One row of a table."""

    table: str
    name: str
    job: Job
    size: Size
    chunk: int = CHUNK
    share: float = 1.0
    """Share of the canaries that the scenario gets."""


def scenarios(looks: int = 100) -> Iterator[Scenario]:
    """All scenarios, in the order of the tables."""
    long, short = Size(20_000, looks), Size(10_000, looks)
    for name, draw in LATENCIES.items():
        yield Scenario("latency", name, partial(latency, draw), long)
    for name, draw in SLOW.items():
        yield Scenario("slow", name, partial(slow, draw, POLICY), long)
    for name in SLOW:
        if name != "warm-up of 500, 30 % slower":
            yield Scenario("slow-covered", name, partial(slow, SLOW[name], LONG), long)
    for name, draw in LATENCIES.items():
        yield Scenario("rivals", name, partial(rivals, draw), long, share=0.5)
    for length in (1, POLICY.burst_pairs, 20, 100):
        for base in (0.0, 0.01):
            draws = [partial(excess_failures, (base, base + more), length) for more in (0.0, 0.01)]
            name = f"failures{f' in bursts of {length}' if length > 1 else ', independent'}, baseline {100 * base:g} %"
            yield Scenario("events", name, partial(events, draws[0], draws[1], POLICY.error_margin / 100), long)
    for phi in (0.0, 0.9, 0.98):
        name = f"answers beyond p95, {f'AR(1), {phi:g}' if phi else 'independent'}"
        yield Scenario("tail", name, partial(tail, phi), long)
    for name, lose in LOSSES.items():
        yield Scenario("missing", name, partial(missing, lose), short)
    for name, several in FAMILIES.items():
        for effects in several:
            job = partial(family, LATENCIES[name], effects)
            size = Size(5_000, max(2, looks // 4))
            yield Scenario("family", f"{name}, {EFFECTS[effects]}", job, size, chunk=25, share=0.1)
    for name, draw, pairs, policy in POWERS:
        yield Scenario("power", name, partial(power, draw, policy), Size(pairs, looks))
    for correlation, pairs, policy in ((0.8, 1_500, POLICY), (0.95, 300, AT_ONCE)):
        window = f", warmup_pairs {policy.warmup_pairs}" if policy is not POLICY else ""
        name = f"20 metrics x 10 segments, correlation {correlation:g}, within {pairs:,} pairs{window}"
        job = partial(family_power, correlation, policy)
        yield Scenario("power", name, job, Size(pairs, max(2, looks // 4)), chunk=25, share=0.1)
    for name, draw in PROMOTIONS.items():
        yield Scenario("promotion", name, partial(promotion, draw), long, share=0.5)


AT_ONCE = replace(POLICY, warmup_pairs=0)
"""Policy for candidates without a warm-up."""
POWERS: Sequence[tuple[str, Draw, int, Policy]] = (
    ("independent, within 720 pairs", independent, 720, POLICY),
    ("independent, within 900 pairs", independent, 900, POLICY),
    ("AR(1), 0.9, within 10,200 pairs", partial(autoregressive, 0.9), 10_200, POLICY),
    ("AR(1), 0.9, within 11,700 pairs", partial(autoregressive, 0.9), 11_700, POLICY),
    ("correlation 0.95, within 720 pairs", partial(independent, correlation=0.95), 720, POLICY),
    ("correlation 0.95, within 300 pairs, warmup_pairs 0", partial(independent, correlation=0.95), 300, AT_ONCE),
    ("correlation 0.8, within 480 pairs, warmup_pairs 0", independent, 480, AT_ONCE),
)
PROMOTIONS = {**LATENCIES, "warm-up of 500, 30 % slower": SLOW["warm-up of 500, 30 % slower"]}
LOSSES = {
    "5 % on each side at random": _lose_at_random,
    "the candidate's slowest 5 %": _lose_slow_candidates,
    "what is slower than the candidate's p95, on both sides": _lose_slow_answers,
}
FAMILIES = {
    "independent": ("none", "margin", "one", "half"),
    "AR(1), 0.5": ("margin", "one"),
    "Pareto tails, index 1.2": ("margin",),
}
EFFECTS = {
    "none": "no effect",
    "margin": "all at the margin",
    "one": "one at the margin, the others 20 % faster",
    "half": "half at the margin, half 15 % slower",
}


def run(
    scenario: Scenario,
    canaries: int,
    seed: int,
    pool: ProcessPoolExecutor | None = None,
    found: Mapping[str, float] | None = None,
    until: float = math.inf,
) -> Mapping[str, float]:
    """Sums of a scenario over its canaries; includes the number of ``canaries``, which is lower if the time is over.

    Args:
        found: sums of the first canaries, from an earlier run.
        until: `time.monotonic` at which to stop.
    """
    wanted = max(1, round(canaries * scenario.share))
    sums = dict(found or {"canaries": 0.0})
    starts = range(int(sums["canaries"]), wanted, scenario.chunk)
    batch = 1 if pool is None else BATCH
    for first in range(0, len(starts), batch):
        tasks = [
            (scenario, min(scenario.chunk, wanted - start), seed, start // scenario.chunk)
            for start in starts[first : first + batch]
        ]
        for task, counts in zip(tasks, map(_chunk, tasks) if pool is None else pool.map(_chunk, tasks), strict=True):
            for name, value in {"canaries": float(task[1]), **counts}.items():
                sums[name] = sums.get(name, 0.0) + value
        if time.monotonic() > until:
            break
    return sums


def _chunk(task: tuple[Scenario, int, int, int]) -> Counts:
    scenario, count, seed, at = task
    words = [seed, at, *f"{scenario.table}, {scenario.name}".encode()]
    return scenario.job(np.random.default_rng(words), count, scenario.size)


def main() -> None:
    """Run the scenarios, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--canaries", type=int, default=1_000, help="canaries per scenario (default: 1000); slow scenarios get a share"
    )
    parser.add_argument("--looks", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", choices=TABLES, action="append", help="compute only this table; may be repeated")
    parser.add_argument("--output", type=Path, help="page in which the tables are replaced")
    parser.add_argument("--sums", type=Path, help="file of intermediate sums, to continue from")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="time limit in seconds; exit code 1 if incomplete"
    )
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    key = f"canaries {args.canaries}, looks {args.looks}, seed {args.seed}"
    known = json.loads(args.sums.read_text()) if args.sums is not None and args.sums.exists() else {}
    sums = known.setdefault(key, {})
    lines: dict[str, list[tuple[str, Mapping[str, float]]]] = {}
    is_done = True
    with ProcessPoolExecutor(args.processes) as pool:
        for scenario in scenarios(args.looks):
            if args.only and scenario.table not in args.only:
                continue
            name = f"{scenario.table}: {scenario.name}"
            sums[name] = run(scenario, args.canaries, args.seed, pool, sums.get(name), until)
            lines.setdefault(scenario.table, []).append((scenario.name, sums[name]))
            print(f"{name}: {sums[name]['canaries']:,.0f} canaries", file=sys.stderr, flush=True)
            if args.sums is not None:
                args.sums.write_text(json.dumps(known))
            if time.monotonic() > until:
                is_done = False
                break
    tables = {name: table(name, each) for name, each in lines.items()}
    if not is_done:
        sys.exit(1)
    if args.output is not None:
        args.output.write_text(with_tables(args.output.read_text(), tables))
    else:
        print("\n\n".join(f"{name}\n{text}" for name, text in tables.items()))


if __name__ == "__main__":
    main()
