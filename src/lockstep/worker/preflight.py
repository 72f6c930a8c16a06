"""Preflight load: tries an artifact that is new on this machine in a separate process before the worker loads it.

If a native library crashes on an artifact, only the trial process ends, and not the worker with all that it serves. A
successful trial is recorded in the cache directory, with a key of everything that affects the executed code.

This module is also the program of that process: it reads one `Load` from standard input. Exit code 0: it can be loaded.
1: standard output contains a `LoadFailed`. A signal: the artifact crashed the process.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.artifacts.task import MERGE
from lockstep.engine.loading import default_cache_dir, download_stage, load_model
from lockstep.engine.options import Progress
from lockstep.errors import ArtifactError, LockstepError
from lockstep.executors.stub import SCHEME as STUB_SCHEME
from lockstep.pocket import SCHEME as EMBEDDED
from lockstep.system import SYSTEM, System
from lockstep.version import __version__
from lockstep.worker.messages import Load, LoadFailed
from lockstep.worker.parent_death import die_with_parent, signal_name
from lockstep.worker.wire import command_decoder, command_encoder, event_decoder, event_encoder

COMMAND = (sys.executable, "-P", "-m", "lockstep.worker.preflight")
TRUSTED = (STUB_SCHEME, EMBEDDED)
"""Prefixes of sources that need no trial unless an adapter is merged into them: a stub runs no native code, and the
embedded model is tested with every release."""
MAX_RECORDS = 4096
"""Maximum number of records, each an empty file. When it is reached, all are deleted."""
_MAX_SHOWN_CHARS = 400


def try_unknown(load: Load, progress: Progress, command: Sequence[str] = COMMAND, system: System = SYSTEM) -> None:
    """Run the trial of an artifact that has no record. Returns when it may be loaded here.

    Raises:
        ArtifactError: the trial crashed or exceeded its time limit.
        LockstepError: the error of the load.
    """
    if not load.trial.enabled or (load.source.startswith(TRUSTED) and MERGE not in load.source):
        return
    record = _record(load, progress)
    if load.trial.is_forced:
        record.unlink(missing_ok=True)
    if record.exists():
        return
    progress("trial", 0.0)
    run_trial(load, command, system)
    _remember(record, system)


def run_trial(load: Load, command: Sequence[str], system: System = SYSTEM) -> None:
    """Load in another process, and raise its error.

    Raises:
        ArtifactError: the trial crashed or exceeded its time limit.
        LockstepError: the error of the load.
    """
    limit_s = load.trial.limit_s
    try:
        code, output = system.run_process(command, command_encoder().encode(load), limit_s)
    except TimeoutError:
        raise ArtifactError(
            f"loading it in a trial process took more than {limit_s:g} s; raise the limit if it needs longer",
            path=load.source,
        ) from None
    if code == 0:
        return
    if code < 0:
        raise ArtifactError(
            f"loading it in a trial process ended with {signal_name(-code)}; the files are damaged, too "
            "large for this machine's memory, or not supported by the executor",
            path=load.source,
        )
    raise _trial_error(output, code, load.source)


def _trial_error(output: bytes, code: int, source: str) -> LockstepError:
    """The error that a trial wrote before it ended."""
    try:
        event = event_decoder().decode(output)
    except ValueError:
        shown = output.decode(errors="replace")[:_MAX_SHOWN_CHARS]
        return ArtifactError(f"loading it in a trial process ended with exit code {code}: {shown}", path=source)
    assert isinstance(event, LoadFailed), "a trial that ends with an error reports it"
    return event.error


def _record(load: Load, progress: Progress) -> Path:
    """Path of the record of this trial, independent of the artifact's name."""
    from lockstep.artifacts.source import open_artifact
    from lockstep.executors.base import environment_digest
    from lockstep.executors.machine import instruction_set
    from lockstep.executors.native.executor import environment_of

    options = load.options
    cache_dir = options.cache_dir or default_cache_dir()
    artifact = open_artifact(load.source, cache_dir=cache_dir, progress=download_stage(progress))
    machine = {"lockstep": __version__, "instructions": instruction_set(), "isa": options.executor.isa or "fastest"}
    return cache_dir / "trials" / environment_digest(environment_of(artifact, options.executor) | machine)


def _remember(record: Path, system: System) -> None:
    """Write a record atomically. If it cannot be written, the next load is tried again."""
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        present = list(record.parent.iterdir())
        if len(present) >= MAX_RECORDS:
            for old in present:
                old.unlink()
        system.write_file(record, permissions=0o600)


def main() -> int:
    """Run a trial in this process. Returns the exit code."""
    die_with_parent(os.getppid())
    load = command_decoder().decode(sys.stdin.buffer.read())
    assert isinstance(load, Load), "a trial is started to load"
    try:
        model, _ = load_model(load.source, load.options)
    except LockstepError as error:
        sys.stdout.buffer.write(event_encoder().encode(LoadFailed(load.replica, error)))
        return 1
    model.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
