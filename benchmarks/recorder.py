"""Cost of recording: processor time and bytes.

    python -m benchmarks.recorder                # a stub without computation, and the embedded model
    python -m benchmarks.recorder --rounds 9

A recording device worker serves as many concurrent requests as there are streams. The recorder's time is the processor
time of its calls on the step thread, without that of reading the clock, plus that of the thread that compresses and
writes. A step's time is that of the process without the recorder. The minimum of several rounds counts, because other
load can only add time. Bytes are those of the file, including its header and its end.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.executors.sampling_params import SamplingParams
from lockstep.worker.device import DeviceWorker
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.messages import Event, Load, Loaded, LoadFailed, Outputs, Stop, Submit, TrialOptions

NUM_OUTPUT_TOKENS = 128
PROMPT_TOKENS = 96
"""Prompt length in tokens, half of which is common to all requests."""
HOOK_CALLS = ("added", "aborted", "pinned", "unpinned", "cache_reset", "came", "committed", "ended", "failed")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one load."""

    cpu_s: float
    """Processor time of the whole process while it served."""
    recorder_s: float
    """Processor time of the recorder."""
    num_steps: int
    num_bytes: int


class Stopwatch:
    """Adds up the processor time of wrapped calls on their thread."""

    def __init__(self) -> None:
        self.total_ns = 0
        self.num_calls = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begun_ns = time.thread_time_ns()
            answer = function(*arguments)
            self.total_ns += time.thread_time_ns() - begun_ns
            self.num_calls += 1
            return answer

        return timed

    def seconds(self) -> float:
        """Total, without the time of reading the clock."""
        empty = Stopwatch()
        nothing = empty.around(lambda: None)
        for _ in range(20_000):
            nothing()
        return max(0.0, self.total_ns - self.num_calls * empty.total_ns / empty.num_calls) / 1e9


class Serving:
    """Concurrent streams; a new one starts when one ends."""

    def __init__(self, folder: Path, num_streams: int, num_requests: int) -> None:
        self.worker = DeviceWorker(self.on_event, trace=TraceOptions(str(folder)))
        self.is_loaded = threading.Event()
        self._num_streams = num_streams
        self._num_requests = num_requests
        self._num_sent = 0
        self._num_ended = 0

    def on_event(self, event: Event) -> None:
        if isinstance(event, Loaded | LoadFailed):
            self.is_loaded.set()
        elif isinstance(event, Outputs):
            for _ in filter(attrgetter("request"), event.outputs):
                self._num_ended += 1
                self.submit()
            if self._num_ended == self._num_requests:
                self.worker.handle(Stop())

    def submit(self) -> None:
        number = self._num_sent
        if number == self._num_requests:
            return
        self._num_sent += 1
        half = PROMPT_TOKENS // 2
        prompt = (*range(half), *((number + at) % 250 for at in range(half)))
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_OUTPUT_TOKENS)
        self.worker.handle(Submit(number, "a", GenerationRequest(prompt, params)))

    def begin(self, source: str) -> None:
        engine = EngineOptions(num_blocks=40 * self._num_streams, max_num_seqs=self._num_streams)
        self.worker.handle(Load("a", source, LoadOptions(engine), TrialOptions(enabled=False)))
        self.is_loaded.wait()
        for _ in range(self._num_streams):
            self.submit()


def run(source: str, num_streams: int, num_requests: int) -> Run:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        load = Serving(folder, num_streams, num_requests)
        load.begin(source)
        recorder = load.worker._recorder
        assert recorder is not None, "the worker records"
        watch = Stopwatch()
        [engine] = recorder._engines.values()
        for owner, calls in ((recorder, ("begin_turn", "turn", "idle")), (engine, HOOK_CALLS)):
            for call in calls:
                setattr(owner, call, watch.around(getattr(owner, call)))
        writer = time.pthread_getcpuclockid(recorder._files._thread.ident or 0)
        writer_s, before_s = time.clock_gettime(writer), time.process_time()
        ended: list[float] = []
        close = recorder.close

        def timed_close() -> None:
            ended.append(time.clock_gettime(writer))
            close()

        recorder.close = timed_close  # type: ignore[method-assign]  # the writer ends with it
        load.worker.run()
        cpu_s = time.process_time() - before_s
        num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    own_s = watch.seconds() + ended[0] - writer_s
    return Run(cpu_s, own_s, num_requests * NUM_OUTPUT_TOKENS // num_streams, num_bytes)


def measure(source: str, num_streams: int, num_requests: int, rounds: int) -> str:
    """One row of the table."""
    runs = [run(source, num_streams, num_requests) for _ in range(rounds)]
    steps = runs[0].num_steps
    own_us = min(each.recorder_s for each in runs) / steps * 1e6
    step_us = min(each.cpu_s - each.recorder_s for each in runs) / steps * 1e6
    num_bytes = min(each.num_bytes for each in runs)
    return (
        f"| {source} | {num_streams} | {steps:,} | {step_us:,.0f} | {own_us:.1f} | {own_us / step_us:.2%} | "
        f"{num_bytes / steps:.1f} | {num_bytes / num_requests:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print("| source | streams | steps | CPU of a step, us | of the recorder, us | share | bytes/step | bytes/request |")
    print("|---|---|---|---|---|---|---|---|")
    for source, num_streams, num_requests in (
        ("pocket://", 1, 4),
        ("pocket://", 8, 32),
        ("stub://a", 1, 8),
        ("stub://a", 8, 160),
        ("stub://a", 32, 640),
    ):
        print(measure(source, num_streams, num_requests, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
