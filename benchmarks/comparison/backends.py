"""Backends of a comparison: engines in separate processes, and servers that are started here or run elsewhere."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks.comparison.routed import RoutedRequests
from benchmarks.comparison.workloads import Answer, Done, Workload
from lockstep.bench.client import Outcome
from lockstep.bench.prompts import RequestTemplate, Units, calibrate, prompt_of
from lockstep.bench.protocol import Target
from lockstep.bench.remote import RemoteServer
from lockstep.bench.runner import PlannedRequest, RunProgress, run_load
from lockstep.errors import LockstepError, RemoteError

START_LIMIT_S = 300.0
ANSWER_LIMIT_S = 600.0
"""Time limit of one workload in seconds; a slower backend is removed from the comparison."""
_PROBE_TOKENS = 2048
"""Maximum tokens of the requests that find out how prompts are sized."""
_TRIAL_TOKENS, _TRIAL_OUTPUT = 1024, 24
"""Total prompt tokens, and tokens per answer, of the warm-up that also chooses between ways."""
_SCRIPT = Path(__file__).with_name("backend_process.py")


class OutError(LockstepError):
    """A backend cannot take part, or has failed."""


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
    """An engine in a given Python, driven by `backend_process.py`."""

    kind: Literal["engine"] = "engine"

    def __init__(self, name: str, python: str, model: str, threads: int, workloads: Sequence[Workload]) -> None:
        self.name = name
        self._ways: dict[int, str] = {}
        limits = (
            threads,
            max(w.streams for w in workloads),
            max(w.streams * (w.context + w.output + 64) for w in workloads),
        )
        command = [python, str(_SCRIPT), name, model, *map(str, limits)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # only the comparison gets Ctrl-C, and ends its backends
            )
        except OSError as error:
            raise OutError(f"cannot run {python} ({error.strerror})") from None
        try:
            ready = self._answer(START_LIMIT_S)
        except BaseException:
            self.close()
            raise
        self.version: str = ready["version"]
        self.vocabulary: int | None = ready["vocabulary"]
        self._watched = Watched(psutil.Process(self._process.pid))

    def warm(self, work: Workload, units: Units) -> str:
        """Prepare once for the streams of a workload; returns the chosen way if there are several."""
        if work.streams not in self._ways:
            self._ways[work.streams] = str(self._ask(trial(work), units, 0, "")["way"])
        return self._ways[work.streams]

    def run(self, work: Workload, units: Units, seed: int) -> Done:
        self._watched.begin()
        times = self._ask(work, units, seed, self._ways[work.streams])["times"]
        if not all(times):
            raise OutError(f"{times.count([])} of {len(times)} answers have no token")
        return self._watched.end(Done([Answer(0.0, tuple(came)) for came in times]))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, work: Workload, units: Units, seed: int, way: str) -> dict[str, Any]:
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
        try:
            line = self._process.stdout.readline()
        finally:
            is_late = not timer.is_alive()
            timer.cancel()
        if not line:
            raise OutError(f"no answer in {limit_s:g} s" if is_late else f"its process ended: {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise OutError(answer["error"])
        return answer


class Server:
    """A server with OpenAI's API. A server that was started here is measured, and ended with the comparison."""

    kind: Literal["server"] = "server"

    def __init__(
        self,
        name: str,
        target: Target,
        process: subprocess.Popen[bytes] | None = None,
        routed: RoutedRequests | None = None,
        *,
        is_router: bool = False,
    ) -> None:
        self.name, self.version = name, name
        self.target, self._process = target, process
        self._routed, self._is_router = routed, is_router
        self._units: Units | None = None
        self._warm_streams: set[int] = set()
        self._watched = None if process is None else Watched(psutil.Process(process.pid))
        try:
            with RemoteServer(target) as remote:
                self.model = remote.model_or_first(None)
        except RemoteError as error:
            raise OutError(str(error)) from None

    def warm(self, work: Workload, units: Units) -> str:
        """Prepare once for the streams or the kind of a workload; returns the sizing method of prompts."""
        if work.kind in ("prompts", "routed"):
            self.run(replace(work, output=8), units, 0)
            return ""
        if self._units is None:
            try:
                with RemoteServer(self.target) as remote:
                    template, path = self._request_template(work), self._path(work)
                    self._units = calibrate(remote, template, path, work.samples(0), 0).units

            except RemoteError as error:
                raise OutError(str(error)) from None
        if work.streams not in self._warm_streams:
            self._send(trial(work), 0)
            self._warm_streams.add(work.streams)
        return f"prompts {self._units.method}"

    def run(self, work: Workload, units: Units, seed: int) -> Done:
        if self._watched is not None:
            self._watched.begin()
        done = Done(self._ask_routed(work, seed) if work.kind == "routed" else self._send(work, seed))
        return done if self._watched is None else self._watched.end(done)

    def close(self) -> None:
        if self._process is not None:
            end(self._process)

    def _request_template(self, work: Workload) -> RequestTemplate:
        return RequestTemplate(self.model, is_chat=work.kind == "prompts", ignore_eos=True)

    def _path(self, work: Workload) -> str:
        return "/v1/chat/completions" if work.kind == "prompts" else "/v1/completions"

    def _send(self, work: Workload, seed: int) -> list[Answer]:
        template, path = self._request_template(work), self._path(work)
        jobs, samples = [], work.samples(seed)
        for sample in samples:
            prompt = prompt_of(sample, self._units or Units(), seed, {})
            body = self.target.post(path, template.body(prompt, sample.output_tokens))
            jobs.append(PlannedRequest(sample.at_s, partial(bytes, body), None))
        run = run_load([self.target], jobs, 1 if work.kind == "prompts" else None, RunProgress(len(jobs)))
        if run.was_interrupted:
            raise KeyboardInterrupt
        failed = [outcome.error for outcome in run.finished if not outcome.is_success]
        if failed:
            raise OutError(f"{len(failed)} of {len(jobs)} requests failed: {failed[0]}")
        answers = zip(answers_of(run.finished), samples, strict=True)
        return [answer for answer, sample in answers if work.counts(sample)]

    def _ask_routed(self, work: Workload, seed: int) -> list[Answer]:
        assert self._routed is not None, "routed work needs a server with routed requests"
        try:
            with RemoteServer(self.target) as remote:
                if self._is_router:
                    return self._routed.ask_ours(remote, work, seed)
                return self._routed.ask_others(remote, self.model, work, seed)
        except RemoteError as error:
            raise OutError(str(error)) from None


Backend = Engine | Server


def trial(work: Workload) -> Workload:
    """Short workload with the same streams: it warms a backend up, and finds the fastest way of an engine."""
    context = min(work.context, max(32, min(512, _TRIAL_TOKENS // work.streams)))
    return Workload(context, work.streams, min(work.output, _TRIAL_OUTPUT))


def answers_of(outcomes: Sequence[Outcome]) -> list[Answer]:
    """Times of tokens from times of chunks; tokens of one chunk, or of no chunk, count as simultaneous."""
    origin_s = min(outcome.start_s for outcome in outcomes)
    answers = []
    for outcome in outcomes:
        sent_s = outcome.start_s - origin_s
        chunks_s = list(accumulate(outcome.itl_s, initial=sent_s + outcome.ttft_s))
        count = max(outcome.output_tokens, len(chunks_s))
        answers.append(Answer(sent_s, tuple(chunks_s[i * len(chunks_s) // count] for i in range(count))))
    return answers


def start_server(
    name: str, command: Sequence[str], routed: RoutedRequests | None = None, *, is_router: bool = False
) -> Server:
    """Start a server by a command with an added port; OutError with the reason if it does not answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        nothing = subprocess.DEVNULL
        process = subprocess.Popen(
            [*command, str(port)], stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
        )
    except OSError as error:
        raise OutError(f"cannot run {command[0]} ({error.strerror})") from None
    target, begin_s = Target("127.0.0.1", port, False, ""), time.monotonic()
    try:
        while time.monotonic() - begin_s < START_LIMIT_S:
            if process.poll() is not None:
                raise OutError(f"it exited with {process.returncode} before serving; run {' '.join(command)}")
            if _answers(target):
                return Server(name, target, process, routed, is_router=is_router)
            time.sleep(0.3)
        raise OutError(f"no answer within {START_LIMIT_S:g} s")
    except BaseException:
        end(process)
        raise


def _answers(target: Target) -> bool:
    """True if a server can answer requests; some list their models while these are still loading."""
    try:
        with RemoteServer(target) as remote:
            body = {"model": remote.model_or_first(None), "prompt": "Hello", "max_tokens": 1}
            return remote.try_post("/v1/completions", body) is not None
    except RemoteError:
        return False


def end(process: subprocess.Popen[bytes]) -> None:
    """End a server, by force if it does not react."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def own_server(model: str, threads: int, max_seqs: int, manifest: str | None = None) -> list[str]:
    """Command of `lockstep serve`; with a manifest, every name in it has the model."""
    served = [model] if manifest is None else ["--manifest", manifest, "--backend", model]
    limits = ("--max-num-seqs", str(max_seqs), "--threads", str(threads), "--log-level", "warning")
    return [sys.executable, "-m", "lockstep", "serve", *served, *limits, "--port"]


def llama_cpp_server(python: str, model: str, threads: int, workloads: Sequence[Workload]) -> list[str]:
    """Command of llama-cpp-python's server, which answers one request at a time."""
    length = max(_PROBE_TOKENS, *(work.context + work.output + 256 for work in workloads))
    limits = ("--n_ctx", str(length), "--n_threads", str(threads), "--n_threads_batch", str(threads))
    flags = ("--n_batch", "2048", "--flash_attn", "true", "--interrupt_requests", "false", "--verbose", "false")
    return [python, "-m", "llama_cpp.server", "--model", model, *limits, *flags, "--port"]
