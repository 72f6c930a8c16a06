"""Progress while models load: bars on a terminal's standard error; of a server's, lines in its log elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import typer

from lockstep.engine.options import Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

log = logging.getLogger(__name__)

REMINDER_S = 5.0
"""Seconds between two reports of a stage that lasts."""
READY = "ready"
_DOWNLOAD = "download "
_DOING = {
    "open": "opening its files",
    "trial": "loading it on trial in a process of its own, as this machine never ran it",
    "pack": "packing its weights",
}
_QUIET = ("open",)
"""Stages that are reported only if they last."""


@contextmanager
def loading_progress(model: str) -> Iterator[Progress]:
    """A callback that draws a bar while its block runs; silent where standard error is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda stage, fraction: None
        return
    with _bars(None) as bars:
        task = bars.add_task(f"loading {model}", total=1.0)
        yield lambda stage, fraction: bars.update(task, description=f"{model}: {stage}", completed=fraction)


def _bars(console: Console | None) -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    return Bars(*columns, console=console or Console(stderr=True), transient=True, redirect_stdout=False)


def doing(stage: str) -> str:
    """A stage in words."""
    return f"fetching {stage.removeprefix(_DOWNLOAD)}" if stage.startswith(_DOWNLOAD) else _DOING.get(stage, stage)


@dataclass(slots=True)
class _Load:
    """One model's way."""

    began_s: float
    stage: str = ""
    """Empty: none is under way."""
    stage_began_s: float = 0.0
    said_s: float = 0.0
    fraction: float = 0.0
    spent_s: dict[str, float] = field(default_factory=dict)


class LoadingLines:
    """A line for every stage of a load, one now and then while it lasts, and one at the end. Any thread may report.

    Args:
        say: writes a line.
        clock: monotonic seconds.
        tells_stages: whether there is more than the line at the end.
    """

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic, *, tells_stages: bool = True
    ) -> None:
        self._say = say
        self._clock = clock
        self._tells_stages = tells_stages
        self._loads: dict[str, _Load] = {}
        self._lock = threading.Lock()

    def __call__(self, model: str, stage: str, fraction: float) -> None:
        """A model's loading has come to a stage, or further in it; 1.0: to its end."""
        with self._lock:
            now_s = self._clock()
            load = self._loads.setdefault(model, _Load(now_s))
            if stage != load.stage and fraction >= 1.0 and stage != READY:
                return  # its end again, or that of one that took no time
            if stage != load.stage:
                self._end_stage(load, now_s)
                load.stage, load.stage_began_s, load.said_s = stage, now_s, now_s
                if self._tells_stages and stage != READY and stage not in _QUIET:
                    self._say(f"{model}: {doing(stage)}")
            load.fraction = fraction
            if stage == READY:
                del self._loads[model]
                parts = [f"{stage} {spent_s:.1f} s" for stage, spent_s in load.spent_s.items() if spent_s >= 0.05]
                spent = f" ({', '.join(parts)})" if parts else ""
                self._say(f"{model}: ready after {now_s - load.began_s:.1f} s{spent}")
            elif fraction >= 1.0:
                self._end_stage(load, now_s)

    def remind(self) -> None:
        """Report stages that are still under way and were not reported for a while."""
        with self._lock:
            now_s = self._clock()
            for model, load in self._loads.items():
                if load.stage and now_s - load.said_s >= REMINDER_S:
                    load.said_s = now_s
                    lasts_s = now_s - load.stage_began_s
                    done = f"{load.fraction:.0%} done after" if load.fraction else "for"
                    self._say(f"{model}: {doing(load.stage)}, {done} {lasts_s:.0f} s")

    def _end_stage(self, load: _Load, now_s: float) -> None:
        if load.stage:
            kind = load.stage.partition(" ")[0]
            load.spent_s[kind] = load.spent_s.get(kind, 0.0) + now_s - load.stage_began_s
            load.stage = ""


class ServingProgress:
    """Progress of a server's loads: `update` it of them, and `announce` lines on standard output beside it.

    Args:
        console: where bars are drawn; None: nowhere, and lines are logged.
    """

    def __init__(self, console: Console | None) -> None:
        self._bars = None if console is None else _bars(console)
        self._tasks: dict[str, TaskID] = {}
        self._lines = LoadingLines(self._say, tells_stages=console is None)
        self._is_over = threading.Event()

    @classmethod
    def for_this(cls, log_format: str) -> ServingProgress:
        """Bars where standard error is a terminal and logs are text."""
        if log_format == "json" or not sys.stderr.isatty():
            return cls(None)
        from rich.console import Console

        return cls(Console(stderr=True))

    def update(self, model: str, stage: str, fraction: float) -> None:
        if self._bars is not None:
            self._draw(self._bars, model, stage, fraction)
        self._lines(model, stage, fraction)

    def announce(self, line: str) -> None:
        """Print a line for people and supervisors, not into the middle of a bar."""
        if self._bars is not None and self._tasks:
            self._bars.stop()
        with contextlib.suppress(BrokenPipeError):  # its reader is gone: no reason to stop serving
            typer.echo(line)
        if self._bars is not None and self._tasks:
            self._bars.start()

    @contextmanager
    def running(self) -> Iterator[None]:
        """While this lasts, stages that take long are reported again and again."""
        reminding = threading.Thread(target=self._remind, name="lockstep-progress", daemon=True)
        reminding.start()
        try:
            yield
        finally:
            self._is_over.set()
            if self._bars is not None:
                self._bars.stop()

    def _remind(self) -> None:
        while not self._is_over.wait(REMINDER_S / 5):
            if self._bars is None:
                self._lines.remind()

    def _say(self, line: str) -> None:
        if self._bars is None:
            log.info("%s", line)
        else:
            self._bars.console.print(line, markup=False, highlight=False)

    def _draw(self, bars: Bars, model: str, stage: str, fraction: float) -> None:
        is_over = stage == READY or (stage in _QUIET and fraction >= 1.0)
        if not is_over and model not in self._tasks:
            self._tasks[model] = bars.add_task("", total=None)
            bars.start()
        if model in self._tasks:
            total = 1.0 if fraction else None  # unknown how long it takes
            said, begins = f"{model}: {doing(stage)}", not fraction
            bars.update(self._tasks[model], description=said, completed=fraction, total=total, refresh=begins)
        if is_over and model in self._tasks:
            bars.remove_task(self._tasks.pop(model))
            if not self._tasks:
                bars.stop()
