"""`lockstep top`: live view of a running cluster in the terminal."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import options as flags
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from lockstep.bench.protocol import Target
    from lockstep.cli.top_client import ServerSnapshot, View
    from lockstep.cli.top_view import ViewOptions

PIPE_WIDTH = 160
"""Columns of a view whose output has no width, such as a pipe."""
EXIT_SIGNAL = 128
KEYS = "q quit  s S sort  r reverse  p pause  ↑ ↓ scroll"


def top(
    base_url: flags.BaseUrl = flags.DEFAULT_URL,
    api_key: flags.ApiKey = None,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=3600, help="Time between updates, which rates cover.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one view after one interval, and exit; for scripts and pipes.")
    ] = False,
    debug: flags.Debug = False,
) -> None:
    """Watch a running cluster in the terminal: models, rates, memory, sessions and events; read-only."""
    from lockstep.bench.protocol import Target
    from lockstep.bench.remote import RemoteServer
    from lockstep.cli.top_client import SILENCE_LIMIT_S, read_server

    target = Target.parse(base_url, api_key)
    if not once and not (sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"):
        raise UsageError("lockstep top requires a terminal; add --once to print one view and exit")
    with RemoteServer(target, SILENCE_LIMIT_S) as remote:
        first = read_server(remote, interval)
        if once:
            time.sleep(interval)
            _print(target, read_server(remote, interval))
            return
    code = _watch(target, first, interval)
    if code:
        raise typer.Exit(code)


def _print(target: Target, server: ServerSnapshot) -> None:
    """Print one view without a limit of lines, with colours on a terminal and as plain lines elsewhere."""
    from rich.console import Console

    from lockstep.cli.top_client import View
    from lockstep.cli.top_view import ViewOptions

    console = Console(highlight=False)
    width = console.width if console.is_terminal else shutil.get_terminal_size((PIPE_WIDTH, 0)).columns
    for line in _lines(console, View(target.url, server), ViewOptions(), max(20, width), None):
        if console.is_terminal:
            console.print(line, no_wrap=True, crop=True)
        else:
            print(line.plain.rstrip())


def _lines(
    console: Console, view: View, options: ViewOptions, width: int, height: int | None, keys: str = ""
) -> list[Text]:
    """Lines of a view, in ASCII if the console supports no other characters."""
    from lockstep.cli.top_layout import to_ascii
    from lockstep.cli.top_view import view_lines

    lines = view_lines(view, options, width, height, keys)
    return to_ascii(lines) if console.options.ascii_only else lines


def _watch(target: Target, first: ServerSnapshot, interval_s: float) -> int:
    """Draw views until a key or a signal ends it; returns the exit code, above 0 after a signal."""
    from prompt_toolkit.input import create_input
    from rich.console import Console, Group
    from rich.live import Live

    from lockstep.cli.top_client import TopClient
    from lockstep.cli.top_view import ViewOptions

    console, keyboard = Console(highlight=False), create_input()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    client = TopClient(target, interval_s, first, lambda: _ring(wake))
    ended_by: list[int] = []
    options, view = ViewOptions(), client.view()
    screen = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    with _signals(wake, ended_by), keyboard.raw_mode(), screen:  # Ctrl-C is a key like q
        client.start()
        while not ended_by:
            if not options.is_paused:
                view = client.view()
            lines = _lines(console, view, options, *console.size, f"{KEYS}  every {interval_s:g} s")
            screen.update(Group(*lines), refresh=True)
            ready, _, _ = select.select([keyboard.fileno(), woken], [], [])
            if woken in ready:
                os.read(woken, 4096)
            for press in keyboard.read_keys():
                if press.key in ("q", "c-c", "c-d"):
                    return 0
                options = options.press(press.key, len(view.server.cluster.models))
            if keyboard.closed:  # the terminal is gone
                return EXIT_SIGNAL + signal.SIGHUP
    return EXIT_SIGNAL + ended_by[0]


def _ring(wake: int) -> None:
    with suppress(BlockingIOError):  # the pipe is full of unread wake-ups, of which one suffices
        os.write(wake, b"\0")


@contextmanager
def _signals(wake: int, ended_by: list[int]) -> Iterator[None]:
    """Context in which signals wake the drawing loop and do not end the program.

    Args:
        wake: file descriptor that gets a byte when the terminal's size changes or a signal requests the end.
        ended_by: list that gets the number of a signal that requests the end.
    """

    def wake_up(number: int, _frame: object) -> None:
        if number != signal.SIGWINCH:
            ended_by.append(number)
        _ring(wake)

    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGWINCH)
    old = {number: signal.signal(number, wake_up) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
