"""Simulation of a workload on the real scheduler, with a logical clock and no model.

The result is deterministic: the simulation uses no wall clock and no randomness, and inspects no token, so the same
workload, config and cost model give the same replay. Each step commits the previous step, queues the requests whose
arrival time has come, and schedules, in this order. A step that only repeats the previous one is counted and not
planned again, up to the next arrival, end or block border (``run_lengths``). All figures and the fingerprint equal
those of single steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lockstep.core.fingerprint import Fingerprint
from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.stats import SchedulerStats
from lockstep.core.step import Explain
from lockstep.errors import RequestError, UsageError
from lockstep.replay.cache_oracle import UnboundedCache
from lockstep.replay.cost import CostModel
from lockstep.replay.progress import Gaps, Progress, RequestProgress
from lockstep.replay.timeline import RequestOutcome, Tick, Totals, Watcher
from lockstep.replay.workload import ArrivalUnit, Workload, WorkloadRequest, content_hashes

MAX_REQUESTS = 1_000_000
"""Maximum requests of one replay; each outcome takes about half a kilobyte."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Result of a simulation."""

    name: str
    """Name of the workload."""
    config: SchedulerConfig
    cost: CostModel
    unit: ArrivalUnit
    is_timed: bool
    """True if a cost model or arrivals in time were given. Otherwise only ticks are meaningful, not times."""
    outcomes: tuple[RequestOutcome, ...]
    """Outcome of each arrived request, in the order of arrival."""
    totals: Totals
    gaps: Gaps
    stats: SchedulerStats
    fingerprint: str
    """Digest of all decisions, sixteen hex digits (core/fingerprint.py)."""
    num_ticks: int
    duration_ps: int
    """Logical time at the end of the last step."""
    num_reserved_blocks: int
    """Number of KV blocks for the prompts and maximum outputs of the admitted requests."""
    num_unbounded_hit_tokens: int | None = None
    """Prompt tokens found in a prefix cache without bounds; None: no caching, or unknown contents."""
    notes: tuple[str, ...] = ()
    """Warnings about the figures."""


class Simulation:
    """One run of a workload, step by step.

    Args:
        cost: step prices; None: 10 ms per step.
        watchers: functions called with every tick.
        on_arrival: function called for each queued request, with its sequence's id, its core request, and its arrival
            in picoseconds.
        run_lengths: count repeating steps; False: plan and commit each step individually.
    """

    def __init__(
        self,
        workload: Workload,
        config: SchedulerConfig,
        cost: CostModel | None = None,
        *,
        watchers: Sequence[Watcher] = (),
        on_arrival: Callable[[int, Request, int], None] | None = None,
        run_lengths: bool = True,
    ) -> None:
        self.workload = workload
        self.config = config
        self.cost = CostModel() if cost is None else cost
        # Sequences that end in one step are read together; this bound affects nothing else.
        self.scheduler = Scheduler(replace(config, max_finished=max(config.max_finished, config.max_num_seqs)))
        self.tick = 0
        """Number of the next tick."""
        self.now_ps = 0
        """Logical time at which the next tick begins."""
        self.notes: list[str] = []
        self.refusals: list[str] = []
        """Names of the requests that were refused when they arrived, in order."""
        self._watchers = tuple(watchers)
        self._on_arrival = on_arrival
        self.run_lengths = run_lengths
        """Whether repeating steps are counted; may change between two steps."""
        self.explain: Explain | None = None
        """Called with the reasons why a step passes sequences over, from the next step on."""
        self._is_timed = cost is not None or workload.unit is ArrivalUnit.PS
        self._in_ticks = workload.unit is ArrivalUnit.TICKS
        self._fingerprint = Fingerprint()
        self._progress = Progress()
        self._totals = Totals(config.max_num_seqs)
        self._outcomes: list[RequestOutcome] = []
        self._num_reserved_blocks = 0
        self._content_size = self._usable_content_size()
        self._unbounded_cache: UnboundedCache | None = None
        if self._content_size and config.enable_prefix_caching:
            self._unbounded_cache = UnboundedCache(self._content_size, config)
        self._requests = iter(workload.requests)
        self._next: WorkloadRequest | None = next(self._requests, None)
        self._horizon: int | None = None if self._next is None else self._next.arrival
        """Time before which no request arrives; None: no further requests."""

    @property
    def fingerprint(self) -> str:
        """Digest of all decisions so far."""
        return self._fingerprint.hexdigest()

    def run(self) -> Replay:
        """Run to the end of the workload."""
        while self.step() is not None:
            pass
        return self.replay()

    def step(self) -> Tick | None:
        """Simulate the next tick, or several equal ones; None: all requests have ended and none follows."""
        while not self._take_arrivals():
            if self._next is None:
                return None
            if self._in_ticks:
                return self._emit(self._wait(self._next.arrival - self.tick))
            self.now_ps = self._next.arrival
        return self._emit(self._run_step())

    def replay(self) -> Replay:
        """Result so far."""
        self._progress.settle()
        # Outcomes of open requests may still change.
        outcomes = [each if each.is_completed else replace(each) for each in self._outcomes]
        return Replay(
            name=self.workload.name,
            config=self.config,
            cost=self.cost,
            unit=self.workload.unit,
            is_timed=self._is_timed,
            outcomes=tuple(outcomes),
            totals=self._totals,
            gaps=self._progress.gaps,
            stats=self.scheduler.stats(),
            fingerprint=self.fingerprint,
            num_ticks=self.tick,
            duration_ps=self.now_ps,
            num_reserved_blocks=self._num_reserved_blocks,
            num_unbounded_hit_tokens=None if self._unbounded_cache is None else self._unbounded_cache.num_hit_tokens,
            notes=tuple(self.notes),
        )

    # -- arrivals -----------------------------------------------------------------------------------------------------

    def _take_arrivals(self) -> bool:
        """Queue the requests whose arrival time has come; True if there is any work."""
        now = self.tick if self._in_ticks else self.now_ps
        while self._next is not None and self._next.arrival <= now:
            self._add(self._next, self.hashes_of(self._next))
            following = next(self._requests, None)
            if following is not None and following.arrival < self._next.arrival:
                raise UsageError(
                    f"{following.place or following.name}: arrives before the request above it; sort the workload"
                )
            self._next = following
            self._horizon = None if following is None else following.arrival
        return self.scheduler.has_work

    def advance(self, until_ps: int) -> Tick | None:
        """Simulate the next tick if it begins before ``until_ps``, the next possible arrival; None: it does not.

        For callers that add requests by ``arrive``, to a simulation with an empty workload in picoseconds.
        """
        if not self.scheduler.has_work or self.now_ps >= until_ps:
            return None
        self._horizon = until_ps
        return self._emit(self._run_step())

    def arrive(self, request: WorkloadRequest, hashes: tuple[bytes, ...]) -> RequestOutcome:
        """Queue a request that arrives after all ticks that begin before it; returns its outcome, which is updated
        later."""
        if not self.scheduler.has_work:
            self.now_ps = max(self.now_ps, request.arrival)
        self._add(request, hashes)
        return self._outcomes[-1]

    def hashes_of(self, request: WorkloadRequest) -> tuple[bytes, ...]:
        """Hashes of a prompt's full blocks; empty if its contents are unknown."""
        size = self._content_size
        if not size or not request.contents:
            return ()
        return content_hashes(request.contents, size, self.config.block_size, request.num_prompt_tokens)

    def _add(self, request: WorkloadRequest, hashes: tuple[bytes, ...]) -> None:
        if len(self._outcomes) >= MAX_REQUESTS:
            raise UsageError(f"{self.workload.name} has more than {MAX_REQUESTS:,} requests; limit them with --limit")
        arrival_ps = self.now_ps if self._in_ticks else request.arrival
        outcome = RequestOutcome(
            request.name,
            seq_id=-1,
            priority=request.priority,
            tenant=request.tenant,
            num_prompt_tokens=request.num_prompt_tokens,
            arrival_tick=self.tick,
            arrival_ps=arrival_ps,
        )
        self._outcomes.append(outcome)
        core_request = Request(
            request.num_prompt_tokens, request.max_output_tokens, hashes, request.priority, request.tenant
        )
        try:
            outcome.seq_id = self.scheduler.add(core_request)
        except RequestError as refusal:
            outcome.refusal = str(refusal)
            self.refusals.append(request.name)
            return
        self._progress.lives[outcome.seq_id] = RequestProgress(request, outcome, request.num_output_tokens)
        if self._on_arrival is not None:
            self._on_arrival(outcome.seq_id, core_request, arrival_ps)

    def _usable_content_size(self) -> int:
        """Content size of the workload, or 0 if it is not a multiple of the block size."""
        size, block_size = self.workload.content_size, self.config.block_size
        if size % block_size:
            self.notes.append(
                f"contents are ignored, so nothing is shared: {size} tokens are no multiple of block_size {block_size}"
            )
            return 0
        return size

    # -- ticks --------------------------------------------------------------------------------------------------------

    def _emit(self, tick: Tick) -> Tick:
        self.tick += tick.num_ticks
        self.now_ps += tick.duration_ps
        self._totals.add(tick)
        for watch in self._watchers:
            watch(tick)
        return tick

    def _wait(self, num_ticks: int) -> Tick:
        return Tick(self.tick, num_ticks, self.now_ps, num_ticks * self.cost.constant_ps, None, None, 0, 0, 0, 0, 0)

    def _run_step(self) -> Tick:
        """Plan and commit one step, and count the steps that repeat it."""
        scheduler, progress, fingerprint = self.scheduler, self._progress, self._fingerprint
        plan = scheduler.schedule(self.explain)
        num_queued, num_active = scheduler.num_waiting, scheduler.num_running
        num_used_blocks = scheduler.num_held_blocks
        if plan.admitted:
            self._count_admitted(plan.admitted)
            progress.admit(plan, self.tick, self.now_ps)
        num_tokens = sum(plan.lengths)
        num_context = sum(plan.starts) + num_tokens
        num_prefill = plan.num_prompt_tokens
        duration_ps = self.cost.step_ps(num_prefill, num_tokens - num_prefill, num_context)
        events = scheduler.commit(plan, progress.answer(plan))
        fingerprint.observe(plan, events)
        progress.take(self.tick, self.now_ps + duration_ps)
        num_seqs = len(events.num_tokens)
        num_ticks = 1
        if events.finished:
            self._note_ends()
        elif self.run_lengths:
            num_more = self._num_repeats(self.now_ps + duration_ps, num_seqs, num_context + num_seqs)
            if num_more > 0:
                scheduler.skip(num_more)
                fingerprint.repeat(num_more)
                progress.gaps.count_run(self.cost, num_more, num_seqs, num_context + num_seqs)
                duration_ps += self.cost.run_ps(num_more, num_seqs, num_context + num_seqs)
                num_ticks += num_more
                progress.repeat(num_more, self.tick + num_more, self.now_ps + duration_ps)
        return Tick(
            self.tick,
            num_ticks,
            self.now_ps,
            duration_ps,
            plan,
            events,
            num_prefill,
            num_seqs * num_ticks,
            num_queued,
            num_active,
            num_used_blocks,
        )

    def _num_repeats(self, end_ps: int, num_seqs: int, num_context: int) -> int:
        """Number of times that the step that ends at ``end_ps`` repeats before the next arrival."""
        most = min(self.scheduler.num_quiet_steps(), self._progress.num_quiet_steps)
        if self._horizon is None or most < 1:
            return most
        if self._in_ticks:
            return min(most, self._horizon - self.tick - 1)
        return self.cost.num_begun_within(self._horizon - end_ps, most, num_seqs, num_context)

    def _count_admitted(self, admitted: tuple[int, ...]) -> None:
        for seq_id in admitted:
            request = self._progress.lives[seq_id].request
            self._num_reserved_blocks += self.config.blocks_for(request.num_prompt_tokens + request.max_output_tokens)
            if self._unbounded_cache is not None:
                self._unbounded_cache.admit(request.contents, request.num_prompt_tokens)

    def _note_ends(self) -> None:
        """Record the ends of the requests that ended with this step."""
        self._progress.settle()
        for end in self.scheduler.drain_finished():
            life = self._progress.lives.pop(end.seq_id)
            life.outcome.end(end, life.last_token_tick, life.last_token_ps)
