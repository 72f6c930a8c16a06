"""Two models on one device: one loop that schedules their steps, against one independent thread per model.

    python -m benchmarks.turns                          # the embedded model, twice
    python -m benchmarks.turns --second out.gguf

Both ways use device workers: one worker with two replicas, or two workers with one replica each. In every round each
model decodes alone, then both decode concurrently in each way. Figures are the sum of each model's share of its speed
alone (1: as good as dividing the time), the smaller of the two shares, the gaps between a stream's tokens, and the
processor time per unit of the sum. Ratios of the two ways are of one round.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.core.request import Priority
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.executors.sampling_params import SamplingParams
from lockstep.worker.device import DeviceWorker
from lockstep.worker.messages import Abort, Event, Load, Loaded, LoadFailed, Outputs, Stop, Submit, TrialOptions

ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1900)
PROMPT_TOKENS = 32
SETTLE_TOKENS = 5
"""Tokens of each stream before a window begins: after the prompts, when the credits for their long steps are
settled."""
SETTLE_LIMIT_S = 60.0
LOAD_LIMIT_S = 600.0


class Device:
    """A worker with its threads; records when each request gets tokens."""

    def __init__(self) -> None:
        self.tokens: list[tuple[float, int]] = []
        self._loaded: list[Event] = []
        self._said = threading.Condition()
        self.worker = DeviceWorker(self._on_event)
        self._steps = threading.Thread(target=self.worker.run, daemon=True)
        self._steps.start()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Outputs):
            now_s = time.perf_counter()
            self.tokens.extend((now_s, output.request_id) for output in event.outputs if output.token_ids)
        elif isinstance(event, Loaded | LoadFailed):
            with self._said:
                self._loaded.append(event)
                self._said.notify_all()

    def load(self, key: str, source: str, num_streams: int, priority: int) -> None:
        engine = EngineOptions(num_blocks=num_streams * 100, max_num_seqs=num_streams)
        before = len(self._loaded)
        options = LoadOptions(engine)
        self.worker.handle(Load(key, source, options, TrialOptions(enabled=False), priority))
        with self._said:
            self._said.wait_for(lambda: len(self._loaded) > before, LOAD_LIMIT_S)
        if not isinstance(self._loaded[-1], Loaded):
            raise SystemExit(f"{source} was not loaded: {self._loaded[-1]}")

    def close(self) -> None:
        self.worker.handle(Stop())
        self._steps.join()


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one model in a window."""

    tokens_per_s: float
    gaps_s: tuple[float, ...]
    """Gaps between the tokens of a stream: median, 99th percentile."""


def window(
    at: Sequence[tuple[Device, str]], ids: Iterator[int], num_streams: int, length_s: float
) -> tuple[list[Measured], float]:
    """Decode with several models concurrently; returns the figures of each, and the processor time of the window in
    seconds."""
    streams = [(device, key, [next(ids) for _ in range(num_streams)]) for device, key in at]
    for device, _, _ in streams:
        device.tokens.clear()
    for device, key, request_ids in streams:
        for number in request_ids:
            prompt = tuple((7 * number + position) % 3000 + 5 for position in range(PROMPT_TOKENS))
            device.worker.handle(Submit(number, key, GenerationRequest(prompt, ENDLESS)))
    settle(streams)
    begin_s, used_s = time.perf_counter(), time.process_time()
    time.sleep(length_s)
    end_s, used_s = time.perf_counter(), time.process_time() - used_s
    for device, key, request_ids in streams:
        device.worker.handle(Abort(key, tuple(request_ids)))
    measured = []
    for device, _, request_ids in streams:
        times_of: dict[int, list[float]] = {number: [] for number in request_ids}
        for at_s, number in device.tokens.copy():
            if number in times_of and begin_s <= at_s < end_s:
                times_of[number].append(at_s)
        gaps = sorted(late - early for times in times_of.values() for early, late in itertools.pairwise(times))
        count = sum(map(len, times_of.values()))
        shown = (gaps[len(gaps) // 2], gaps[len(gaps) * 99 // 100]) if gaps else (length_s, length_s)
        measured.append(Measured(count / (end_s - begin_s), shown))
    time.sleep(0.2)
    return measured, used_s


def settle(streams: Sequence[tuple[Device, str, list[int]]]) -> None:
    """Wait until every stream has produced tokens."""
    for device, key, request_ids in streams:
        until_s = time.perf_counter() + SETTLE_LIMIT_S
        while min(map([number for _, number in device.tokens.copy()].count, request_ids)) < SETTLE_TOKENS:
            if time.perf_counter() > until_s:
                raise SystemExit(
                    f"the streams of model {key} did not get {SETTLE_TOKENS} tokens in {SETTLE_LIMIT_S:g} s"
                )
            time.sleep(0.05)


def compare(sources: Sequence[str], num_streams: int, length_s: float, rounds: int, priority: int) -> None:
    """Run all ways alternately, round by round, and print medians."""
    shared, apart = Device(), (Device(), Device())
    for key, source, own in zip("ab", sources, apart, strict=True):
        shared.load(key, source, num_streams, priority if key == "a" else Priority.NORMAL)
        own.load(key, source, num_streams, Priority.NORMAL)
    ids = itertools.count()
    ways = {"turns": [(shared, "a"), (shared, "b")], "threads": [(apart[0], "a"), (apart[1], "b")]}
    rows: dict[str, list[list[float]]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        alone = [window([(shared, key)], ids, num_streams, length_s / 2)[0][0] for key in "ab"]
        for way, at in ways.items():
            got, used_s = window(at, ids, num_streams, length_s)
            parts = [mine.tokens_per_s / whole.tokens_per_s for mine, whole in zip(got, alone, strict=True)]
            gaps_ms = [1e3 * gap for mine in got for gap in mine.gaps_s]
            if turn:  # the first turn is a warm-up
                rows[way].append([sum(parts), *parts, *gaps_ms, used_s / sum(parts)])
    print(f"{sources[0]} and {sources[1]}, {num_streams} streams each, medians of {rounds} windows of {length_s:g} s")
    print("            sum  part a  part b   a: gap, p99 (ms)   b: gap, p99 (ms)   processor s per part")
    for way, table in rows.items():
        total, a, b, *gaps, used = map(statistics.median, zip(*table, strict=True))
        shown = "   ".join(f"{gaps[i]:7.1f} {gaps[i + 1]:8.1f}" for i in (0, 2))
        print(f"  {way:8} {total:5.2f}   {a:5.2f}   {b:5.2f}   {shown}   {used:8.2f}")
    for what, column in (("sum", 0), ("processor time per part", -1)):
        ratios = [turns[column] / threads[column] for turns, threads in zip(*rows.values(), strict=True)]
        print(f"  {what}, turns / threads: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    for device in (shared, *apart):
        device.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", default="pocket://")
    parser.add_argument("--second", default="pocket://")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--priority", type=int, default=Priority.NORMAL, help="priority of the first model (default: normal)"
    )
    arguments = parser.parse_args()
    sources = (arguments.first, arguments.second)
    compare(sources, arguments.streams, arguments.seconds, arguments.rounds, arguments.priority)


if __name__ == "__main__":
    main()
