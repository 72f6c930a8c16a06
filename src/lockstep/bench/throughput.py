"""Throughput bench: measures the engine in this process, without a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lockstep.core.request import FinishReason
from lockstep.errors import LockstepError, UsageError

if TYPE_CHECKING:
    from lockstep.engine.llm import LLM
    from lockstep.engine.outputs import TokenOutput
    from lockstep.engine.request import GenerationRequest

MAX_PROMPTS = 1_000_000


@dataclass(frozen=True, slots=True)
class ThroughputOptions:
    """Load of a throughput bench: prompts of random tokens with equal lengths, and answers of equal lengths."""

    num_prompts: int = 64
    """Number of requests."""
    input_len: int = 200
    """Tokens of each prompt."""
    output_len: int = 64
    """Tokens of each answer."""
    concurrency: int = 32
    """Number of concurrent requests in the engine."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    seed: int = 0
    """Seed of the prompts and of the sampling."""
    num_warmups: int = 1
    """Number of unmeasured requests before the run."""

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len", "concurrency"):
            if not 1 <= getattr(self, name) <= MAX_PROMPTS:
                raise UsageError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be from 1 to {MAX_PROMPTS:,}"
                )
        if self.num_warmups < 0 or self.seed < 0:
            raise UsageError("--num-warmups and --seed must not be negative")


def run_throughput(
    llm: LLM, options: ThroughputOptions, report: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """Answer all prompts; returns the duration in seconds, throughputs per second, and CPU seconds per output token.

    Args:
        report: called with the number of completed requests.
    """
    import numpy as np

    from lockstep.engine.request import GenerationRequest
    from lockstep.executors.sampling_params import SamplingParams

    vocab_size = llm.model.vocab_size
    params = SamplingParams(
        temperature=options.temperature, seed=options.seed, max_tokens=options.output_len, ignore_eos=True
    )
    rng = np.random.default_rng([options.seed, 4])
    prompts = rng.integers(0, vocab_size, (options.num_prompts + options.num_warmups, options.input_len))
    requests = [GenerationRequest(tuple(prompt), params) for prompt in prompts.tolist()]
    for request in requests[: options.num_warmups]:
        answer_all(llm, [request], 1, lambda done: None)
    cpu_s, started_s = time.process_time(), time.perf_counter()
    num_output = answer_all(llm, requests[options.num_warmups :], options.concurrency, report)
    duration_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    num_input = options.num_prompts * options.input_len
    return {
        "model_id": llm.model.name,
        **asdict(options),
        "duration": duration_s,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": options.num_prompts / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "cpu_s_per_token": cpu_s / num_output,
    }


def text_of(result: Mapping[str, Any]) -> str:
    """Text of a result, one line."""
    return (
        f"{result['request_throughput']:.2f} requests/s, {result['output_throughput']:.1f} output tokens/s, "
        f"{result['total_token_throughput']:.1f} total tokens/s, "
        f"{result['cpu_s_per_token'] * 1e3:.3f} ms CPU per output token"
    )


def answer_all(llm: LLM, requests: list[GenerationRequest], concurrency: int, report: Callable[[int], None]) -> int:
    """Run requests with a maximum number of them in the engine; returns the number of generated tokens.

    Args:
        report: called with the number of completed requests after each step.

    Raises:
        LockstepError: the error of the first failed request; the others are aborted.
    """

    engine, waiting = llm.engine, iter(requests)
    errors: list[LockstepError] = []
    num_tokens = num_done = num_open = 0

    def collect(output: TokenOutput) -> None:
        nonlocal num_tokens, num_done, num_open
        num_tokens += len(output.token_ids)
        if output.request is not None:
            num_done, num_open = num_done + 1, num_open - 1
            if output.error is not None or output.finish_reason is FinishReason.ERROR:
                errors.append(output.error or LockstepError("a request ended with an error"))

    try:
        while num_done < len(requests) and not errors:
            while num_open < concurrency and (request := next(waiting, None)) is not None:
                num_open += 1
                engine.submit(request, collect)
            engine.step()
            report(num_done)
    finally:
        engine.abort_all()
    if errors:
        raise errors[0]
    return num_tokens
