"""Tables on the terminal. A pipe gets whole cells whatever their length: another program reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

PIPE_WIDTH = 1000


def new_table(*columns: str) -> Table:
    """A table without lines, its head bold."""
    from rich.table import Table

    return Table(*columns, box=None, pad_edge=False, header_style="bold")


def print_table(table: Table) -> None:
    """To standard output."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=PIPE_WIDTH)
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))
