"""What a manifest says of an engine: its limits and policy (``engine:``) and its defaults of sampling (``sampling:``).

The names are those of EngineOptions, SchedulerConfig and SamplingParams, and so are the ranges: they are asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lockstep.cluster.manifest_nodes import FAULTY, Place, Reader, shown
from lockstep.cluster.manifest_readers import Key, one_of, read_fields, size, whole
from lockstep.cluster.quantities import size_text
from lockstep.engine.options import EngineOptions, check_limits
from lockstep.errors import ConfigError, InvalidParameterError
from lockstep.executors.sampling_params import SamplingParams

SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "seed")
"""Fields of SamplingParams whose None says that the request was silent; only those can have a default."""
_ANY_VOCABULARY = 2**31
"""Ranges of what a manifest may set do not depend on the vocabulary."""


def engine_block(place: Place) -> object:
    """Read ``engine:``; the scheduler's own checks are made with what is decided at load left open."""
    before = len(place.reading.problems)
    given = read_fields(place, engine_keys())
    if len(place.reading.problems) > before:
        return FAULTY
    try:
        check_limits(EngineOptions(**given))
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
    """The keys of ``engine:``: the fields of EngineOptions, read by their types."""
    special = {
        "max_model_len": Key(whole(2)),
        "kv_cache_memory_bytes": Key(size(1), write=size_text),
        "host_kv_memory_bytes": Key(size(), write=size_text),
        "num_blocks": Key(whole(1)),
        "block_size": Key(whole(1)),
    }
    return {name: special.get(name) or Key(_value(hint)) for name, hint in get_type_hints(EngineOptions).items()}


def _value(hint: Any) -> Reader:
    kind = get_args(hint)[0]  # without its None
    if get_origin(kind) is Literal:
        return one_of({word: word for word in get_args(kind)})
    return _flag if kind is bool else whole(0)


def _flag(place: Place) -> bool:
    value = place.scalar()
    if not isinstance(value, bool):
        raise ConfigError(f"is {shown(value)}; it must be true or false")
    return value
