"""``--config FILE``: a YAML file whose keys are the command's flags. Flags and environment variables override it."""

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
    """Make the file's values the defaults of the flags. It is the callback of an eager ``--config``."""
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
    """Values of the file by parameter; UsageError if a parameter has two values under different names of its flag."""
    values: dict[str, Any] = {}
    for key, value in given.items():
        if names[key] in values:
            flags = " and ".join(repr(each.replace("_", "-")) for each in given if names[each] == names[key])
            raise UsageError(f"--config {path}: {flags} are names of the same flag; give one of them")
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
        known: valid names, with underscores. The file may have them with dashes or underscores.
        repeatable: names that take a list; a single value is a list of one.
        option: flag that names the file, for messages.
        keys: description of the keys, for messages.
        null: value of a null; None: nulls are invalid.

    Raises:
        UsageError: the file cannot be read.
        InvalidTextError: a key is unknown or given twice, or its value is invalid for a flag.
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
            reading.fault(node.where, "is given twice, with dashes and with underscores; keep one of them")
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
    """Value of a node, as the command line would give it."""
    if is_repeatable:
        return [_plain(item, False, null) for item in (node.items() if node.is_list else [node])]
    value = node.plain()
    if value is None and null is not None:
        return null
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):  # flags that take JSON
        return json.dumps(value)
    raise ConfigError(f"is {value!r}; it must be a number, a string, true or false")
