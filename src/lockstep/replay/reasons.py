"""A divergence in words: what differs over which request, and which limit was reached. Pure."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.core.sequence import SequenceState
from lockstep.core.step import StepPlan
from lockstep.replay.divergence import Change, Difference
from lockstep.replay.limits import (
    called,
    listed,
    why_no_longer_chunk,
    why_no_turn,
    why_not_admitted,
    why_not_resumed,
)
from lockstep.replay.situation import Situation

MAX_REQUESTS = 3
"""Requests of one divergence that are told one by one."""

_States = Callable[[Situation, int], list[str]]


def sentences(found: Difference, a: Situation, b: Situation) -> list[str]:
    """What differs, and what each side's state says of it; without a full stop."""
    change = found.change
    if change is Change.REFUSAL:
        return _refusals(found, a, b)
    if change is Change.IDLE:
        busy, other = (a, b) if found.only_a else (b, a)
        return [f"{busy.label} runs {_names(busy, found.only_a or found.only_b)}, and {other.label} has nothing to do"]
    if change in _ONE_SIDED:
        return _one_sided(found, a, b)
    told = [_BOTH[change](a, b, seq_id) for seq_id in found.only_a[:MAX_REQUESTS]]
    if not told:
        return ["the same work in the same blocks, but other cached content is given up, or moved elsewhere"]
    return [sentence for each in told for sentence in each] + _more(found.only_a)


def names_of(found: Difference, a: Situation, b: Situation) -> list[str]:
    """The requests that the divergence is about, each once."""
    if found.change is Change.REFUSAL:
        return [name for here in (a, b) for name in here.decision.refused]
    named = [a.name(seq_id) for seq_id in found.only_a] + [b.name(seq_id) for seq_id in found.only_b]
    return list(dict.fromkeys(named))


def _names(here: Situation, ids: tuple[int, ...]) -> str:
    return listed([here.name(seq_id) for seq_id in ids])


def _more(ids: tuple[int, ...]) -> list[str]:
    count = len(ids) - MAX_REQUESTS
    return [f"and so for {count} more"] if count > 0 else []


def _refusals(found: Difference, a: Situation, b: Situation) -> list[str]:
    told = []
    for ids, here, other in ((found.only_a, a, b), (found.only_b, b, a)):
        names = [here.decision.refused[place] for place in ids]
        if names:
            why = here.refusals.get(names[0], "")
            told.append(
                f"{here.label} refuses {listed(names)}, and {other.label} takes it" + (f": {why}" if why else "")
            )
    return told


# -- what happens on one side only ------------------------------------------------------------------------------------

_ONE_SIDED: dict[Change, tuple[str, str, _States]] = {
    # What happens on one side, what on the other, and why not there.
    Change.VICTIM: ("preempts {}", "leaves {} running", lambda here, seq_id: []),
    Change.TURN: ("lets {} take part in the step", "lets {} wait", why_no_turn),
    Change.RESUMPTION: ("brings {} back", "leaves {} preempted", why_not_resumed),
    Change.ADMISSION: ("admits {}", "lets {} wait", why_not_admitted),
    Change.END: ("ends {} with this step", "goes on with {}", lambda here, seq_id: []),
}


def _one_sided(found: Difference, a: Situation, b: Situation) -> list[str]:
    does, does_not, why = _ONE_SIDED[found.change]
    told = []
    for ids, here, other in ((found.only_a, a, b), (found.only_b, b, a)):
        if not ids or (ids == found.only_b == found.only_a and here is b):
            continue
        names = _names(here, ids)
        has_them = any(seq_id in other.standings for seq_id in ids)
        what = does_not.format(names) if has_them else "has none of that name: it has not come, or has ended before"
        told.append(f"{here.label} {does.format(names)}, and {other.label} {what}")
        if found.change is Change.VICTIM:
            told += _why_victims(here, other)
        for seq_id in ids[:MAX_REQUESTS]:
            reasons = why(other, seq_id) if seq_id in other.standings else []
            told += [f"in {other.label}, {called(other.name(seq_id))} waits: {'; '.join(reasons)}"] if reasons else []
    return told


def _why_victims(here: Situation, other: Situation) -> list[str]:
    plan = here.decision.plan
    assert plan is not None
    told = []
    for side in (here, other):
        held = side.config.num_blocks - side.num_free_blocks
        told.append(f"in {side.label}, {held} of {side.config.num_blocks} blocks are held after that")
    for seq_id in plan.preempted[:MAX_REQUESTS]:
        standing = here.standings.get(seq_id)
        if standing is None:  # it came before a recording began
            continue
        told.append(
            f"in {here.label}, {called(standing.name)} (class {standing.priority}) held {standing.num_held_blocks} "
            "before"
        )
    return told


# -- what happens on both sides, differently --------------------------------------------------------------------------


def _chunk(a: Situation, b: Situation, seq_id: int) -> list[str]:
    rows = []
    for here in (a, b):
        plan = _plan(here)
        place = plan.seq_ids.index(seq_id)
        rows.append((plan.lengths[place], plan.starts[place]))
    (length_a, start), (length_b, _) = rows
    told = [f"{called(a.name(seq_id))} computes {length_a} tokens from position {start} on in A, and {length_b} in B"]
    prompts = [here.standings[seq_id].num_prompt_tokens for here in (a, b) if seq_id in here.standings]
    if len(set(prompts)) > 1:
        return [*told, f"its prompt has {prompts[0]} tokens in A, and {prompts[1]} in B"]
    less = a if length_a < length_b else b
    is_known = length_a != length_b and seq_id in less.standings
    reasons = why_no_longer_chunk(less, seq_id) if is_known else []
    return told + ([f"in {less.label}, {'; '.join(reasons)}"] if reasons else [])


def _cache(a: Situation, b: Situation, seq_id: int) -> list[str]:
    starts = [_plan(here).starts[_plan(here).seq_ids.index(seq_id)] for here in (a, b)]
    standing = a.standings.get(seq_id)
    whole = "prompt tokens" if standing is None else f"{standing.num_prompt_tokens} prompt tokens"
    return [f"of the {whole} of {called(a.name(seq_id))}, {starts[0]} come from the cache in A, and {starts[1]} in B"]


def _move(a: Situation, b: Situation, seq_id: int) -> list[str]:
    told = []
    for here in (a, b):
        count = len(_plan(here).swap_out)
        standing = here.standings.get(seq_id)
        held = "" if standing is None else f" with {standing.num_held_blocks} blocks"
        saved = f"{count} block{' is' if count == 1 else 's are'} saved to the host"
        kept = saved if count else "its tail is dropped, to be computed again"
        told.append(
            f"in {here.label}, {called(here.name(seq_id))} is preempted{held}: {kept} "
            f"(preemption {here.config.preemption}; {here.num_free_host_blocks} host blocks are free)"
        )
    return told


def _block(a: Situation, b: Situation, seq_id: int) -> list[str]:
    table_a, table_b = (_plan(here).tables[_plan(here).seq_ids.index(seq_id)] for here in (a, b))
    if len(table_a) != len(table_b):
        return [f"{called(a.name(seq_id))} holds {len(table_a)} blocks in A, and {len(table_b)} in B"]
    place = next(place for place, (x, y) in enumerate(zip(table_a, table_b, strict=True)) if x != y)
    how = [
        str(table[place]) + (" (giving up its cached content)" if table[place] in _plan(here).evicted else "")
        for here, table in ((a, table_a), (b, table_b))
    ]
    return [
        f"{called(a.name(seq_id))} gets another block at place {place} of its table: {how[0]} in A, and {how[1]} in B"
    ]


def _plan(here: Situation) -> StepPlan:
    assert here.decision.plan is not None, "only steps that run have rows"
    return here.decision.plan


_BOTH: dict[Change, Callable[[Situation, Situation, int], list[str]]] = {
    Change.MOVE: _move,
    Change.CHUNK: _chunk,
    Change.CACHE: _cache,
    Change.BLOCK: _block,
}


def state_line(here: Situation) -> str:
    """The side in one line."""
    count = here.num_in_state
    return (
        f"{here.label}: before the step {count(SequenceState.RUNNING)} run, {count(SequenceState.WAITING)} wait, "
        f"{count(SequenceState.PREEMPTED)} are preempted; after it {here.num_active} of {here.config.max_num_seqs} run "
        f"and {here.num_free_blocks} of {here.config.num_blocks} blocks are free"
    )
