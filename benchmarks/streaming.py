"""Server overhead: the same requests in this process, and streamed by a real `lockstep serve`.

    python -m benchmarks.streaming                          # pocket://
    python -m benchmarks.streaming --model model.gguf       # any model; add --model pocket:// for both

32 requests with 200 prompt tokens and 64 output tokens run concurrently, in rounds that alternate between the two so
that other load affects both. Prompts differ in every round, so the prefix cache has no effect. The main figure is the
ratio of output tokens per second: medians over rounds, with minimum and maximum. The processor time per output token is
reported separately for the server with its worker and for the client, which on a small machine competes with the
server.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from lockstep.bench.prompts import RequestTemplate, Units, prompt_of
from lockstep.bench.protocol import Target
from lockstep.bench.remote import RemoteServer
from lockstep.bench.runner import PlannedRequest, RunProgress, run_load
from lockstep.bench.samples import RandomLengths, Sample, random_samples
from lockstep.bench.throughput import answer_all
from lockstep.engine.llm import LLM
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.executors.sampling_params import SamplingParams

PATH = "/v1/completions"
START_LIMIT_S = 300.0
READY = "lockstep: ready on "


@dataclass(frozen=True, slots=True)
class Round:
    """One pass over all requests, in seconds."""

    num_tokens: int
    duration_s: float
    cpu_s: float
    """Processor time of this process, or of the server with its worker."""
    client_cpu_s: float = 0.0

    @property
    def rate(self) -> float:
        return self.num_tokens / self.duration_s


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one round, for both sides."""

    samples: tuple[Sample, ...]
    units: Units
    seed: int

    def prompts(self) -> list[list[int]]:
        return [prompt_of(sample, self.units, self.seed, {}) for sample in self.samples]


@contextmanager
def serving(model: str, num_sequences: int, extra: Sequence[str]) -> Iterator[tuple[Target, psutil.Process]]:
    """Server process with its target."""
    command = [sys.executable, "-m", "lockstep", "serve", model, "--port", "0", "--max-num-seqs", str(num_sequences)]
    process = subprocess.Popen([*command, "--log-level", "warning", *extra], stdout=subprocess.PIPE, text=True)
    try:
        yield Target.parse(_ready_url(process)), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def _ready_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    started_s = time.monotonic()
    for line in process.stdout:
        if line.startswith(READY):
            return line.removeprefix(READY).split(",")[0].strip()
        if time.monotonic() - started_s > START_LIMIT_S:
            break
    raise SystemExit("the server did not become ready")


def cpu_s(process: psutil.Process) -> float:
    """Processor time of a process and its children so far."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def run_served(target: Target, server: psutil.Process, model: str, load: Load) -> Round:
    template = RequestTemplate(model, is_chat=False, ignore_eos=True)
    bodies = [
        target.post(PATH, template.body(prompt, sample.output_tokens))
        for prompt, sample in zip(load.prompts(), load.samples, strict=True)
    ]
    jobs = [PlannedRequest(None, lambda body=body: body, None) for body in bodies]  # type: ignore[misc]  # mypy cannot infer a lambda's default
    before_s = cpu_s(server)
    run = run_load([target], jobs, None, RunProgress(len(jobs)))
    spent_s = cpu_s(server) - before_s
    failed = [outcome.error for outcome in run.finished if not outcome.is_success]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    num_tokens = sum(outcome.output_tokens for outcome in run.finished)
    return Round(num_tokens, run.duration_s, spent_s, run.cpu_s)


def run_in_process(llm: LLM, load: Load) -> Round:
    requests = [
        GenerationRequest(prompt, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=sample.output_tokens))
        for prompt, sample in zip(load.prompts(), load.samples, strict=True)
    ]
    cpu, started_s = time.process_time(), time.perf_counter()
    num_tokens = answer_all(llm, requests, len(requests), lambda done: None)
    return Round(num_tokens, time.perf_counter() - started_s, time.process_time() - cpu)


def report(model: str, pairs: Sequence[tuple[Round, Round]]) -> None:
    ratios = [served.rate / own.rate for own, served in pairs]

    def per_token_us(values: list[float]) -> str:
        return f"{statistics.median(values) * 1e6:7.0f}"

    print(f"\n{model}, {len(pairs)} rounds (medians)")
    print(f"  in process   {statistics.median(own.rate for own, _ in pairs):9.1f} output tokens/s")
    print(f"  served       {statistics.median(served.rate for _, served in pairs):9.1f} output tokens/s")
    print(f"  ratio        {statistics.median(ratios):9.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    print(f"  CPU us/token in process         {per_token_us([own.cpu_s / own.num_tokens for own, _ in pairs])}")
    print(f"  CPU us/token server and worker  {per_token_us([s.cpu_s / s.num_tokens for _, s in pairs])}")
    print(f"  CPU us/token client             {per_token_us([s.client_cpu_s / s.num_tokens for _, s in pairs])}")


def compare(model: str, arguments: argparse.Namespace) -> None:
    """Rounds of both sides, alternately; the first pair is a warm-up and omitted."""
    engine = EngineOptions(kv_cache_memory_bytes=arguments.kv_bytes, max_num_seqs=arguments.requests)
    options = LoadOptions(engine)
    lengths = RandomLengths(arguments.input_len, arguments.output_len)
    extra = ["--kv-cache-memory-bytes", str(arguments.kv_bytes), *arguments.serve_flag]
    with LLM(model, options) as llm, serving(model, arguments.requests, extra) as (target, server):
        with RemoteServer(target) as remote:
            served_name = remote.model_or_first(None)
        units = Units(ids=tuple(range(llm.model.vocab_size)))
        pairs: list[tuple[Round, Round]] = []
        for seed in range(arguments.rounds + 1):
            load = Load(random_samples(arguments.requests, lengths, seed), units, seed)
            pairs.append((run_in_process(llm, load), run_served(target, server, served_name, load)))
    report(model, pairs[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="model; may be repeated (default: pocket://)")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=200)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-bytes", type=int, default=1 << 30, help="size of each side's KV pool")
    parser.add_argument(
        "--serve-flag", action="append", default=[], help="additional flag of the server, as --flag=value"
    )
    arguments = parser.parse_args()
    for model in arguments.model or ["pocket://"]:
        compare(model, arguments)


if __name__ == "__main__":
    main()
