"""The planner reports the reasons of sequences without a part in the step on request; reasons change no decision."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lockstep.core.groups import KVGroup
from lockstep.core.request import FinishReason, Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import Limit, Reason
from tests.core.drive import answer, commit, config, prompt, scheduler, step


def told(core: Scheduler) -> list[Reason]:
    """Reasons of the next step, which is committed."""
    reasons: list[Reason] = []
    commit(core, core.schedule(reasons.append))
    return reasons


def one(core: Scheduler, seq_id: int) -> Reason:
    [reason] = [each for each in told(core) if each.seq_id == seq_id]
    return reason


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_num_seqs": 2}, Reason(2, Limit.SEQS, 2, 2)),
        ({"max_num_step_seqs": 2}, Reason(2, Limit.PLACES, 2, 2)),
        ({"max_num_batched_tokens": 70, "max_num_seqs": 8}, Reason(2, Limit.TOKENS, 70, 70)),
        ({"max_num_prefill_tokens": 18}, Reason(2, Limit.PREFILL, 18, 18)),
        ({"max_num_batched_tokens": 70, "max_num_seqs": 8, "chunking": False}, Reason(2, Limit.TOKENS, 66, 70)),
        ({"num_blocks": 20, "max_model_len": 60}, Reason(2, Limit.BLOCKS, 18, 20, needed=9)),
        ({"max_num_decode_seqs": 2}, Reason(2, Limit.WIDTH, 2, 2)),
        ({"max_chunk_tokens": 20}, Reason(2, Limit.CHUNK, 20, 20)),
    ],
)
def test_each_limit_is_reported_with_its_usage(limits: dict[str, Any], reason: Reason) -> None:
    core = scheduler(**limits)
    for length in (9, 9, 33) if "max_num_prefill_tokens" in limits else (33, 33, 33):
        core.add(Request(length, 4))
    found = told(core)
    if reason.limit is Limit.CHUNK:
        reason = reason._replace(used=0)
    assert reason in found, found


def test_a_sibling_waits_for_the_prompt_of_the_first() -> None:
    core = scheduler()
    core.add(Request(9, 4))
    core.add(Request(9, 4, sibling_of=0))
    assert one(core, 1) == Reason(1, Limit.SIBLING)


def test_sequences_that_may_not_be_overtaken_again_are_named() -> None:
    core = scheduler(num_blocks=12, max_model_len=48, max_skips=1)
    for length in (30, 30, 4, 4):
        core.add(Request(length, 4))
    reasons = told(core)
    assert Reason(1, Limit.BLOCKS, 8, 12, needed=8) in reasons
    core.add(Request(4, 4))
    assert Reason(4, Limit.OVERTAKEN, 0, 1, others=(1, 3)) in told(core)


def test_a_sequence_that_does_not_fit_is_named_to_those_behind_it() -> None:
    core = scheduler(num_blocks=12, max_model_len=48, max_skips=0)
    for length in (30, 30, 4):
        core.add(Request(length, 4))
    assert one(core, 2) == Reason(2, Limit.OVERTAKEN, 0, 0, others=(1,))


def test_a_bulk_request_that_was_overtaken_too_often_is_named_to_the_others() -> None:
    core = scheduler(num_blocks=12, max_model_len=48, max_skips=0)
    core.add(Request(30, 4))
    core.add(Request(30, 1, is_bulk=True))
    core.add(Request(4, 4))
    assert step(core).admitted == (0, 2)
    core.add(Request(4, 4))
    assert Reason(3, Limit.OVERTAKEN, 0, 0, others=(1,)) in told(core)


def test_a_blocked_queue_reports_its_reason_at_every_step() -> None:
    core = scheduler(num_blocks=12, max_model_len=48)
    core.add(Request(30, 16))
    core.add(Request(30, 16))
    step(core)
    step(core)
    assert one(core, 1).limit is Limit.BLOCKS


class Random:
    """Requests that arrive, end, fail and are aborted, in small pools."""

    def __init__(self, core: Scheduler, seed: int) -> None:
        self.core = core
        self.draw = random.Random(seed)

    def before(self) -> None:
        draw = self.draw
        if draw.random() < 0.3:
            tokens, tenant = [*range(draw.randrange(14)), draw.randrange(5)], draw.choice("ab")
            self.core.add(prompt(tokens, draw.randrange(1, 14), priority=draw.randrange(-1, 2), tenant=tenant))
        if draw.random() < 0.03:
            self.core.abort(draw.randrange(40))

    def after(self, plan: Any) -> None:
        draw = self.draw
        if draw.random() < 0.02:
            self.core.fail(plan)
            return
        some = draw.choice(plan.seq_ids)
        stops = (some,) if draw.random() < 0.05 else ()
        self.core.commit(plan, answer(plan, {some: 3} if draw.random() < 0.2 else None, stops))


WINDOW = KVGroup(window=6)
STATE = KVGroup(2, is_state=True, snapshot_interval=8)
LIMITS: list[dict[str, Any]] = [
    {"num_blocks": 10, "num_host_blocks": 4},
    {"num_blocks": 10, "max_num_seqs": 3, "order": "priority", "max_skips": 1},
    {"num_blocks": 12, "max_num_decode_seqs": 2, "order": "fair", "preemption": "recompute"},
    {"num_blocks": 14, "max_num_step_seqs": 3, "max_num_decode_seqs": 2, "prefill_share": "adaptive"},
    {"num_blocks": 14, "max_num_step_seqs": 2, "max_num_batched_tokens": 20, "max_num_decode_seqs": 4},
    {"num_blocks": 40, "max_num_decode_seqs": 3, "max_num_batched_tokens": 18, "max_chunk_tokens": 5},
    {"num_blocks": 12, "chunking": False, "admission": "reserve"},
    {"num_blocks": 24, "groups": (KVGroup(), WINDOW), "max_num_decode_seqs": 2, "num_host_blocks": 12},
    {"num_blocks": 24, "groups": (KVGroup(), STATE), "max_num_decode_seqs": 1, "decode_order": "oldest"},
    {"num_blocks": 40, "groups": (KVGroup(), WINDOW, STATE), "admission": "reserve", "max_chunk_tokens": 5},
]


@pytest.mark.parametrize("limits", LIMITS)
def test_explaining_changes_no_decision_and_gives_each_unscheduled_sequence_a_reason(limits: dict[str, Any]) -> None:
    seen = set()
    for seed in range(12):
        settings = config(**{"max_model_len": 36, "max_num_batched_tokens": 40, "max_num_seqs": 6, **limits})
        asked, quiet = Random(Scheduler(settings), seed), Random(Scheduler(settings), seed)
        for _ in range(120):
            asked.before()
            quiet.before()
            reasons: list[Reason] = []
            plan, other = asked.core.schedule(reasons.append), quiet.core.schedule()
            assert plan == other, f"seed {seed}"
            if not plan.has_work:
                continue
            with_reason = {reason.seq_id for reason in reasons}
            for seq_id in [each.seq_id for each in asked.core.state().sequences]:
                assert seq_id in plan.seq_ids or seq_id in with_reason, f"seed {seed}, step {plan.step}: {seq_id}"
            seen |= {reason.limit for reason in reasons}
            asked.after(plan)
            quiet.after(other)
        assert asked.core.state() == quiet.core.state()
    assert seen
    assert FinishReason.LENGTH in dict(asked.core.stats().num_finished)
