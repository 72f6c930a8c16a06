"""`lockstep`: the entry point and its verbs. A verb's module is imported when the verb is used.

An error is printed as one line, each fault of a manifest as one line, and a manifest over budget as a line and a table.
The exit code is 2. `--debug` shows the traceback.
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
"""Exit code of errors of `VERDICT_VERBS`, whose other exit codes are verdicts."""
VERDICT_VERBS = ("gate", "mirror", "mirror-gate")
EXIT_INTERRUPTED = 130
COMPLETION_VARIABLE = "_LOCKSTEP_COMPLETE"
"""Environment variable with which a shell's script requests completions."""
VERBS: Mapping[str, tuple[str, str]] = {
    "run": (
        "lockstep.cli.run:run",
        "Answer a prompt, chat, or print vectors or scores of texts.",
    ),
    "serve": ("lockstep.cli.serve:serve", "Serve a model, or a cluster of models, to OpenAI clients."),
    "demo": (
        "lockstep.cli.demo:demo",
        "Show a routed cluster on the embedded model: answers, replay, gate verdict; no download, no GPU.",
    ),
    "run-batch": (
        "lockstep.cli.run_batch:run_batch",
        "Answer a file of requests, in OpenAI's batch format, without a server; exit code 1 if some failed.",
    ),
    "check": (
        "lockstep.cli.manifests:check",
        "Report every fault of a manifest, or the placement of its models; exit code 2 if it cannot boot.",
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
        "Watch a running cluster in the terminal: models, rates, memory, sessions and events; read-only.",
    ),
    "replay": (
        "lockstep.cli.replay:replay",
        "Replay a workload with the server's scheduler, on a logical clock: same input, same bytes.",
    ),
    "replay --serve": (
        "lockstep.cli.replay_serve:replay_serve",
        "Serve recorded answers without a model, token by token at their recorded times.",
    ),
    "diff": (
        "lockstep.cli.diff:diff",
        "Show the first step that A and B decide differently, and why; exit code 1 if there is one.",
    ),
    "bisect": (
        "lockstep.cli.diff:bisect",
        "Change each differing field alone, and all but each, and show which fields change the metric.",
    ),
    "sweep": (
        "lockstep.cli.sweep:sweep",
        "Replay every combination of a grid of limits; exit code 1 if no combination meets the given goals.",
    ),
    "gate": ("lockstep.cli.gate:gate", "Judge a candidate: exit code 0 promote, 1 rollback, 2 hold, 3 bad input."),
    "gate serve": (
        "lockstep.cli.gate_serve:gate_serve",
        "Judge growing files, and serve the verdict over HTTP, for example to Argo Rollouts or Flagger.",
    ),
    "mirror": (
        "lockstep.cli.gate:mirror",
        "Convert files of other tools to one file of observations for the gate.",
    ),
    "mirror-gate": (
        "lockstep.cli.gate:mirror_gate",
        "Convert files of other tools and judge them; the exit codes are those of gate.",
    ),
    "chat": ("lockstep.cli.chat:chat", "Chat with a server that has the OpenAI API, by default a local Lockstep."),
    "pull": (
        "lockstep.cli.models:pull",
        "Download a model from the Hugging Face hub into the hub's cache, or update it there.",
    ),
    "list": ("lockstep.cli.models:list_models", "List the models in the hub's cache that can be served."),
    "rm": ("lockstep.cli.models:rm", "Delete a model, one revision of it or one GGUF file from the hub's cache."),
    "collect-env": (
        "lockstep.cli.collect_env:collect_env",
        "Print versions, machine, limits, caches and settings for a bug report.",
    ),
    "completion": (
        "lockstep.cli.main:completion",
        'Print the script for a shell\'s completion, e.g. eval "$(lockstep completion bash)" in ~/.bashrc.',
    ),
    "models": ("lockstep.cli.models:models_app", "Inspect models on disk."),
    "bench": ("lockstep.cli.bench:bench_app", "Measure a server, or the engine in this process."),
}
"""Location and help of each verb, in the order of the help: ``module:function`` or ``module:group``, and the first line
of its docstring."""


class _LazyGroup(TyperGroup):
    """Group whose commands are placeholders with a line of help; a command is imported when it is used."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # the types are in a private module of typer
        args = _joined(args)
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else command_of(name), rest


def _joined(args: list[str]) -> list[str]:
    """Arguments in which a verb of two words is one argument.

    The second word follows the first (`gate serve`), or is a flag anywhere after it (`replay FILE --serve`).
    """
    if " ".join(args[:2]) in VERBS:
        return [" ".join(args[:2]), *args[2:]]
    for at, flag in enumerate(args):
        name, equals, value = flag.partition("=")
        if flag.startswith("--") and f"{args[0]} {name}" in VERBS:
            return [f"{args[0]} {name}", *args[1:at], *([value] if equals else []), *args[at + 1 :]]
    return args


app = typer.Typer(
    name="lockstep",
    help="Serves language models on CPUs; answers are bitwise identical, alone or batched.",
    cls=_LazyGroup,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for _name, (_, _help) in VERBS.items():
    app.command(_name, help=_help)(lambda: None)


def command_of(name: str) -> Any:
    """Import the module of a verb, and return its command or group."""
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
    """Serves language models on CPUs; answers are bitwise identical, alone or batched."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="Shell to print the script for.")],
) -> None:
    """Print the script for a shell's completion, e.g. eval "$(lockstep completion bash)" in ~/.bashrc."""
    from typer.completion import get_completion_script

    install = {
        "bash": 'eval "$(lockstep completion bash)" in ~/.bashrc',
        "zsh": 'eval "$(lockstep completion zsh)" in ~/.zshrc, after compinit',
        "fish": "lockstep completion fish > ~/.config/fish/completions/lockstep.fish",
    }
    print(get_completion_script(prog_name="lockstep", complete_var=COMPLETION_VARIABLE, shell=shell))
    print(f"# {install[shell]}")  # at the end, because zsh interprets a script's first line


def main() -> None:
    """Run the command line and exit."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the parent process closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open until the process ends
    sys.exit(invoke(sys.argv[1:]))


def invoke(argv: list[str]) -> int:
    """Run one command and return its exit code. Errors that a user can cause are printed and not raised."""
    if COMPLETION_VARIABLE in os.environ:  # typer does this by itself only together with options of its own
        from typer.completion import completion_init

        completion_init()
    try:
        if "--lora-modules" in argv:  # vLLM allows several values after one flag
            from lockstep.cli.adapter_flags import separated

            argv = separated(argv)
        code = app(args=argv, prog_name="lockstep", standalone_mode=False)
        if code == EXIT_INTERRUPTED:  # typer returns this code after Ctrl-C
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
    except SystemExit as error:  # raised by typer when the reader of the output has closed its pipe
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        return _exit_code(argv, 0)
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:
            _discard_output()
            return _fail(f"the output cannot be written: {error.strerror}", argv)
        return _defect(error, argv)
    except Exception as error:
        return _defect(error, argv)


def _usage_text(error: typer.TyperException) -> str:
    """Text of a command-line error; pydantic's reason is replaced by one in plain words."""
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
    """Write all buffered output, and return the exit code."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed its pipe, which is no error
        _discard_output()
    return code


def _discard_output() -> None:
    """Discard buffered output, whose writing would fail again when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _defect(error: Exception, argv: list[str]) -> int:
    """Print an internal error as one line that names the flag for its traceback; returns the exit code."""
    return _fail(f"internal error: {type(error).__name__}: {error} (--debug shows the traceback)", argv)


def _fail(message: str, argv: list[str]) -> int:
    if "--debug" in argv:
        traceback.print_exc()
    with suppress(BrokenPipeError):  # the exit code reports the error, too
        print(f"lockstep: error: {' '.join(message.split())}", file=sys.stderr)
    return _exit_code(argv, EXIT_ERROR)


def _exit_code(argv: list[str], usual: int) -> int:
    """Exit code of a command that was interrupted or failed: the usual one, except for `VERDICT_VERBS`."""
    verb = next((argument for argument in argv if not argument.startswith("-")), "")
    return EXIT_NO_VERDICT if verb in VERDICT_VERBS else usual
