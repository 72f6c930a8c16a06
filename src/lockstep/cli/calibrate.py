"""`lockstep calibrate TRACE`: fits the duration of a step on the machine of a recording."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import options as flags
from lockstep.cli.replay_options import open_with_notes
from lockstep.cli.writing import check_outputs, expanded, write_file

if TYPE_CHECKING:
    from lockstep.worker.flight.entries import Header


def calibrate(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="Recording of lockstep serve --trace: file or directory.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", callback=expanded, help="File for the cost model, for replay --cost.")
    ] = Path("cost.json"),
    engine: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Engine to calibrate, if the recording has several.")
    ] = None,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Fit a step-time model to a recording, and report its prediction errors."""
    from lockstep.replay import calibrate as fitting
    from lockstep.replay.configs import changed_fields
    from lockstep.replay.cost_file import MadeOn, cost_document, to_bytes
    from lockstep.replay.live import live_steps
    from lockstep.report.text import show

    check_outputs([(output, "the cost model")], [trace])
    recording = open_with_notes(trace.expanduser())
    traced = recording.engine(engine)
    made_on = MadeOn(
        lockstep=recording.header.lockstep,
        machine=_machine(recording.header),
        model=traced.name,
        fingerprint=traced.fingerprint,
        config=changed_fields(traced.config),
        environment=dict(traced.environment),
    )
    file = fitting.calibrate(live_steps(recording, traced.number), made_on)
    data = to_bytes(file)
    write_file(output, data, "the cost model")
    print(data.decode(), end="") if as_json else show(cost_document(file))


def _machine(header: Header) -> str:
    """Name of the machine that made the recording, which may differ from this one."""
    return "no machine: a simulated run" if header.is_simulated else header.machine or "an unrecorded machine"
