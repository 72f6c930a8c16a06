"""What recording costs: processor time and bytes.

    python -m benchmarks.recorder                # a stub, whose steps compute nothing, and the embedded model
    python -m benchmarks.recorder --rounds 9

A device worker serves as many requests at once as there are streams, recorded. The recorder's time is that of its own
calls on the step thread, on the clock of that thread's processor time and less what reading the clock takes, and all of
the thread that compresses and writes; a step's is that of the process without it. Of several rounds the least counts,
since whatever else a machine does can only add. Bytes are those of the file, with what it begins and ends with.
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
"""Of which a half is common to all requests."""
HOOK_CALLS = ("added", "aborted", "pinned", "unpinned", "cache_reset", "came", "committed", "ended", "failed")


@dataclass(frozen=True, slots=True)
class Run:
    """One load, once."""

    cpu_s: float
    """Of the whole process, while it served."""
    recorder_s: float
    """Of that, the recorder's."""
    num_steps: int
    num_bytes: int


class Stopwatch:
    """Adds up the processor time that calls take on their thread."""

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
        """Without what reading the clock took."""
        empty = Stopwatch()
        nothing = empty.around(lambda: None)
        for _ in range(20_000):
            nothing()
        return max(0.0, self.total_ns - self.num_calls * empty.total_ns / empty.num_calls) / 1e9


class Serving:
    """So many streams, each answered by the next when it ends."""

    def __init__(self, folder: Path, num_streams: int, num_requests: int) -> None:
        self.worker = DeviceWorker(self.hear, trace=TraceOptions(str(folder)))
        self.is_loaded = threading.Event()
        self._num_streams = num_streams
        self._num_requests = num_requests
        self._num_sent = 0
        self._num_ended = 0

    def hear(self, event: Event) -> None:
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
        assert recorder is not None, "it was asked to record"
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
    """One line of the table."""
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
