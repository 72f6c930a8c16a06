"""Determinism probe: checks that a sequence's logits are bitwise the same alone, in a batch, in chunks and in other
blocks.

One subject, a fixed prompt and then fixed tokens one by one, is run in several scenarios (`Scenario`). A case compares
the logits of every row that would be sampled with those of the same subject alone. A scenario that was not run is not
in the report, and no claim is made about it. The probe uses the Executor protocol and depends on no implementation. It
overwrites the KV pool: run it before the executor serves requests, or on a separate executor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from lockstep.errors import ConfigError, ExecutorError
from lockstep.executors.base import Executor, Geometry, Logits
from lockstep.executors.fixed_plans import Item, Regions, Tokens, num_regions, step_of

MAX_COMPANIONS = 31
_QUICK_TOKENS = 45
_THOROUGH_TOKENS = 75
_LONG_TOKENS = 600
"""Length of a prompt that needs several chunks of the scheduler's default size."""
BESIDE_TOKENS = 64
"""Number of tokens after which a companion that only prefills restarts."""
_NUM_DECODES = 4
_MOVE_AFTER_DECODES = 2


@dataclass(frozen=True, slots=True)
class ProbeCase:
    """One scenario that was tried, and whether the bits were the same."""

    name: str
    passed: bool
    detail: str
    """The difference that was found, or how much was compared."""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Cases that were tried, and the verdict over all of them."""

    deterministic: bool
    """True if every case passed, and there was at least one."""
    cases: tuple[ProbeCase, ...]

    @classmethod
    def of(cls, cases: Sequence[ProbeCase]) -> ProbeReport:
        return cls(bool(cases) and all(case.passed for case in cases), tuple(cases))


def quick_probe(executor: Executor, num_blocks: int) -> ProbeReport:
    """Run a few cases. Takes about a second for a model of a hundred million parameters.

    Args:
        executor: an allocated executor; its pool is overwritten.
        num_blocks: number of allocated blocks, without the null block.
    """
    room = num_blocks // num_regions(executor.geometry)
    alone = Scenario((_prompt_length(executor, room, _QUICK_TOKENS),), decodes=2)
    prompt = alone.chunks[0]
    scenarios = [("alone again", alone), *_batched(alone, (3,), executor.geometry, room)]
    if prompt >= 16:
        scenarios.append((f"in chunks of 13 and {prompt - 13}", replace(alone, chunks=(13, prompt - 13))))
    return _report(executor, num_blocks, alone, scenarios)


def thorough_probe(
    executor: Executor, num_blocks: int, num_host_blocks: int = 0, reload: Callable[[], Executor] | None = None
) -> ProbeReport:
    """Run every scenario of the guarantee that fits the pool. Takes tens of seconds.

    Args:
        executor: an allocated executor; its pool is overwritten.
        reload: returns another executor of the same model with the same allocation; it is closed here.
    """
    room = num_blocks // num_regions(executor.geometry)
    host_room = num_host_blocks // num_regions(executor.geometry)
    alone = Scenario((_prompt_length(executor, room, _THOROUGH_TOKENS),))
    scenarios = list(_circumstances(alone, executor.geometry, room, host_room))
    report = _report(executor, num_blocks, alone, scenarios)
    report = ProbeReport.of((*report.cases, *_long_cases(executor, num_blocks)))
    if reload is None or not report.cases:
        return report
    other = reload()
    try:
        case = _compare("loaded again", play(executor, num_blocks, alone), lambda: play(other, num_blocks, alone))
    finally:
        other.close()
    return ProbeReport.of((*report.cases, case))


@dataclass(frozen=True, slots=True)
class Scenario:
    """Conditions under which the subject runs."""

    chunks: tuple[int, ...]
    """Chunk lengths of the prompt."""
    decodes: int = _NUM_DECODES
    companions: tuple[int, ...] = ()
    """Prompt lengths of sequences that are prefilled with the subject's first chunk and then decode with it."""
    beside: tuple[int, ...] = ()
    """Chunk lengths of sequences that prefill in every step, during both prompt and decodes."""
    blocks: str = "ascending"
    """Order in which blocks are taken from the pool: ``ascending``, ``descending`` or ``scattered``."""
    move: str = ""
    """Move of the subject's blocks during decoding. ``swap``: to the host and back into other blocks, while the old
    ones are overwritten; ``copy``: directly to other blocks."""
    all_rows: bool = False
    """True if the logits of every token are requested, not only of the sampled ones."""


def play(executor: Executor, num_blocks: int, scenario: Scenario) -> Logits:
    """Run a scenario on an allocated executor.

    Returns:
        Logits [1 + decodes, vocab]: after the prompt, and after each token fed.

    Raises:
        ConfigError: the pool is too small.
        ExecutorError: a step failed.
    """
    return _ScenarioRun(executor, num_blocks, scenario).run()


def split_prompt(length: int, size: int) -> tuple[int, ...]:
    """Chunks of ``size``, and one for the remainder."""
    return (size,) * (length // size) + (length % size,) * (length % size > 0)


def num_blocks_for(num_tokens: int, geometry: Geometry) -> int:
    return -(-num_tokens // geometry.block_size)


def _long_cases(executor: Executor, num_blocks: int) -> tuple[ProbeCase, ...]:
    """Cases of a long prompt, for which the matrix products use other block sizes. None if it does not fit the pool."""
    room = num_blocks // num_regions(executor.geometry)
    if _prompt_length(executor, room, _LONG_TOKENS) < _LONG_TOKENS:
        return ()
    alone = Scenario((_LONG_TOKENS,))
    scenarios = [
        (f"{_LONG_TOKENS} tokens in chunks of {size}", replace(alone, chunks=split_prompt(_LONG_TOKENS, size)))
        for size in (64, 199, 256, 512)
    ]
    scenarios += [
        (f"{_LONG_TOKENS} tokens {name}", scenario)
        for name, scenario in _batched(alone, (7, 31), executor.geometry, room)
    ]
    return _report(executor, num_blocks, alone, scenarios).cases[1:]


def _circumstances(
    alone: Scenario, geometry: Geometry, num_blocks: int, num_host_blocks: int
) -> Iterator[tuple[str, Scenario]]:
    prompt = alone.chunks[0]
    yield "alone again", alone
    yield from _batched(alone, range(1, MAX_COMPANIONS + 1), geometry, num_blocks)
    for size in range(1, prompt):
        yield f"in chunks of {size}", replace(alone, chunks=split_prompt(prompt, size))
    for order in ("descending", "scattered"):
        yield f"in {order} blocks", replace(alone, blocks=order)
    own = num_blocks_for(prompt + alone.decodes, geometry)
    room = num_blocks - own
    for beside in ((2,), (17,), (32, 3), (5, 11, 29)):
        if len(beside) * num_blocks_for(BESIDE_TOKENS, geometry) <= room:
            yield f"beside prefills of {', '.join(map(str, beside))}", replace(alone, beside=beside)
            mixed = replace(alone, beside=beside, chunks=split_prompt(prompt, 19), blocks="scattered")
            yield f"in chunks of 19 beside prefills of {', '.join(map(str, beside))}", mixed
    yield "with the logits of every row", replace(alone, all_rows=True)
    if room >= own:
        yield "copied to other blocks", replace(alone, move="copy")
        yield "recomputed in other blocks", replace(alone, blocks="descending")
        if num_host_blocks >= own:
            yield "swapped out and in", replace(alone, move="swap")


def _batched(
    alone: Scenario, counts: Sequence[int], geometry: Geometry, num_blocks: int
) -> Iterator[tuple[str, Scenario]]:
    """Batches with this many companions of varying lengths, as far as they fit the pool."""
    num_steps = 1 + alone.decodes
    room = num_blocks - num_blocks_for(alone.chunks[0] + alone.decodes, geometry)
    lengths = tuple(5 + 11 * i % 31 for i in range(MAX_COMPANIONS))
    edges = np.cumsum([num_blocks_for(n + num_steps, geometry) for n in lengths])
    longest = max(lengths) + num_steps
    for count in counts:
        if edges[count - 1] <= room and longest <= geometry.max_model_len:
            yield f"batched with {count}", replace(alone, companions=lengths[:count])


def _report(
    executor: Executor, num_blocks: int, alone: Scenario, scenarios: Sequence[tuple[str, Scenario]]
) -> ProbeReport:
    if alone.chunks[0] < 2:
        return ProbeReport.of([ProbeCase("alone", False, "the pool or the context is too small for any test")])
    try:
        expected = play(executor, num_blocks, alone)
    except ExecutorError as error:
        return ProbeReport.of([ProbeCase("alone", False, str(error))])
    finite = bool(np.isfinite(expected).all())
    first = ProbeCase("finite logits", finite, f"{len(expected)} rows" if finite else "NaN or infinity in a row")
    cases = [_compare(name, expected, partial(play, executor, num_blocks, scenario)) for name, scenario in scenarios]
    return ProbeReport.of((first, *cases))


def _compare(name: str, expected: Logits, again: Callable[[], Logits]) -> ProbeCase:
    try:
        logits = again()
    except ExecutorError as error:
        return ProbeCase(name, False, str(error))
    if logits.shape != expected.shape:
        return ProbeCase(name, False, f"logits of shape {list(logits.shape)}, not {list(expected.shape)}")
    differs = (logits.view(np.uint32) != expected.view(np.uint32)).any(axis=1)
    if not differs.any():
        return ProbeCase(name, True, f"{len(expected)} rows are bitwise the same")
    distance = float(np.abs(logits[differs] - expected[differs]).max())
    return ProbeCase(
        name,
        False,
        f"{int(differs.sum())} of {len(expected)} rows differ, first row {int(differs.argmax())}, "
        f"by up to {distance:.3g}",
    )


def _prompt_length(executor: Executor, num_blocks: int, most: int) -> int:
    geometry = executor.geometry
    return min(most, min(geometry.max_model_len, num_blocks * geometry.block_size) - Scenario((1,)).decodes)


@dataclass(slots=True)
class _Row:
    """One sequence of a scenario."""

    tokens: Tokens
    table: tuple[int, ...]
    position: int = 0

    def chunk(self, length: int) -> Item:
        begin, self.position = self.position, self.position + length
        return self.tokens[begin : self.position], begin, self.table


@dataclass(slots=True)
class _ScenarioRun:
    """One run of a scenario, with the pool of free blocks."""

    executor: Executor
    num_blocks: int
    scenario: Scenario
    regions: Regions = field(init=False)
    free: list[int] = field(init=False)
    """Blocks of the first region that no sequence has."""

    def __post_init__(self) -> None:
        self.regions = Regions.of(self.executor.geometry, self.num_blocks)
        blocks = list(range(1, self.regions.num_blocks + 1))
        if self.scenario.blocks == "descending":
            blocks.reverse()
        elif self.scenario.blocks == "scattered":
            blocks = [int(block) for block in np.random.default_rng(7).permutation(blocks)]
        self.free = blocks

    def take_blocks(self, num_tokens: int) -> tuple[int, ...]:
        needed = num_blocks_for(num_tokens, self.executor.geometry)
        if needed > len(self.free):
            raise ConfigError(f"a pool of {self.num_blocks} blocks is too small for this scenario")
        taken, self.free = tuple(self.free[:needed]), self.free[needed:]
        return taken

    def run(self) -> Logits:
        """Logits [1 + decodes, vocab] of the subject's sampled rows."""
        scenario, vocab = self.scenario, self.executor.geometry.vocab_size
        steps = (*scenario.chunks, *(1,) * scenario.decodes)
        length = sum(steps)
        subject = _Row(_tokens(0, length, vocab), self.take_blocks(length))
        companions = [
            _Row(_tokens(1 + i, n + len(steps), vocab), self.take_blocks(n + len(steps)))
            for i, n in enumerate(scenario.companions)
        ]
        beside = [
            _Row(_tokens(99 + i, 2048, vocab), self.take_blocks(BESIDE_TOKENS)) for i in range(len(scenario.beside))
        ]
        kept: list[Logits] = []
        for index, step in enumerate(steps):
            items = [row.chunk(n if index == 0 else 1) for row, n in zip(companions, scenario.companions, strict=True)]
            for row, n in zip(beside, scenario.beside, strict=True):
                row.position = 0 if row.position + n > BESIDE_TOKENS else row.position
                items.append(row.chunk(n))
            place = len(items) // 2
            items.insert(place, subject.chunk(step))
            samples = index >= len(scenario.chunks) - 1
            batch = step_of(items, self.regions, {} if samples else {place}, scenario.all_rows)
            logits = self.executor.execute(batch)
            if samples:
                last_token = sum(len(tokens) for tokens, _, _ in items[: place + 1]) - 1
                kept.append(logits[int(np.searchsorted(batch.rows, last_token))].copy())
            if scenario.move and index == len(scenario.chunks) - 1 + _MOVE_AFTER_DECODES:
                subject.table = self._move(subject.table)
        return np.stack(kept)

    def _move(self, table: tuple[int, ...]) -> tuple[int, ...]:
        """Move the subject's blocks to others, and overwrite the old ones."""
        geometry = self.executor.geometry
        target = self.take_blocks(len(table) * geometry.block_size)
        overwriting = (_tokens(55, len(table) * geometry.block_size, geometry.vocab_size), 0, table)
        old, new = self.regions.blocks_of(table), self.regions.blocks_of(target)
        if self.scenario.move == "swap":
            out = tuple(zip(old, range(len(old)), strict=True))
            back = tuple(zip(range(len(old)), new, strict=True))
            self.executor.execute(step_of([], self.regions, swap_out=out))
            self.executor.execute(step_of([overwriting], self.regions))
            self.executor.execute(step_of([], self.regions, swap_in=back))
        else:
            self.executor.execute(step_of([], self.regions, copies=tuple(zip(old, new, strict=True))))
            self.executor.execute(step_of([overwriting], self.regions))
        return target


def _tokens(salt: int, length: int, vocab_size: int) -> Tokens:
    return np.random.default_rng(salt).integers(0, vocab_size, length)
