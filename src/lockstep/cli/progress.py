"""Progress of loading models: bars if standard error is a terminal; otherwise a server writes lines to its log."""

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
"""Seconds between two reports of the same stage."""
READY = "ready"
_DOWNLOAD = "download "
_STAGES = {
    "open": "opening its files",
    "trial": "loading it in a trial process, because this machine never ran it",
    "pack": "packing its weights",
    "merge": "merging its adapters",
}
"""Descriptions of stages."""
_SHORT_STAGES = ("open",)
"""Stages that are reported only after `REMINDER_S`."""


@contextmanager
def loading_progress(model: str) -> Iterator[Progress]:
    """Callback that draws a bar while the block runs; it does nothing if standard error is not a terminal."""
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


def stage_text(stage: str) -> str:
    """Description of a stage."""
    return f"fetching {stage.removeprefix(_DOWNLOAD)}" if stage.startswith(_DOWNLOAD) else _STAGES.get(stage, stage)


@dataclass(slots=True)
class _Load:
    """State of loading one model."""

    began_s: float
    stage: str = ""
    """Current stage; empty: none."""
    stage_began_s: float = 0.0
    reported_s: float = 0.0
    """Time of the last report of the current stage."""
    fraction: float = 0.0
    spent_s: dict[str, float] = field(default_factory=dict)
    """Seconds by kind of stage."""


class LoadingLines:
    """Lines about loads: one per stage, reminders while a stage lasts, and one at the end. Any thread may call it.

    Args:
        write: writes a line.
        clock: monotonic seconds.
        has_stages: False: writes only the line at the end, and reminders.
    """

    def __init__(
        self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic, *, has_stages: bool = True
    ) -> None:
        self._write = write
        self._clock = clock
        self._has_stages = has_stages
        self._loads: dict[str, _Load] = {}
        self._lock = threading.Lock()

    def __call__(self, model: str, stage: str, fraction: float) -> None:
        """Report the progress of a stage; a fraction of 1.0 is its end."""
        with self._lock:
            now_s = self._clock()
            load = self._loads.setdefault(model, _Load(now_s))
            if stage != load.stage and fraction >= 1.0 and stage != READY:
                return  # a repeated end, or the end of a stage that took no time
            if stage != load.stage:
                self._end_stage(load, now_s)
                load.stage, load.stage_began_s, load.reported_s = stage, now_s, now_s
                if self._has_stages and stage != READY and stage not in _SHORT_STAGES:
                    self._write(f"{model}: {stage_text(stage)}")
            load.fraction = fraction
            if stage == READY:
                del self._loads[model]
                parts = [f"{stage} {spent_s:.1f} s" for stage, spent_s in load.spent_s.items() if spent_s >= 0.05]
                spent = f" ({', '.join(parts)})" if parts else ""
                self._write(f"{model}: ready after {now_s - load.began_s:.1f} s{spent}")
            elif fraction >= 1.0:
                self._end_stage(load, now_s)

    def remind(self) -> None:
        """Report current stages whose last report is at least `REMINDER_S` old."""
        with self._lock:
            now_s = self._clock()
            for model, load in self._loads.items():
                if load.stage and now_s - load.reported_s >= REMINDER_S:
                    load.reported_s = now_s
                    lasts_s = now_s - load.stage_began_s
                    done = f"{load.fraction:.0%} done after" if load.fraction else "for"
                    self._write(f"{model}: {stage_text(load.stage)}, {done} {lasts_s:.0f} s")

    def _end_stage(self, load: _Load, now_s: float) -> None:
        if load.stage:
            kind = load.stage.partition(" ")[0]
            load.spent_s[kind] = load.spent_s.get(kind, 0.0) + now_s - load.stage_began_s
            load.stage = ""


class ServingProgress:
    """Progress of a server's loads: `update` reports it, and `announce` prints other lines without disturbing the bars.

    Args:
        console: console for the bars; None: the progress is logged as lines.
    """

    def __init__(self, console: Console | None) -> None:
        self._bars = None if console is None else _bars(console)
        self._tasks: dict[str, TaskID] = {}
        self._lines = LoadingLines(self._write, has_stages=console is None)
        self._is_over = threading.Event()

    @classmethod
    def of_process(cls, log_format: str) -> ServingProgress:
        """Progress as bars if standard error is a terminal and the log format is text, and otherwise as log lines."""
        if log_format == "json" or not sys.stderr.isatty():
            return cls(None)
        from rich.console import Console

        return cls(Console(stderr=True))

    def update(self, model: str, stage: str, fraction: float) -> None:
        if self._bars is not None:
            self._draw(self._bars, model, stage, fraction)
        self._lines(model, stage, fraction)

    def announce(self, line: str) -> None:
        """Print a line to standard output, without breaking a bar."""
        if self._bars is not None and self._tasks:
            self._bars.stop()
        with contextlib.suppress(BrokenPipeError):  # a closed pipe must not stop the server
            typer.echo(line)
        if self._bars is not None and self._tasks:
            self._bars.start()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Report long stages repeatedly while the block runs."""
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

    def _write(self, line: str) -> None:
        if self._bars is None:
            log.info("%s", line)
        else:
            self._bars.console.print(line, markup=False, highlight=False)

    def _draw(self, bars: Bars, model: str, stage: str, fraction: float) -> None:
        is_over = stage == READY or (stage in _SHORT_STAGES and fraction >= 1.0)
        if not is_over and model not in self._tasks:
            self._tasks[model] = bars.add_task("", total=None)
            bars.start()
        if model in self._tasks:
            total = 1.0 if fraction else None  # None: a bar without an end, as the duration is unknown
            text, begins = f"{model}: {stage_text(stage)}", not fraction
            bars.update(self._tasks[model], description=text, completed=fraction, total=total, refresh=begins)
        if is_over and model in self._tasks:
            bars.remove_task(self._tasks.pop(model))
            if not self._tasks:
                bars.stop()
