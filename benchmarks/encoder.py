"""Steps of an encoder with a long text, and chunks of prompts of a decoder on the same device, alternately.

    python -m tools.random_encoders bge-m3 F16 bge-m3
    python -m tools.random_models gguf qwen3-0.6b Q8_0 qwen3.gguf
    python -m benchmarks.encoder bge-m3 qwen3.gguf --tokens 8192

A request to the decoder waits for the encoder's step that is under way, so the longest step should be no longer than
the decoder's own chunk of 256 tokens. Processor time of the whole process is reported beside wall time, because other
work on the machine lengthens it less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np

from lockstep.engine.engine import Engine
from lockstep.engine.loading import load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.executors.machine import machine_name
from lockstep.executors.options import ExecutorOptions
from lockstep.executors.sampling_params import SamplingParams

CHUNK_TOKENS = 256
STEPS_PER_CHUNK = 4
Times = list[tuple[float, float]]
"""Wall and processor time of each run, in ms."""


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encoder", help="model source of the encoder")
    parser.add_argument("decoder", help="model source of the decoder")
    parser.add_argument("--tokens", type=int, default=8_192, help="length of the text (default: 8192)")
    parser.add_argument("--quantize", default="int8", help="weights of the encoder: int8, int4 or none")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--batched-tokens", type=int, default=None, help="max_num_batched_tokens of the encoder")
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
