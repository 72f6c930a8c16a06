"""Steps of an encoder with a long text, and chunks of prompts of a decoder on the same device, alternately.

    python -m tools.random_encoders bge-m3 F16 bge-m3
    python -m tools.random_models gguf qwen3-0.6b Q8_0 qwen3.gguf
    python -m benchmarks.encoder bge-m3 qwen3.gguf --tokens 8192
    python -m benchmarks.encoder minilm qwen3.gguf --chats 40 --threads 1

A request to the decoder waits for the encoder's step that is under way, so the longest step should be no longer than
the decoder's own chunk of 256 tokens. Processor time of the whole process is reported beside wall time, because other
work on the machine lengthens it less. With --chats, clients' time to first token is compared with and without bulk
embeddings, on a clock of processor time (`benchmarks.beside` measures it through a server, on a quiet machine).
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from lockstep.core.request import Priority
from lockstep.engine.engine import Engine
from lockstep.engine.loading import load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.outputs import TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.executors.machine import machine_name
from lockstep.executors.options import ExecutorOptions
from lockstep.executors.sampling_params import SamplingParams
from lockstep.worker.device_scheduler import DeviceScheduler

CHUNK_TOKENS = 256
STEPS_PER_CHUNK = 4
NUM_TEXTS = 32
"""Texts that wait or run beside chats."""
Times = list[tuple[float, float]]
"""Wall and processor time of each run, in ms."""


@dataclass(frozen=True, slots=True)
class Chats:
    """An open loop of chats, and the texts beside them."""

    num: int
    rate: float
    prompt_len: int
    output_len: int
    text_len: int
    seed: int = 0


def timed(run: Callable[[], object], times: Times) -> None:
    """Run a function, and append its times."""
    begin = time.perf_counter(), time.process_time()
    run()
    times.append(((time.perf_counter() - begin[0]) * 1e3, (time.process_time() - begin[1]) * 1e3))


def chunks(engine: Engine, random: np.random.Generator) -> Iterator[Callable[[], object]]:
    """Steps that each compute one chunk of a new prompt, which is cancelled afterwards."""
    while True:
        prompt = tuple(random.integers(300, engine.model.vocab_size, CHUNK_TOKENS).tolist())
        engine.submit(GenerationRequest(prompt, SamplingParams(max_tokens=1)))
        yield engine.step
        engine.run_until_idle()


def described(name: str, times: Times) -> str:
    """One row of the table."""
    columns = zip(*times, strict=True)
    shown = [f"{median(column):9.1f} {max(column):9.1f}" for column in columns]
    return f"{name:<36} {len(times):>5} {'  '.join(shown)}"


def chat_latencies(encoder: Engine, decoder: Engine, chats: Chats, num_texts: int, priority: int) -> tuple[Times, int]:
    """Wait for the first token of each chat, in ms on a clock of processor time, and the number of embedded tokens.

    Chats arrive in an open loop. The device scheduler chooses the engine of each step, as in a device worker, and the
    clock moves by the processor time of the step, so that other work on the machine does not count.

    Args:
        num_texts: texts that wait or run at any time; 0: the chats are alone.
        priority: priority of the encoder; that of the decoder is normal.
    """
    random, scheduler = np.random.default_rng(chats.seed), DeviceScheduler()
    engines, priorities = {"encoder": encoder, "decoder": decoder}, {"encoder": priority, "decoder": Priority.NORMAL}
    arrivals_s = deque(np.cumsum(random.exponential(1 / chats.rate, chats.num)).tolist())
    waits: Times = []
    open_s: dict[int, float] = {}
    now_s, num_tokens = 0.0, 0
    params = SamplingParams(max_tokens=chats.output_len, ignore_eos=True)
    num_open = 0

    def take_chat(output: TokenOutput) -> None:
        if (arrival_s := open_s.pop(output.request_id, None)) is not None:
            first.append(arrival_s)

    def take_text(output: TokenOutput) -> None:
        nonlocal num_open
        num_open -= output.request is not None

    while arrivals_s or open_s:
        while arrivals_s and arrivals_s[0] <= now_s:
            prompt = tuple(random.integers(300, decoder.model.vocab_size, chats.prompt_len).tolist())
            request_id = decoder.submit(GenerationRequest(prompt, params), take_chat)
            open_s[request_id] = arrivals_s.popleft()
        while num_open < num_texts:
            text = tuple(random.integers(5, encoder.model.vocab_size, chats.text_len).tolist())
            encoder.submit(GenerationRequest(text, pooling="cls"), take_text)
            num_open, num_tokens = num_open + 1, num_tokens + len(text)
        chosen = scheduler.choose(priorities, frozenset(key for key, engine in engines.items() if engine.has_work))
        if chosen is None:
            now_s = arrivals_s[0]
            continue
        first: list[float] = []
        steps: Times = []
        timed(engines[chosen].step, steps)
        scheduler.spend(chosen, int(steps[0][1] * 1e3))
        now_s += steps[0][1] / 1e3
        waits += [((now_s - arrival_s) * 1e3, 0.0) for arrival_s in first]
    for engine in engines.values():
        engine.run_until_idle()
    return waits, num_tokens


def compare_chats(encoder: Engine, decoder: Engine, chats: Chats, priority: int) -> None:
    """Print the p95 of chats alone and beside embeddings."""
    p95_ms = []
    for num_texts in (0, NUM_TEXTS):
        waits, num_tokens = chat_latencies(encoder, decoder, chats, num_texts, priority)
        values = [wait for wait, _ in waits]
        p95_ms.append(float(np.percentile(values, 95)))
        what = f"beside {num_tokens:,} tokens of embeddings" if num_texts else "alone"
        print(f"TTFT {what}: p50 {median(values):.1f} ms, p95 {p95_ms[-1]:.1f} ms ({len(values)} chats)", flush=True)
    print(f"p95 beside / alone: {p95_ms[1] / p95_ms[0]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encoder", help="model source of the encoder")
    parser.add_argument("decoder", help="model source of the decoder")
    parser.add_argument("--tokens", type=int, default=8_192, help="length of the text (default: 8192)")
    parser.add_argument("--quantize", default="int8", help="weights of the encoder: int8, int4 or none")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--batched-tokens", type=int, default=None, help="max_num_batched_tokens of the encoder")
    parser.add_argument("--chats", type=int, default=0, help="compare this many chats alone and beside embeddings")
    parser.add_argument("--rate", type=float, default=1.0, help="chats a second (default: 1)")
    parser.add_argument("--input-len", type=int, default=200)
    parser.add_argument("--output-len", type=int, default=16)
    parser.add_argument("--priority", type=int, default=Priority.NORMAL, help="priority of the encoder (default: 0)")
    parser.add_argument("--cache-dir", type=Path, default=None)
    arguments = parser.parse_args()
    quantize = None if arguments.quantize == "none" else arguments.quantize
    engines = []
    for source, quantized, batched in (
        (arguments.encoder, quantize, arguments.batched_tokens),
        (arguments.decoder, None, None),
    ):
        executor = ExecutorOptions(threads=arguments.threads, quantize=quantized)
        options = EngineOptions(max_num_batched_tokens=batched, kv_cache_memory_bytes=1 << 30, host_kv_memory_bytes=0)
        engines.append(Engine(*load_model(source, LoadOptions(options, executor, arguments.cache_dir))))
    encoder, decoder = engines
    random = np.random.default_rng(0)
    prompts = chunks(decoder, random)
    times: tuple[Times, Times] = ([], [])
    timed(next(prompts), [])  # memory is allocated on first use
    text = tuple(random.integers(5, encoder.model.vocab_size, arguments.tokens).tolist())
    encoder.submit(GenerationRequest(text, pooling="cls"))
    encoder.step()
    if arguments.chats:
        encoder.run_until_idle()
        chats = Chats(
            arguments.chats, arguments.rate, arguments.input_len, arguments.output_len, text_len=arguments.tokens
        )
        compare_chats(encoder, decoder, chats, arguments.priority)
        return
    while encoder.has_work:
        if len(times[0]) % STEPS_PER_CHUNK == 0:
            timed(next(prompts), times[1])
        timed(encoder.step, times[0])
    config, stages = encoder.config, encoder.model.executor.geometry.num_stages
    print(f"{machine_name()}; {encoder.model.executor.machine['threads']} threads; {arguments.tokens:,} tokens")
    print(f"a step has at most {config.max_num_batched_tokens:,} positions; the pool has {config.num_blocks:,} blocks")
    print(f"{'':<36} {'steps':>5} {'wall ms: median, longest':>19}  {'processor ms: median, longest'}")
    print(described(f"{encoder.model.name}, {stages} stages", times[0]))
    print(described(f"{decoder.model.name}, {CHUNK_TOKENS} tokens of a prompt", times[1]))
    seconds = sum(wall for wall, _ in times[0]) / 1e3
    print(f"{arguments.tokens / seconds:,.1f} tokens of the text a second")


if __name__ == "__main__":
    main()
