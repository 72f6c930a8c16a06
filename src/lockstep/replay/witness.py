"""Runs one side again up to a step, and writes down what its scheduler stood before."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import takewhile

from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.sequence import SequenceState, SequenceView
from lockstep.replay.side_by_side import Place
from lockstep.replay.simulator import Simulation
from lockstep.replay.situation import Situation, Standing
from lockstep.replay.workload import ArrivalUnit, WorkloadRequest, content_hashes


def witness(label: str, simulation: Simulation, requests: Sequence[WorkloadRequest], place: Place) -> Situation:
    """The facts of one side at a step.

    Args:
        simulation: a fresh one, of the side.
        requests: those of its workload.
        place: where the side stood.
    """
    while simulation.tick < place.run_tick and simulation.step() is not None:
        pass
    scheduler = simulation.scheduler
    num_arrived = len(simulation.replay().outcomes)
    coming = _arriving(simulation, requests[num_arrived:])
    stats = scheduler.stats()
    views = {
        outcome.seq_id: (index, view)
        for index, outcome in enumerate(simulation.replay().outcomes)
        if (view := scheduler.view(outcome.seq_id)) is not None
    }
    held = {block for _, view in views.values() for block in view.table}
    standings = {
        seq_id: standing_of(
            scheduler,
            _asked(simulation, requests[index]),
            view,
            held,
            requests[index].name,
            index,
            place.tick - place.run_tick,
        )
        for seq_id, (index, view) in views.items()
    }
    new = [
        standing_of(scheduler, _asked(simulation, request), None, held, request.name, index)
        for index, request in enumerate(coming, start=num_arrived)
    ]
    tick = simulation.step()
    arrived = simulation.replay().outcomes[num_arrived:]
    pairs = zip(arrived, new, strict=False)
    standings.update((outcome.seq_id, standing) for outcome, standing in pairs if not outcome.refusal)
    return Situation(
        label=label,
        config=simulation.config,
        decision=place.decision,
        standings=standings,
        num_active=0 if tick is None else tick.num_active,
        num_free_blocks=simulation.config.num_blocks - (0 if tick is None else tick.num_used_blocks),
        num_free_host_blocks=stats.num_free_host_blocks,
        refusals={outcome.name: outcome.refusal for outcome in arrived if outcome.refusal},
    )


def _arriving(simulation: Simulation, rest: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    """Those that the next step begins with."""
    now = simulation.tick if simulation.workload.unit is ArrivalUnit.TICKS else simulation.now_ps
    if rest and not simulation.scheduler.has_work:
        now = max(now, rest[0].arrival)
    return list(takewhile(lambda request: request.arrival <= now, rest))


def _asked(simulation: Simulation, request: WorkloadRequest) -> Request:
    """The request as the scheduler has it."""
    config, size = simulation.config, simulation.workload.content_size
    hashes: tuple[bytes, ...] = ()
    if request.contents and size and not size % config.block_size:
        hashes = content_hashes(request.contents, size, config.block_size, request.num_prompt_tokens)
    return Request(request.num_prompt_tokens, request.max_output_tokens, hashes, request.priority, request.tenant)


def standing_of(
    scheduler: Scheduler,
    request: Request,
    view: SequenceView | None,
    held: Container[int],
    name: str,
    index: int,
    num_steps_into_run: int = 0,
) -> Standing:
    """One sequence before a step.

    Args:
        view: None for one that is only arriving.
        held: blocks that somebody holds.
        num_steps_into_run: how far on the step is in a run of equal steps, in which who decodes gets a token each time.
    """
    config = scheduler.config
    state = SequenceState.WAITING if view is None else view.state
    hits = _hits(scheduler, request) if state is SequenceState.WAITING else ()
    num_computed = 0 if view is None else view.num_computed
    return Standing(
        index=index,
        name=name,
        state=state,
        priority=request.priority,
        tenant=request.tenant,
        num_prompt_tokens=request.num_prompt_tokens,
        max_output_tokens=_most_output(config, request),
        num_computed=num_computed + (num_steps_into_run if state is SequenceState.RUNNING else 0),
        num_held_blocks=0 if view is None else len(view.table),
        num_host_blocks=0 if view is None else len(view.host_table),
        num_cached_tokens=len(hits) * config.block_size,
        num_needed_blocks=_num_needed(config, request, view, hits, held),
    )


def _most_output(config: SchedulerConfig, request: Request) -> int:
    wanted = request.max_output_tokens
    return config.max_model_len - request.num_prompt_tokens if wanted is None else wanted


def _hits(scheduler: Scheduler, request: Request) -> tuple[int, ...]:
    """Blocks that the prefix cache would give it now."""
    config = scheduler.config
    if not config.enable_prefix_caching or not request.reads_cache or request.num_prompt_tokens < 2:
        return ()
    most = (request.num_prompt_tokens - 2) // config.block_size
    blocks = scheduler.cached_blocks(request.block_hashes[:most])
    return tuple(takewhile(bool, (block or 0 for block in blocks)))


def _num_needed(
    config: SchedulerConfig,
    request: Request,
    view: SequenceView | None,
    hits: tuple[int, ...],
    held: Container[int],
) -> int:
    """Available blocks that admitting or resuming takes; hits that somebody holds cost none."""
    most = request.num_prompt_tokens + _most_output(config, request)
    if view is None or view.state is SequenceState.WAITING:
        positions = most if config.admission == "reserve" else request.num_prompt_tokens
        return config.blocks_for(positions) - sum(block in held for block in hits)
    if view.state is SequenceState.PREEMPTED:
        positions = most if config.admission == "reserve" else view.num_known
        spare = min(1, config.blocks_for(config.kv_positions(most)) - config.blocks_for(positions))
        return config.blocks_for(positions) + spare - len(view.table)
    return 0
