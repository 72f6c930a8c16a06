"""Commands as processes of their own, forked from one that has imported what they import.

Each has its pid, arguments, environment, standard streams and signals; it lacks only the second in which an interpreter
imports. What a fresh interpreter alone shows is tested by fresh ones: its flags, its variables and its seed of hashes,
what it imports, how it ends, and processes that it starts by `multiprocessing`.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.cli.main import main as lockstep
from tests.waiting import HANG_S

ROOT = Path(__file__).resolve().parents[1]
SOURCES = Path(inspect.getfile(lockstep)).resolve().parents[2]
"""Folder of the package that is tested: the sources, or a copy with compiled modules."""
_PRELOADED = "tests.preloaded"


class Program:
    """A running `lockstep`.

    Args:
        words: what it is called with.
        streams: its standard input, output and error.
        environment: all of its variables; this process's if nothing is said.
        main: the program; one that can be imported.
        is_on_terminal: whether its standard input is a terminal whose foreground process it is.
        folder: where it is called; this process's own folder if nothing is said.
    """

    def __init__(
        self,
        words: Sequence[str],
        streams: tuple[int, int, int],
        environment: Mapping[str, str] | None = None,
        *,
        main: Callable[[], None] = lockstep,
        is_on_terminal: bool = False,
        folder: Path | None = None,
    ) -> None:
        variables = dict(os.environ if environment is None else environment)
        _start_server()
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(
            target=_run,
            args=(main, list(words), _Descriptors(streams), variables, is_on_terminal, str(folder or Path.cwd())),
            daemon=True,
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative if a signal ended it."""
        return self._process.exitcode

    def wait(self, timeout_s: float = HANG_S) -> int:
        """Wait for its end; `subprocess.TimeoutExpired` if it does not come."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("lockstep", timeout_s)
        return code

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


class Piped:
    """A running `lockstep` whose standard output is read by the test; its standard input is empty."""

    def __init__(self, *words: str, environment: Mapping[str, str] | None = None) -> None:
        out, out_end = os.pipe()
        self.stdout = os.fdopen(out)
        self._err = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with this
        with open(os.devnull) as nothing:
            self.program = Program(words, (nothing.fileno(), out_end, self._err.fileno()), environment)
        os.close(out_end)

    def communicate(self) -> tuple[int, str, str]:
        """Its exit code, the rest of its output, and its standard error."""
        out = self.stdout.read()
        code = self.program.wait()
        self._err.seek(0)
        return code, out, self._err.read()

    def __enter__(self) -> Piped:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.program.send_signal(signal.SIGKILL)
        self.stdout.close()
        self._err.close()


def run(
    *words: str, stdin: str = "", environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `lockstep` to its end; all warnings are errors."""
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        given.write(stdin)
        given.seek(0)
        code = Program(words, (given.fileno(), out.fileno(), err.fileno()), environment, folder=folder).wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


def _start_server() -> None:
    """Start the process that others are forked from, unless it runs; it finds our modules by its environment."""
    forkserver.set_forkserver_preload([_PRELOADED])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), str(SOURCES), before)))
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class _Descriptors:
    """Open files on their way to a process that is being started."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ([DupFd(number) for number in self._numbers],)


def _run(
    main: Callable[[], None],
    words: list[str],
    streams: Any,
    environment: Mapping[str, str],
    is_on_terminal: bool,
    folder: str,
) -> None:
    """Be the program: the streams and variables of who forked us are none of ours."""
    for number, stream in enumerate(streams):
        received = stream.detach()
        os.dup2(received, number)
        os.close(received)
    if is_on_terminal:
        import fcntl
        import termios

        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode, buffering = ("w" if number else "r"), (1 if name == "stderr" else -1)
        text = open(number, mode, buffering, closefd=False)  # noqa: SIM115 - as long as the process
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    sys.argv = ["lockstep", *words]
    warnings.simplefilter("error")
    main()
