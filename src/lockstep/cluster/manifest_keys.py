"""Keys of a manifest: defines for each key the field that it sets, and how it is read, checked and written.

There is one table for each block. The same table is used to read and to write, so a written manifest reads back
unchanged. The keys and ranges of ``engine:`` come from EngineOptions, those of ``sampling:`` from SamplingParams.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from lockstep.artifacts.task import ADAPTER_FORMS, MERGE, TASKS
from lockstep.cluster.manifest import PRIORITIES, Persona, Remote, Tier
from lockstep.cluster.quantities import duration_text, parse_budget, parse_duration, parse_size, size_text
from lockstep.engine.options import EngineOptions, check_limits
from lockstep.engine.speculative_config import SpeculativeConfig
from lockstep.errors import ArtifactError, ConfigError, UsageError
from lockstep.executors.sampling_params import SamplingParams
from lockstep.option_fields import OptionType, Range, option_types
from lockstep.pocket import SCHEME as EMBEDDED
from lockstep.pocket import adapter_path
from lockstep.spelling import did_you_mean, listed, odd_character
from lockstep.yaml_reading import INVALID, Reader, YamlNode, shown

PROMOTION_HINT = "on_router_classification"
TIERS: Mapping[str, Tier] = {**{tier.value: tier for tier in Tier}, "active": Tier.RESIDENT}
NEVER = "never"
UNLIMITED = "unlimited"
MIN_SWEEP_INTERVAL_S = 0.01
MAX_PRIORITY = 100
MAX_NAME_CHARS = 128
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "seed")
"""Fields of SamplingParams in which None means that the request did not set them; only these can have a default."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFERENCE = re.compile(r"\$(?:(\$)|\{([^{}]*)\}|\{)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def _same(value: Any) -> Any:
    return value


class NameShape(Enum):
    """Allowed form of names: a pattern, and its description for errors."""

    NAME = (
        re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?"),
        "letters, digits, `.`, `_` and `-`, first a letter or digit, last no `.`",
    )
    ALIAS = (
        re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*"),
        "letters, digits and `._-:/@`, first a letter or digit",
    )
    SET = (re.compile(r"[A-Za-z_][A-Za-z0-9_-]*"), "letters, digits, `_` and `-`, first a letter")


@dataclass(frozen=True, slots=True)
class ManifestKey:
    """One key of a block."""

    read: Reader
    attribute: str = ""
    """Field that the key sets; empty: the field has the key's name."""
    write: Callable[[Any], Any] = _same


def text(node: YamlNode) -> str:
    """Read a string that is not empty."""
    value = node.scalar()
    if not isinstance(value, str):
        quote = f'; write "{value}" in quotes for the text' if value is not None else ""
        raise ConfigError(f"is {shown(value)}; it must be a string{quote}")
    if not value.strip():
        raise ConfigError("is empty; it must be a string")
    return value


def check_name(value: str, shape: NameShape = NameShape.NAME) -> str:
    """Raise ConfigError for an invalid name. The default shape is that of ids, clusters and the words of an entry's
    answer."""
    pattern, right = shape.value
    if len(value) > MAX_NAME_CHARS or not pattern.fullmatch(value):
        odd = odd_character(value)
        found = f"is {shown(value)}, which {odd}" if odd else f"is {shown(value)}"
        raise ConfigError(f"{found}; a name has at most {MAX_NAME_CHARS} characters: {right}")
    return value


def name(node: YamlNode) -> str:
    return check_name(text(node))


def alias(node: YamlNode) -> str:
    return check_name(text(node), NameShape.ALIAS)


def one_of(known: Mapping[str, Any], shown_names: Sequence[str] | None = None) -> Reader:
    """Return a reader of an enumerated word, as the value that it stands for."""
    names = list(known) if shown_names is None else list(shown_names)

    def read(node: YamlNode) -> Any:
        value = node.scalar()
        if not isinstance(value, str) or value not in known:
            hint = did_you_mean(value, known) if isinstance(value, str) else ""
            raise ConfigError(f"is {shown(value)}; it must be {listed(names, 'or')}{hint and '; '}{hint}")
        return known[value]

    return read


def option(type_: OptionType) -> Reader:
    """Return a reader of values of an option's type."""

    def read(node: YamlNode) -> Any:
        value = node.scalar()
        if value is None or not type_.fits(value):
            hint = did_you_mean(value, type_.words) if isinstance(value, str) else ""
            raise ConfigError(f"is {shown(value)}; it must be {type_.right(value)}{hint and '; '}{hint}")
        return value

    return read


def whole(low: int, high: int | None = None) -> Reader:
    """Return a reader of integers in a range."""
    return option(OptionType(int, Range(low, high)))


flag = option(OptionType(bool))
"""Reader of ``true`` or ``false``; other spellings are rejected."""


def size(low: int = 0, *, is_budget: bool = False) -> Reader:
    """Return a reader of a size in bytes, written with a unit.

    Args:
        is_budget: accepts the other forms of `parse_budget`, each with a warning.
    """

    def read(node: YamlNode) -> int:
        written = quantity(node, "a size with a unit, e.g. 18GB")
        num_bytes, note = parse_budget(written) if is_budget else (parse_size(written), "")
        if num_bytes < low:
            raise ConfigError("is 0; it must be larger than 0")
        if note:
            node.reading.warn(node.where, note)
        return num_bytes

    return read


def duration(low_s: float = 0.0, read_text: Callable[[YamlNode], str] | None = None) -> Reader:
    """Return a reader of a duration in seconds, written with a unit."""

    def read(node: YamlNode) -> float:
        right = "a duration with a unit, e.g. 30s"
        duration_s = parse_duration(quantity(node, right) if read_text is None else read_text(node))
        if duration_s < low_s:
            raise ConfigError(f"is {duration_text(duration_s)}; it must be at least {duration_text(low_s)}")
        return duration_s

    return read


def quantity(node: YamlNode, right: str) -> str:
    """Return a quantity as it was written, with its unit. YAML parses it as a number where the unit is missing."""
    value = node.scalar()
    if value is None or isinstance(value, bool):
        raise ConfigError(f"is {shown(value)}; it must be {right}")
    return value if isinstance(value, str) else str(getattr(node.source, "value", value))


def unless(word: str, reader: Reader) -> Reader:
    """Return a reader that maps a word to None, meaning no limit, and passes everything else to another reader."""

    def read(node: YamlNode) -> Any:
        if node.scalar() == word:
            return None
        try:
            return reader(node)
        except ConfigError as error:
            raise ConfigError(f"{error}, or {word}") from None

    return read


def word_for_none(word: str, write: Callable[[Any], Any] = _same) -> Callable[[Any], Any]:
    """Return a writer of values that `unless` reads."""
    return lambda value: word if value is None else write(value)


def one_or_many(reader: Reader) -> Reader:
    """Return a reader of a tuple, written as a list or as one value. Duplicates are rejected."""

    def read(node: YamlNode) -> tuple[Any, ...]:
        if not node.is_list:
            return (reader(node),)
        values: list[Any] = []
        for item in node.items():
            value = item.read(reader)
            if value is not INVALID and value in values:
                item.reading.fault(item.where, f"is {shown(value)} a second time; name it once")
            elif value is not INVALID:
                values.append(value)
        return tuple(values)

    return read


def one_or_list(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else list(values)


def read_fields(node: YamlNode, keys: Mapping[str, ManifestKey], required: Sequence[str] = ()) -> dict[str, Any]:
    """Read the well-formed values of a block, by field; each malformed value is recorded as a problem."""
    values: dict[str, Any] = {}
    for key, child in node.known_entries(keys, required).items():
        value = child.read(keys[key].read)
        if value is not INVALID:
            values[keys[key].attribute or key] = value
    return values


def mapping(keys: Mapping[str, ManifestKey], required: Sequence[str] = ()) -> Reader:
    """Return a reader of a block as its well-formed values, by field."""
    return lambda node: read_fields(node, keys, required)


def written(keys: Mapping[str, ManifestKey], value: Any, always: Sequence[str] = ()) -> dict[str, Any]:
    """Write a dataclass as a block: the fields that differ from their defaults, and those of the keys in `always`."""
    block: dict[str, Any] = {}
    defaults = {each.name: _default(each) for each in fields(value)}
    for key, how in keys.items():
        attribute = how.attribute or key
        mine = getattr(value, attribute)
        if key in always or mine != defaults[attribute]:
            block[key] = how.write(mine)
    return block


def _default(each: Field[Any]) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


def priority(node: YamlNode) -> int:
    """Read a priority: its name, or an integer, which may lie between the named ones."""
    value = node.scalar()
    if isinstance(value, str):
        return int(one_of(PRIORITIES)(node))
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_PRIORITY:
        raise ConfigError(
            f"is {shown(value)}; it must be {listed(list(PRIORITIES), 'or')}, or a whole number of "
            f"-{MAX_PRIORITY}..{MAX_PRIORITY}, lower first"
        )
    return value


def _priority_text(value: int) -> str | int:
    return next((each for each, number in PRIORITIES.items() if number == value), value)


def source(node: YamlNode) -> str:
    """Read the source of an artifact; its form is checked, but nothing is opened."""
    value = text(node)
    if "${" in value:
        raise ConfigError(f"is {shown(value)}; ${{…}} is expanded in `remote:` only, so write the source out")
    check_source(value)
    return value


def adapter(node: YamlNode) -> str:
    """Read the source of an adapter; its form is checked, but nothing is opened."""
    value = text(node)
    check_adapter(value)
    return value


def check_adapter(value: str) -> None:
    """Raise ConfigError for a source that names no adapter; the error's text omits the subject."""
    if not value or ("://" in value and not value.startswith(("hf://", EMBEDDED))):
        raise ConfigError(f"is {shown(value)}; an adapter is {ADAPTER_FORMS}")
    check_source(value, is_adapter=True)


def check_source(value: str, *, is_adapter: bool = False) -> None:
    """Raise ConfigError for a source that names no artifact; the error's text omits the subject.

    Args:
        is_adapter: whether it is the source of an adapter, which may be embedded and is never merged into another one.
    """
    from lockstep.artifacts.hub.source import parse_hub_source

    model, *adapters = value.split(MERGE)
    for each in adapters:
        check_adapter(each)
    scheme, sign, rest = model.partition("://")
    if _CONTROL.search(value) or "\n" in value:
        raise ConfigError(f"is {shown(value)}; a source has no control characters")
    if not sign:
        return
    if scheme in ("http", "https"):
        raise ConfigError(f"is {shown(value)}; a server is named by `remote: {{base_url: …}}` with `tier: remote`")
    if scheme not in ("hf", "pocket", "stub"):
        known = "known are hf://org/name, pocket://, stub://NAME and paths"
        hint = did_you_mean(scheme, ("hf", "pocket", "stub")) or known
        raise ConfigError(f"is {shown(value)}, of an unknown scheme {scheme!r}; {hint}")
    try:
        if scheme == "hf":
            parse_hub_source(model)
        elif scheme == "pocket" and is_adapter:
            adapter_path(model)
        elif scheme == "pocket" and rest:
            raise ConfigError(f"is {shown(value)}; the embedded model is called pocket://")
        elif scheme == "stub":
            from lockstep.executors.stub import StubOptions

            StubOptions.parse(value)
    except (ArtifactError, UsageError) as error:
        raise ConfigError(
            f"is {shown(value)}: {str(error).removeprefix(f'{value}: ').removeprefix(f'{model}: ')}"
        ) from None


def _remote_text(environment: Mapping[str, str] | None) -> Callable[[YamlNode], str]:
    """Return a reader of strings in which ``${NAME}`` is replaced by a variable's value and ``$$`` by a dollar sign.
    Without an environment, ``${NAME}`` is an error."""

    def read(node: YamlNode) -> str:
        def value_of(found: re.Match[str]) -> str:
            if found[1]:
                return "$"
            variable_name = found[2]
            if variable_name is None or not _VARIABLE.fullmatch(variable_name):
                raise ConfigError(f"has {shown(found[0])}; a variable is written ${{NAME}}, a dollar sign $$")
            if environment is None:
                message = (
                    f"names ${{{variable_name}}}, but a manifest sent over HTTP cannot read the server's variables"
                )
                raise ConfigError(f"{message}; write the value out, or put it into the server's manifest file")
            if variable_name not in environment:
                message = f"names ${{{variable_name}}}, which is not set in the environment"
                raise ConfigError(f"{message}; set it, or write $$ for a dollar sign")
            return environment[variable_name]

        raw = quantity(node, "a string")
        expanded = _REFERENCE.sub(value_of, raw)
        if not expanded.strip() or _CONTROL.search(expanded):
            raise ConfigError("is empty, or has control characters; it must be a string")
        return expanded

    return read


def _dollars(value: str) -> str:
    return value.replace("$", "$$")


def remote_keys(environment: Mapping[str, str] | None) -> Mapping[str, ManifestKey]:
    """Keys of ``remote:``, the only block in which ``${NAME}`` is expanded."""
    expanded = _remote_text(environment)

    def base_url(node: YamlNode) -> str:
        value = expanded(node)
        try:
            parts = urlsplit(value)
            is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_right = False
        if not is_right or re.search(r"\s", value):
            raise ConfigError(f"is {shown(value)}; it must be a URL like https://api.example.com/v1")
        if parts.username is not None or parts.password is not None:
            raise ConfigError(
                "contains a user name or password; put the key into the variable that `api_key_env` names"
            )
        if parts.query or parts.fragment:
            raise ConfigError(f"is {shown(value)}; it must end with the path, e.g. …/v1")
        return value

    def key_variable(node: YamlNode) -> str:
        value = expanded(node)
        if not _VARIABLE.fullmatch(value):
            raise ConfigError(
                "is not the name of an environment variable, e.g. OPENAI_API_KEY; never write the key itself here"
            )
        return value

    return {
        "base_url": ManifestKey(base_url, write=_dollars),
        "model": ManifestKey(expanded, write=_dollars),
        "api_key_env": ManifestKey(key_variable, write=_dollars),
        "timeout": ManifestKey(duration(0.001, expanded), "timeout_s", duration_text),
    }


RESOURCES: Mapping[str, ManifestKey] = {
    key: ManifestKey(read, f"{key}_bytes", size_text)
    for key, read in {
        "gpu_budget": size(1, is_budget=True),
        "ram_budget": size(is_budget=True),
        "kv_budget": size(1),
        "host_kv_budget": size(),
        "disk_kv_budget": size(),
    }.items()
}
SESSIONS: Mapping[str, ManifestKey] = {
    "idle_threshold": ManifestKey(unless(NEVER, duration()), "idle_threshold_s", word_for_none(NEVER, duration_text)),
    "min_lifetime": ManifestKey(duration(), "min_lifetime_s", duration_text),
    "sweep_interval": ManifestKey(duration(MIN_SWEEP_INTERVAL_S), "sweep_interval_s", duration_text),
    "max_active_sessions": ManifestKey(unless(UNLIMITED, whole(1)), write=word_for_none(UNLIMITED)),
}


def entry_keys(environment: Mapping[str, str] | None) -> Mapping[str, ManifestKey]:
    """Keys of a model, in the order in which they are written."""
    remote = remote_keys(environment)
    return {
        "source": ManifestKey(source),
        "adapter": ManifestKey(adapter),
        "tier": ManifestKey(one_of(TIERS, [tier.value for tier in Tier]), write=lambda tier: tier.value),
        "priority": ManifestKey(priority, write=_priority_text),
        "max_active_sessions": ManifestKey(whole(1)),
        "co_activation": ManifestKey(one_or_many(name), write=one_or_list),
        "promotion_hint": ManifestKey(
            one_of({PROMOTION_HINT: True}),
            "promotes_on_intent",
            lambda is_set: PROMOTION_HINT if is_set else None,
        ),
        "aliases": ManifestKey(one_or_many(alias), write=one_or_list),
        "system_prompt": ManifestKey(text),
        "persona": ManifestKey(one_of({each.value: each for each in Persona}), write=lambda persona: persona.value),
        "sampling": ManifestKey(sampling_block, write=dict),
        "size": ManifestKey(size(1), "size_bytes", size_text),
        "engine": ManifestKey(engine_block, write=engine_written),
        "chat_template": ManifestKey(text),
        "task": ManifestKey(one_of({task: task for task in TASKS})),
        "keep_alive": ManifestKey(duration(), "keep_alive_s", duration_text),
        "remote": ManifestKey(
            lambda node: _remote(read_fields(node, remote, ("base_url",))),
            write=lambda value: written(remote, value),
        ),
    }


def _remote(values: Mapping[str, Any]) -> object:
    return Remote(**values) if "base_url" in values else INVALID


def engine_block(node: YamlNode) -> object:
    """Read ``engine:`` and check it as the scheduler would; values that are only known at load are left out of the
    check."""
    before = len(node.reading.problems)
    given = read_fields(node, engine_keys())
    if len(node.reading.problems) > before:
        return INVALID
    try:
        check_limits(EngineOptions(**given))
    except ConfigError as error:
        raise ConfigError(f"cannot work: {error}") from None
    return given


def engine_written(given: Mapping[str, object]) -> dict[str, object]:
    """Write ``engine:`` in the form that `engine_block` reads."""
    return {key: engine_keys()[key].write(value) for key, value in given.items()}


def sampling_block(node: YamlNode) -> dict[str, float | int]:
    """Read ``sampling:``; each value must be valid in a request as well."""
    types = option_types(SamplingParams)
    return read_fields(node, {key: ManifestKey(option(types[key])) for key in SAMPLING_KEYS})


def speculation(node: YamlNode) -> str:
    """Read ``speculative_config:``, a block or JSON."""
    value = node.plain()
    config = SpeculativeConfig.parse(value) if isinstance(value, str) else None
    if config is None:
        if not isinstance(value, dict):
            raise ConfigError(f"is {shown(value)}; it must be a block, for example {{method: suffix}}")
        config = SpeculativeConfig.of(value)
    return config.text()


@cache
def engine_keys() -> Mapping[str, ManifestKey]:
    """Keys of ``engine:``: the fields of EngineOptions, read by their types."""
    sizes = {
        "kv_cache_memory_bytes": ManifestKey(size(1), write=size_text),
        "host_kv_memory_bytes": ManifestKey(size(), write=size_text),
        "speculative_config": ManifestKey(speculation, write=json.loads),
    }
    return {name: sizes.get(name) or ManifestKey(option(type_)) for name, type_ in option_types(EngineOptions).items()}
