"""`lockstep`: the entry point, and its verbs, each of which is imported when it is chosen.

Whatever goes wrong becomes one line, a manifest's faults one each, a boot over budget a line and a table; exit code 2.
`--debug` shows the traceback.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from lockstep.errors import InvalidTextError, LockstepError, OverBudgetError
from lockstep.version import __version__

EXIT_ERROR = 2
EXIT_NO_VERDICT = 3
"""Of verbs whose other exit codes are verdicts: whatever went wrong, it is none of those."""
VERDICT_VERBS = ("gate", "mirror", "mirror-gate")
EXIT_INTERRUPTED = 130
COMPLETION_VARIABLE = "_LOCKSTEP_COMPLETE"
"""Environment variable by which a shell's script requests completions."""
VERBS: Mapping[str, tuple[str, str]] = {
    "run": ("lockstep.cli.run:run", "Answer a prompt, or chat when there is none."),
    "serve": ("lockstep.cli.serve:serve", "Serve a model, or a cluster of them, to OpenAI clients."),
    "demo": (
        "lockstep.cli.demo:demo",
        "Show a routed cluster on the embedded model: answers, a replay of them, a verdict; no download, no GPU.",
    ),
    "run-batch": (
        "lockstep.cli.run_batch:run_batch",
        "Answer a file of requests, in OpenAI's batch format, without a server; exit code 1 if some failed.",
    ),
    "check": (
        "lockstep.cli.manifests:check",
        "Report every fault of a manifest, or the placement of its models; exit code 2 if it would not boot.",
    ),
    "calibrate": (
        "lockstep.cli.calibrate:calibrate",
        "Fit a step-time model to a recording, and report its prediction errors.",
    ),
    "ps": (
        "lockstep.cli.ps:ps",
        "Show a running cluster: models, hosts and replicas, budgets and counters; or drain one of its hosts.",
    ),
    "top": (
        "lockstep.cli.top:top",
        "Watch a running cluster in the terminal: models, rates, memory, sessions and events; changes nothing.",
    ),
    "replay": (
        "lockstep.cli.replay:replay",
        "Replay a workload through the scheduler that serves, on a logical clock: same input, same bytes.",
    ),
    "replay --serve": (
        "lockstep.cli.replay_serve:replay_serve",
        "Answer recorded requests again, token by token with their recorded times: a server without a model.",
    ),
    "diff": (
        "lockstep.cli.diff:diff",
        "Show the first step that A and B decide differently, and why; exit code 1 if there is one.",
    ),
    "bisect": (
        "lockstep.cli.diff:bisect",
        "Take over each differing field alone, and all but each, and show which of them change the metric.",
    ),
    "sweep": (
        "lockstep.cli.sweep:sweep",
        "Replay every combination of a grid of limits; exit code 1 if goals are given and none meets them.",
    ),
    "gate": ("lockstep.cli.gate:gate", "Judge a candidate: exit code 0 promote, 1 rollback, 2 hold, 3 bad input."),
    "gate serve": (
        "lockstep.cli.gate_serve:gate_serve",
        "Judge growing files, and serve the verdict over HTTP, for example to Argo Rollouts or Flagger.",
    ),
    "mirror": (
        "lockstep.cli.gate:mirror",
        "Convert what other tools wrote to one file of observations that the gate reads.",
    ),
    "mirror-gate": (
        "lockstep.cli.gate:mirror_gate",
        "Convert what other tools wrote, and judge it: exit codes as those of gate.",
    ),
    "chat": ("lockstep.cli.chat:chat", "Chat with a server of the OpenAI API; Lockstep's own is the default."),
    "pull": (
        "lockstep.cli.models:pull",
        "Bring a model from the Hugging Face hub into its cache, or the cached one up to date.",
    ),
    "list": ("lockstep.cli.models:list_models", "List the models in the hub's cache that can be served."),
    "rm": ("lockstep.cli.models:rm", "Delete a model, one revision of it or one GGUF file from the hub's cache."),
    "collect-env": (
        "lockstep.cli.collect_env:collect_env",
        "Print versions, machine, limits, caches and settings: paste it into a bug report.",
    ),
    "completion": (
        "lockstep.cli.main:completion",
        'Print the script for a shell\'s completion, e.g. eval "$(lockstep completion bash)" in ~/.bashrc.',
    ),
    "models": ("lockstep.cli.models:models_app", "Look at models on disk."),
    "bench": ("lockstep.cli.bench:bench_app", "Measure a server, or the engine in this process."),
}
"""By name, in the order of the help: where its function or group is, and the first line of that one's docstring."""


class _LazyGroup(TyperGroup):
    """Commands that stand only with their line of help, until one is chosen and imported."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # the types are of a module that typer keeps private
        args = _joined(args)
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else command_of(name), rest


def _joined(args: list[str]) -> list[str]:
    """Arguments with a verb of two words as one: beside a verb that takes files, or anywhere behind it a flag."""
    if " ".join(args[:2]) in VERBS:
        return [" ".join(args[:2]), *args[2:]]
    for at, flag in enumerate(args):
        name, equals, value = flag.partition("=")
        if flag.startswith("--") and f"{args[0]} {name}" in VERBS:
            return [f"{args[0]} {name}", *args[1:at], *([value] if equals else []), *args[at + 1 :]]
    return args


app = typer.Typer(
    name="lockstep",
    help="Serves language models on one box; the same bytes alone or batched.",
    cls=_LazyGroup,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for _name, (_, _help) in VERBS.items():
    app.command(_name, help=_help)(lambda: None)


def command_of(name: str) -> Any:
    """A verb as typer's command or group; its module is imported."""
    module, _, attribute = VERBS[name][0].partition(":")
    verb = getattr(import_module(module), attribute)
    if isinstance(verb, typer.Typer):
        return typer.main.get_group(verb)
    from lockstep.cli.flag_groups import ENVIRONMENT_PREFIX

    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    settings = {"auto_envvar_prefix": ENVIRONMENT_PREFIX} if name == "serve" else None
    alone.command(name, context_settings=settings)(verb)
    return typer.main.get_command(alone)


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
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="Whose script to print.")],
) -> None:
    """Print the script for a shell's completion, e.g. eval "$(lockstep completion bash)" in ~/.bashrc."""
    from typer.completion import get_completion_script

    install = {
        "bash": 'eval "$(lockstep completion bash)" in ~/.bashrc',
        "zsh": 'eval "$(lockstep completion zsh)" in ~/.zshrc, after compinit',
        "fish": "lockstep completion fish > ~/.config/fish/completions/lockstep.fish",
    }
    print(get_completion_script(prog_name="lockstep", complete_var=COMPLETION_VARIABLE, shell=shell))
    print(f"# {install[shell]}")  # last: zsh reads a script's first line


def main() -> None:
    """Run the command line and exit."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # whoever started us closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
    sys.exit(invoke(sys.argv[1:]))


def invoke(argv: list[str]) -> int:
    """Run one command; returns its exit code and never raises what a user could have caused."""
    if COMPLETION_VARIABLE in os.environ:  # typer does it by itself only where it also adds its own options
        from typer.completion import completion_init

        completion_init()
    try:
        code = app(args=argv, prog_name="lockstep", standalone_mode=False)
        if code == EXIT_INTERRUPTED:  # typer makes it of Ctrl-C
            return _exit_code(argv, code)
        return _flushed(code if isinstance(code, int) else 0)
    except typer.TyperException as error:
        return _fail(f"{_usage_text(error)} (see --help)", argv)
    except InvalidTextError as error:
        for problem in error.problems:
            _fail(f"{error.name}, {problem}", argv)
        return EXIT_ERROR
    except OverBudgetError as error:
        code = _fail(str(error), argv)
        print(error.table, file=sys.stderr)
        return code
    except LockstepError as error:
        return _fail(str(error), argv)
    except (KeyboardInterrupt, typer.Abort):
        return _exit_code(argv, EXIT_INTERRUPTED)
    except SystemExit as error:  # typer's own way to end when the reader of our output went away
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        return _exit_code(argv, 0)
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:
            _forget_output()
            return _fail(f"the output cannot be written: {error.strerror}", argv)
        return _defect(error, argv)
    except Exception as error:
        return _defect(error, argv)


def _usage_text(error: typer.TyperException) -> str:
    """The text of an error of the command line, with a reason of ours in the place of pydantic's."""
    from pydantic import ValidationError

    from lockstep.spelling import demand

    if isinstance(error.__cause__, ValidationError):
        fault = error.__cause__.errors(include_url=False)[0]
        if fault["type"] == "value_error":
            error.message = str(fault["msg"]).removeprefix("Value error, ").rstrip(".")
        else:
            error.message = f"it is {fault['input']!r} and must {demand(fault, 'be as --help shows')}"
    return error.format_message()


def _flushed(code: int) -> int:
    """The exit code, once all output is written or its reader is gone."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # nothing to report, and nobody to report it to
        _forget_output()
    return code


def _forget_output() -> None:
    """Discard buffered output, which would only fail again when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _defect(error: Exception, argv: list[str]) -> int:
    """A defect of ours; still one line, and the way to see more."""
    return _fail(f"internal error: {type(error).__name__}: {error} (--debug shows where)", argv)


def _fail(message: str, argv: list[str]) -> int:
    if "--debug" in argv:
        traceback.print_exc()
    with suppress(BrokenPipeError):  # the exit code reports it, too
        print(f"lockstep: error: {' '.join(message.split())}", file=sys.stderr)
    return _exit_code(argv, EXIT_ERROR)


def _exit_code(argv: list[str], of_others: int) -> int:
    """The exit code of a command that was not ended by itself, unless its verb's exit codes are verdicts."""
    verb = next((argument for argument in argv if not argument.startswith("-")), "")
    return EXIT_NO_VERDICT if verb in VERDICT_VERBS else of_others
