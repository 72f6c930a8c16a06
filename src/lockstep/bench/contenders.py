"""Contenders of a race: engines in processes of their own, and servers that are started here or run elsewhere."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import psutil

from lockstep.bench.client import Outcome
from lockstep.bench.prompts import Asking, Units, calibrate, prompt_of
from lockstep.bench.protocol import Target
from lockstep.bench.remote import Remote
from lockstep.bench.runner import Job, Watch, run_load
from lockstep.bench.samples import RandomLengths, Sample, random_samples
from lockstep.errors import LockstepError, RemoteError

START_LIMIT_S = 300.0
ANSWER_LIMIT_S = 600.0
"""A contender that takes longer for one piece of work is out of the race."""
_PROBE_TOKENS = 2048
"""Room for the requests that find out how prompts are sized."""
_SCRIPT = Path(__file__).with_name("contestant.py")
# The folder of a script comes first among a Python's modules; ours has a statistics.py, which is not theirs.
_RUN = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


class OutError(LockstepError):
    """A contender cannot take part, or not any longer."""


@dataclass(frozen=True, slots=True)
class Work:
    """Requests of one piece of work: random prompts at once, or texts one after the other."""

    context: int
    """Tokens of each prompt."""
    streams: int
    output: int
    texts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{len(self.texts)} prompts" if self.texts else f"{self.context} x{self.streams}"

    def samples(self, seed: int) -> tuple[Sample, ...]:
        if self.texts:
            return tuple(Sample(({"role": "user", "content": text},), self.output) for text in self.texts)
        return random_samples(self.streams, RandomLengths(self.context, self.output), seed)


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds after the start of the work: when a request was sent, and when each of its tokens came."""

    sent_s: float
    tokens_s: tuple[float, ...]


@dataclass(slots=True)
class Done:
    """One piece of work as it was seen."""

    answers: list[Answer]
    cpu_s: float | None = None
    """Of the contender's processes; None: they are not ours to watch."""
    memory_mb: float | None = None


@dataclass(slots=True)
class Watched:
    """Processor time and memory of a process with its children."""

    process: psutil.Process
    _before_s: float = field(default=0.0, init=False)

    def begin(self) -> None:
        self._before_s = self._cpu_s()

    def end(self, done: Done) -> Done:
        done.cpu_s = self._cpu_s() - self._before_s
        done.memory_mb = sum(each.memory_info().rss for each in self._family()) / 1e6
        return done

    def _cpu_s(self) -> float:
        return sum(times.user + times.system for times in (each.cpu_times() for each in self._family()))

    def _family(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]


class Engine:
    """An engine under some Python, driven by `lockstep.bench.contestant`."""

    kind: Literal["engine"] = "engine"

    def __init__(self, name: str, python: str, model: str, threads: int, works: Sequence[Work]) -> None:
        self.name = name
        self._ways: dict[str, str] = {}
        limits = (threads, max(w.streams for w in works), max(w.streams * (w.context + w.output + 64) for w in works))
        command = [python, "-c", _RUN, str(_SCRIPT), name, model, *map(str, limits)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError as error:
            raise OutError(f"{python} cannot be run ({error.strerror})") from None
        try:
            ready = self._answer(START_LIMIT_S)
        except OutError:
            self.close()
            raise
        self.version: str = ready["version"]
        self.vocabulary: int | None = ready["vocabulary"]
        self._watched = Watched(psutil.Process(self._process.pid))

    def warm(self, work: Work, units: Units) -> str:
        """Prepare for a piece of work; returns how it will be done where there was a choice."""
        short = Work(min(work.context, 512), work.streams, min(work.output, 24))
        self._ways[work.name] = str(self._ask(short, units, 0, "")["way"])
        return self._ways[work.name]

    def run(self, work: Work, units: Units, seed: int) -> Done:
        self._watched.begin()
        times = self._ask(work, units, seed, self._ways[work.name])["times"]
        return self._watched.end(Done([Answer(0.0, tuple(came)) for came in times]))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, work: Work, units: Units, seed: int, way: str) -> dict[str, Any]:
        prompts = [prompt_of(sample, units, seed, {}) for sample in work.samples(seed)]
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "num_output": work.output, "way": way}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise OutError(f"its process ended with {self._process.wait()}") from None
        return self._answer(ANSWER_LIMIT_S)

    def _answer(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(limit_s, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        is_late = not timer.is_alive()
        timer.cancel()
        if not line:
            raise OutError(f"no answer in {limit_s:g} s" if is_late else f"its process ended: {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise OutError(answer["error"])
        return answer


class Server:
    """A server that speaks OpenAI's protocol; one that was started here is watched, and ended with the race."""

    kind: Literal["server"] = "server"

    def __init__(self, name: str, target: Target, process: subprocess.Popen[bytes] | None = None) -> None:
        self.name, self.version = name, name
        self._target, self._process = target, process
        self._units: Units | None = None
        self._watched = None if process is None else Watched(psutil.Process(process.pid))
        try:
            with Remote(target) as remote:
                self._model = remote.model_or_first(None)
        except RemoteError as error:
            raise OutError(str(error)) from None

    def warm(self, work: Work, units: Units) -> str:
        asking = self._asking(work)
        if self._units is None and not work.texts:
            with Remote(self._target) as remote:
                try:
                    self._units = calibrate(remote, asking, self._path(work), work.samples(0), 0).units
                except RemoteError as error:
                    raise OutError(str(error)) from None
        self._send(Work(min(work.context, 512), work.streams, 8, work.texts), 0)
        return "" if work.texts or self._units is None else f"prompts {self._units.method}"

    def run(self, work: Work, units: Units, seed: int) -> Done:
        if self._watched is not None:
            self._watched.begin()
        done = Done(answers_of(self._send(work, seed)))
        return done if self._watched is None else self._watched.end(done)

    def close(self) -> None:
        if self._process is not None:
            end(self._process)

    def _asking(self, work: Work) -> Asking:
        return Asking(self._model, is_chat=bool(work.texts), ignore_eos=True)

    def _path(self, work: Work) -> str:
        return "/v1/chat/completions" if work.texts else "/v1/completions"

    def _send(self, work: Work, seed: int) -> list[Outcome]:
        asking, path = self._asking(work), self._path(work)
        bodies = []
        for sample in work.samples(seed):
            prompt = prompt_of(sample, self._units or Units(), seed, {})
            bodies.append(self._target.post(path, asking.body(prompt, sample.output_tokens)))
        jobs = [Job(None, partial(bytes, body), None) for body in bodies]
        run = run_load([self._target], jobs, 1 if work.texts else None, Watch(len(jobs)))
        if run.was_interrupted:
            raise KeyboardInterrupt
        failed = [outcome.error for outcome in run.finished if not outcome.is_success]
        if failed:
            raise OutError(f"{len(failed)} of {len(jobs)} requests failed: {failed[0]}")
        return run.finished


Contender = Engine | Server


def answers_of(outcomes: Sequence[Outcome]) -> list[Answer]:
    """Times of tokens from times of chunks; tokens that came in one chunk, or that none tells of, came together."""
    origin_s = min(outcome.start_s for outcome in outcomes)
    answers = []
    for outcome in outcomes:
        sent_s = outcome.start_s - origin_s
        chunks_s = list(accumulate(outcome.itl_s, initial=sent_s + outcome.ttft_s))
        count = max(outcome.output_tokens, len(chunks_s))
        answers.append(Answer(sent_s, tuple(chunks_s[i * len(chunks_s) // count] for i in range(count))))
    return answers


def start_server(name: str, command: Sequence[str]) -> Server:
    """Start a server whose command is followed by a port; OutError says why it does not answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        process = subprocess.Popen(
            [*command, str(port)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except OSError as error:
        raise OutError(f"{command[0]} cannot be run ({error.strerror})") from None
    target, begin_s = Target("127.0.0.1", port, False, ""), time.monotonic()
    try:
        while time.monotonic() - begin_s < START_LIMIT_S:
            if process.poll() is not None:
                raise OutError(f"it ended with {process.returncode} instead of serving; see {' '.join(command)}")
            if _answers(target):
                return Server(name, target, process)
            time.sleep(0.3)
        raise OutError(f"it did not answer within {START_LIMIT_S:g} s")
    except BaseException:
        end(process)
        raise


def _answers(target: Target) -> bool:
    """True if a server does what it is for: some list their models while these are loading."""
    try:
        with Remote(target) as remote:
            asked = {"model": remote.model_or_first(None), "prompt": "Hello", "max_tokens": 1}
            return remote.try_post("/v1/completions", asked) is not None
    except RemoteError:
        return False


def end(process: subprocess.Popen[bytes]) -> None:
    """End a server, with force where it does not listen."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def own_server(model: str, threads: int, max_seqs: int) -> list[str]:
    """Command of `lockstep serve`."""
    limits = ("--max-num-seqs", str(max_seqs), "--threads", str(threads), "--no-probe", "--log-level", "warning")
    return [sys.executable, "-m", "lockstep", "serve", model, *limits, "--port"]


def llama_cpp_server(python: str, model: str, threads: int, works: Sequence[Work]) -> list[str]:
    """Command of llama-cpp-python's server, which answers one request at a time."""
    length = max(_PROBE_TOKENS, *(work.context + work.output + 256 for work in works))
    limits = ("--n_ctx", str(length), "--n_threads", str(threads), "--n_threads_batch", str(threads))
    flags = ("--n_batch", "2048", "--flash_attn", "true", "--interrupt_requests", "false", "--verbose", "false")
    return [python, "-m", "llama_cpp.server", "--model", model, *limits, *flags, "--port"]
