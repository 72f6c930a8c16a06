"""`lockstep run-batch IN OUT MODEL`: answers a file of requests with a model in this process, without a server."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lockstep.cli import options as flags
from lockstep.cli.flag_groups import SWITCH, Flag, with_flags
from lockstep.cli.progress import loading_progress
from lockstep.cli.writing import check_outputs, make_folder
from lockstep.engine.options import LoadOptions
from lockstep.errors import UsageError
from lockstep.option_fields import Range

if TYPE_CHECKING:
    from fastapi import FastAPI

    from lockstep.cluster.cluster import Cluster
    from lockstep.server.batches import BatchJob, CheckedInput
    from lockstep.server.options import ServerOptions

EXIT_FAILED = 1
"""Exit code if some requests were rejected or failed; the output has a line for each."""
MAX_REQUESTS = 1_000_000
"""Maximum number of requests of a file, each of which takes some 200 bytes of memory."""
MAX_SHOWN_FAULTS = 20
NUM_AT_ONCE = 64
REPORT_S = 10.0
"""Seconds between two reports of progress if standard error is not a terminal."""
PIPE = "-"
_PART = ".part"
_READABLE = 0o666
"""File mode of the output, before the user's umask."""
_TEMPORARY = "lockstep-owned-run-batch-"
"""Prefix of the names of temporary folders."""
OUTPUT = "the output"
NAME = "run-batch"
"""Prefix of the ids of requests."""

InputArgument = Annotated[
    str | None, typer.Argument(metavar="IN", help="Requests, one JSON object per line; - reads standard input.")
]
OutputArgument = Annotated[
    str | None, typer.Argument(metavar="OUT", help="Answers in the order of the requests; - writes standard output.")
]
Model = Annotated[str | None, typer.Argument(metavar="MODEL", help=flags.MODEL_HELP)]
InputFile = Annotated[str | None, typer.Option("-i", "--input-file", metavar="IN", help="IN, as an option.")]
OutputFile = Annotated[str | None, typer.Option("-o", "--output-file", metavar="OUT", help="OUT, as an option.")]
ModelFlag = Annotated[str | None, typer.Option("--model", metavar="MODEL", help="MODEL, as an option.")]


@dataclass(frozen=True, slots=True)
class AnswerFlags:
    """Flags for the names of the model and for the run."""

    served_model_name: Annotated[list[str] | None, Flag(shown="MODEL")] = None
    """Name of the model in requests; may be repeated for aliases."""
    max_num_seqs: Annotated[int, Range(1)] = NUM_AT_ONCE
    """Maximum number of requests that are answered at once."""
    resume: Annotated[bool, SWITCH] = False
    """Continue an interrupted run, whose answers are in OUT.part."""
    worker: Literal["process", "thread"] = "process"
    """Run the model in a supervised process or in a thread of this one."""


@dataclass(frozen=True, slots=True)
class RunBatchFlags:
    """Flags of `lockstep run-batch`."""

    input_argument: InputArgument = None
    output_argument: OutputArgument = None
    model: Model = None
    input_file: InputFile = None
    output_file: OutputFile = None
    model_flag: ModelFlag = None
    run: AnswerFlags = field(default_factory=AnswerFlags)
    local: flags.LocalModelFlags = field(default_factory=flags.LocalModelFlags)
    debug: flags.Debug = False

    def arguments(self) -> tuple[str, str, str]:
        """Input, output and model of arguments and flags; UsageError for a missing or a superfluous one."""
        positional = (self.input_argument, self.output_argument, self.model)
        return arguments_of(positional, (self.input_file, self.output_file, self.model_flag))


@with_flags
def run_batch(given: RunBatchFlags) -> None:
    """Answer a file of requests, in OpenAI's batch format, without a server; exit code 1 if some failed."""
    from lockstep.cluster.manifest import names_of_source
    from lockstep.server.options import ServerOptions

    source, target, name = given.arguments()
    names = tuple(given.run.served_model_name or names_of_source(name))
    kwargs = given.local.template_variables()
    options = ServerOptions(chat_template_kwargs=kwargs, reasoning=given.local.reasoning, log_requests=False)
    load = given.local.load_options(given.run.max_num_seqs)
    if target != PIPE:
        check_outputs([(Path(target).expanduser(), OUTPUT)], [None if source == PIPE else source])
    with _input(source) as path:
        checked = _checked(path, source, names)
        with _job(path, target, name, checked, resumes=given.run.resume) as job:
            _answer(job, name, names, load, given.run, options)
            _write(job, target)
            num_failed, num_requests = job.journal.num_failed, job.journal.num_requests
            job.journal.path.unlink()
    failed = f", {num_failed} failed" if num_failed else ""
    _print(f"{num_requests - num_failed} of {num_requests} requests answered{failed}")
    if num_failed:
        raise typer.Exit(EXIT_FAILED)


def arguments_of(positional: Sequence[str | None], given: Sequence[str | None]) -> tuple[str, str, str]:
    """Input, output and model of arguments and flags; UsageError for a missing or a superfluous one."""
    rest = [value for value in positional if value is not None]
    found = [value if value is not None or not rest else rest.pop(0) for value in given]
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}; give IN, OUT and MODEL, each once")
    for value, what in zip(found, ("IN", "OUT", "MODEL"), strict=True):
        if not value:
            raise UsageError(f"{what} is missing; for example: lockstep run-batch in.jsonl out.jsonl pocket://")
    source, target, model = (str(value) for value in found)
    return source, target, model


@contextmanager
def _input(source: str) -> Iterator[Path]:
    """Path of the input. Standard input is copied to a temporary file, because the input is read twice."""
    if source != PIPE:
        yield Path(source).expanduser()
        return
    with tempfile.NamedTemporaryFile(prefix="lockstep-", suffix=".jsonl") as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
        yield Path(copy.name)


def _checked(path: Path, source: str, names: Sequence[str]) -> CheckedInput:
    """Check the input.

    Raises:
        UsageError: the input cannot be read, has faults, which are printed with their lines, or names another model.
    """
    from lockstep.server.batches import checked_input
    from lockstep.server.options import ServerOptions

    try:
        with path.open("rb") as file:
            checked = checked_input(file, None, ServerOptions().max_body_bytes, MAX_REQUESTS)
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror or error}") from None
    for fault in checked.faults[1:MAX_SHOWN_FAULTS]:
        _print(f"{source}, line {fault.line}: {fault.message}")
    if checked.faults:
        first = checked.faults[0]
        where = source if first.line is None else f"{source}, line {first.line}"
        raise UsageError(f"{where}: {first.message}")
    for model, line in checked.models.items():
        if model is not None and model not in names:
            raise UsageError(
                f"{source}, line {line}: model is {model!r}; it must be {' or '.join(map(repr, names))}; add "
                f"--served-model-name {model}, or remove model from the requests"
            )
    return checked


@contextmanager
def _job(path: Path, target: str, model: str, checked: CheckedInput, *, resumes: bool) -> Iterator[BatchJob]:
    """Job of an input. Its answers are written to OUT.part until the output is complete."""
    from lockstep.owned_folders import temporary_folder
    from lockstep.server.batches import BatchJob, Journal

    if target == PIPE:
        if resumes:
            raise UsageError("--resume requires a file as OUT; standard output cannot be continued")
        with temporary_folder(_TEMPORARY) as folder:
            journal = Journal(folder / "part", NAME, len(checked.offsets))
            with closing(BatchJob(NAME, "", path, checked.offsets, journal)) as job:
                yield job
        return
    part = part_of(target)
    if part.exists() and not resumes:
        raise UsageError(f"{part} has the answers of an interrupted run; add --resume, or delete the file")
    if resumes and not part.exists():
        raise UsageError(f"--resume: there is no {part} of an interrupted run; remove the flag")
    make_folder(part, OUTPUT)
    digest = blake2b(path.read_bytes() + b"\0" + model.encode(), digest_size=16).hexdigest()
    try:
        journal = Journal(part, digest, len(checked.offsets))
    except OSError as error:
        raise _storage_error(part, error) from None
    with closing(BatchJob(NAME, "", path, checked.offsets, journal)) as job:
        yield job


def part_of(target: str) -> Path:
    """Path of the file with the answers of an incomplete run."""
    path = Path(target).expanduser()
    return path.with_name(f"{path.name}{_PART}")


def _answer(
    job: BatchJob, model: str, names: Sequence[str], load: LoadOptions, run: AnswerFlags, options: ServerOptions
) -> None:
    """Load the model, and answer the requests that have no answer yet."""
    from lockstep.cluster.cluster import Cluster
    from lockstep.cluster.manifest import Manifest
    from lockstep.cluster.state import ClusterOptions
    from lockstep.server.app import create_app
    from lockstep.worker.link import WorkerOptions

    if job.journal.is_complete:  # the earlier run was interrupted while it wrote the output
        return
    manifest = Manifest.of_model(model, tuple(names), load.chat_template)
    with loading_progress(model) as progress:
        cluster = Cluster(
            manifest,
            ClusterOptions(load=load, worker=WorkerOptions(run.worker), is_fixed=True),
            progress=lambda _, stage, fraction: progress(stage, fraction),
        )
        app = create_app(cluster, options)
        asyncio.run(_run(cluster, app, job, run.max_num_seqs))


async def _run(cluster: Cluster, app: FastAPI, job: BatchJob, num_at_once: int) -> None:
    from lockstep.server.batches import InProcessServer, run_job

    shown = _Progress(job)
    try:
        await cluster.prepare()
        await cluster.start()
        try:
            await run_job(job, InProcessServer(app), num_at_once, shown.update)
        except OSError as error:
            raise _storage_error(job.journal.path, error) from None
    except asyncio.CancelledError:
        journal = job.journal
        num_answered = journal.num_completed + journal.num_failed
        _print(f"interrupted: {num_answered} of {journal.num_requests} requests answered; --resume continues")
        raise
    finally:
        await cluster.close()


def _storage_error(path: Path, error: OSError) -> UsageError:
    """Error of a run whose answers cannot be written to disk."""
    advice = ", and continue with --resume" if path.suffix == _PART else ""
    why = error.strerror or error
    return UsageError(f"{path}: answers cannot be written there: {why}; free space on that disk{advice}")


class _Progress:
    """Progress of a job, in lines on standard error."""

    def __init__(self, job: BatchJob) -> None:
        self._job = job
        self._is_terminal = sys.stderr.isatty()
        self._reported_s = time.monotonic()

    def update(self) -> None:
        now_s, journal = time.monotonic(), self._job.journal
        if now_s - self._reported_s < (0.2 if self._is_terminal else REPORT_S):
            return
        self._reported_s = now_s
        done = journal.num_completed + journal.num_failed
        failed = f", {journal.num_failed} failed" if journal.num_failed else ""
        text = f"{done} of {journal.num_requests} requests{failed}"
        if self._is_terminal:
            print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)
        else:
            _print(text)


def _write(job: BatchJob, target: str) -> None:
    """Write all answers in order. An output file appears only when it is complete."""
    from lockstep.server.batches import durable_file

    if target == PIPE:
        job.write_results(sys.stdout.buffer, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    try:
        with durable_file(Path(target).expanduser(), _READABLE) as file:
            job.write_results(file, file)
    except OSError as error:
        raise UsageError(f"{target}: {OUTPUT} cannot be written there: {error.strerror or error}") from None


def _print(text: str) -> None:
    begin = "\r" if sys.stderr.isatty() else ""  # overwrites the line of progress
    print(f"{begin}lockstep: {text}", file=sys.stderr)
