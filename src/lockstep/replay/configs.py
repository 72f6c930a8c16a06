"""Scheduler configs of replays: combines a workload's fields, the command line's and defaults; parses grids.

Defaults are those of a server that refuses no request, so that a trace from any machine runs to its end:

- ``block_size``: the ``content_size`` of a workload that has contents, else 16;
- ``num_blocks``: a pool of 1,048,576 tokens;
- ``max_model_len``: the whole pool;
- ``max_num_seqs`` 256, ``max_num_batched_tokens`` 8,192, ``max_chunk_tokens`` the same, so that only the step's budget
  limits chunks;
- ``order``: ``priority`` if a request has a priority other than normal;
- queues without a practical bound.

Other fields have the defaults of ``SchedulerConfig``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import product
from math import prod
from typing import Any

import msgspec

from lockstep.core.groups import KVGroup
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
"""Bounds of the waiting queue: more than any trace has."""
_TYPES = {name: type_ for name, type_ in option_types(SchedulerConfig).items() if name != "groups"}
"""Types of the fields that a user may set. The KV groups are those of the recorded model."""
_DEFAULTS = {field.name: field.default for field in fields(SchedulerConfig) if field.default is not MISSING}


def parse_overrides(pairs: Iterable[str]) -> dict[str, str]:
    """Parse overrides: ``["max_num_seqs=64"]`` becomes a mapping.

    Raises:
        UsageError: an item is not ``field=value``, is not a field of ``SchedulerConfig``, or occurs twice.
    """
    overrides: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not value:
            raise UsageError(f"{pair!r} has no value; write field=value, such as max_num_seqs=64")
        check_field(name, "no such scheduler field")
        if name in overrides:
            raise UsageError(f"{name} is set twice, to {overrides[name]} and to {value}; set it once")
        overrides[name] = value
    return overrides


def config_for(workload: Workload, overrides: Mapping[str, str] | None = None) -> SchedulerConfig:
    """Scheduler config of a replay.

    Args:
        overrides: values as text by field; they take precedence over those of the workload.

    Raises:
        UsageError: an unknown field, or a value of another type.
        ConfigError: values that are invalid together.
    """
    values: dict[str, Any] = {}
    recorded = dict(workload.config)
    if (groups := recorded.pop("groups", None)) is not None:
        values["groups"] = _groups(workload.name, groups)
    for name, value in recorded.items():
        check_field(name, f"{workload.name}: its config has an unknown scheduler field")
        if not _TYPES[name].fits(value):
            raise UsageError(f"{workload.name}: config: {name} is {value!r}; it must be {_TYPES[name].right(value)}")
        values[name] = value
    for name, text in (overrides or {}).items():
        check_field(name, "no such scheduler field")
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


def _groups(name: str, given: object) -> tuple[KVGroup, ...]:
    try:
        groups = msgspec.convert(given, tuple[KVGroup, ...])
    except msgspec.ValidationError as error:
        raise UsageError(f"{name}: config: groups is {given!r}, not a list of KV groups: {error}") from None
    if not groups:
        raise UsageError(f"{name}: config: groups is empty; a model has at least one KV group")
    return groups


def order_note(workload: Workload, overrides: Mapping[str, str] | None = None) -> str:
    """Warning about the order of admission of requests with priorities; empty: none.

    Args:
        overrides: the overrides passed to `config_for`.
    """
    order = {**workload.config, **(overrides or {})}.get("order")
    if order == "priority" or not _has_priorities(workload):
        return ""
    if order is None:
        return "requests have priorities and no order is set, so they are admitted by priority (order=priority)"
    return (
        f"order is {order}, so the queue ignores the priorities of requests; they only decide how "
        "running requests share decode steps (decode_order) and which is preempted first"
    )


def _has_priorities(workload: Workload) -> bool:
    """True if a request has a priority other than normal. Formats whose requests are streamed have no priorities."""
    requests = workload.requests
    return isinstance(requests, Collection) and any(request.priority != Priority.NORMAL for request in requests)


def changed_fields(config: SchedulerConfig) -> dict[str, Any]:
    """Fields that differ from the defaults of ``SchedulerConfig``, in the order of their definition."""
    pairs = {field.name: getattr(config, field.name) for field in fields(config)}
    return {name: value for name, value in pairs.items() if name not in _DEFAULTS or value != _DEFAULTS[name]}


def parse_value(name: str, text: str) -> Any:
    """Parse a field's value as its type."""
    type_ = _TYPES[name]
    try:
        return type_.parse(text)
    except ValueError:
        hint = did_you_mean(text, type_.words)
        raise UsageError(f"{name} is {text!r}; it must be {type_.right()}{'; ' if hint else ''}{hint}") from None


def check_field(name: str, complaint: str) -> None:
    """Raise a UsageError with the nearest names if ``SchedulerConfig`` has no such field."""
    if name in _TYPES:
        return
    near = nearest(name, _TYPES, n=3, cutoff=0.5)
    help_text = f"did you mean {' or '.join(near)}?" if near else f"fields: {', '.join(_TYPES)}"
    raise UsageError(f"{complaint}: {name!r}; {help_text}")


MAX_CONFIGS = 1024
"""Maximum combinations of one grid: about an hour at a few seconds each."""

Settings = dict[str, str]
"""Values as text by field."""


def parse_grid(axes: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Parse a grid: ``["max_num_seqs=8,16,32"]`` becomes values by field, in the given order.

    Raises:
        UsageError: an item is not ``field=value,value``, not a scheduler field, a value has another type, or a field or
            value occurs twice.
    """
    grid: dict[str, tuple[str, ...]] = {}
    for axis in axes:
        name, equals, text = (part.strip() for part in axis.partition("="))
        values = tuple(value.strip() for value in text.split(","))
        if not equals or not all(values):
            raise UsageError(f"--grid {axis!r} is invalid; write field=value,value, such as max_num_seqs=8,16,32")
        check_field(name, "no such scheduler field")
        if name in grid:
            raise UsageError(f"--grid sets {name} twice; list all its values in one --grid")
        if len(set(values)) < len(values):
            raise UsageError(f"--grid {axis!r} repeats a value; list each once")
        for value in values:
            parse_value(name, value)
        grid[name] = values
    return grid


def combinations(grid: Mapping[str, Sequence[str]]) -> tuple[Settings, ...]:
    """All combinations; the last axis changes fastest.

    Raises:
        UsageError: no axis, or more than ``MAX_CONFIGS`` combinations.
    """
    count = prod(len(values) for values in grid.values())
    if not grid:
        raise UsageError("no grid to sweep; give at least one --grid field=value,value")
    if count > MAX_CONFIGS:
        raise UsageError(f"the grid has {count:,} combinations; the maximum of a sweep is {MAX_CONFIGS:,}")
    return tuple(dict(zip(grid, values, strict=True)) for values in product(*grid.values()))
