"""`lockstep top` against a real server: in a pipe, and at a real terminal of which it is the foreground process."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import pytest

from lockstep.cli.main import invoke
from tests.processes import Program, run
from tests.server.process import IN_THREAD, ServerProcess, serve
from tests.waiting import HANG_S

KEY = "a-key"
QUICK = ("--interval", "0.1")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
_HOME, _OTHER_SCREEN, _OWN_SCREEN, _CURSOR = "\x1b[H", "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"
_SIZE = struct.Struct("HHHH")


class Terminal:
    """A terminal of some size, and `lockstep top` in it."""

    def __init__(self, *words: str, width: int = 80, height: int = 24) -> None:
        self._outer, self._inner = pty.openpty()
        self.size = (width, height)
        self._set_size()
        self.before = termios.tcgetattr(self._inner)
        environment = {**os.environ, "TERM": "xterm", "OPENAI_API_KEY": KEY}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        streams = (self._inner, self._inner, self._inner)
        self._program = Program(("top", *words), streams, environment, is_on_terminal=True)
        self.shown = ""

    def presses(self, keys: str) -> None:
        os.write(self._outer, keys.encode())

    def resizes(self, width: int, height: int) -> None:
        self.size = (width, height)
        self._set_size()
        self.signals(signal.SIGWINCH)

    def signals(self, number: signal.Signals) -> None:
        self._program.send_signal(number)

    def sees(self, is_so: Callable[[list[str]], bool]) -> list[str]:
        """Wait for a whole frame of the terminal's size of which this is true."""
        end_s = time.monotonic() + HANG_S
        while True:
            lines = self._frame()
            if (len(lines[-1]), len(lines)) == self.size and is_so(lines):
                return lines
            assert time.monotonic() < end_s, "\n".join(lines)
            self._read()

    def frames(self) -> list[list[str]]:
        """All that were shown so far, the last of which may not be whole."""
        return [_ESCAPES.sub("", part).split("\r\n") for part in self.shown.split(_HOME)[1:]]

    def leaves(self) -> int:
        """Wait for its end; returns the exit code."""
        end_s = time.monotonic() + HANG_S
        while self._program.returncode is None:
            self._read()
            assert time.monotonic() < end_s, self.shown[-500:]
        code = self._program.wait()
        self._read()
        return code

    def is_as_before(self) -> bool:
        """Whether everything of the terminal was given back."""
        is_own = self.shown.rindex(_OWN_SCREEN) > self.shown.rindex(_OTHER_SCREEN)
        return is_own and self.shown.count(_CURSOR) == 1 and termios.tcgetattr(self._inner) == self.before

    def _frame(self) -> list[str]:
        frames = self.frames()
        return frames[-1] if frames else [""]

    def _set_size(self) -> None:
        width, height = self.size
        fcntl.ioctl(self._inner, termios.TIOCSWINSZ, _SIZE.pack(height, width, 0, 0))

    def _read(self) -> None:
        if select.select([self._outer], [], [], 0.05)[0]:
            self.shown += os.read(self._outer, 65_536).decode(errors="replace")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._program.send_signal(signal.SIGKILL)
        os.close(self._inner)
        os.close(self._outer)
        self._program.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve("stub://alpha", "--served-model-name", "alpha", "--api-key", KEY, *IN_THREAD) as server:
        with server.client(api_key=KEY) as client:
            body = {"prompt": "a few words", "max_tokens": 4, "session_id": "conversation"}
            assert client.post("/v1/completions", json=body).status_code == 200
        yield server


def has(text: str) -> Callable[[list[str]], bool]:
    return lambda lines: any(text in line for line in lines)


def test_one_frame_goes_into_a_pipe_as_plain_lines(server: ServerProcess) -> None:
    environment = {**os.environ, "OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": server.base_url, "COLUMNS": "100"}
    done = run("top", "--once", *QUICK, environment=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("lockstep top  one-model  ready")
    assert server.base_url in lines[0]
    assert any(line.startswith("alpha ") and " resident " in line for line in lines)
    assert any(line.startswith("conversation ") for line in lines)
    assert any("tier_changed  alpha loading → resident" in line for line in lines)


def test_top_without_a_terminal_suggests_once() -> None:
    done = run("top")
    assert done.returncode == 2
    assert done.stderr == ("lockstep: error: lockstep top requires a terminal; add --once to print one view and exit\n")


@pytest.mark.parametrize(
    "words", [("--base-url", "http://127.0.0.1:9"), ("--base-url", "ftp://x"), ("--api-key", "no")]
)
def test_a_wrong_address_or_key_is_the_error_that_ps_has(
    words: tuple[str, str], server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
    assert invoke(["top", "--once", *words]) == 2
    error = capsys.readouterr().err
    assert invoke(["ps", *words]) == 2
    assert capsys.readouterr().err == error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(("key", "code"), [("q", 0), ("\x03", 0), ("\x04", 0)])
def test_it_leaves_and_gives_the_terminal_back(key: str, code: int, server: ServerProcess) -> None:
    with Terminal("--base-url", server.base_url, *QUICK) as terminal:
        terminal.sees(has("alpha "))
        terminal.presses(key)
        assert terminal.leaves() == code
        assert terminal.is_as_before()


def test_it_gives_the_terminal_back_when_it_is_ended(server: ServerProcess) -> None:
    with Terminal("--base-url", server.base_url, *QUICK) as terminal:
        terminal.sees(has("alpha "))
        terminal.signals(signal.SIGTERM)
        assert terminal.leaves() == 128 + signal.SIGTERM
        assert terminal.is_as_before()


def test_a_terminal_may_change_its_size_at_any_time(server: ServerProcess) -> None:
    with Terminal("--base-url", server.base_url, *QUICK) as terminal:
        for size in ((60, 15), (200, 60), (20, 5), (80, 24)):
            terminal.resizes(*size)
            lines = terminal.sees(lambda lines: lines[0].startswith("lockstep top") and lines[-1].startswith("q quit"))
            assert {len(line) for line in lines} == {size[0]}


def test_keys_sort_and_pause(server: ServerProcess) -> None:
    with Terminal("--base-url", server.base_url, *QUICK) as terminal:
        terminal.sees(has("alpha "))
        terminal.presses("s")
        terminal.sees(has("MODEL ▼"))
        terminal.presses("r\x1b[B")
        terminal.sees(has("MODEL ▲"))
        terminal.presses("p")
        terminal.sees(has("paused"))
        terminal.presses("p")
        terminal.sees(lambda lines: not has("paused")(lines))


def test_requests_are_seen_as_they_come(server: ServerProcess) -> None:
    with (
        Terminal("--base-url", server.base_url, *QUICK, width=160, height=50) as terminal,
        server.client(api_key=KEY) as client,
    ):
        terminal.sees(has("alpha "))
        body: dict[str, Any] = {"prompt": "a few words", "max_tokens": 4, "session_id": "another"}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        name = answer.headers["x-request-id"]
        lines = terminal.sees(lambda lines: has(name)(lines) and has("session another  model alpha")(lines))
        [row] = [line for line in lines if line.startswith(name)]
        assert row.split()[1:3] == ["ended", "alpha"]
        assert row.split()[-5:] == [str(answer.json()["usage"]["prompt_tokens"]), "0", "4", "another", "length"]
        assert has("another ")(lines)


def test_an_output_without_unicode_is_ascii(server: ServerProcess) -> None:
    """In a fresh interpreter, which alone obeys the variable."""
    environment = {**os.environ, "OPENAI_API_KEY": KEY, "PYTHONIOENCODING": "ascii"}
    words = ("top", "--once", *QUICK, "--base-url", server.base_url)
    done = subprocess.run([sys.executable, "-m", "lockstep", *words], env=environment, capture_output=True, check=True)
    assert b"tier_changed  alpha loading > resident" in done.stdout
    assert done.stdout.isascii()


def test_a_lost_server_is_shown_and_reconnected() -> None:
    with serve("stub://alpha", *IN_THREAD) as server:
        url = server.base_url
        terminal = Terminal("--base-url", url, *QUICK)
        with terminal:
            terminal.sees(has("alpha "))
            server.stop()
            shown = terminal.sees(has("reconnecting: "))
            assert has("cannot connect to")(shown) or has("the connection to")(shown)
            with serve("stub://alpha", "--port", url.rpartition(":")[2], *IN_THREAD):
                terminal.sees(lambda lines: not has("reconnecting: ")(lines) and has("ready")(lines))
                terminal.presses("q")
                assert terminal.leaves() == 0
