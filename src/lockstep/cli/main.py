"""`lockstep`: the entry point. Whatever goes wrong becomes one line, a manifest's faults one each, a boot over budget a
line and a table; exit code 2. `--debug` shows the traceback."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import Annotated

import typer

from lockstep.cli.bench import bench_app
from lockstep.cli.calibrate import calibrate
from lockstep.cli.chat import chat
from lockstep.cli.check import check
from lockstep.cli.collect_env import collect_env
from lockstep.cli.completion import VARIABLE, completion, enable_completion
from lockstep.cli.diff import bisect, diff
from lockstep.cli.flag_groups import ENVIRONMENT_PREFIX
from lockstep.cli.hub import list_models, pull, rm
from lockstep.cli.models import models_app
from lockstep.cli.options import show_help_without_command
from lockstep.cli.ps import ps
from lockstep.cli.replay import replay
from lockstep.cli.run import run
from lockstep.cli.serve import serve
from lockstep.cli.sweep import sweep
from lockstep.errors import LockstepError, ManifestError, OverBudgetError
from lockstep.version import __version__

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="lockstep",
    help="Serves language models on one box; the same bytes alone or batched.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(run)
app.command(context_settings={"auto_envvar_prefix": ENVIRONMENT_PREFIX})(serve)
app.command()(check)
app.command()(calibrate)
app.command()(ps)
app.command()(replay)
app.command()(diff)
app.command()(bisect)
app.command()(sweep)
app.command()(chat)
app.command()(pull)
app.command("list")(list_models)
app.command()(rm)
app.command("collect-env")(collect_env)
app.command()(completion)
app.add_typer(models_app, name="models")
app.add_typer(bench_app, name="bench")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"lockstep {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serves language models on one box; the same bytes alone or batched."""
    show_help_without_command(context)


def main() -> None:
    """Run the command line and exit."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # whoever started us closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
    sys.exit(invoke(sys.argv[1:]))


def invoke(argv: list[str]) -> int:
    """Run one command; returns its exit code and never raises what a user could have caused."""
    if VARIABLE in os.environ:
        enable_completion()
    try:
        code = app(args=argv, prog_name="lockstep", standalone_mode=False)
        return _flushed(code if isinstance(code, int) else 0)
    except typer.TyperException as error:
        return _fail(f"{error.format_message()} (see --help)", argv)
    except ManifestError as error:
        for problem in error.problems:
            _fail(f"{error.name}, {problem}", argv)
        return EXIT_ERROR
    except OverBudgetError as error:
        _fail(str(error), argv)
        print(error.table, file=sys.stderr)
        return EXIT_ERROR
    except LockstepError as error:
        return _fail(str(error), argv)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except SystemExit as error:  # typer's own way to end when the reader of our output went away
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        return 0
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:
            _forget_output()
            return _fail(f"the output cannot be written: {error.strerror}", argv)
        return _defect(error, argv)
    except Exception as error:
        return _defect(error, argv)


def _flushed(code: int) -> int:
    """The exit code, once all output is written or nobody is there to read it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # nothing to report, and nobody to report it to
        _forget_output()
    return code


def _forget_output() -> None:
    """What is still to be written would only fail again when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _defect(error: Exception, argv: list[str]) -> int:
    """A defect of ours; still one line, and the way to see more."""
    return _fail(f"internal error: {type(error).__name__}: {error} (--debug shows where)", argv)


def _fail(message: str, argv: list[str]) -> int:
    if "--debug" in argv:
        traceback.print_exc()
    line = " ".join(message.split())
    print(f"lockstep: error: {line}", file=sys.stderr)
    return EXIT_ERROR
