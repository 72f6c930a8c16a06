"""Scheduler configs as the verbs of replays take them: ``--set``, or YAML and JSON files of its fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.config_file import read_config
from lockstep.cli.replay_trace import tell
from lockstep.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from lockstep.core.policy import SchedulerConfig
    from lockstep.replay.workload import Workload


def settings_of(settings: Sequence[str] | None) -> dict[str, str]:
    """What ``--set a=1,b=2 --set c=3`` says: field to value as text."""
    from lockstep.replay.configs import parse_overrides

    return parse_overrides([part for setting in settings or () for part in setting.replace(",", " ").split()])


def file_settings(path: Path) -> dict[str, str]:
    """The fields that a config file sets. An empty one sets none.

    Raises:
        UsageError: it cannot be read, or a key is no field; the message has the line and the nearest names.
    """
    from lockstep.core.policy import SchedulerConfig

    names = [field.name for field in fields(SchedulerConfig)]
    values = read_config(path.expanduser(), names, (), "", f"a scheduler's fields: {', '.join(names)}", null="none")
    return {name: str(value) for name, value in values.items()}


def config_of(workload: Workload, overrides: dict[str, str], source: str) -> SchedulerConfig:
    """The config of a replay; an error says which side it is about."""
    from lockstep.replay.configs import config_for

    try:
        return config_for(workload, overrides)
    except (ConfigError, UsageError) as error:
        raise UsageError(f"{source}: {error}") from None


def tell_order(*sides: tuple[Workload, Mapping[str, str]]) -> None:
    """Say on standard error in which order requests with priorities are admitted, where that is not plain.

    Args:
        sides: workloads and what is set over their configs.
    """
    from lockstep.replay.configs import order_note

    tell(dict.fromkeys(filter(None, (order_note(workload, overrides) for workload, overrides in sides))))
