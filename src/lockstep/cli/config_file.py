"""``--config FILE``: a YAML file whose keys are the command's flags. A flag and the environment come before it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lockstep.errors import ConfigError, InvalidTextError, UsageError

if TYPE_CHECKING:
    from lockstep.yaml_reading import YamlNode


def use_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of the flags; the callback of an eager ``--config``."""
    if path is not None:
        known = {name: parameter for parameter in context.command.params if (name := parameter.name) is not None}
        repeatable = {name for name, parameter in known.items() if getattr(parameter, "multiple", False)}
        names = {
            option[2:].replace("-", "_"): name
            for name, parameter in known.items()
            for option in (f"--{name}", *parameter.opts)
            if option.startswith("--") and name != "config"
        }
        context.default_map = _by_parameter(path, read_config(path, names, repeatable), names)
    return path


def _by_parameter(path: Path, given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Values under any of their flags' names, by parameter; UsageError where one has two values."""
    values: dict[str, Any] = {}
    for key, value in given.items():
        if names[key] in values:
            flags = " and ".join(repr(each.replace("_", "-")) for each in given if names[each] == names[key])
            raise UsageError(f"--config {path}: {flags} are names of one flag; give one of them")
        values[names[key]] = value
    return values


def read_config(
    path: Path,
    known: Iterable[str],
    repeatable: Collection[str],
    option: str = "--config",
    keys: str = "the flags that --help lists",
    null: str | None = None,
) -> dict[str, Any]:
    """The file's values by parameter name.

    Args:
        known: names that may be given; the file writes them like the flags, or with underscores.
        repeatable: names that take a list; one value alone is a list of one.
        option: what stands before the path in messages.
        keys: what the keys are, for messages.
        null: what a null stands for; None: it stands for nothing, and is refused.

    Raises:
        UsageError: it cannot be read.
        InvalidTextError: keys are unknown, given twice or hold what no flag can.
    """
    from lockstep.yaml_reading import INVALID, Reading, read_text

    reading, names = Reading(), sorted(known)
    root = reading.compose(read_text(path, option))
    values: dict[str, Any] = {}
    for key, node in _entries(root).items():
        name = key.lstrip("-").replace("-", "_")
        if name not in names:
            reading.unknown_key(node.where, key, [each.replace("_", "-") for each in names], f"keys are {keys}")
        elif name in values:
            reading.fault(node.where, "is given twice, in two spellings; keep one of them")
        else:
            value = node.read(partial(_plain, is_repeatable=name in repeatable, null=null))
            values[name] = None if value is INVALID else value
    if reading.problems:
        raise InvalidTextError(reading.problems, f"{option} {path}")
    return values


def _entries(root: YamlNode | None) -> Mapping[str, YamlNode]:
    entries = None if root is None else root.read(lambda node: node.entries())
    return entries if isinstance(entries, dict) else {}


def _plain(node: YamlNode, is_repeatable: bool, null: str | None) -> Any:
    """A value as a flag would have given it."""
    if is_repeatable:
        return [_plain(item, False, null) for item in (node.items() if node.is_list else [node])]
    value = node.plain()
    if value is None and null is not None:
        return null
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):  # flags that take JSON
        return json.dumps(value)
    raise ConfigError(f"is {value!r}, which no flag can hold; write a number, a string, true or false")
