"""The process of a trial: reads one Load from standard input, loads and probes, and says what went wrong, if anything.

Exit code 0: it can be loaded. 1: standard output holds a LoadFailed. A signal: the artifact took the process down.
"""

from __future__ import annotations

import os
import sys

from lockstep.engine.loading import load_model
from lockstep.errors import LockstepError
from lockstep.worker.lifeline import die_with_parent
from lockstep.worker.messages import Load, LoadFailed
from lockstep.worker.wire import command_decoder, event_encoder


def main() -> int:
    """Run the trial; returns the exit code."""
    die_with_parent(os.getppid())
    load = command_decoder().decode(sys.stdin.buffer.read())
    assert isinstance(load, Load), "a trial is asked to load"
    try:
        model, _ = load_model(load.source, load.options)
    except LockstepError as error:
        sys.stdout.buffer.write(event_encoder().encode(LoadFailed(load.replica, error)))
        return 1
    model.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
