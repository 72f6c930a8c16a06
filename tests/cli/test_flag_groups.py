"""Groups of flags are values, and flags of options are their fields: types, defaults and sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
import typer

from lockstep.cli.flag_groups import Flag, OptionFlags, with_flags
from lockstep.option_fields import Range, field_docs


@dataclass(frozen=True, slots=True)
class Options:
    """Options as a package of a lower layer has them."""

    width: Annotated[int, Range(1)] = 4
    """Columns of a table.

    Whatever a developer must know besides."""
    order: Literal["up", "down"] | None = None
    """Direction of ``rows``; None: up."""
    limit: int | None = None
    """Rows in a table; None: ``width``."""
    exact: bool = True
    """Numbers keep all
    their digits."""
    hidden: str = "kept"


@dataclass(frozen=True, slots=True)
class Group:
    """Flags of a command itself."""

    name: Annotated[str, typer.Option(help="Of the table.")] = "t"


FLAGS = OptionFlags(
    Options,
    {"width": Flag("columns"), "order": Flag(also=("direction",)), "limit": Flag(), "exact": Flag()},
)


def made(*argv: str) -> tuple[Options, Group, str]:
    """What a command with both kinds of groups is called with."""
    calls: list[tuple[Options, Group, str]] = []

    @with_flags
    def command(word: str = "", *, options: Annotated[Options, FLAGS], group: Group) -> None:
        calls.append((options, group, word))

    app = typer.Typer()
    app.command()(command)
    app(args=list(argv), standalone_mode=False)
    return calls[0]


def parameters() -> dict[str, Any]:
    return {each.name: each.annotation.__metadata__[0] for each in FLAGS.parameters()}


def test_a_command_gets_the_values_of_its_groups() -> None:
    assert made() == (Options(), Group(), "")
    argv = ("--columns", "2", "--direction", "down", "--no-exact", "--name", "n", "--word", "w")
    assert made(*argv) == (Options(2, "down", exact=False), Group("n"), "w")
    assert made("--limit", "3")[0] == Options(limit=3)


def test_help_and_shown_defaults_are_of_the_first_paragraph() -> None:
    flags = parameters()
    assert {name: flag.help for name, flag in flags.items()} == {
        "columns": "Columns of a table.",
        "order": "Direction of rows.",
        "limit": "Rows in a table.",
        "exact": "Numbers keep all their digits.",
    }
    assert [flag.show_default for flag in flags.values()] == [True, "as up", "as width", True]


def test_a_flag_of_several_names_has_a_variable_for_each() -> None:
    flags = parameters()
    assert flags["order"].envvar == ["LOCKSTEP_ORDER", "LOCKSTEP_DIRECTION"]
    assert flags["limit"].envvar is None, "it is found by the flag's name"


@pytest.mark.parametrize("argv", [("--columns", "0"), ("--order", "sideways"), ("--hidden", "x"), ("--width", "3")])
def test_ranges_choices_and_names_are_those_of_the_flags(argv: tuple[str, ...]) -> None:
    with pytest.raises(typer.TyperException):
        made(*argv)


def test_sentences_are_those_under_the_fields() -> None:
    assert field_docs(Options) == {
        "width": "Columns of a table.",
        "order": "Direction of rows; None: up.",
        "limit": "Rows in a table; None: width.",
        "exact": "Numbers keep all their digits.",
    }
