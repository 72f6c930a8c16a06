"""The keys of a manifest: for each the field that it fills, how it is read, and how it is written.

One table per block, used in both directions, so that what is written is what is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from lockstep.cluster.manifest import PRIORITIES, Persona, Remote, Tier
from lockstep.cluster.manifest_engine import engine_block, engine_written, sampling_block
from lockstep.cluster.manifest_nodes import Place, did_you_mean, listed, shown
from lockstep.cluster.manifest_readers import (
    Key,
    alias,
    budget,
    duration,
    filled,
    name,
    one_of,
    one_or_list,
    one_or_many,
    quantity,
    size,
    text,
    unless,
    whole,
    word_for_none,
    written,
)
from lockstep.cluster.quantities import duration_text, size_text
from lockstep.errors import ArtifactError, ConfigError, UsageError

PROMOTION_HINT = "on_router_classification"
TIERS: Mapping[str, Tier] = {**{tier.value: tier for tier in Tier}, "active": Tier.RESIDENT}
NEVER = "never"
UNLIMITED = "unlimited"
MIN_SWEEP_INTERVAL_S = 0.01
MAX_PRIORITY = 100
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFERENCE = re.compile(r"\$(?:(\$)|\{([^{}]*)\}|\{)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def priority(place: Place) -> int:
    """A class by its name, or the number of one between them."""
    value = place.scalar()
    if isinstance(value, str):
        return int(one_of(PRIORITIES)(place))
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_PRIORITY:
        raise ConfigError(
            f"is {shown(value)}; it must be {listed(list(PRIORITIES), 'or')}, or a whole number of "
            f"-{MAX_PRIORITY}..{MAX_PRIORITY}, lower first"
        )
    return value


def _priority_text(value: int) -> str | int:
    return next((each for each, number in PRIORITIES.items() if number == value), value)


def source(place: Place) -> str:
    """Where an artifact comes from; its form is checked, and nothing is opened."""
    value = text(place)
    if "${" in value:
        raise ConfigError(f"is {shown(value)}; ${{…}} is expanded in `remote:` only, so write the source out")
    check_source(value)
    return value


def check_source(value: str) -> None:
    """Refuse what names no artifact; ConfigError says why, without its subject."""
    from lockstep.artifacts.hub.source import parse_hub_source

    scheme, sign, rest = value.partition("://")
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
            parse_hub_source(value)
        elif scheme == "pocket" and rest:
            raise ConfigError(f"is {shown(value)}; the embedded model is called pocket://")
        elif scheme == "stub":
            from lockstep.executors.stub import StubOptions

            StubOptions.parse(value)
    except (ArtifactError, UsageError) as error:
        raise ConfigError(f"is {shown(value)}: {str(error).removeprefix(f'{value}: ')}") from None


def _remote_text(environment: Mapping[str, str] | None) -> Callable[[Place], str]:
    """A string in which ``${NAME}`` is a variable's value and ``$$`` a dollar; without an environment the first is a
    fault."""

    def read(place: Place) -> str:
        def value_of(found: re.Match[str]) -> str:
            if found[1]:
                return "$"
            variable_name = found[2]
            if variable_name is None or not _VARIABLE.fullmatch(variable_name):
                raise ConfigError(f"has {shown(found[0])}; a variable is written ${{NAME}}, a dollar sign $$")
            if environment is None:
                told = (
                    f"names ${{{variable_name}}}, but a manifest that comes over HTTP reads no variables of the server"
                )
                raise ConfigError(f"{told}; write the value out, or bring the manifest in as the server's file")
            if variable_name not in environment:
                told = f"names ${{{variable_name}}}, which is not set in the environment"
                raise ConfigError(f"{told}; set it, or write $$ for a dollar sign")
            return environment[variable_name]

        raw = quantity(place, "a string")
        expanded = _REFERENCE.sub(value_of, raw)
        if not expanded.strip() or _CONTROL.search(expanded):
            raise ConfigError("is empty, or has control characters; it must be a string")
        return expanded

    return read


def _dollars(value: str) -> str:
    return value.replace("$", "$$")


def remote_keys(environment: Mapping[str, str] | None) -> Mapping[str, Key]:
    """The keys of ``remote:``, the only place where ``${NAME}`` is expanded."""
    expanded = _remote_text(environment)

    def base_url(place: Place) -> str:
        value = expanded(place)
        try:
            parts = urlsplit(value)
            is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_right = False
        if not is_right or re.search(r"\s", value):
            raise ConfigError(f"is {shown(value)}; it must be a URL like https://api.example.com/v1")
        if parts.username is not None or parts.password is not None:
            raise ConfigError("holds a name or password; the key belongs into the variable that `api_key_env` names")
        if parts.query or parts.fragment:
            raise ConfigError(f"is {shown(value)}; it must end with the path, e.g. …/v1")
        return value

    def key_variable(place: Place) -> str:
        value = expanded(place)
        if not _VARIABLE.fullmatch(value):
            raise ConfigError("is no name of an environment variable, e.g. OPENAI_API_KEY; a key is never written here")
        return value

    return {
        "base_url": Key(base_url, write=_dollars),
        "model": Key(expanded, write=_dollars),
        "api_key_env": Key(key_variable, write=_dollars),
        "timeout": Key(duration(0.001, expanded), "timeout_s", duration_text),
    }


RESOURCES: Mapping[str, Key] = {
    key: Key(read, f"{key}_bytes", size_text)
    for key, read in {
        "gpu_budget": budget(1),
        "ram_budget": budget(),
        "kv_budget": size(1),
        "host_kv_budget": size(),
        "disk_kv_budget": size(),
    }.items()
}
SESSIONS: Mapping[str, Key] = {
    "idle_threshold": Key(unless(NEVER, duration()), "idle_threshold_s", word_for_none(NEVER, duration_text)),
    "min_lifetime": Key(duration(), "min_lifetime_s", duration_text),
    "sweep_interval": Key(duration(MIN_SWEEP_INTERVAL_S), "sweep_interval_s", duration_text),
    "max_active_sessions": Key(unless(UNLIMITED, whole(1)), write=word_for_none(UNLIMITED)),
}


def entry_keys(environment: Mapping[str, str] | None) -> Mapping[str, Key]:
    """The keys of a model, in the order in which they are written."""
    remote = remote_keys(environment)
    return {
        "source": Key(source),
        "tier": Key(one_of(TIERS, [tier.value for tier in Tier]), write=lambda tier: tier.value),
        "priority": Key(priority, write=_priority_text),
        "max_active_sessions": Key(whole(1)),
        "co_activation": Key(one_or_many(name), write=one_or_list),
        "promotion_hint": Key(
            one_of({PROMOTION_HINT: True}),
            "promotes_on_intent",
            lambda is_set: PROMOTION_HINT if is_set else None,
        ),
        "aliases": Key(one_or_many(alias), write=one_or_list),
        "system_prompt": Key(text),
        "persona": Key(one_of({each.value: each for each in Persona}), write=lambda persona: persona.value),
        "sampling": Key(sampling_block, write=dict),
        "size": Key(size(1), "size_bytes", size_text),
        "engine": Key(engine_block, write=engine_written),
        "chat_template": Key(text),
        "keep_alive": Key(duration(), "keep_alive_s", duration_text),
        "remote": Key(
            lambda place: filled(place, remote, Remote, ("base_url",)),
            write=lambda value: written(remote, value),
        ),
    }
