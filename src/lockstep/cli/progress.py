"""Progress while a model loads: on the terminal's standard error, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.engine.loading import Progress


@contextmanager
def loading_progress(model: str) -> Iterator[Progress]:
    """A callback that draws a bar while its block runs; silent where nobody looks."""
    if not sys.stderr.isatty():
        yield lambda stage, fraction: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(f"loading {model}", total=1.0)
        yield lambda stage, fraction: bars.update(task, description=f"{model}: {stage}", completed=fraction)
