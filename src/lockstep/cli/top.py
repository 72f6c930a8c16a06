"""`lockstep top`: a running cluster in the terminal, live."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options as flags
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.bench.protocol import Target
    from lockstep.cli.top_client import Reading

PIPE_WIDTH = 160
"""Columns where the terminal does not report its width."""
EXIT_SIGNAL = 128
KEYS = "q quit  s S sort  r reverse  p pause  ↑ ↓ scroll"
_ESCAPES = {
    **{
        f"\x1b{lead}{letter}": name
        for lead in "[O"
        for letter, name in zip("ABHF", ("up", "down", "home", "end"), strict=True)
    },
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[1~": "home",
    "\x1b[4~": "end",
}
"""What terminals send for keys without a letter."""
_PRINTED_KEYS = "qsSrp jk\x03\x04"
"""The last two are Ctrl-C and Ctrl-D."""


def top(
    base_url: flags.BaseUrl = flags.DEFAULT_URL,
    api_key: flags.ApiKey = None,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=3600, help="Between two readings; rates are over it.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame after one interval, and exit: for scripts and pipes.")
    ] = False,
    debug: flags.Debug = False,
) -> None:
    """Watch a running cluster in the terminal: models, rates, memory, sessions and events; changes nothing."""
    from lockstep.bench.protocol import Target
    from lockstep.bench.remote import Remote
    from lockstep.cli.top_client import SILENCE_LIMIT_S, take

    target = Target.parse(base_url, api_key)
    if not once and not (sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"):
        raise UsageError("lockstep top draws on a terminal, and this is none; --once prints one frame and ends")
    with Remote(target, SILENCE_LIMIT_S) as remote:
        first = take(remote, interval)
        if once:
            time.sleep(interval)
            _print(target, take(remote, interval))
            return
    code = _watch(target, first, interval)
    if code:
        raise typer.Exit(code)


def keys_in(text: str) -> Iterator[str]:
    """Keys that a terminal sent, by their letter or their name; what is none of ours is passed over."""
    while text:
        for sequence, name in _ESCAPES.items():
            if text.startswith(sequence):
                yield name
                text = text[len(sequence) :]
                break
        else:
            if text[0] in _PRINTED_KEYS:
                yield text[0]
            text = text[1:]


def _print(target: Target, reading: Reading) -> None:
    """One frame of any length: with colours on a terminal, as plain lines elsewhere."""
    from rich.console import Console

    from lockstep.cli.top_client import View
    from lockstep.cli.top_layout import to_ascii
    from lockstep.cli.top_view import ViewOptions, frame

    console = Console(highlight=False)
    width = console.width if console.is_terminal else shutil.get_terminal_size((PIPE_WIDTH, 0)).columns
    lines = frame(View(target.url, reading), ViewOptions(), max(20, width), None)
    if console.options.ascii_only:
        lines = to_ascii(lines)
    for line in lines:
        if console.is_terminal:
            console.print(line, no_wrap=True, crop=True)
        else:
            print(line.plain.rstrip())


def _watch(target: Target, first: Reading, interval_s: float) -> int:
    """Draw until a key or a signal ends it; the exit code, not 0 after a signal."""
    from rich.console import Console
    from rich.control import Control

    from lockstep.cli.top_client import TopClient
    from lockstep.cli.top_view import ViewOptions

    console = Console(highlight=False)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    feed = TopClient(target, interval_s, first, lambda: _ring(wake))
    ended_by: list[int] = []
    look, view = ViewOptions(), feed.view()
    with _screen(console, wake, ended_by):
        feed.start()
        while not ended_by:
            if not look.is_paused:
                view = feed.view()
            console.control(Control.home())
            _draw(console, view, look, interval_s)
            ready, _, _ = select.select([sys.stdin.fileno(), woken], [], [])
            if woken in ready:
                os.read(woken, 4096)
            if sys.stdin.fileno() not in ready:
                continue
            typed = os.read(sys.stdin.fileno(), 1024)
            if not typed:  # the terminal is gone
                return EXIT_SIGNAL + signal.SIGHUP
            for key in keys_in(typed.decode(errors="replace")):
                if key in ("q", "\x03", "\x04"):
                    return 0
                look = look.press(key, len(view.reading.cluster.models))
    return EXIT_SIGNAL + ended_by[0]


def _draw(console: Console, view: Any, look: Any, interval_s: float) -> None:
    """Write one frame over the one before, in one piece so that nothing flickers."""
    from rich.text import Text

    from lockstep.cli.top_layout import to_ascii
    from lockstep.cli.top_view import frame

    width, height = console.size
    lines = frame(view, look, width, height, f"{KEYS}  every {interval_s:g} s")
    if console.options.ascii_only:
        lines = to_ascii(lines)
    whole = Text("\n").join(Text.assemble(line, " " * (width - line.cell_len)) for line in lines)
    console.print(whole, end="", no_wrap=True, crop=True, overflow="crop")


def _ring(wake: int) -> None:
    with suppress(BlockingIOError):  # it is full of calls that were not heard yet
        os.write(wake, b"\0")


@contextmanager
def _screen(console: Console, wake: int, ended_by: list[int]) -> Iterator[None]:
    """The terminal's other screen, without a cursor and without an echo; all as it was when the block ends.

    Args:
        wake: file descriptor that is written to when the terminal's size changes or a signal requests the end.
        ended_by: receives such a signal's number.
    """
    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    raw = termios.tcgetattr(descriptor)
    raw[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG)  # Ctrl-C is a key like q
    raw[6][termios.VMIN], raw[6][termios.VTIME] = 1, 0

    def end(number: int, _frame: object) -> None:
        ended_by.append(number)
        _ring(wake)

    old = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    old[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_: _ring(wake))
    try:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, raw)
        with console.screen(hide_cursor=True):
            yield
    finally:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        for number, handler in old.items():
            signal.signal(number, handler)
