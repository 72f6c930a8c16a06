"""Wait reasons: records why waiting requests are passed over, as the planner decides. Engine thread only.

Without waiting requests, the clock is not read. Otherwise the planner is sampled a few times a second, and less often
the more requests wait, so that reasons take a small part of the time for any length of the queue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from lockstep.core.scheduler import Scheduler
from lockstep.core.step import Limit, Reason, StepPlan
from lockstep.engine.generation import Generation, LiveRequest
from lockstep.engine.outputs import WaitReason

MIN_INTERVAL_S = 0.1
"""Minimum interval between two steps that are explained."""
REQUEST_INTERVAL_S = 2e-4
"""Additional interval for each waiting request, as a reason takes some microseconds."""
PRIORITY, SESSION, RETURNING, ADAPTER = "PRIORITY", "SESSION", "RETURNING", "ADAPTER"
"""Reasons outside of the planner: requests of higher priority, an idle session, blocks that are being loaded, a slot
for an adapter."""
_CUTS = frozenset({Limit.CHUNK})
"""Limits that only shorten a chunk."""
_DECODE_LIMITS = frozenset({Limit.PLACES, Limit.TOKENS})
"""Limits that keep a request with a first token from the next one; then ``decode_order`` decides."""


class WaitSampler:
    """Samples the planner's reasons why requests wait.

    Args:
        generations: the unfinished sequences by id.
        now_s: the engine's clock.
    """

    def __init__(self, scheduler: Scheduler, generations: Mapping[int, Generation], now_s: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._generations = generations
        self._now_s = now_s
        self._next_s = -math.inf
        self._num_left = 0
        """Number of sequences that waited after the last decision."""
        self._found: list[WaitReason] = []
        """Sampled reasons, at most one for each limit of each open request."""

    def schedule(self) -> StepPlan:
        """Decide the next step. If the last one left requests waiting and a sample is due, record the reasons."""
        scheduler, num_left = self._scheduler, self._num_left
        if not num_left or (now_s := self._now_s()) < self._next_s:
            plan = scheduler.schedule()
        else:
            self._next_s = now_s + MIN_INTERVAL_S + num_left * REQUEST_INTERVAL_S
            reasons: list[Reason] = []
            plan = scheduler.schedule(reasons.append)
            self._take_over(plan, reasons)
        self._num_left = scheduler.num_waiting
        return plan

    def record_wait(self, live: LiveRequest, reason: str | None = None) -> None:
        """Record the reason of a request that has arrived, or was admitted to its session, and is not in the scheduler:
        it waits for its session, for its blocks, or as the given reason states."""
        is_out = live.request.session_id is not None and not live.is_in_session
        self._found.append(WaitReason(live.request_id, reason or (SESSION if is_out else RETURNING)))

    def take(self) -> list[WaitReason]:
        """Take the reasons recorded since the last call."""
        found, self._found = self._found, []
        return found

    def _take_over(self, plan: StepPlan, reasons: list[Reason]) -> None:
        """Add the reasons of requests that have no part in the step."""
        busy = {*plan.seq_ids, *plan.admitted, *plan.resumed}
        found: dict[tuple[int, str], WaitReason] = {}
        ranked: dict[int, None] = {}
        for reason in reasons:
            if reason.seq_id in busy or reason.limit in _CUTS or reason.seq_id not in self._generations:
                continue
            generation = self._generations[reason.seq_id]
            request_id, limit = generation.live.request_id, reason.limit.name
            found[request_id, limit] = WaitReason(
                request_id, limit, reason.used, reason.most, reason.needed, len(reason.others)
            )
            if self._is_by_priority(generation, reason.limit):
                ranked[request_id] = None
        self._add_priorities(found, ranked)
        self._found += found.values()

    def _is_by_priority(self, generation: Generation, limit: Limit) -> bool:
        """True if requests of higher priority come strictly first at this limit."""
        config = self._scheduler.config
        has_token = generation.first_token_s is not None
        decodes = limit is Limit.WIDTH or (has_token and limit in _DECODE_LIMITS)
        return config.order == "priority" and (not decodes or config.decode_order == "priority")

    def _add_priorities(self, found: dict[tuple[int, str], WaitReason], ranked: Iterable[int]) -> None:
        """Add the number of requests with higher priority for each of ``ranked``."""
        priorities = {each.live.request_id: each.live.request.priority for each in self._generations.values()}
        counts: dict[int, int] = {}
        for priority in priorities.values():
            counts[priority] = counts.get(priority, 0) + 1
        num_higher, higher = 0, {}
        for priority in sorted(counts):
            higher[priority] = num_higher
            num_higher += counts[priority]
        for request_id in ranked:
            if count := higher[priorities[request_id]]:
                found[request_id, PRIORITY] = WaitReason(request_id, PRIORITY, num_others=count)
