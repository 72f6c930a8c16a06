"""Explanations of a divergence: list differing requests, and the limits that the planner reports as reached."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.core.sequence import SequenceState
from lockstep.core.step import Chunk, Limit, Reason, StepPlan
from lockstep.core.wording import Reached, phrase
from lockstep.replay.divergence import Change, Difference, rows_of
from lockstep.replay.snapshot import Snapshot, UnfinishedSequence

MAX_REQUESTS = 3
"""Maximum requests of one divergence with their own sentences."""
MAX_NAMES = 4
"""Maximum names in one sentence; the others are counted."""

_States = Callable[[Snapshot, int], list[str]]


def sentences(found: Difference, a: Snapshot, b: Snapshot) -> list[str]:
    """Difference as sentences without a full stop, with the reasons from each side's state."""
    change = found.change
    if change is Change.REFUSAL:
        return _refusals(found, a, b)
    if change is Change.IDLE:
        busy, other = (a, b) if found.only_a else (b, a)
        return [f"{busy.label} runs {_names(busy, found.only_a or found.only_b)}, and {other.label} has no work"]
    if change in _ONE_SIDED:
        return _one_sided(found, a, b)
    lines = [_BOTH[change](a, b, seq_id) for seq_id in found.only_a[:MAX_REQUESTS]]
    if not lines:
        return ["the same work in the same blocks, but different cached content is evicted or moved"]
    return [sentence for each in lines for sentence in each] + _more(found.only_a)


def called(name: str) -> str:
    """Label of a request: ``chat-7``, or ``request 7`` if its name is a number."""
    return f"request {name}" if name.isdigit() else name


def listed(names: list[str]) -> str:
    """``request 1, request 2 and 7 more``."""
    shown = ", ".join(map(called, names[:MAX_NAMES]))
    return shown if len(names) <= MAX_NAMES else f"{shown} and {len(names) - MAX_NAMES} more"


def names_of(found: Difference, a: Snapshot, b: Snapshot) -> list[str]:
    """Names of the requests in the divergence, each once."""
    if found.change is Change.REFUSAL:
        return [name for side in (a, b) for name in side.decision.refused]
    named = [a.name(seq_id) for seq_id in found.only_a] + [b.name(seq_id) for seq_id in found.only_b]
    return list(dict.fromkeys(named))


def _names(side: Snapshot, ids: tuple[int, ...]) -> str:
    return listed([side.name(seq_id) for seq_id in ids])


def _more(ids: tuple[int, ...]) -> list[str]:
    count = len(ids) - MAX_REQUESTS
    return [f"and the same for {count} more"] if count > 0 else []


def _refusals(found: Difference, a: Snapshot, b: Snapshot) -> list[str]:
    lines = []
    for ids, side, other in ((found.only_a, a, b), (found.only_b, b, a)):
        names = [side.decision.refused[place] for place in ids]
        if names:
            why = side.refusals.get(names[0], "")
            lines.append(
                f"{side.label} refuses {listed(names)}, and {other.label} accepts it" + (f": {why}" if why else "")
            )
    return lines


# -- reasons why sequences wait ---------------------------------------------------------------------------------------


def _no_reasons(side: Snapshot, seq_id: int) -> list[str]:
    return []


def _wait_reasons(side: Snapshot, seq_id: int) -> list[str]:
    """Reasons why a sequence has no part in the step: the planner's limits, and the sequences with precedence."""
    reasons = side.reasons_of(seq_id)
    lines = [words for reason in reasons if (words := _words(side, reason))]
    own, plan = side.unfinished[seq_id], side.decision.plan
    if own.state is SequenceState.RUNNING and any(reason.limit in _DECODE_LIMITS for reason in reasons):
        lines += _earlier_decoders(side, own)
    first = None if plan is None or not plan.admitted else side.unfinished.get(plan.admitted[0])
    if first is not None and own.state is SequenceState.WAITING:
        if side.config.order == "priority" and first.priority < own.priority:
            lines.append(
                f"{called(first.name)} has priority {first.priority}, which runs before priority {own.priority}"
            )
        elif side.config.order == "fair" and first.outcome.tenant != own.outcome.tenant:
            lines.append(f"{called(first.name)} precedes: its tenant was served no more than {own.outcome.tenant!r}")
    return list(dict.fromkeys(lines))


_DECODE_LIMITS = (Limit.WIDTH, Limit.PLACES)
"""Limits for which running sequences compete in the order of ``decode_order``."""


def _earlier_decoders(side: Snapshot, own: UnfinishedSequence) -> list[str]:
    """Running sequences that sample in this step before ``own``, and the order that puts them first."""
    order, plan = side.config.decode_order, _plan(side)
    sampling = [seq_id for seq_id, samples in zip(plan.seq_ids, plan.samples, strict=True) if samples]
    running = [each for seq_id in sampling if (each := side.unfinished.get(seq_id)) is not None and each is not own]
    ahead = [each for each in running if each.state is SequenceState.RUNNING]
    higher = [each for each in ahead if each.priority < own.priority]
    is_higher = order == "priority" and bool(higher)
    first = higher if is_higher else ahead
    if not first:
        return []
    names, verb = listed([each.name for each in first]), "decodes" if len(first) == 1 else "decode"
    return [f"{names} {verb} {f'before priority {own.priority}' if is_higher else 'first'} (decode_order={order})"]


def _words(side: Snapshot, reason: Reason) -> str:
    """Limit that excludes a sequence from the step; empty: no explanation."""
    own = side.unfinished[reason.seq_id]
    reached = Reached(
        reason.limit,
        reason.used,
        reason.most,
        reason.needed,
        _names(side, reason.others),
        len(reason.others),
        own.num_prompt_tokens,
        own.state is SequenceState.RUNNING,
    )
    return phrase(reached, side.config)


def _chunk_words(side: Snapshot, reason: Reason) -> str:
    """Limit that shortens a chunk."""
    if reason.limit is Limit.CHUNK:
        return f"a chunk has at most {reason.most} tokens"
    rest = ", so the prompt is not finished" if reason.limit is Limit.WIDTH else ""
    return _words(side, reason) + rest


# -- decisions of one side only ---------------------------------------------------------------------------------------

_ONE_SIDED: dict[Change, tuple[str, str, _States]] = {
    # Decision of one side, of the other side, and the reasons of the other side.
    Change.VICTIM: ("preempts {}", "leaves {} running", _no_reasons),
    Change.TURN: ("includes {} in the step", "leaves {} waiting", _wait_reasons),
    Change.RESUMPTION: ("resumes {}", "leaves {} preempted", _wait_reasons),
    Change.ADMISSION: ("admits {}", "leaves {} waiting", _wait_reasons),
    Change.END: ("ends {} with this step", "continues {}", _no_reasons),
}


def _one_sided(found: Difference, a: Snapshot, b: Snapshot) -> list[str]:
    does, does_not, why = _ONE_SIDED[found.change]
    lines = []
    for ids, side, other in ((found.only_a, a, b), (found.only_b, b, a)):
        if not ids or (ids == found.only_b == found.only_a and side is b):
            continue
        names = _names(side, ids)
        has_them = any(seq_id in other.unfinished for seq_id in ids)
        what = does_not.format(names) if has_them else "has no such request: it has not arrived yet, or has ended"
        lines.append(f"{side.label} {does.format(names)}, and {other.label} {what}")
        if found.change is Change.VICTIM:
            lines += _victim_reasons(side, other)
        for seq_id in ids[:MAX_REQUESTS]:
            reasons = why(other, seq_id) if seq_id in other.unfinished else []
            lines += [f"in {other.label}, {called(other.name(seq_id))} waits: {'; '.join(reasons)}"] if reasons else []
    return lines


def _victim_reasons(side: Snapshot, other: Snapshot) -> list[str]:
    lines = []
    for each in (side, other):
        held = each.config.num_blocks - each.num_free_blocks
        lines.append(f"in {each.label}, {held} of {each.config.num_blocks} blocks are in use afterwards")
    for seq_id in _plan(side).preempted[:MAX_REQUESTS]:
        sequence = side.unfinished.get(seq_id)
        if sequence is None:  # added before the recording began
            continue
        lines.append(
            f"in {side.label}, {called(sequence.name)} (priority {sequence.priority}) held {sequence.num_held_blocks} "
            "before"
        )
    return lines


# -- decisions of both sides that differ ------------------------------------------------------------------------------


def _chunk(a: Snapshot, b: Snapshot, seq_id: int) -> list[str]:
    row, other = _row(a, seq_id), _row(b, seq_id)
    name = called(a.name(seq_id))
    lines = [f"{name} computes {row.length} tokens from position {row.start} on in A and {other.length} in B"]
    drafts = [_num_drafts(side, seq_id) for side in (a, b)]
    if row.length - drafts[0] == other.length - drafts[1]:
        return [*lines, f"{drafts[0]} of them are drafts in A and {drafts[1]} in B"]
    prompts = [side.unfinished[seq_id].num_prompt_tokens for side in (a, b) if seq_id in side.unfinished]
    if len(set(prompts)) > 1:
        return [*lines, f"its prompt has {prompts[0]} tokens in A and {prompts[1]} in B"]
    less = a if row.length < other.length else b
    is_known = row.length != other.length and seq_id in less.unfinished
    reasons = [_chunk_words(less, reason) for reason in less.reasons_of(seq_id)] if is_known else []
    return lines + ([f"in {less.label}, {'; '.join(reasons)}"] if reasons else [])


def _num_drafts(side: Snapshot, seq_id: int) -> int:
    """Number of drafts in a sequence's row."""
    plan = side.decision.plan
    return plan.drafts[plan.seq_ids.index(seq_id)] if plan is not None and plan.drafts else 0


def _cache(a: Snapshot, b: Snapshot, seq_id: int) -> list[str]:
    starts = [_row(side, seq_id).start for side in (a, b)]
    sequence = a.unfinished.get(seq_id)
    whole = "prompt tokens" if sequence is None else f"{sequence.num_prompt_tokens} prompt tokens"
    return [f"of the {whole} of {called(a.name(seq_id))}, {starts[0]} come from the cache in A and {starts[1]} in B"]


def _move(a: Snapshot, b: Snapshot, seq_id: int) -> list[str]:
    lines = []
    for side in (a, b):
        count = len(_plan(side).swap_out)
        sequence = side.unfinished.get(seq_id)
        held = "" if sequence is None else f" with {sequence.num_held_blocks} blocks"
        saved = f"{count} block{' is' if count == 1 else 's are'} saved to the host"
        kept = saved if count else "its last blocks are dropped and computed again"
        lines.append(
            f"in {side.label}, {called(side.name(seq_id))} is preempted{held}: {kept} "
            f"(preemption {side.config.preemption}; {side.num_free_host_blocks} host blocks are free)"
        )
    return lines


def _block(a: Snapshot, b: Snapshot, seq_id: int) -> list[str]:
    table_a, table_b = _row(a, seq_id).table, _row(b, seq_id).table
    if len(table_a) != len(table_b):
        return [f"{called(a.name(seq_id))} holds {len(table_a)} blocks in A and {len(table_b)} in B"]
    place = next(place for place, (x, y) in enumerate(zip(table_a, table_b, strict=True)) if x != y)
    how = [
        str(table[place]) + (" (evicting its cached content)" if table[place] in _plan(side).evicted else "")
        for side, table in ((a, table_a), (b, table_b))
    ]
    return [
        f"{called(a.name(seq_id))} has a different block at index {place} of its table: {how[0]} in A and {how[1]} in B"
    ]


def _row(side: Snapshot, seq_id: int) -> Chunk:
    return rows_of(side.decision.plan)[seq_id]


def _plan(side: Snapshot) -> StepPlan:
    assert side.decision.plan is not None, "rows exist only in steps that ran"
    return side.decision.plan


_BOTH: dict[Change, Callable[[Snapshot, Snapshot, int], list[str]]] = {
    Change.MOVE: _move,
    Change.CHUNK: _chunk,
    Change.CACHE: _cache,
    Change.BLOCK: _block,
}


def state_line(side: Snapshot) -> str:
    """State of one side in one line."""
    count = side.num_in_state
    return (
        f"{side.label}: before the step {count(SequenceState.RUNNING)} run, {count(SequenceState.WAITING)} wait, "
        f"{count(SequenceState.PREEMPTED)} are preempted; after it {side.num_active} of {side.config.max_num_seqs} run "
        f"and {side.num_free_blocks} of {side.config.num_blocks} blocks are free"
    )
