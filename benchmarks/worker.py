"""Cost of running the model behind messages: in threads, and in a separate process.

    python -m benchmarks.worker                  # the embedded model
    python -m benchmarks.worker --model out.gguf

The first table has the processor time per token of the message path alone: a step's outputs are encoded and framed,
then decoded, put into mailboxes and taken out. The second table has tokens per second of concurrent streams, for each
way to run a model, alternately within one run; compare ratios, and on a shared machine the processor time, including
that of the worker process. The last figure is the time to replace a killed worker, and the load time of its model.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import psutil
from msgspec.structs import replace

from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest import Manifest
from lockstep.cluster.state import ClusterOptions
from lockstep.engine.llm import AsyncEngine
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.outputs import TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.executors.logits import TokenLogprobs
from lockstep.executors.sampling_params import SamplingParams
from lockstep.worker.link import WorkerOptions
from lockstep.worker.messages import Outputs
from lockstep.worker.pending import PendingRequests
from lockstep.worker.wire import FrameReader, event_decoder, event_encoder, framed

Stream = Callable[[tuple[int, ...], SamplingParams], AsyncGenerator[Any, None]]
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
FIVE_LOGPROBS = (TokenLogprobs(-0.5, tuple((1000 + rank, -0.5 - rank) for rank in range(5))),)
NUM_MESSAGES = 2000
PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the model."""

    name: str
    stream: Stream
    pid: int | None = None
    """Id of the worker process; None: there is none."""


async def message_path(num_streams: int, logprobs: tuple[TokenLogprobs, ...] | None) -> tuple[int, float, float]:
    """Bytes of a step, and microseconds per token on the worker's and on the server's side."""
    letters = PendingRequests()
    mailboxes = [letters.open("m") for _ in range(num_streams)]
    outputs = [TokenOutput(box.request_id, 0, (1234,), " word", logprobs=logprobs) for box in mailboxes]
    encoder, decoder, reader = event_encoder(), event_decoder(), FrameReader()
    started = time.process_time()
    for _ in range(NUM_MESSAGES):
        data = framed(encoder.encode(Outputs([], outputs)))
    encoded = time.process_time()
    for _ in range(NUM_MESSAGES):
        for body in reader.feed(data):
            event = decoder.decode(body)
            assert isinstance(event, Outputs)
            letters.outputs(event)
        for mailbox in mailboxes:
            await mailbox.take()
    decoded = time.process_time()
    per_token = 1e6 / (NUM_MESSAGES * num_streams)
    return len(data), (encoded - started) * per_token, (decoded - encoded) * per_token


async def tokens_per_second(way: Way, num_streams: int, num_tokens: int) -> tuple[float, float, float]:
    """Tokens per second of all streams, then microseconds per token of this process and of all processes."""
    params = replace(GREEDY, max_tokens=num_tokens)

    async def read(number: int) -> None:
        prompt = tuple((7 * number + position) % 3000 + 5 for position in range(PROMPT_TOKENS))
        async for _ in way.stream(prompt, params):
            pass

    started, ours, theirs = time.perf_counter(), time.process_time(), processor_time_s(way.pid)
    await asyncio.gather(*(read(number) for number in range(num_streams)))
    total = num_streams * num_tokens
    speed = total / (time.perf_counter() - started)
    ours = (time.process_time() - ours) / total * 1e6
    return speed, ours, ours + (processor_time_s(way.pid) - theirs) / total * 1e6


def processor_time_s(pid: int | None) -> float:
    """Processor time of another process so far; 0 for no process."""
    if pid is None:
        return 0.0
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


async def compare(model: str, num_streams: int, num_tokens: int, rounds: int) -> None:
    """Run all ways alternately; medians of each, and of the ratios to the engine in this process."""
    load = LoadOptions(EngineOptions(max_num_seqs=num_streams))
    manifest = Manifest.of_model(model, ("m",))
    thread = Cluster(manifest, ClusterOptions(load=load, worker=WorkerOptions("thread")))
    process = Cluster(manifest, ClusterOptions(load=load, worker=WorkerOptions("process")))
    engine = await asyncio.to_thread(AsyncEngine, model, load)
    await thread.start()
    await process.start()
    ways = (
        Way("engine", lambda prompt, params: engine.engine.stream(GenerationRequest(prompt, params))),
        Way("thread", lambda prompt, params: thread.stream(GenerationRequest(prompt, params))),
        Way("process", lambda prompt, params: process.stream(GenerationRequest(prompt, params)), process.worker_pid),
    )
    figures: dict[str, list[tuple[float, float, float]]] = {way.name: [] for way in ways}
    for turn in range(rounds + 1):
        for way in ways:
            measured = await tokens_per_second(way, num_streams, num_tokens)
            if turn:  # the first turn is a warm-up
                figures[way.name].append(measured)
    print(f"\n{model}, {num_streams} streams of {num_tokens} tokens, medians of {rounds} rounds")
    print("           tokens/s   ratio   us/token here   us/token in all   ratio")
    for way in ways:
        pairs = list(zip(figures[way.name], figures["engine"], strict=True))
        speed, ours, all_of_it = map(statistics.median, zip(*figures[way.name], strict=True))
        faster = statistics.median(mine[0] / engines[0] for mine, engines in pairs)
        dearer = statistics.median(mine[2] / engines[2] for mine, engines in pairs)
        print(f"  {way.name:8} {speed:8.0f}  {faster:6.2f}  {ours:14.1f}  {all_of_it:16.1f}  {dearer:6.2f}")
    engine.close()
    await thread.close()
    await come_back(process)
    await process.close()


async def come_back(model: Cluster) -> None:
    """Time until a killed worker is replaced."""
    load_s, pid = model.snapshot().replicas[0].load_s, model.worker_pid
    assert load_s is not None
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    killed = time.perf_counter()
    while model.worker_pid == pid or not model.health().ready:
        await asyncio.sleep(0.005)
    away_s = time.perf_counter() - killed
    print(f"\nkilled worker replaced in {away_s:.2f} s; its model loads in {load_s:.2f} s (goal: at most 2 s more)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket://")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(f"messages of {arguments.streams} tokens, processor time")
    for what, logprobs in (("plain", None), ("5 log-probabilities", FIVE_LOGPROBS)):
        size, encode_us, decode_us = asyncio.run(message_path(arguments.streams, logprobs))
        print(f"  {what:20} {size:6} bytes  worker {encode_us:5.2f} us  server {decode_us:5.2f} us per token (goal 10)")
    asyncio.run(compare(arguments.model, arguments.streams, arguments.tokens, arguments.rounds))


if __name__ == "__main__":
    main()
