"""Oracle model whose bits depend on everything that a scheduler can get wrong, and a loop that serves requests with it.

Each KV slot holds a hash of its token, its position, the kernel that a real model would have used, and of everything
that attention read, *through the block table*. The next token is a hash of all that. So a wrong block, a stale slot, a
lost swap, a one-token prompt chunk or a generated token replayed in another segment each change the answer. A model of
one kernel, as an executor has whose decoding equals its prefill, leaves the kernel out, and only that.

The layers of further KV groups come after those of the first one. In a group with a window, attention reads exactly the
window, through the row's table of this group. A state is a chain of hashes over all tokens: a row reads it from its
source blocks and writes it to its target blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile
from typing import cast

from lockstep.core.groups import ContentKey, KVGroup, content_key
from lockstep.core.policy import SchedulerConfig
from lockstep.core.prefix import block_hashes
from lockstep.core.request import FinishReason, Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import Explain, StepEvents, StepPlan, StepResult

NAMESPACE = b"oracle"
Guess = Callable[[int, bytes], int]
"""Draft after the logits of a sequence, right or wrong."""
Block = list[bytes | None]
"""Content of a block: a value per position, or a part of a state in the first place."""


def digest(*parts: bytes) -> bytes:
    return blake2b(b"|".join(parts), digest_size=8).digest()


class OracleModel:
    """The pools and the forward pass."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.groups = config.groups
        self.has_one_kernel = True
        """True if a token has the same bits computed alone or together with others, as executors may promise."""
        self.device: list[Block] = [[None] * config.block_size for _ in range(config.num_blocks + 1)]
        self.host: list[Block] = [[None] * config.block_size for _ in range(config.num_host_blocks)]

    def move(self, plan: StepPlan) -> None:
        """Evict, swap out, swap in, copy."""
        assert not plan.copies
        for device, host in plan.swap_out:
            self.host[host] = list(self.device[device])
        self.clear(plan.evicted)
        for host, device in plan.swap_in:
            self.device[device] = list(self.host[host])

    def clear(self, blocks: Iterable[int], host_blocks: Iterable[int] = ()) -> None:
        """Remove content that no row may need any more."""
        for block in blocks:
            self.device[block] = [None] * self.block_size
        for block in host_blocks:
            self.host[block] = [None] * self.block_size

    def forward(
        self, plan: StepPlan, tokens: dict[int, list[int]], prompts: dict[int, int], guess: Guess | None = None
    ) -> list[tuple[list[bytes], list[int]]]:
        """Logits of the sampling rows, in plan order: those of the last known token and of each draft, and the drafts.

        Args:
            guess: chooses a draft from the logits before it, so that it may be right.
        """
        self._check_rows(plan)
        seen = []
        for row, chunk in enumerate(plan.chunks()):
            assert 0 not in chunk.table
            num_drafts = plan.drafts[row] if plan.drafts else 0
            known = tokens[chunk.seq_id]
            end = chunk.start + chunk.length - num_drafts
            kernel = f"prompt{min(chunk.length, 2)}"
            if chunk.start >= prompts[chunk.seq_id]:
                kernel = f"segment{chunk.start}+{chunk.length}"
            logits = [self._compute(plan, row, known[:end], chunk.start, kernel)]
            if chunk.samples:
                assert end == len(known), "only the last known token is sampled from"
                drafts: list[int] = []
                for _ in range(num_drafts):
                    assert guess is not None
                    drafts.append(guess(chunk.seq_id, logits[-1]))
                    so_far = known + drafts
                    logits.append(self._compute(plan, row, so_far, len(so_far) - 1, kernel))
                seen.append((logits, drafts))
            else:
                assert not num_drafts
        return seen

    def _compute(self, plan: StepPlan, row: int, tokens: Sequence[int], start: int, kernel: str) -> bytes:
        """Compute tokens of a row from position ``start`` on. Returns the logits of the last one."""
        values = []
        main = plan.tables[row]
        past = b"".join(self._contents(main, start))
        for position in range(start, len(tokens)):
            value = digest(str((tokens[position], position, "" if self.has_one_kernel else kernel)).encode(), past)
            block, slot = divmod(position, self.block_size)
            self.device[main[block]][slot] = value
            values.append(value)
            past += value
        if plan.other_tables:
            for group, table in zip(self.groups[1:], plan.other_tables[row], strict=True):
                layer = self._update_state if group.is_state else self._see_window
                values = layer(group, table, start, values)
        last = digest(*self._contents(main, len(tokens)))
        return digest(last, values[-1]) if plan.other_tables else last

    def _see_window(self, group: KVGroup, table: tuple[int, ...], start: int, values: list[bytes]) -> list[bytes]:
        """Outputs of a layer with a window for the values of a row's tokens."""
        first, parts = table[0], group.num_parts
        columns = [table[at : at + parts] for at in range(1, len(table), parts)]
        assert len(table) == 1 + len(columns) * parts
        assert first + len(columns) >= -(-(start + len(values)) // self.block_size)
        seen = []
        for position, value in enumerate(values, start):
            column, slot = divmod(position, self.block_size)
            for part, block in enumerate(columns[column - first]):
                self.device[block][slot] = digest(value, str(part).encode())
            past = []
            for before in range(max(0, position + 1 - group.window), position + 1):
                column, slot = divmod(before, self.block_size)
                assert column >= first, "the window begins before the table"
                past += [self._read((block,), slot) for block in columns[column - first]]
            seen.append(digest(*past))
        return seen

    def _update_state(self, group: KVGroup, table: tuple[int, ...], start: int, values: list[bytes]) -> list[bytes]:
        """Outputs of a recurrent layer for the values of a row's tokens."""
        parts = group.num_parts
        assert len(table) in ((parts, 2 * parts) if start else (parts,))
        state = [self._read((block,), 0) for block in table[:parts]] if start else [b""] * parts
        seen = []
        for value in values:
            state = [digest(value, *state, str(part).encode()) for part in range(parts)]
            seen.append(digest(*state))
        for block, part_of_state in zip(table[-parts:], state, strict=True):
            self.device[block][0] = part_of_state
        return seen

    def _contents(self, table: Sequence[int], count: int) -> list[bytes]:
        """Contents of the first positions."""
        blocks = table[: -(-count // self.block_size)]
        found = [value for block in blocks for value in self.device[block]][:count]
        assert len(found) == count
        assert None not in found, "attention reads a slot that was never written"
        return cast("list[bytes]", found)

    def _read(self, table: Sequence[int], position: int) -> bytes:
        value = self.device[table[position // self.block_size]][position % self.block_size]
        assert value is not None, "attention reads a slot that was never written"
        return value

    def _check_rows(self, plan: StepPlan) -> None:
        """Check that no row writes to blocks of another row."""
        size = self.block_size
        written: dict[int, int] = {}
        for chunk in plan.chunks():
            assert len(chunk.table) * size >= chunk.start + chunk.length
            for index in range(chunk.start // size, (chunk.start + chunk.length - 1) // size + 1):
                assert written.setdefault(chunk.table[index], chunk.seq_id) == chunk.seq_id
        for row, seq_id in enumerate(plan.seq_ids if plan.other_tables else ()):
            for block in self._written_in_other_groups(plan, row):
                assert written.setdefault(block, seq_id) == seq_id
                assert block not in plan.tables[row]
        for row, chunk in enumerate(plan.chunks()):
            others = plan.other_tables[row] if plan.other_tables else ()
            read = list(chunk.table)
            for group, table in zip(self.groups[1:], others, strict=True):
                read += table if group.is_state else table[1:]
            for block in read:
                assert written.get(block, chunk.seq_id) == chunk.seq_id, "a shared block is written"

    def _written_in_other_groups(self, plan: StepPlan, row: int) -> Iterator[int]:
        start, length = plan.starts[row], plan.lengths[row]
        for group, table in zip(self.groups[1:], plan.other_tables[row], strict=True):
            if group.is_state:
                yield from table[-group.num_parts :]
            else:
                begin = 1 + (start // self.block_size - table[0]) * group.num_parts
                end = 1 + ((start + length - 1) // self.block_size + 1 - table[0]) * group.num_parts
                yield from table[begin:end]


@dataclass
class Job:
    """A request with its tokens."""

    prompt: tuple[int, ...]
    max_output: int = 8
    priority: int = 0
    tenant: str = ""
    allows_forced: bool = True
    reads_cache: bool = True
    sibling_of: int | None = None
    salt: bytes = b""
    is_bulk: bool = False
    snapshots: tuple[int, ...] = ()


@dataclass
class Served:
    """Answer of a request."""

    tokens: list[int]
    num_prompt: int
    reason: FinishReason | None = None
    published: int = 0

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.num_prompt :])


@dataclass
class Loop:
    """A small engine: adds tokens to the scheduler's decisions, and checks the invariants of every plan."""

    config: SchedulerConfig
    can_stop: bool = True
    forces: bool = True
    explain: Explain | None = None
    rng: random.Random | None = None
    """Chooses drafts, right ones and wrong ones; None: there are none."""
    served: dict[int, Served] = field(default_factory=dict)
    jobs: dict[int, Job] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    events: list[StepEvents] = field(default_factory=list)
    kept: dict[ContentKey, list[Block]] = field(default_factory=dict)
    """Contents of cached blocks by hash and group, like those of a store outside of the pool."""
    filled: set[int] = field(default_factory=set)
    """Blocks that were filled since the last step."""

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config)
        self.model = OracleModel(self.config)

    def add(self, job: Job) -> int:
        hashes = block_hashes(NAMESPACE + job.salt, job.prompt, self.config.block_size)
        seq_id = self.scheduler.add(
            Request(
                len(job.prompt),
                job.max_output,
                hashes,
                job.priority,
                job.tenant,
                job.reads_cache,
                job.allows_forced,
                job.sibling_of,
                job.snapshots,
                job.is_bulk,
            )
        )
        self.served[seq_id] = Served(list(job.prompt), len(job.prompt))
        self.jobs[seq_id] = job
        return seq_id

    def abort(self, seq_id: int) -> bool:
        if self.served[seq_id].reason is None:
            self.name_answer(seq_id, self.served[seq_id].tokens)
        done = self.scheduler.abort(seq_id)
        if done:
            self.served[seq_id].reason = FinishReason.ABORT
        return done

    def name_answer(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Name the full blocks of an answer; the last token has no KV."""
        job, size = self.jobs[seq_id], self.config.block_size
        hashes = block_hashes(NAMESPACE + job.salt, tokens[:-1], size)
        self.scheduler.name_answer(seq_id, hashes[len(job.prompt) // size :])

    def restart(self) -> None:
        """Continue with a scheduler that was restored from the state of the present one."""
        self.scheduler = Scheduler.from_state(self.config, self.scheduler.state())

    def turns(self) -> list[tuple[int, ...]]:
        """Prompts and answers of the last ended sequences, for prompts that continue them."""
        ended = [tuple(served.tokens) for served in self.served.values() if served.reason is not None]
        return ended[-3:]

    def keep(self, hashes: Sequence[bytes]) -> None:
        """Copy the blocks of a chain from the device."""
        for group in range(len(self.config.groups)):
            for block_hash, blocks in zip(hashes, self.scheduler.cached_blocks(hashes, group), strict=True):
                if blocks:
                    content = [list(self.model.device[block]) for block in blocks]
                    key = content_key(block_hash, group)
                    assert self.kept.setdefault(key, content) == content, "one hash, two contents"

    def fill(self, hashes: Sequence[bytes]) -> int:
        """Restore the stored blocks of a chain up to the first missing one, and in the other groups those before its
        end up to the first missing one; returns the number of restored columns."""
        known = list(takewhile(self.kept.__contains__, hashes))
        count = self._fill(known, 0, 0)
        for group in range(1, len(self.config.groups)):
            end = len(known)
            while end and content_key(known[end - 1], group) not in self.kept:
                end -= 1
            start = end
            while start and content_key(known[start - 1], group) in self.kept:
                start -= 1
            count += self._fill(known[:end], start, group)
        return count

    def _fill(self, hashes: Sequence[bytes], start: int, group: int) -> int:
        given = self.scheduler.fill(hashes, start, group)
        for place, blocks in given:
            for block, content in zip(blocks, self.kept[content_key(hashes[place], group)], strict=True):
                self.model.device[block] = list(content)
                self.filled.add(block)
        return len(given)

    def _execute_moves(self, plan: StepPlan) -> None:
        """Make the moves. Blocks that were evicted to be filled keep their content."""
        filled = {block: list(self.model.device[block]) for block in plan.evicted if block in self.filled}
        self.model.move(plan)
        for block, content in filled.items():
            self.model.device[block] = content
        self.filled.clear()

    def _clear_free(self) -> None:
        """Remove the content of all free blocks."""
        pool, host = self.scheduler._kv.pool, self.scheduler._kv.host
        self.model.clear(pool.free_order()[: pool.num_free], host.orders()[0])

    def step(self) -> StepPlan:
        """Run one step; a plan without rows is only returned."""
        self.propose()
        plan = self.scheduler.schedule(self.explain)
        if not plan.has_work:
            return plan
        self.check_plan(plan)
        self._execute_moves(plan)
        tokens = {seq_id: served.tokens for seq_id, served in self.served.items()}
        seen = self.model.forward(plan, tokens, {seq_id: s.num_prompt for seq_id, s in self.served.items()}, self.guess)
        self.commit(plan, seen)
        return plan

    def propose(self) -> None:
        """Propose a random number of drafts for some sequences, waiting ones and unknown ones too."""
        if self.rng is not None and self.config.allows_drafts and self.rng.random() < 0.8:
            ids = range(len(self.served) + 2)
            self.scheduler.propose({seq_id: self.rng.randint(1, 7) for seq_id in ids if self.rng.random() < 0.7})

    def guess(self, seq_id: int, logits: bytes) -> int:
        """A draft: mostly the token that these logits give, unless a grammar has forced another one."""
        assert self.rng is not None
        return self._sample(seq_id, logits)[0][0] if self.rng.random() < 0.7 else self.rng.randrange(50)

    def fail_step(self, *, moved: bool, ran: bool) -> StepPlan:
        """Run a step that fails before or after it moved blocks or computed."""
        self.propose()
        plan = self.scheduler.schedule(self.explain)
        if plan.has_work:
            if moved:
                self._execute_moves(plan)
                if ran:
                    tokens = {seq_id: [-1] * len(served.tokens) for seq_id, served in self.served.items()}
                    prompts = {seq_id: s.num_prompt for seq_id, s in self.served.items()}
                    self.model.forward(plan, tokens, prompts, lambda seq_id, logits: -1)
            self.filled.clear()
            self.scheduler.fail(plan)
            self.scheduler.check()
            self._clear_free()
        return plan

    def commit(self, plan: StepPlan, seen: Iterable[tuple[list[bytes], list[int]]]) -> None:
        sampling = [seq_id for seq_id, samples in zip(plan.seq_ids, plan.samples, strict=True) if samples]
        answers = [self._verify(seq_id, *row) for seq_id, row in zip(sampling, seen, strict=True)]
        finishes = [FinishReason.STOP if stops else None for _, stops, _ in answers]
        for seq_id, (new, stops, _) in zip(sampling, answers, strict=True):
            served, job = self.served[seq_id], self.jobs[seq_id]
            known = (served.tokens + new)[: served.num_prompt + job.max_output]
            if stops or len(known) == served.num_prompt + job.max_output:
                self.name_answer(seq_id, known)
        accepted = tuple(num_accepted for _, _, num_accepted in answers)
        result = StepResult(tuple(len(new) for new, _, _ in answers), tuple(finishes), accepted if plan.drafts else ())
        events = self.scheduler.commit(plan, result)
        for seq_id, (new, _, _), count in zip(sampling, answers, events.num_tokens, strict=True):
            self.served[seq_id].tokens.extend(new[:count])
        for finish in events.finished:
            assert self.served[finish.seq_id].reason is None, "served twice"
            self.served[finish.seq_id].reason = finish.reason
        self.plans.append(plan)
        self.results.append(result)
        self.events.append(events)
        self.scheduler.check()
        self._clear_free()

    def run(self, max_steps: int = 5000) -> None:
        """Run until all requests have ended."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished:
                return
            assert self.step().has_work
        raise AssertionError(f"not finished within {max_steps} steps")

    def _verify(self, seq_id: int, logits: list[bytes], drafts: list[int]) -> tuple[list[int], bool, int]:
        """Tokens of a row, whether the sequence ends with them, and how many drafts are among them: samples row by row
        as long as the tokens so far are drafts, whose logits are known."""
        tokens: list[int] = []
        equal = 0
        while True:
            new, stops = self._sample(seq_id, logits[equal])
            tokens += new
            while equal < min(len(tokens), len(drafts)) and tokens[equal] == drafts[equal]:
                equal += 1
            if stops or equal < len(tokens):
                return tokens, stops, min(equal, len(tokens) - 1)

    def _sample(self, seq_id: int, value: bytes) -> tuple[list[int], bool]:
        new = [value[0] % 50]
        if self.forces and self.jobs[seq_id].allows_forced and value[1] % 4 == 0:
            new += [byte % 50 for byte in value[2 : 2 + value[1] % self.config.max_forced_tokens]][:5]
        return new[: self.config.max_forced_tokens], self.can_stop and value[7] % 16 == 0

    def check_plan(self, plan: StepPlan) -> None:
        """Check the limits of a plan, and that it has no forbidden chunks."""
        config = self.config
        assert len(set(plan.seq_ids)) == len(plan.seq_ids) <= config.step_limit
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert not set(plan.preempted) & {*plan.seq_ids, *plan.admitted, *plan.resumed}
        prompt_tokens = 0
        outputs = 0
        for chunk, num_drafts in zip(plan.chunks(), plan.drafts or (0,) * len(plan.seq_ids), strict=True):
            served = self.served[chunk.seq_id]
            assert served.reason is None, "an ended sequence is served"
            end = chunk.start + chunk.length - num_drafts
            assert end + num_drafts < served.num_prompt + self.jobs[chunk.seq_id].max_output or not num_drafts
            assert chunk.samples or not num_drafts
            if config.chunking:
                assert chunk.length <= max(config.max_chunk_tokens, config.max_forced_tokens)  # with drafts
                outputs += chunk.samples
            elif chunk.start < served.num_prompt:
                assert end <= served.num_prompt
                prompt_tokens += chunk.length
                outputs += chunk.samples
            else:
                outputs += 1
            assert chunk.samples == (end == len(served.tokens))
        assert prompt_tokens <= config.prefill_limit
        assert plan.num_prompt_tokens <= config.prefill_limit
        assert outputs <= config.decode_limit
        moved = [device for device, _ in plan.swap_out]
        assert len(set(moved)) == len(moved)
        hosts = [host for _, host in plan.swap_out]
        assert len(set(hosts)) == len(hosts)
        assert not set(hosts) & {host for host, _ in plan.swap_in}


def alone(job: Job, config: SchedulerConfig, *, can_stop: bool = True, forces: bool = True) -> tuple[int, ...]:
    """Answer of a request alone in a large pool."""
    roomy = SchedulerConfig(
        block_size=config.block_size,
        num_blocks=64 * len(config.groups),
        max_model_len=config.max_model_len,
        max_num_batched_tokens=1024,
        max_chunk_tokens=1024,
        max_forced_tokens=config.max_forced_tokens,
        groups=config.groups,
    )
    loop = Loop(roomy, can_stop, forces)
    seq_id = loop.add(Job(job.prompt, job.max_output, allows_forced=job.allows_forced))
    loop.run()
    return loop.served[seq_id].output
