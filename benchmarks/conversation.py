"""Multi-turn conversations: cached tokens and time to first token per turn, with and without a warm prefix cache.

    python -m tools.random_models gguf smollm2-135m Q8_0 model.gguf
    python -m benchmarks.conversation model.gguf
    python -m benchmarks.conversation 'stub://s?token_us=100'

Cold turns have the same prompt with a unique cache salt, so the cache has nothing for them. Warm and cold turns
alternate, in an order that changes from turn to turn. Figures are medians over rounds with a new conversation each;
ratios are medians of ratios with minimum and maximum. CPU seconds are those of the whole process. If the executor's
decoding computes the same bits as a prefill, the cache also holds answers, so all full blocks of the previous turn are
cached. The benchmark also checks that warm and cold answers are equal."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass

from lockstep.engine.engine import Engine
from lockstep.engine.loading import load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.executors.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One answer with the time to its first token."""

    output: RequestOutput
    wall_ms: float
    cpu_ms: float


def ask(engine: Engine, prompt: tuple[int, ...], num_output: int, salt: str) -> TimedAnswer:
    """Answer a prompt without concurrent requests."""
    params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True, logprobs=1)
    first: list[tuple[float, float]] = []
    last: list[RequestOutput] = []

    def take(output: TokenOutput) -> None:
        if not first:
            first.append((time.perf_counter(), time.process_time()))
        if output.request is not None:
            last.append(output.request)

    wall_s, cpu_s = time.perf_counter(), time.process_time()
    engine.submit(GenerationRequest(prompt, params, cache_salt=salt), take)
    engine.run_until_idle()
    return TimedAnswer(last[0], (first[0][0] - wall_s) * 1e3, (first[0][1] - cpu_s) * 1e3)


def converse(engine: Engine, seed: int, options: argparse.Namespace) -> list[tuple[TimedAnswer, TimedAnswer]]:
    """Turns of one conversation, each as a warm and a cold answer."""
    rng = random.Random(seed)
    size = engine.model.vocab_size

    def words(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(min(1000, size // 4), min(4000, size * 3 // 4)) for _ in range(count))

    prompt = words(options.first)
    turns = []
    for turn in range(options.turns):
        salts = {"warm": f"{seed}", "cold": f"{seed} {turn}"}
        order = ("warm", "cold") if (seed + turn) % 2 else ("cold", "warm")
        answers = {way: ask(engine, prompt, options.output, salts[way]) for way in order}
        warm, cold = answers["warm"], answers["cold"]
        assert cold.output.num_cached_tokens == 0, "a cold turn has no cached tokens"
        assert content_of(warm.output) == content_of(cold.output), f"turn {turn}: the cache changed the answer"
        turns.append((warm, cold))
        prompt += (*warm.output.completions[0].token_ids, *words(options.message))
    return turns


def content_of(output: RequestOutput) -> tuple[object, ...]:
    completion = output.completions[0]
    return completion.token_ids, completion.logprobs


def times(answers: tuple[TimedAnswer, ...]) -> str:
    wall, cpu = (statistics.median(getattr(each, field) for each in answers) for field in ("wall_ms", "cpu_ms"))
    return f"{wall:8.1f} ({cpu:7.1f})"


def show(rounds: list[list[tuple[TimedAnswer, TimedAnswer]]]) -> None:
    print("turn  prompt  cached  to compute   warm ms (CPU)      cold ms (CPU)   warm / cold")
    for turn, row in enumerate(zip(*rounds, strict=True), 1):
        [(length, cached)] = {(len(w.output.prompt_token_ids), w.output.num_cached_tokens) for w, _ in row}
        ratios = [warm.wall_ms / cold.wall_ms for warm, cold in row]
        warm, cold = map(times, zip(*row, strict=True))
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"{turn:4}{length:8}{cached:8}{length - cached:12}{warm}   {cold}   {spread}")


def main() -> None:
    """Load the model, run the conversations, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="artifact, such as one of tools.random_models")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--first", type=int, default=800, help="tokens of the first prompt (default: 800)")
    parser.add_argument("--message", type=int, default=24, help="tokens of each later message (default: 24)")
    parser.add_argument("--output", type=int, default=128, help="tokens of each answer (default: 128)")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    length = options.first + options.turns * (options.message + options.output)
    model, config = load_model(options.model, LoadOptions(EngineOptions(max_num_seqs=4)))
    if length > config.max_model_len:
        parser.error(f"the conversation has {length} tokens; the maximum of this model is {config.max_model_len}")
    engine = Engine(model, config)
    found = "found again" if config.enable_prefix_caching else "not found again"
    print(f"{model.name}, blocks of {config.block_size}, answers are {found}")
    ask(engine, tuple(range(40, 80)), 4, "warming up")
    show([converse(engine, seed, options) for seed in range(options.rounds)])
    print("all warm and cold answers are equal in tokens and log-probabilities")
    model.close()


if __name__ == "__main__":
    main()
