"""Which limits a step has reached, in words. Pure: from the facts of a situation to sentences without a full stop."""

from __future__ import annotations

from dataclasses import replace

from lockstep.core.sequence import SequenceState
from lockstep.core.step import StepPlan
from lockstep.replay.situation import Situation, Standing

MAX_NAMES = 4
"""Names that one sentence lists; more are counted."""


def called(name: str) -> str:
    """A request by its name: ``chat-7``, or ``request 7`` where the name is but a number."""
    return f"request {name}" if name.isdigit() else name


def listed(names: list[str]) -> str:
    """``request 1, request 2 and 7 more``."""
    shown = ", ".join(map(called, names[:MAX_NAMES]))
    return shown if len(names) <= MAX_NAMES else f"{shown} and {len(names) - MAX_NAMES} more"


def why_not_admitted(here: Situation, seq_id: int) -> list[str]:
    """Why a request is left in the queue by this step; empty: its turn did not come, or nothing simple."""
    standing, plan = here.standings[seq_id], here.decision.plan
    if plan is None:
        return []
    overtakers = [other for other in plan.admitted if _comes_before(here, seq_id, other)]
    if overtakers:  # what they took was still there when this one was passed over
        here, plan = _without(here, plan, overtakers)
    config = here.config
    reasons = []
    if here.num_active >= config.max_num_seqs:
        reasons.append(f"{here.num_active} of {config.max_num_seqs} sequences run")
    reasons += _no_place(here, plan) + _spent(here, plan, standing)
    if standing.num_needed_blocks > here.num_free_blocks:
        reasons.append(_lacks_blocks(here, standing))
    return reasons + _who_comes_first(here, plan, seq_id)


def _comes_before(here: Situation, seq_id: int, other_id: int) -> bool:
    """Whether the one is asked before the other by an order that does not change."""
    standings, order = here.standings, here.config.order
    if order == "fair" or here.config.priority_aging_steps or other_id not in standings:
        return False
    if order == "priority":
        return (standings[seq_id].priority, seq_id) < (standings[other_id].priority, other_id)
    return seq_id < other_id


def _without(here: Situation, plan: StepPlan, ids: list[int]) -> tuple[Situation, StepPlan]:
    """The step as it was before these were admitted. Of the rows, only what counts budgets is kept right."""
    kept = [row for row in plan.chunks() if row.seq_id not in ids]
    num_taken = sum(row.length for row in plan.chunks() if row.seq_id in ids)
    before = replace(
        plan,
        seq_ids=tuple(row.seq_id for row in kept),
        starts=tuple(row.start for row in kept),
        lengths=tuple(row.length for row in kept),
        tables=tuple(row.table for row in kept),
        samples=tuple(row.samples for row in kept),
        admitted=tuple(seq_id for seq_id in plan.admitted if seq_id not in ids),
        num_prompt_tokens=plan.num_prompt_tokens - num_taken,
    )
    num_blocks = sum(here.standings[seq_id].num_needed_blocks for seq_id in ids)
    return replace(
        here, num_active=here.num_active - len(ids), num_free_blocks=here.num_free_blocks + num_blocks
    ), before


def why_not_resumed(here: Situation, seq_id: int) -> list[str]:
    """Why a preempted sequence stays so."""
    standing = here.standings[seq_id]
    reasons = []
    if here.num_active >= here.config.max_num_seqs:
        reasons.append(f"{here.num_active} of {here.config.max_num_seqs} sequences run")
    if standing.num_needed_blocks > here.num_free_blocks:
        reasons.append(_lacks_blocks(here, standing))
    plan = here.decision.plan
    stalled = [] if plan is None else _stalled(here, plan)
    if stalled:
        reasons.append(f"{listed(stalled)} runs and has no room in the step, so that nobody comes back")
    return reasons


def why_no_turn(here: Situation, seq_id: int) -> list[str]:
    """Why a running sequence has no row in this step."""
    standing, plan, config = here.standings[seq_id], here.decision.plan, here.config
    if plan is None:
        return []
    reasons = _no_place(here, plan)
    if config.max_num_decode_seqs is not None and plan.num_samples >= config.decode_limit:
        reasons.append(f"{plan.num_samples} of {config.decode_limit} places to sample are taken")
    reasons += _spent(here, plan, standing)
    if standing.state is SequenceState.RUNNING and here.num_free_blocks == 0:
        reasons.append(f"none of {config.num_blocks} blocks is free for it")
    return reasons


def why_no_longer_chunk(here: Situation, seq_id: int) -> list[str]:
    """What cuts the chunk that a sequence has in this step."""
    standing, plan, config = here.standings[seq_id], here.decision.plan, here.config
    assert plan is not None
    length = plan.lengths[plan.seq_ids.index(seq_id)]
    if length >= standing.prompt_left or standing.prompt_left == 0:
        return []
    reasons = []
    if config.chunking and length >= config.max_chunk_tokens - 2:
        reasons.append(f"a chunk has at most {config.max_chunk_tokens} tokens")
    if length <= standing.prompt_left - 2 and plan.num_samples >= config.decode_limit:
        taken = f"{plan.num_samples} of {config.decode_limit} places to sample are taken"
        reasons.append(f"{taken}, so that the prompt stops short of its end")
    return reasons + _spent(here, plan, standing)


def _no_place(here: Situation, plan: StepPlan) -> list[str]:
    """Whether the step has as many rows as it may; without a limit of its own that is all who may run, and told so."""
    limit = here.config.max_num_step_seqs
    if limit is None or plan.num_sequences < limit:
        return []
    return [f"{plan.num_sequences} of {limit} places of the step are taken"]


def _spent(here: Situation, plan: StepPlan, standing: Standing) -> list[str]:
    """Which token budgets leave the sequence nothing."""
    config = here.config
    if not config.chunking and standing.prompt_left:
        needed, so = standing.prompt_left, f"too little for its prompt of {standing.prompt_left} in one go"
    else:
        # Neither a chunk nor what it leaves of a prompt is ever a single token (core/policy.py).
        needed, so = {0: 1, 1: 1, 3: 3}.get(standing.prompt_left, 2), "too little to go on with"
    budgets = [("budget", config.max_num_batched_tokens, plan.num_tokens)]
    if standing.prompt_left and config.prefill_limit < config.max_num_batched_tokens:
        budgets.append(("prefill budget", config.prefill_limit, plan.num_prompt_tokens))
    reasons = []
    for what, limit, used in budgets:
        left = limit - used
        if left == 0:
            reasons.append(f"the {what} of {limit} tokens is used up")
        elif left < needed:
            reasons.append(f"{used} tokens of the {what} of {limit} are used, and {left} are {so}")
    if config.prefill_share == "adaptive" and standing.prompt_left and not reasons:
        reasons.append(f"{plan.num_prompt_tokens} prompt tokens are the share of the budget that prompts have now")
    return reasons


def _lacks_blocks(here: Situation, standing: Standing) -> str:
    what = "prompt and output" if here.config.admission == "reserve" else "it"
    count = standing.num_needed_blocks
    return (
        f"{what} {'need' if what != 'it' else 'needs'} {count} block{'s' * (count != 1)}, "
        f"{here.num_free_blocks} of {here.config.num_blocks} are free"
    )


def _who_comes_first(here: Situation, plan: StepPlan, seq_id: int) -> list[str]:
    """Others that keep a request out although it would fit."""
    own, config = here.standings[seq_id], here.config
    reasons = []
    waiting_back = [
        other.name
        for other_id, other in here.standings.items()
        if other.state is SequenceState.PREEMPTED and other_id not in plan.resumed and other.priority <= own.priority
    ]
    if waiting_back:
        reasons.append(f"{listed(waiting_back)} {_is(waiting_back)} preempted and must come back first")
    stalled = _stalled(here, plan)
    if stalled:
        reasons.append(f"{listed(stalled)} {_is(stalled)} running without room in the step, so that nobody is admitted")
    if plan.admitted and not reasons:
        first = here.standings.get(plan.admitted[0])
        if first is not None and config.order == "priority" and first.priority < own.priority:
            reasons.append(f"{first.name} of class {first.priority} comes before class {own.priority}")
        elif first is not None and config.order == "fair" and first.tenant != own.tenant:
            reasons.append(f"{first.name} of tenant {first.tenant!r} was served less than tenant {own.tenant!r}")
    return reasons


def _stalled(here: Situation, plan: StepPlan) -> list[str]:
    """Running prompts that the step leaves where they are although there is a place to sample."""
    if plan.num_samples >= here.config.decode_limit:
        return []
    rows = dict.fromkeys((*plan.seq_ids, *plan.preempted))
    return [
        other.name
        for other_id, other in here.standings.items()
        if other.state is SequenceState.RUNNING and other.prompt_left and other_id not in rows
    ]


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
