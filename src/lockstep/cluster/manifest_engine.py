"""What a manifest says of an engine: its limits and policy (``engine:``) and its defaults of sampling (``sampling:``).

The names are those of EngineOptions, SchedulerConfig and SamplingParams, and so are the ranges: they are asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lockstep.cluster.manifest_nodes import FAULTY, Place, Reader, shown
from lockstep.cluster.manifest_readers import Key, one_of, read_fields, size, whole
from lockstep.cluster.quantities import size_text
from lockstep.core.policy import SchedulerConfig
from lockstep.engine.sizing import DECIDED_AT_LOAD, EngineOptions, check_limits
from lockstep.errors import ConfigError, InvalidParameterError
from lockstep.executors.sampling_params import SamplingParams

SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "seed")
"""Fields of SamplingParams whose None says that the request was silent; only those can have a default."""
_OWN_KEYS = tuple(each.name for each in fields(EngineOptions) if each.name != "scheduler")
_BYTES = "_bytes"
_ANY_VOCABULARY = 2**31
"""Ranges of what a manifest may set do not depend on the vocabulary."""


def engine_options(given: Mapping[str, object]) -> EngineOptions:
    """The ``engine:`` of an entry as what loading takes."""
    own: dict[str, Any] = {key: given[key] for key in _OWN_KEYS if key in given}
    return EngineOptions(**own, scheduler={key: value for key, value in given.items() if key not in _OWN_KEYS})


def engine_block(place: Place) -> object:
    """Read ``engine:``; the scheduler's own checks are made with what is decided at load left open."""
    before = len(place.reading.problems)
    given = read_fields(place, engine_keys())
    if len(place.reading.problems) > before:
        return FAULTY
    try:
        check_limits(engine_options(given))
    except ConfigError as error:
        raise ConfigError(f"cannot work: {error}") from None
    return given


def engine_written(given: Mapping[str, object]) -> dict[str, object]:
    """As `engine_block` reads it."""
    return {key: engine_keys()[key].write(value) for key, value in given.items()}


def sampling_block(place: Place) -> dict[str, float | int]:
    """Read ``sampling:``; every value is one that a request could give."""
    return read_fields(place, {key: Key(_sampling_value(key)) for key in SAMPLING_KEYS})


def _sampling_value(key: str) -> Reader:
    def read(place: Place) -> Any:
        value: Any = place.scalar()
        if value is None:
            raise ConfigError("is empty; leave it out where the model's own default is meant")
        try:
            SamplingParams(**{key: value}).validate(_ANY_VOCABULARY)
        except InvalidParameterError as error:
            raise ConfigError(str(error).removeprefix(f"{key} ")) from None
        return value

    return read


@cache
def engine_keys() -> Mapping[str, Key]:
    """The keys of ``engine:``; those of the scheduler are read by the types of its fields."""
    keys = {
        "max_model_len": Key(whole(2)),
        "kv_cache_memory_bytes": Key(size(1), write=size_text),
        "host_kv_memory_bytes": Key(size(), write=size_text),
        "num_blocks": Key(whole(1)),
        "num_host_blocks": Key(whole(0)),
        "block_size": Key(whole(1)),
    }
    hints = get_type_hints(SchedulerConfig)
    for each in fields(SchedulerConfig):
        if each.name not in DECIDED_AT_LOAD:
            keys[each.name] = Key(_scheduler_value(hints[each.name]))
    return keys


def _scheduler_value(hint: Any) -> Reader:
    if get_origin(hint) is Literal:
        return one_of({word: word for word in get_args(hint)})
    return _flag if hint is bool else whole(0)


def _flag(place: Place) -> bool:
    value = place.scalar()
    if not isinstance(value, bool):
        raise ConfigError(f"is {shown(value)}; it must be true or false")
    return value
