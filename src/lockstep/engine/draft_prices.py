"""Prices of rows: measures at load how long a step takes by its number of tokens, for the decision about drafts.

A step includes the choice of a token for each of its rows, one row after the other, as accepted drafts have it.

The measurement runs steps of one sequence with drafts, which are planned like all others, before the first request. Its
result is an input of later decisions and is recorded. It affects no token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf

import numpy as np

from lockstep.core.policy import SchedulerConfig, positions_that_fit
from lockstep.core.request import Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import StepPlan, StepResult
from lockstep.engine.draft_counts import FLAT_PRICES, Price, Prices
from lockstep.engine.drafter import Speculator
from lockstep.engine.loading import LoadedModel
from lockstep.engine.speculative_config import SpeculativeConfig
from lockstep.executors.base import Executor, SequenceObserver, StepBatch
from lockstep.executors.sampling import likeliest
from lockstep.system import SYSTEM

log = logging.getLogger(__name__)
NUM_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of rows that are measured, as far as the limits of a step allow."""
NUM_CONTEXT_TOKENS = 32
"""Number of positions before the rows of other steps."""
NUM_LONG_CONTEXT_TOKENS = 512
"""Number of positions before the row that measures the price of a context."""
MAX_CONTEXT_SHARE = 0.25
"""Maximum price of a long context, as a share of the duration of a step with a short one. A higher measurement is a
disturbance, which would make drafts look cheap."""
NUM_RUNS = 4
"""Rounds with a step of each number of rows. The shortest one counts, since disturbances only lengthen them."""
MAX_MEASURING_S = 5.0
"""No further measurement begins after this time."""


def speculator_for(
    model: LoadedModel, config: SchedulerConfig, text: str | None, now_s: Callable[[], float] = SYSTEM.now_s
) -> Speculator | None:
    """The drafter of an engine; None: it has none, as without the option, or for a model that cannot have drafts.

    Args:
        text: the `SpeculativeConfig` as JSON; None: there are no drafts.
    """
    if text is None or model.task != "generate":
        return None
    if not config.allows_drafts:
        reason = "states of recurrent layers cannot take tokens back"
        log.warning("%s: speculative_config has no effect, because %s", model.name, reason)
        return None
    drafts = SpeculativeConfig.parse(text)
    log.info("%s: speculative decoding (%s, up to %d drafts)", model.name, drafts.method, drafts.num_speculative_tokens)
    return Speculator(drafts, measured_prices(model.executor, config, now_s))


def measured_prices(executor: Executor, config: SchedulerConfig, now_s: Callable[[], float] = SYSTEM.now_s) -> Prices:
    """Measure steps of one sequence. The executor's blocks have no content that is needed.

    An executor that needs whole requests, like a stub, gets flat prices.
    """
    most_tokens = min(config.max_model_len, positions_that_fit(config))
    if isinstance(executor, SequenceObserver) or most_tokens < 2:
        return FLAT_PRICES
    begin_s = now_s()
    shortest: dict[int, float] = {}
    num_short, num_long = (min(count, most_tokens // 2) for count in (NUM_CONTEXT_TOKENS, NUM_LONG_CONTEXT_TOKENS))
    scheduler = _decoding(executor, config, num_short, most_tokens)
    for _ in range(NUM_RUNS):
        for num_rows in NUM_ROWS:
            start_s = now_s()
            plan = _run(executor, scheduler, num_rows - 1)
            if plan is None or plan.num_tokens < num_rows:
                break
            shortest[num_rows] = min(now_s() - start_s, shortest.get(num_rows, inf))
        if now_s() - begin_s > MAX_MEASURING_S:
            break
    steps: list[Price] = []
    for num_rows, duration_s in shortest.items():
        least_us = steps[-1].duration_us if steps else 1  # a shorter time with more rows is noise
        steps.append(Price(num_rows, max(least_us, round(duration_s * 1e6))))
    if not steps:
        return FLAT_PRICES
    if num_long <= 2 * num_short or now_s() - begin_s > MAX_MEASURING_S:
        return Prices(tuple(steps))
    scheduler = _decoding(executor, config, num_long, most_tokens)
    long_s = inf
    for _ in range(NUM_RUNS):
        start_s = now_s()
        _run(executor, scheduler, 0)
        long_s = min(long_s, now_s() - start_s)
    longer_s = min(max(0.0, long_s - shortest[1]), shortest[1] * MAX_CONTEXT_SHARE)
    return Prices(tuple(steps), round(longer_s * 1e9) // (num_long - num_short))


def _decoding(executor: Executor, config: SchedulerConfig, num_prompt: int, most_tokens: int) -> Scheduler:
    """Compute the prompt of a new sequence. Returns its scheduler."""
    scheduler = Scheduler(config)
    scheduler.add(Request(num_prompt, most_tokens - num_prompt))
    num_tokens = 0
    while num_tokens < num_prompt and (plan := _run(executor, scheduler, 0)) is not None:
        num_tokens += plan.num_tokens
    return scheduler


def _run(executor: Executor, scheduler: Scheduler, num_drafts: int) -> StepPlan | None:
    """Run a step of the only sequence, whose drafts are all rejected; None: it has ended."""
    if not scheduler.has_unfinished:
        return None
    if num_drafts:
        scheduler.propose({0: num_drafts})
    plan = scheduler.schedule()
    num_sampled = sum(plan.samples)
    count = sum(plan.drafts) + num_sampled
    rows = np.arange(plan.num_tokens - count, plan.num_tokens, dtype=np.int64)
    logits = executor.execute(StepBatch(plan, np.zeros(plan.num_tokens, np.int64), rows))
    for row in range(count):
        likeliest(logits[row : row + 1])
    accepted = (0,) if plan.drafts else ()
    scheduler.commit(plan, StepResult((1,) * num_sampled, (None,) * num_sampled, accepted))
    return plan
