"""Report of a replay: a versioned value with all figures, and its JSON with stable bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import islice
from typing import Any

import msgspec
from msgspec.structs import replace

from lockstep.replay.latencies import Latencies, latencies_in_ms, latencies_in_ticks, ratio
from lockstep.replay.simulator import Replay
from lockstep.replay.timeline import Course, RequestOutcome, TickRecord, TickRecorder, TickSpan, names_of
from lockstep.replay.workload import PS_PER_MS

VERSION = 2
"""Version of the report's form; it increases when a field is removed or changes its meaning."""
_PS_PER_S = 1000 * PS_PER_MS
_MEASURES: dict[str, Callable[[Course], int]] = {
    "ttft": lambda course: course.ttft,
    "tpot": lambda course: course.tpot(),
    "e2e": lambda course: course.e2e,
}
GOALS = tuple(_MEASURES)
"""Metrics that each request can meet or miss."""
_SEQUENCE_FIELDS = ("admitted", "resumed", "preempted", "decoded", "completed")
"""Fields of a tick that list requests."""


class Goodput(msgspec.Struct, frozen=True):
    """Requests that met every goal. A request of one token meets any goal for the time per token."""

    goals_ms: dict[str, float]
    requests: int
    ratio: float
    """Share of all requests that arrived, including refused ones."""
    requests_per_s: float
    """Requests per second of logical time."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a replay. Ratios and times have 6 decimals. A refused request counts only as arrived."""

    version: int = VERSION
    name: str
    config: dict[str, Any]
    """Scheduler config."""
    cost_ps: dict[str, int]
    """Step prices (replay/cost.py)."""
    arrivals: str
    """Unit of the workload's arrivals: ``ticks`` or ``ps``."""
    requests: int
    requests_completed: int
    requests_refused: int
    total_ticks: int
    """Number of ticks; includes idle ones if arrivals are in ticks."""
    busy_ticks: int
    duration_ms: float
    """Logical time at the end of the last step."""
    prompt_tokens: int
    """Prompt tokens of the completed requests, including cache hits."""
    decode_tokens: int
    """Number of generated tokens."""
    prefill_tokens: int
    """Number of computed prompt tokens, without cache hits and including recomputed ones."""
    reserved_blocks: int
    """Number of blocks for the prompts and maximum outputs of the admitted requests."""
    peak_blocks: int
    peak_blocks_percent: float
    max_queued: int
    max_active: int
    queue_pressure_ticks: int
    """Number of ticks with waiting requests after admission."""
    active_capacity_ticks: int
    """Number of ticks with the maximum of running requests."""
    prefill_capacity: int
    """Maximum prompt tokens per tick."""
    decode_capacity: int
    """Maximum sampling sequences per tick."""
    kv_capacity: int
    """Number of device blocks."""
    prefill_utilization: float
    """Computed prompt tokens divided by the capacity of all ticks."""
    decode_utilization: float
    kv_occupancy: float
    """Blocks in use, summed over ticks, divided by ticks times blocks."""
    preemptions: int
    recomputed_tokens: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    evicted_blocks: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    prefix_hit_rate: float
    """Hit tokens divided by queried tokens."""
    prefix_unbounded_hit_tokens: int | None = None
    """Hit tokens of a cache without bounds for the same prompts; never less than the actual ones. None: prompts share
    nothing, or have too many distinct contents."""
    prefix_unbounded_hit_rate: float | None = None
    requests_per_s: float
    """Completed requests per second of logical time."""
    output_tokens_per_s: float
    latency_ticks: Latencies
    latency_ms: Latencies | None
    """Latencies in milliseconds; None: the duration of a tick is unknown."""
    goodput: Goodput | None
    """Goodput; None: no goals were given."""
    fairness: float
    """Jain's index over tenants, of tokens per time in the system: 1 is equal speed for all, 1/n all for one of n."""
    tenants: int
    all_blocks_returned: bool
    fingerprint: str
    notes: tuple[str, ...]
    ticks: tuple[TickRecord, ...] | None = None
    outcomes: tuple[RequestOutcome, ...] | None = None


def report_of(
    replay: Replay,
    goals_ms: Mapping[str, float] | None = None,
    recorder: TickRecorder | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """Compute the figures of a replay.

    Args:
        notes: further warnings for the reader.
        goals_ms: milliseconds by metric, one of ``GOALS``.
        recorder: watcher of the simulation; its ticks and all request outcomes become part of the report.
    """
    config, totals, stats = replay.config, replay.totals, replay.stats
    unbounded = replay.num_unbounded_hit_tokens
    done = [each for each in replay.outcomes if each.is_completed]
    num_decoded = sum(each.num_output_tokens for each in replay.outcomes)
    tenants = list(dict.fromkeys(each.tenant for each in done))
    ticks = None if recorder is None else tuple(islice(tick_records(replay, recorder.spans), recorder.most))
    return Report(
        name=replay.name,
        config=asdict(config),
        cost_ps=asdict(replay.cost),
        arrivals=replay.unit.value,
        requests=len(replay.outcomes),
        requests_completed=len(done),
        requests_refused=sum(bool(each.refusal) for each in replay.outcomes),
        total_ticks=replay.num_ticks,
        busy_ticks=totals.num_steps,
        duration_ms=ratio(replay.duration_ps, PS_PER_MS),
        prompt_tokens=sum(each.num_prompt_tokens for each in done),
        decode_tokens=num_decoded,
        prefill_tokens=totals.num_prefill_tokens,
        reserved_blocks=replay.num_reserved_blocks,
        peak_blocks=totals.max_used_blocks,
        peak_blocks_percent=ratio(100 * totals.max_used_blocks, config.num_blocks),
        max_queued=totals.max_queued,
        max_active=totals.max_active,
        queue_pressure_ticks=totals.num_queue_pressure_ticks,
        active_capacity_ticks=totals.num_active_capacity_ticks,
        prefill_capacity=config.prefill_limit,
        decode_capacity=config.decode_limit,
        kv_capacity=config.num_blocks,
        prefill_utilization=ratio(totals.num_prefill_tokens, replay.num_ticks * config.prefill_limit),
        decode_utilization=ratio(num_decoded, replay.num_ticks * config.decode_limit),
        kv_occupancy=ratio(totals.num_block_ticks, replay.num_ticks * config.num_blocks),
        preemptions=stats.num_preemptions,
        recomputed_tokens=stats.num_recomputed_tokens,
        swapped_out_blocks=stats.num_swapped_out_blocks,
        swapped_in_blocks=stats.num_swapped_in_blocks,
        evicted_blocks=stats.num_evicted_blocks,
        prefix_queried_tokens=stats.prefix_queries_tokens,
        prefix_hit_tokens=stats.prefix_hits_tokens,
        prefix_hit_rate=ratio(stats.prefix_hits_tokens, stats.prefix_queries_tokens),
        prefix_unbounded_hit_tokens=unbounded,
        prefix_unbounded_hit_rate=None if unbounded is None else ratio(unbounded, stats.prefix_queries_tokens),
        requests_per_s=ratio(len(done) * _PS_PER_S, replay.duration_ps),
        output_tokens_per_s=ratio(num_decoded * _PS_PER_S, replay.duration_ps),
        latency_ticks=latencies_in_ticks(done, replay.gaps),
        latency_ms=latencies_in_ms(done, replay.gaps) if replay.is_timed else None,
        goodput=_goodput(replay, done, goals_ms) if goals_ms else None,
        fairness=_fairness(done, tenants),
        tenants=len(tenants),
        all_blocks_returned=stats.num_held_blocks == 0,
        fingerprint=replay.fingerprint,
        notes=(*_notes(replay, ticks), *notes),
        ticks=ticks,
        outcomes=None if ticks is None else replay.outcomes,
    )


def to_json(report: Report | tuple[Report, ...]) -> bytes:
    """Indented JSON with one line per tick and outcome and a final newline; equal reports give equal bytes."""
    if isinstance(report, Report):
        return _document(report) + b"\n"
    return b"[\n  " + b",\n  ".join(_document(each).replace(b"\n", b"\n  ") for each in report) + b"\n]\n"


def _document(report: Report) -> bytes:
    whole = msgspec.json.format(msgspec.json.encode(replace(report, ticks=None, outcomes=None)), indent=2)
    rest = b'  "ticks": null,\n  "outcomes": null\n}'
    assert whole.endswith(rest), "the long lists are the last fields"
    return b'%s  "ticks": %s,\n  "outcomes": %s\n}' % (
        whole.removesuffix(rest),
        _lines(report.ticks),
        _lines(report.outcomes),
    )


def _lines(values: Sequence[object] | None) -> bytes:
    if not values:
        return b"null" if values is None else b"[]"
    return b"[\n    " + b",\n    ".join(map(msgspec.json.encode, values)) + b"\n  ]"


def _goodput(replay: Replay, done: list[RequestOutcome], goals_ms: Mapping[str, float]) -> Goodput:
    limits = [(_MEASURES[name], round(limit_ms * PS_PER_MS)) for name, limit_ms in goals_ms.items()]
    good = sum(all(measure(each.in_ps) <= limit_ps for measure, limit_ps in limits) for each in done)
    return Goodput(
        goals_ms=dict(goals_ms),
        requests=good,
        ratio=ratio(good, len(replay.outcomes)),
        requests_per_s=ratio(good * _PS_PER_S, replay.duration_ps),
    )


def _fairness(done: list[RequestOutcome], tenants: list[str]) -> float:
    tokens, times_ps = dict.fromkeys(tenants, 0), dict.fromkeys(tenants, 0)
    for each in done:
        tokens[each.tenant] += each.num_prompt_tokens + each.num_output_tokens
        times_ps[each.tenant] += each.in_ps.e2e
    speeds = [tokens[tenant] / times_ps[tenant] for tenant in tenants if times_ps[tenant]]
    return ratio(sum(speeds) ** 2, len(speeds) * sum(speed * speed for speed in speeds)) if speeds else 1.0


def tick_records(replay: Replay, spans: Iterable[TickSpan]) -> Iterator[TickRecord]:
    """Single ticks of a replay's spans, with the names of requests."""
    names = names_of(replay.outcomes)
    for first, num_ticks in spans:
        values = {field.name: getattr(first, field.name) for field in fields(TickRecord)}
        values |= {key: tuple([names[seq_id] for seq_id in values[key]]) for key in _SEQUENCE_FIELDS}
        # The context of each row grows by one with each tick.
        growth_ps = replay.cost.context_token_ps * len(first.decoded) if num_ticks > 1 else 0
        duration_ps = (first.duration_ps - growth_ps * (num_ticks * (num_ticks - 1) // 2)) // num_ticks
        start_ps = first.start_ps
        for tick in range(first.tick, first.tick + num_ticks):
            values |= {"tick": tick, "start_ps": start_ps, "duration_ps": duration_ps}
            yield TickRecord(**values)
            start_ps += duration_ps
            duration_ps += growth_ps


def refusals_in_words(replay: Replay) -> str:
    """Number of refused requests, and the reason for the first; empty: none."""
    refused = [each for each in replay.outcomes if each.refusal]
    if not refused:
        return ""
    number = "1 request was refused" if len(refused) == 1 else f"{len(refused):,} requests were refused"
    return f"{number}, first {refused[0].name}: {refused[0].refusal}"


def _notes(replay: Replay, ticks: Sequence[TickRecord] | None) -> tuple[str, ...]:
    """Warnings of the simulation, the first refusal, and omitted ticks."""
    notes = list(replay.notes)
    refused = refusals_in_words(replay)
    if refused:
        notes.append(refused)
    if ticks is not None and len(ticks) < replay.num_ticks:
        notes.append(f"ticks has the first {len(ticks):,}; {replay.num_ticks - len(ticks):,} are omitted")
    return tuple(notes)
