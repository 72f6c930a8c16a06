"""``--config FILE``: a YAML file whose keys are the command's flags. A flag and the environment come before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lockstep.errors import UsageError
from lockstep.spelling import nearest, odd_character

if TYPE_CHECKING:
    import yaml

MAX_CONFIG_BYTES = 1 << 20
"""More than any set of flags needs."""


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
    repeatable: Iterable[str],
    option: str = "--config ",
    keys: str = "the flags that --help lists",
    null: str | None = None,
) -> dict[str, Any]:
    """The file's values by parameter name.

    Args:
        option: what stands before the path in messages.
        keys: what the keys are, for messages.
        null: what a null stands for; None: it stands for nothing, and is refused.
        known: names that may be given; the file writes them like the flags, or with underscores.
        repeatable: names that take a list; one value alone is a list of one.

    Raises:
        UsageError: it cannot be read, or a key is unknown, given twice or holds what no flag can; with its line.
    """
    import yaml

    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise UsageError(f"{option}{path} is larger than {MAX_CONFIG_BYTES} bytes")
        root = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{option}{path} cannot be read ({why})") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{option}{path} is not YAML: {error}") from error
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{option}{path} must hold `flag: value` lines")
    return _values(f"{option}{path}", root, set(known), set(repeatable), keys, null)


def _values(
    source: str, root: yaml.MappingNode, known: set[str], repeatable: set[str], keys: str, null: str | None
) -> dict[str, Any]:
    import yaml

    values: dict[str, Any] = {}
    for key_node, value_node in root.value:
        where = f"{source}, line {key_node.start_mark.line + 1}"
        name = str(key_node.value).lstrip("-").replace("-", "_")
        if name not in known:
            near = [each.replace("_", "-") for each in nearest(name, sorted(known))]
            hint = f"did you mean {near[0]!r}?" if near else f"keys are {keys}"
            odd = odd_character(str(key_node.value))
            raise UsageError(f"{where}: unknown key {key_node.value!r}; {f'it {odd}; ' if odd else ''}{hint}")
        if name in values:
            raise UsageError(f"{where}: {key_node.value!r} is given twice")
        loader = yaml.SafeLoader("")
        try:
            value = loader.construct_object(value_node, deep=True)
        except yaml.YAMLError as error:
            raise UsageError(f"{where}: {error}") from error
        finally:
            loader.dispose()
        values[name] = _plain(where, null if value is None else value, name in repeatable)
    return values


def _plain(where: str, value: Any, is_repeatable: bool) -> Any:
    """A value as a flag would have given it."""
    if is_repeatable:
        items = value if isinstance(value, list) else [value]
        return [_plain(where, item, False) for item in items]
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):  # flags that take JSON
        import json

        return json.dumps(value)
    raise UsageError(f"{where}: {value!r} is not what a flag can hold; write a number, a string, true or false")
