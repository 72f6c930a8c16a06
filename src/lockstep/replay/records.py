"""What every tick did, as values that a file can hold, by the names that requests have in their file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from lockstep.core.step import StepPlan
from lockstep.replay.cost import CostModel
from lockstep.replay.timeline import RequestOutcome, Tick

MAX_TICKS = 500_000
"""Ticks that a report holds at most; those after them are left out, and the report says so."""
MAX_TICKS_UNASKED = 10_000
"""A replay of more has them only where they are asked for."""


class TickRecord(msgspec.Struct, frozen=True):
    """One tick. Requests go by their names, and every key is always there: nothing happened is an empty list, or 0."""

    tick: int
    start_ps: int
    duration_ps: int
    admitted: tuple[str, ...]
    resumed: tuple[str, ...]
    preempted: tuple[str, ...]
    decoded: tuple[str, ...]
    """Who got a token."""
    completed: tuple[str, ...]
    prefill_tokens: int
    """Prompt tokens computed."""
    admitted_prefill_tokens: int
    """Those of them that were of requests admitted in it."""
    decoded_tokens: int
    queued: int
    """After admission, preempted ones counted; likewise the next."""
    active: int
    used_blocks: int
    swapped_out_blocks: int
    swapped_in_blocks: int


@dataclass(frozen=True, slots=True)
class TickSpan:
    """One tick, or ``num_ticks`` that are alike: then everything happens in each of them. Ids are of sequences."""

    tick: int
    start_ps: int
    duration_ps: int
    """Of all of them together."""
    num_ticks: int
    admitted: tuple[int, ...] = ()
    resumed: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()
    decoded: tuple[int, ...] = ()
    completed: tuple[int, ...] = ()
    prefill_tokens: int = 0
    admitted_prefill_tokens: int = 0
    decoded_tokens: int = 0
    """In each."""
    queued: int = 0
    active: int = 0
    used_blocks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0


class TickRecorder:
    """A watcher that keeps the first spans.

    Args:
        most: how many.
    """

    def __init__(self, most: int = MAX_TICKS) -> None:
        self.spans: list[TickSpan] = []
        self.most = most
        self.num_left_out = 0

    def __call__(self, tick: Tick) -> None:
        if len(self.spans) < self.most:
            self.spans.append(span_of(tick))
        else:
            self.num_left_out += 1


def span_of(tick: Tick) -> TickSpan:
    """What a tick did, or a run of ticks."""
    plan, events = tick.plan, tick.events
    if plan is None or events is None:
        return TickSpan(tick.tick, tick.start_ps, tick.duration_ps, tick.num_ticks)
    return TickSpan(
        tick=tick.tick,
        start_ps=tick.start_ps,
        duration_ps=tick.duration_ps,
        num_ticks=tick.num_ticks,
        admitted=plan.admitted,
        resumed=plan.resumed,
        preempted=plan.preempted,
        decoded=tuple([seq_id for seq_id, samples in zip(plan.seq_ids, plan.samples, strict=True) if samples]),
        completed=tuple([finish.seq_id for finish in events.finished]),
        prefill_tokens=tick.num_prefill_tokens,
        admitted_prefill_tokens=_tokens_of(plan, plan.admitted),
        decoded_tokens=tick.num_decoded_tokens // tick.num_ticks,
        queued=tick.num_queued,
        active=tick.num_active,
        used_blocks=tick.num_used_blocks,
        swapped_out_blocks=len(plan.swap_out),
        swapped_in_blocks=len(plan.swap_in),
    )


def names_of(outcomes: Iterable[RequestOutcome]) -> dict[int, str]:
    """What sequences are called in their file, by their ids."""
    return {outcome.seq_id: outcome.name for outcome in outcomes if outcome.seq_id >= 0}


def tick_records(spans: Iterable[TickSpan], names: Mapping[int, str], cost: CostModel) -> Iterator[TickRecord]:
    """Each tick of the spans by itself.

    Args:
        names: of every sequence in them.
        cost: what the replay's steps took.
    """
    for span in spans:
        num_ticks = span.num_ticks
        growth_ps = (
            cost.context_token_ps * len(span.decoded) if num_ticks > 1 else 0
        )  # each row's context is one longer
        duration_ps = (span.duration_ps - growth_ps * (num_ticks * (num_ticks - 1) // 2)) // num_ticks
        start_ps = span.start_ps
        admitted, resumed = _named(span.admitted, names), _named(span.resumed, names)
        preempted, decoded = _named(span.preempted, names), _named(span.decoded, names)
        completed = _named(span.completed, names)
        for tick in range(span.tick, span.tick + num_ticks):
            yield TickRecord(
                tick,
                start_ps,
                duration_ps,
                admitted,
                resumed,
                preempted,
                decoded,
                completed,
                span.prefill_tokens,
                span.admitted_prefill_tokens,
                span.decoded_tokens,
                span.queued,
                span.active,
                span.used_blocks,
                span.swapped_out_blocks,
                span.swapped_in_blocks,
            )
            start_ps += duration_ps
            duration_ps += growth_ps


def _named(seq_ids: Sequence[int], names: Mapping[int, str]) -> tuple[str, ...]:
    return tuple([names[seq_id] for seq_id in seq_ids])


def _tokens_of(plan: StepPlan, seq_ids: tuple[int, ...]) -> int:
    """Tokens that the plan computes of some sequences; all prompt, as those who were just admitted have no other."""
    return sum(length for seq_id, length in zip(plan.seq_ids, plan.lengths, strict=True) if seq_id in seq_ids)
