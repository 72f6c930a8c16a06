"""`lockstep calibrate TRACE`: what a step costs on this machine, from a recording of a live run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import options as flags
from lockstep.cli.collect_env import gather
from lockstep.errors import UsageError
from lockstep.version import __version__

if TYPE_CHECKING:
    from lockstep.replay.trace import TracedEngine

TracePath = Annotated[
    Path, typer.Argument(metavar="TRACE", help="A recording of lockstep serve --trace: file or directory.")
]
OutputFile = Annotated[Path, typer.Option("--output", "-o", help="Where the cost model goes, for replay --cost.")]
EngineNumber = Annotated[int, typer.Option("--engine", min=0, help="Which of the recorded engines.")]


def calibrate(
    trace: TracePath,
    output: OutputFile = Path("cost.json"),
    engine: EngineNumber = 0,
    debug: flags.Debug = False,
) -> None:
    """Fit a step-time model to a recording, and say how far it can be trusted."""
    from lockstep.replay import calibrate as fitting
    from lockstep.replay.configs import changed_fields
    from lockstep.replay.cost_file import MadeOn, to_bytes
    from lockstep.replay.render.cost import show_cost
    from lockstep.replay.trace import live_steps, open_trace

    recording = open_trace(trace)
    traced = {each.number: each for each in recording.engines}.get(engine)
    if traced is None:
        raise UsageError(f"{trace} has no engine {engine}; it has {_engines(recording.engines)}")
    made_on = MadeOn(
        lockstep=__version__,
        machine=_machine(),
        model=traced.name,
        fingerprint=traced.fingerprint,
        config=changed_fields(traced.config),
    )
    file = fitting.calibrate(live_steps(recording, engine), made_on)
    try:
        output.write_bytes(to_bytes(file))
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}") from error
    show_cost(file)


def _engines(engines: tuple[TracedEngine, ...]) -> str:
    return ", ".join(f"{each.number} ({each.name})" for each in engines) or "none"


def _machine() -> str:
    """Of this moment: a recording that was made elsewhere has prices of elsewhere."""
    facts = gather(os.environ)["processor"]
    return f"{facts['model'] or 'unknown processor'}, {facts['logical_cores']} logical cores"
