"""Commands that tests fork are processes of their own, and begin with what they would import."""

from __future__ import annotations

import os
import signal
import sys

from tests.preloaded import MODULES
from tests.processes import Piped, Program, run
from tests.waiting import until


def told() -> None:
    """A program that tells what it was given."""
    print(os.getpid(), sys.argv, os.environ.get("WHO"), sys.stdin.read(), set(MODULES) <= set(sys.modules))
    sys.exit(7)


def test_a_program_has_its_own_arguments_environment_streams_and_exit_code() -> None:
    read, write = os.pipe()
    given, giver = os.pipe()
    os.write(giver, b"hello")
    os.close(giver)
    program = Program(["a", "b"], (given, write, write), {"WHO": "me"}, main=told)
    os.close(given)
    os.close(write)
    assert program.wait() == 7
    with os.fdopen(read) as out:
        assert out.read() == f"{program.pid} ['lockstep', 'a', 'b'] me hello True\n"
    assert program.pid != os.getpid()


def test_its_warnings_and_errors_are_those_of_a_command() -> None:
    done = run("run", "no/such/model.gguf", "-p", "-", stdin="x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lockstep: error: no/such/model.gguf: no such file or directory")


def test_a_signal_ends_it_as_it_ends_any() -> None:
    with Piped("run", "stub://alpha?step_ms=5", "-p", "x", "--ignore-eos", "--max-tokens", "8000") as process:
        assert process.stdout.read(1) == "["
        process.program.send_signal(signal.SIGKILL)
        until(lambda: process.program.returncode == -signal.SIGKILL)
