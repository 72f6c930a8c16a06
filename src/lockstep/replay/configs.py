"""Scheduler configs of replays: a workload's own, what the command line sets over it, defaults for the rest; and grids.

Defaults are those of a server that refuses no request, so that a trace of any machine runs to its end:

- ``block_size``: the ``content_size`` of a workload that has contents, else 16;
- ``num_blocks``: a pool of 1,048,576 tokens;
- ``max_model_len``: all that the pool holds;
- ``max_num_seqs`` 256, ``max_num_batched_tokens`` 8,192, ``max_chunk_tokens`` as many (a prompt is cut by the budget
  alone);
- ``order``: ``priority`` where a request has another priority than normal, since a file that gives them means them;
- queues without a practical bound.

All else is as in ``SchedulerConfig``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import product
from math import prod
from typing import Any

from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import Priority
from lockstep.errors import UsageError
from lockstep.option_fields import option_types
from lockstep.replay.workload import Workload
from lockstep.spelling import did_you_mean, nearest

DEFAULT_BLOCK_TOKENS = 16
DEFAULT_POOL_TOKENS = 1 << 20
DEFAULT_NUM_SEQS = 256
DEFAULT_STEP_TOKENS = 8192
UNBOUNDED = 1 << 40
"""For the bounds of the waiting queue: more than any trace holds."""
_TYPES = option_types(SchedulerConfig)
_DEFAULTS = {field.name: field.default for field in fields(SchedulerConfig) if field.default is not MISSING}


def parse_overrides(pairs: Iterable[str]) -> dict[str, str]:
    """``["max_num_seqs=64"]`` as a mapping.

    Raises:
        UsageError: not ``field=value``, no field of ``SchedulerConfig``, or one named twice.
    """
    overrides: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not value:
            raise UsageError(f"{pair!r} sets nothing; write field=value, such as max_num_seqs=64")
        check_field(name, "no limit of a scheduler has that name")
        if name in overrides:
            raise UsageError(f"{name} is set twice, to {overrides[name]} and to {value}; say it once")
        overrides[name] = value
    return overrides


def config_for(workload: Workload, overrides: Mapping[str, str] | None = None) -> SchedulerConfig:
    """The config of a replay.

    Args:
        overrides: field to value as text; they have precedence over those of the workload.

    Raises:
        UsageError: an unknown field, or a value that is not of its type.
        ConfigError: values that cannot work together.
    """
    values: dict[str, Any] = {}
    for name, value in workload.config.items():
        check_field(name, f"{workload.name}: its config has a field that no scheduler has")
        if not _TYPES[name].fits(value):
            raise UsageError(f"{workload.name}: config: {name} is {value!r}; it must be {_TYPES[name].right(value)}")
        values[name] = value
    for name, text in (overrides or {}).items():
        check_field(name, "no limit of a scheduler has that name")
        values[name] = parse_value(name, text)
    if "block_size" not in values:
        values["block_size"] = workload.content_size or DEFAULT_BLOCK_TOKENS
    block_size = max(1, values["block_size"])
    values.setdefault("num_blocks", max(1, DEFAULT_POOL_TOKENS // block_size))
    values.setdefault("max_model_len", max(2, values["num_blocks"] * block_size))
    values.setdefault("max_num_seqs", DEFAULT_NUM_SEQS)
    values.setdefault("max_num_batched_tokens", max(DEFAULT_STEP_TOKENS, values.get("max_num_prefill_tokens") or 0))
    values.setdefault("max_chunk_tokens", values["max_num_batched_tokens"])
    values.setdefault("max_num_queued_reqs", UNBOUNDED)
    values.setdefault("max_num_queued_tokens", UNBOUNDED)
    if "order" not in values and _has_priorities(workload):
        values["order"] = "priority"
    return SchedulerConfig(**values)


def order_note(workload: Workload, overrides: Mapping[str, str] | None = None) -> str:
    """Caveat on the order in which requests with priorities are admitted; empty: none.

    Args:
        overrides: as `config_for` got them.
    """
    order = {**workload.config, **(overrides or {})}.get("order")
    if order == "priority" or not _has_priorities(workload):
        return ""
    if order is None:
        return "requests have priorities and nothing sets an order, so they are admitted by priority (order=priority)"
    return (
        f"order is {order}, so the queue does not look at the priorities that requests have; they only decide how "
        "running requests share decode steps (decode_order) and which is preempted first"
    )


def _has_priorities(workload: Workload) -> bool:
    """True if a request has another priority than normal. No format whose requests stream gives any."""
    requests = workload.requests
    return isinstance(requests, Collection) and any(request.priority != Priority.NORMAL for request in requests)


def changed_fields(config: SchedulerConfig) -> dict[str, Any]:
    """Fields that differ from the defaults of ``SchedulerConfig``, in their order."""
    pairs = {field.name: getattr(config, field.name) for field in fields(config)}
    return {name: value for name, value in pairs.items() if name not in _DEFAULTS or value != _DEFAULTS[name]}


def parse_value(name: str, text: str) -> Any:
    """The text of a field's value as that field's type; UsageError states what would be right."""
    type_ = _TYPES[name]
    try:
        return type_.parse(text)
    except ValueError:
        hint = did_you_mean(text, type_.words)
        raise UsageError(f"{name} is {text!r}; it must be {type_.right()}{'; ' if hint else ''}{hint}") from None


def check_field(name: str, complaint: str) -> None:
    """UsageError with the nearest names where ``SchedulerConfig`` has no such field."""
    if name in _TYPES:
        return
    near = nearest(name, _TYPES, n=3, cutoff=0.5)
    help_text = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(_TYPES)}"
    raise UsageError(f"{complaint}: {name!r}; {help_text}")


MAX_CONFIGS = 1024
"""Combinations of one grid: at seconds for each, an hour."""

Settings = dict[str, str]
"""Field to value as text."""


def parse_grid(axes: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """``["max_num_seqs=8,16,32"]`` as values by field, in the order given.

    Raises:
        UsageError: not ``field=value,value``, no field of a scheduler, a value that is not of its type, or a field or
            value given twice.
    """
    grid: dict[str, tuple[str, ...]] = {}
    for axis in axes:
        name, equals, text = (part.strip() for part in axis.partition("="))
        values = tuple(value.strip() for value in text.split(","))
        if not equals or not all(values):
            raise UsageError(f"--grid {axis!r} is no axis; write field=value,value, such as max_num_seqs=8,16,32")
        check_field(name, "no limit of a scheduler has that name")
        if name in grid:
            raise UsageError(f"--grid names {name} twice; give all its values at once")
        if len(set(values)) < len(values):
            raise UsageError(f"--grid {axis!r} has a value twice")
        for value in values:
            parse_value(name, value)
        grid[name] = values
    return grid


def combinations(grid: Mapping[str, Sequence[str]]) -> tuple[Settings, ...]:
    """Every combination; the last axis changes fastest.

    Raises:
        UsageError: none at all, or more than ``MAX_CONFIGS``.
    """
    count = prod(len(values) for values in grid.values())
    if not grid:
        raise UsageError("there is no grid to sweep; give one --grid field=value,value or more")
    if count > MAX_CONFIGS:
        raise UsageError(f"the grid has {count:,} combinations; one sweep takes at most {MAX_CONFIGS:,}")
    return tuple(dict(zip(grid, values, strict=True)) for values in product(*grid.values()))
