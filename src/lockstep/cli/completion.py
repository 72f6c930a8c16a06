"""`lockstep completion`: the script that teaches a shell our commands and options; the machinery is typer's."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from typer.completion import completion_init, get_completion_script

PROGRAM = "lockstep"
VARIABLE = "_LOCKSTEP_COMPLETE"
"""The environment variable by which the script asks the program what comes next."""
_INSTALL = {
    "bash": 'eval "$(lockstep completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(lockstep completion zsh)" in ~/.zshrc, after compinit',
    "fish": "lockstep completion fish > ~/.config/fish/completions/lockstep.fish",
}


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="Whose script to print.")],
) -> None:
    """Print the script for a shell's completion, e.g. eval "$(lockstep completion bash)" in ~/.bashrc."""
    print(get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell))
    print(f"# {_INSTALL[shell]}")  # last: zsh reads a script's first line


def enable_completion() -> None:
    """Answer the requests of these scripts; typer does it by itself only where it also adds its own options."""
    completion_init()
