"""The determinism probe: is a sequence bitwise the same alone, in company, in chunks, elsewhere in memory?

Works on the Executor protocol and knows no implementation. A case compares the logits of one scenario (probe_play.py)
with those of the same subject alone. What was not played is not in the report, and nothing is claimed of it.
The probe overwrites the KV pool: run it before anything is served from it, or on an executor of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from lockstep.errors import ExecutorError
from lockstep.executors.base import Executor, Geometry, Logits
from lockstep.executors.probe_play import BESIDE_TOKENS, Scenario, num_blocks_for, play, split_prompt

MAX_COMPANIONS = 31
_QUICK_TOKENS = 45
_THOROUGH_TOKENS = 75
_LONG_TOKENS = 600
"""A prompt of several chunks of the scheduler's default size."""


@dataclass(frozen=True, slots=True)
class ProbeCase:
    """One truth that was tried."""

    name: str
    passed: bool
    detail: str
    """What differed, or how much was compared."""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What the probe saw."""

    deterministic: bool
    """Every case passed, and there was at least one."""
    cases: tuple[ProbeCase, ...]

    @classmethod
    def of(cls, cases: Sequence[ProbeCase]) -> ProbeReport:
        return cls(bool(cases) and all(case.passed for case in cases), tuple(cases))


def quick_probe(executor: Executor, num_blocks: int) -> ProbeReport:
    """A handful of cases for every load: about a second for a model of a hundred million parameters.

    Args:
        executor: allocated; its pool is overwritten.
        num_blocks: what it was allocated with, without the null block.
    """
    alone = Scenario((_prompt_length(executor, num_blocks, _QUICK_TOKENS),), decodes=2)
    prompt = alone.chunks[0]
    scenarios = [("alone again", alone), *_in_company(alone, (3,), executor.geometry, num_blocks)]
    if prompt >= 16:
        scenarios.append((f"in chunks of 13 and {prompt - 13}", replace(alone, chunks=(13, prompt - 13))))
    return _report(executor, num_blocks, alone, scenarios)


def thorough_probe(
    executor: Executor, num_blocks: int, num_host_blocks: int = 0, reload: Callable[[], Executor] | None = None
) -> ProbeReport:
    """Every circumstance that the promise names, as far as the pool allows; tens of seconds.

    Args:
        executor: allocated; its pool is overwritten.
        reload: gives another executor of the same model, allocated alike; it is closed here.
    """
    alone = Scenario((_prompt_length(executor, num_blocks, _THOROUGH_TOKENS),))
    scenarios = list(_circumstances(alone, executor.geometry, num_blocks, num_host_blocks))
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


def _long_cases(executor: Executor, num_blocks: int) -> tuple[ProbeCase, ...]:
    """The same of a long prompt, where other blockings of the matrix products begin; none when it does not fit."""
    if _prompt_length(executor, num_blocks, _LONG_TOKENS) < _LONG_TOKENS:
        return ()
    alone = Scenario((_LONG_TOKENS,))
    scenarios = [
        (f"{_LONG_TOKENS} tokens in chunks of {size}", replace(alone, chunks=split_prompt(_LONG_TOKENS, size)))
        for size in (64, 199, 256, 512)
    ]
    scenarios += [
        (f"{_LONG_TOKENS} tokens {name}", scenario)
        for name, scenario in _in_company(alone, (7, 31), executor.geometry, num_blocks)
    ]
    return _report(executor, num_blocks, alone, scenarios).cases[1:]


def _circumstances(
    alone: Scenario, geometry: Geometry, num_blocks: int, num_host_blocks: int
) -> Iterator[tuple[str, Scenario]]:
    prompt = alone.chunks[0]
    yield "alone again", alone
    yield from _in_company(alone, range(1, MAX_COMPANIONS + 1), geometry, num_blocks)
    for size in range(2, prompt):
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
    yield "with every row asked for", replace(alone, all_rows=True)
    if room >= own:
        yield "copied to other blocks", replace(alone, move="copy")
        yield "recomputed in other blocks", replace(alone, blocks="descending")
        if num_host_blocks >= own:
            yield "swapped out and in", replace(alone, move="swap")


def _in_company(
    alone: Scenario, counts: Sequence[int], geometry: Geometry, num_blocks: int
) -> Iterator[tuple[str, Scenario]]:
    """Batches with that many others of ragged lengths, as many as fit the pool."""
    num_steps = 1 + alone.decodes
    room = num_blocks - num_blocks_for(alone.chunks[0] + alone.decodes, geometry)
    lengths = tuple(5 + 11 * i % 31 for i in range(MAX_COMPANIONS))
    edges = np.cumsum([num_blocks_for(n + num_steps, geometry) for n in lengths])
    longest = max(lengths) + num_steps
    for count in counts:
        if edges[count - 1] <= room and longest <= geometry.max_model_len:
            yield f"batched with {count}", replace(alone, company=lengths[:count])


def _report(
    executor: Executor, num_blocks: int, alone: Scenario, scenarios: Sequence[tuple[str, Scenario]]
) -> ProbeReport:
    if alone.chunks[0] < 2:
        return ProbeReport.of([ProbeCase("alone", False, "the pool or the context is too small to try anything")])
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


def _prompt_length(executor: Executor, num_blocks: int, wanted: int) -> int:
    geometry = executor.geometry
    return min(wanted, min(geometry.max_model_len, num_blocks * geometry.block_size) - Scenario((1,)).decodes)
