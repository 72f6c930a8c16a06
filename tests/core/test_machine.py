"""Random orders of commands, found by Hypothesis, with a tiny pool."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lockstep.core.groups import KVGroup
from lockstep.core.policy import SchedulerConfig
from lockstep.core.prefix import block_hashes
from lockstep.errors import RequestError
from tests.core.oracle import NAMESPACE, Job, Loop, alone

PREFIX = (1, 2) * 8
WINDOWS = st.builds(KVGroup, st.integers(1, 2), st.integers(1, 10))
STATES = st.builds(KVGroup, st.integers(1, 3), st.just(0), st.just(True), st.integers(1, 3))
"""The interval of these is in blocks."""


def kv_groups(others: list[KVGroup], block_size: int) -> tuple[KVGroup, ...]:
    """The groups of a model with these ones after the first."""
    return (KVGroup(), *[group._replace(snapshot_interval=group.snapshot_interval * block_size) for group in others])


class Machine(RuleBasedStateMachine):
    """Any order of commands and steps. The loop checks every plan; this test checks that no request is lost or
    stuck."""

    @initialize(
        block_size=st.sampled_from([1, 3, 4]),
        others=st.lists(WINDOWS, max_size=2) | st.tuples(STATES).map(list) | st.tuples(WINDOWS, STATES).map(list),
        spare_blocks=st.integers(0, 4),
        num_host_blocks=st.sampled_from([0, 2, 9, 30]),
        num_seqs=st.integers(1, 4),
        width=st.integers(1, 4),
        places=st.integers(1, 4),
        chunk=st.integers(3, 8),
        chunking=st.booleans(),
        admission=st.sampled_from(["optimistic", "reserve"]),
        order=st.sampled_from(["fcfs", "priority", "fair"]),
        decode_order=st.sampled_from(["weighted", "priority", "oldest"]),
        priority_aging_steps=st.sampled_from([0, 2]),
        preemption=st.sampled_from(["swap", "recompute"]),
        max_skips=st.sampled_from([0, 1, 64]),
        drafts=st.none() | st.integers(0, 1000),
    )
    def start(self, block_size, others, spare_blocks, num_seqs, width, places, chunk, chunking, drafts, **policy):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN003, ANN201
        one = SchedulerConfig(
            block_size=block_size,
            num_blocks=-(-20 // block_size) + spare_blocks,
            max_model_len=20,
            max_num_seqs=num_seqs,
            max_num_step_seqs=min(places, num_seqs),
            max_num_decode_seqs=min(width, num_seqs),
            max_num_batched_tokens=min(width, num_seqs) + 3 if chunking else 24,
            max_chunk_tokens=chunk,
            max_forced_tokens=4,
            chunking=chunking,
            max_num_queued_reqs=6,
            groups=kv_groups(others, block_size),
            **policy,
        )
        self.config = replace(one, num_blocks=one.num_blocks + one.other_blocks(20))
        self.loop = Loop(self.config, rng=None if drafts is None else random.Random(drafts))
        self.aborted: set[int] = set()

    @rule(
        shared=st.integers(0, 12),
        turn=st.integers(0, 5),
        own=st.lists(st.integers(0, 2), min_size=1, max_size=6),
        output=st.integers(1, 8),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from("ab"),
        is_sibling=st.booleans(),
        allows_forced=st.booleans(),
        is_bulk=st.booleans(),
        snapshots=st.sets(st.integers(1, 6), max_size=2),
    )
    def add(
        self,
        shared: int,
        turn: int,
        own: list[int],
        output: int,
        priority: int,
        tenant: str,
        is_sibling: bool,
        allows_forced: bool,
        is_bulk: bool,
        snapshots: set[int],
    ) -> None:
        first = max(self.loop.jobs, default=None) if is_sibling else None
        heads = [*self.loop.turns(), PREFIX[:shared]]
        prompt = (*heads[min(turn, len(heads) - 1)], *own)[:19]
        job = Job(
            prompt,
            min(output, 20 - len(prompt)),
            priority,
            tenant,
            allows_forced,
            sibling_of=first,
            is_bulk=is_bulk,
            snapshots=tuple([column * self.config.block_size for column in sorted(snapshots)]),
        )
        try:
            self.loop.add(job)
        except RequestError:
            assert self.loop.scheduler.stats().num_queued == 6 or self.config.admission == "reserve"

    @precondition(lambda self: self.loop.jobs)
    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        seq_id = list(self.loop.jobs)[pick % len(self.loop.jobs)]
        if self.loop.abort(seq_id):
            self.aborted.add(seq_id)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            had_work = self.loop.scheduler.has_work
            assert self.loop.step().has_work == had_work, "while a sequence is unfinished, no plan is empty"

    @rule(moved=st.booleans(), ran=st.booleans())
    def fail(self, moved: bool, ran: bool) -> None:
        self.loop.fail_step(moved=moved, ran=ran)

    @rule()
    def restart(self) -> None:
        self.loop.restart()

    @rule()
    def reset(self) -> None:
        self.loop.scheduler.reset_prefix_cache()

    @rule(length=st.integers(0, 12))
    def pin(self, length: int) -> None:
        self.loop.scheduler.pin(block_hashes(NAMESPACE, PREFIX[:length], self.config.block_size))

    @rule(length=st.integers(0, 12))
    def sweep(self, length: int) -> None:
        self.loop.scheduler.sweep(block_hashes(NAMESPACE, PREFIX[:length], self.config.block_size))

    @rule(length=st.integers(0, 12), is_kept=st.booleans())
    def fill(self, length: int, is_kept: bool) -> None:
        hashes = block_hashes(NAMESPACE, PREFIX[:length], self.config.block_size)
        if is_kept:
            self.loop.keep(hashes)
        self.loop.fill(hashes)

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "loop"):
            self.loop.scheduler.check()

    def teardown(self) -> None:
        """Every accepted request ends within bounded steps, with the tokens of a run alone."""
        if not hasattr(self, "loop"):
            return
        self.loop.run(max_steps=60 + 40 * len(self.loop.jobs))
        for seq_id, job in self.loop.jobs.items():
            served = self.loop.served[seq_id]
            assert served.reason is not None, f"sequence {seq_id} was lost"
            if seq_id not in self.aborted:
                assert served.output == alone(job, self.config)
        assert self.loop.scheduler.stats().num_held_blocks == 0


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
