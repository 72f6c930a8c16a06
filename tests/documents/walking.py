"""A reader who tries one page from top to bottom: each command as it stands, in one folder, with real servers.

`lockstep serve` stays up and is what the commands below it talk to; a page without one talks to one that all share.
Only addresses are others than on the page: each server has a free port.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from lockstep.cli.main import command_of
from lockstep.cluster.manifest_file import parse
from tests.artifacts.hub.stand_in import StandIn
from tests.documents.named_files import lay_out, stock
from tests.documents.pages import OUTPUT, ROOT, SHELL, Block
from tests.processes import run
from tests.server.process import ServerProcess
from tests.waiting import HANG_S

DEFAULT_PORT = 9000
TYPED = "Hello\n"
"""What stands in the standard input of every command: a chat's one message."""
ANSWERS: Mapping[str, tuple[int, ...]] = {
    "diff": (0, 1),
    "sweep": (0, 1),
    "gate": (0, 1, 2),
    "mirror-gate": (0, 1, 2),
}
"""Exit codes that are answers, of verbs that have more than one."""
READERS = ("replay", "diff", "bisect", "sweep", "calibrate", "gate", "mirror", "mirror-gate")
"""Verbs that read what a server has recorded: before them it gets some work, and is stopped."""
SERVERS = (("serve",), ("replay", "--serve"))
"""Verbs that stay up for what follows on their page."""
CLIENTS = ("chat", "ps", "top", "bench")
"""Verbs that talk to the server at 127.0.0.1:9000 where nothing else is said."""
TERMINALS = ("top",)
"""Verbs that draw on a terminal: they get one, and a `q` that ends them."""
PARENTS = ("lockstep sweep", "lockstep bench peers")
"""Verbs that start processes by `multiprocessing`, which those that were forked for tests may not."""
PROGRAMS = (
    *("lockstep", "python", "curl", "jq", "make", "zstd"),
    *("eval", "export", "echo", "printf", "cat", "head", "tail", "grep", "sort", "wc", "diff", "true", "sleep"),
)
"""All that is run of a page: no other command of an unmarked block touches the machine that the tests run on."""
BUILTINS = ("eval", "export")
"""Those of them that are the shell's own."""
_ADDRESS = re.compile(r"(?:127\.0\.0\.1|localhost):(9\d\d\d)\b")
_SHELL_ONLY = re.compile(r"[|<>&;$`]|\n(?!\s)")
SLOW_S = 1800.0
"""Bound of a command that takes long."""
_ENDLESS_S = 1
_TIMED_OUT = 28
"""Exit code of curl when it was told to stop after a time: an event stream has no end."""
_NUM_REQUESTS = 12


class CommandFailedError(AssertionError):
    """A command of a page that does not do what the page says: where, what, and how it went."""


@dataclass
class Tally:
    """Number of commands and snippets of pages, by what became of them."""

    commands: int = 0
    snippets: int = 0
    targets: int = 0
    """Of `make`, which were found and not made."""
    slow: int = 0
    by_hand: int = 0
    missing: int = 0
    """Commands that need a program that is not on this machine."""
    shown: int = 0
    """Blocks of output of which nothing is run or compared."""


@dataclass
class Walk:
    """One page's reader: a folder, the servers that the page has started, what was printed last."""

    folder: Path
    environment: dict[str, str]
    hub: StandIn
    shared_url: Callable[[], str]
    """Address of the server that pages share, which is started when it is first asked for."""
    is_slow: bool = False
    tally: Tally = field(default_factory=Tally)
    servers: dict[int, ServerProcess] = field(default_factory=dict)
    """By the port that the page gives them."""
    recording: set[int] = field(default_factory=set)
    printed: str = ""
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "examples").symlink_to(ROOT / "examples")
        (self.folder / ".curlrc").write_text("fail-with-body\nshow-error\nmax-time = 60\n")

    def __enter__(self) -> Walk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for port in list(self.servers):
            self._stop(port)

    def page(self, blocks: list[Block]) -> list[str]:
        """Run all blocks in order; returns what failed, which does not keep the rest from being tried."""
        for block in blocks:
            if block.language in SHELL:
                self._shell(block)
            elif block.has("prints"):
                with self._trying(block.where):
                    compare(block.text.splitlines(), self.printed)
            elif block.language in OUTPUT:
                self.tally.shown += 1
            elif self._is_run(block, block.text):
                self.tally.snippets += 1
                with self._trying(block.where):
                    self._python(block) if block.language == "python" else check_data(block)
        return self.faults

    def _is_run(self, block: Block, text: str) -> bool:
        if block.marked("by hand", text):
            self.tally.by_hand += 1
            return False
        if block.marked("slow", text) and not self.is_slow:
            self.tally.slow += 1
            return False
        return True

    def _is_missing(self, text: str) -> bool:
        """True if a command needs a program that is not on this machine, such as jq."""
        path = self.environment["PATH"]
        known = [word for word in programs_of(text) if word in PROGRAMS and word not in BUILTINS]
        is_missing = any(shutil.which(word, path=path) is None for word in known)
        self.tally.missing += is_missing
        return is_missing

    def _shell(self, block: Block) -> None:
        claimed: set[int] = set()
        for text in block.first:
            with self._trying(f"{block.where}: before it, {text}"):
                self._one(text, (), claimed)
        for command in block.commands():
            if not self._is_run(block, command.text) or self._is_missing(command.text):
                continue
            is_target = command.text.startswith("make ")
            self.tally.targets += is_target
            self.tally.commands += not is_target
            with self._trying(f"{block.page}:{command.line}: {command.text}"):
                self._one(command.text, () if block.has("example") else command.shown, claimed)

    @contextlib.contextmanager
    def _trying(self, where: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.faults.append(f"{where}\n{type(error).__name__}: {error}")

    def _one(self, text: str, shown: tuple[str, ...], claimed: set[int]) -> None:
        words = shlex.split(text, comments=True)
        if foreign := [word for word in programs_of(text) if word not in PROGRAMS]:
            raise CommandFailedError(
                f"{foreign[0]!r} is not run by tests, which know {', '.join(PROGRAMS)}; say why above the block: "
                "<!-- run: by hand, because it needs ... -->"
            )
        verb = serving_verb(words)
        if not verb or needs_shell(text):
            self._command(text)
            compare(shown, self.printed)
            return
        port = int(words[words.index("--port") + 1]) if "--port" in words else DEFAULT_PORT
        if port not in claimed:  # a second one of a block is a variant of the first: the page goes on with that
            self._stop(port)
        if verb[0] in READERS:
            self._end_recordings()
        server = self._serve(words[1 + len(verb) :], text, verb)
        if port in claimed:
            server.stop()
            return
        claimed.add(port)
        self.servers[port] = server
        if "--trace" in words:
            self.recording.add(port)

    def _serve(self, arguments: list[str], text: str, verb: tuple[str, ...]) -> ServerProcess:
        self._prepare(text)
        if "--port" in arguments:
            at = arguments.index("--port")
            arguments = [*arguments[:at], *arguments[at + 2 :]]
        server = ServerProcess(*arguments, "--port", "0", environment=self.environment, folder=self.folder, verb=verb)
        try:
            server.wait_ready()
        except AssertionError:
            server.stop()
            raise
        return server

    def _stop(self, port: int) -> None:
        self.recording.discard(port)
        if port in self.servers:
            self.servers.pop(port).stop()

    def _prepare(self, text: str) -> None:
        lay_out(text, self.folder)
        stock(text, self.hub, self.folder)

    def _address(self, port: int) -> str:
        url = self.servers[port].base_url if port in self.servers else self.shared_url()
        return url.removeprefix("http://")

    def _command(self, text: str) -> None:
        """Run one command that ends by itself."""
        self._prepare(text)
        words = shlex.split(text, comments=True)
        verb = words[1] if words[0] == "lockstep" and len(words) > 1 else ""
        if verb in READERS:
            self._end_recordings()
        text = _ADDRESS.sub(lambda found: self._address(int(found[1])), text)
        environment = dict(self.environment)
        if verb in CLIENTS and "--base-url" not in words:
            environment["OPENAI_BASE_URL"] = f"http://{self._address(DEFAULT_PORT)}"
        is_forked = not needs_shell(text) and verb not in TERMINALS and not text.startswith(PARENTS)
        if words[0] == "lockstep" and is_forked:
            ended = run(*shlex.split(text, comments=True)[1:], stdin=TYPED, environment=environment, folder=self.folder)
        else:
            ended = self._by_bash(text, environment)
        self.printed = ended.stdout + ended.stderr
        good = ANSWERS.get(verb, (0,))
        if "/v1/events" in text and ended.returncode == _TIMED_OUT:
            good = (_TIMED_OUT,)
        if ended.returncode not in good or "Traceback" in ended.stderr:
            raise CommandFailedError(f"exit code {ended.returncode}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}")

    def _by_bash(self, text: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """A command that needs a shell, or is another program's; `make` only says what it would do."""
        if text.startswith("make "):
            text = f"make -n -C {ROOT} {text.removeprefix('make ')}"
        if text.startswith(tuple(f"lockstep {verb}" for verb in TERMINALS)):
            text = f"echo q | script --quiet --return --command {shlex.quote(text)} /dev/null"
        if "/v1/events" in text:
            text = text.replace("curl ", f"curl --max-time {_ENDLESS_S} ")
        program = ["bash", "-euo", "pipefail", "-c", text]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen(
            program, cwd=self.folder, env=environment, text=True, start_new_session=True, **pipes
        ) as process:
            try:
                out, err = process.communicate(TYPED, timeout=SLOW_S if self.is_slow else HANG_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
                raise
        return subprocess.CompletedProcess(program, process.returncode, out, err)

    def _end_recordings(self) -> None:
        for port in sorted(self.recording):
            give_work(self.servers[port])
            self._stop(port)

    def _python(self, block: Block) -> None:
        """Run a program in this process; it may await at its top, as in a notebook."""
        lay_out(block.text, self.folder)
        source = _ADDRESS.sub(lambda found: self._address(int(found[1])), block.text)
        code = compile("\n" * (block.line - 1) + source, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        names: dict[str, object] = {"__name__": "snippet"}
        out = io.StringIO()
        before = dict(os.environ)
        os.environ.update(self.environment)
        try:
            with contextlib.chdir(self.folder), contextlib.redirect_stdout(out):
                if code.co_flags & inspect.CO_COROUTINE:
                    asyncio.run(eval(code, names))
                else:
                    exec(code, names)
        finally:
            os.environ.clear()
            os.environ.update(before)
            self.printed = out.getvalue()


def environment(folder: Path, home: Path, hub: StandIn) -> dict[str, str]:
    """For the commands of a page: this checkout's `lockstep` first, a cache of the test run's own, the hub here."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_", "HF_", "OPENAI_"))
    }
    return {
        **inherited,
        **hub.environment(home),
        "LOCKSTEP_CACHE_DIR": str(home / "lockstep"),
        "HOME": str(folder),
        "CURL_HOME": str(folder),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "COLUMNS": "120",
    }


def give_work(server: ServerProcess) -> None:
    """Let a server answer some requests, four at a time, so that its recording has something to tell."""
    with server.client() as client, ThreadPoolExecutor(4) as threads:
        model = client.get("/v1/models").json()["data"][0]["id"]

        def ask(number: int) -> int:
            messages = [{"role": "user", "content": f"I was charged {number} times for my subscription"}]
            body = {"model": model, "messages": messages, "max_tokens": 16 + number, "ignore_eos": True}
            return client.post("/v1/chat/completions", json=body).status_code

        assert set(threads.map(ask, range(_NUM_REQUESTS))) == {200}


def serving_verb(words: Sequence[str]) -> tuple[str, ...]:
    """The verb of a command that stays up as a server; empty: it ends by itself."""
    return next((verb for verb in SERVERS if tuple(words[: 1 + len(verb)]) == ("lockstep", *verb)), ())


def needs_shell(text: str) -> bool:
    """True if a command has what only a shell understands: pipes, variables, other files as input and output."""
    return _SHELL_ONLY.search(re.sub(r"'[^']*'", "", text).partition(" #")[0]) is not None


def programs_of(text: str) -> list[str]:
    """First words of a command and of what is joined to it by pipes and operators."""
    lexer = shlex.shlex(text.partition("<<")[0], posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    words = list(lexer)
    operators = [-1, *(at for at, word in enumerate(words) if word and set(word) <= set("|&;"))]
    return [words[at + 1] for at in operators if at + 1 < len(words)]


def compare(shown: Sequence[str], printed: str) -> None:
    """Fail unless each line that a page shows is printed, in this order.

    Spaces at the ends do not count, nor do the dashes of Markdown's lists, which terminals lack; ``...`` is anything.
    """
    lines = iter([line.strip(" -") for line in printed.splitlines()])
    for text in filter(None, (line.strip(" -") for line in shown)):
        pattern = re.compile(".*".join(re.escape(part) for part in re.split(r"\.\.\.|…", text)))
        if not any(pattern.fullmatch(line) for line in lines):
            raise CommandFailedError(f"the page shows {text!r}, which is not printed there:\n{printed}")


def check_data(block: Block) -> None:
    """Read a block of data: as a manifest or a part of one, as a server's settings, or as what it is written in."""
    if block.language == "json":
        json.loads(block.text)
    elif block.language == "toml":
        tomllib.loads(block.text)
    else:
        _check_yaml(block.text)


def _check_yaml(text: str) -> None:
    read = yaml.safe_load(text)
    if not isinstance(read, dict):
        return
    if "cluster" in read:
        parse(text)
        return
    manifest = yaml.safe_load((ROOT / "examples" / "customer-support.yaml").read_text())
    if set(read) <= {*manifest, "hosts", "sessions", "rollouts"}:
        parse(yaml.safe_dump({**manifest, **read}, sort_keys=False))
        return
    flags = {name.removeprefix("--") for flag in command_of("serve").params for name in flag.opts}
    if "model" in read:
        assert set(read) <= {*flags, "model"}, f"{set(read) - flags - {'model'}} are no flags of `lockstep serve`"
