"""Wording of a planner's reasons: formats the sentences for comparisons of runs and for a request's wait reasons.

Sentences have no full stop and contain no request ids: the caller adds the names of other requests, since they may be
confidential.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lockstep.core.policy import SchedulerConfig
from lockstep.core.step import Limit

TEMPLATES: Mapping[Limit, str] = {
    Limit.SEQS: "{used} of {most} sequences run",
    Limit.PLACES: "{used} of {most} places of the step are taken",
    Limit.WIDTH: "{used} of {most} places to sample are taken",
    Limit.STALLED: "{names} {are} running without room in the step, so that no sequence is admitted or resumed",
    Limit.PREEMPTED: "{names} {are} preempted and must come back first",
    Limit.OVERTAKEN: "{names} {wait} before it, and lets at most {most} pass (max_skips)",
    Limit.SIBLING: "the first of its siblings has not computed the prompt",
    Limit.VICTIM: "it lost blocks to others in this step, and comes back in a later one",
}
"""Templates of the limits whose sentence does not depend on the config."""


class Reached(NamedTuple):
    """A limit that was reached, and the sequence that it keeps out."""

    limit: Limit
    used: int
    most: int
    needed: int
    names: str
    """Names of the other requests that the limit involves."""
    num_others: int
    num_prompt_tokens: int | None = None
    """Prompt tokens of the request that is kept out; None: not known."""
    is_running: bool = False
    """Whether that request runs."""
    num_stages: int = 1
    """Positions of each prompt token, which budgets count; see `Geometry`."""


def phrase(reached: Reached, config: SchedulerConfig) -> str:
    """Sentence for a limit that keeps a sequence out of the step; empty: there is none for this limit."""
    if reached.limit in (Limit.TOKENS, Limit.PREFILL):
        return _spent(reached, config)
    if reached.limit is Limit.BLOCKS:
        return _lacking(reached, config)
    are, wait = ("is", "waits") if reached.num_others == 1 else ("are", "wait")
    template = TEMPLATES.get(reached.limit, "")
    return template.format(used=reached.used, most=reached.most, names=reached.names, are=are, wait=wait)


def _spent(reached: Reached, config: SchedulerConfig) -> str:
    """Sentence for a budget that is too small."""
    used, most = reached.used, reached.most
    unit = "tokens" if reached.num_stages == 1 else f"positions ({reached.num_stages} for each token)"
    if config.prefill_share == "adaptive" and reached.limit is Limit.PREFILL:
        return f"{most} prompt {unit} are the share of the budget that prompts have now"
    name = f"the {reached.limit.value}"
    if used >= most or config.chunking:
        return f"{name} of {most} {unit} is used up"
    prompt = "" if reached.num_prompt_tokens is None else f" of {reached.num_prompt_tokens}"
    left = f"what is left is too little for its prompt{prompt} in one go"
    return f"{used} of {most} {unit} of {name} are used, and {left}"


def _lacking(reached: Reached, config: SchedulerConfig) -> str:
    """Sentence for blocks that a sequence needs and that are not available."""
    free = reached.most - reached.used
    if reached.is_running and not free:
        return f"none of {reached.most} blocks is free for it"
    what = "prompt and output need" if config.admission == "reserve" else "it needs"
    return f"{what} {reached.needed} block{'s' * (reached.needed != 1)}, {free} of {reached.most} are free"
