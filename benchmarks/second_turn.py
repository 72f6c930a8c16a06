"""The second turn of a conversation: time to its first token with what the first turn has left, and without it.

    python -m tools.random_models gguf qwen3.5-0.8b Q8_0 model.gguf
    python -m benchmarks.second_turn model.gguf --chat-template template.jinja --history 1900 2100 8000
    python -m benchmarks.second_turn model.gguf --chat-template template.jinja --peer-python PY    with llama.cpp

The first turn is a user's message of about that many tokens and an answer with reasoning. The second one repeats the
message, and the answer without its reasoning, as chat templates do, and asks another question. Cold turns have the same
prompt with a cache salt of their own. Warm and cold ones alternate; ratios are of one round. Answers are compared. The
peer gets the same token ids, in one conversation of each length.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.engine.engine import Engine
from lockstep.engine.loading import load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.executors.sampling_params import SamplingParams

WORDS = (
    "the",
    "parcel",
    "of",
    "last",
    "week",
    "has",
    "not",
    "come",
    "and",
    "its",
    "number",
    "is",
    "unknown",
    "to",
    "you",
)
REASONING_TOKENS = 64


class Turn(NamedTuple):
    """An answer, and the time to its first token."""

    tokens: tuple[int, ...]
    first_ms: float
    prompt: tuple[int, ...]
    num_cached_tokens: int


def ask(engine: Engine, messages: Sequence[dict[str, str]], salt: str, num_output: int) -> Turn:
    """Answer a conversation without concurrent requests."""
    params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
    conversation = Conversation(tuple(messages), {"enable_thinking": True})
    first: list[float] = []
    last: list[RequestOutput] = []

    def take(output: TokenOutput) -> None:
        if not first:
            first.append(time.perf_counter())
        if output.request is not None:
            last.append(output.request)

    begin_s = time.perf_counter()
    engine.submit(GenerationRequest(conversation, params, cache_salt=salt), take)
    engine.run_until_idle()
    [output] = last
    assert output.error is None, output.error
    [completion] = output.completions
    tokens = tuple(completion.token_ids)
    return Turn(tokens, (first[0] - begin_s) * 1e3, output.prompt_token_ids, output.num_cached_tokens)


def message(engine: Engine, num_tokens: int, generator: random.Random) -> str:
    """A text of about this many tokens."""
    text = " ".join(generator.choices(WORDS, k=64))
    per_word = len(engine.model.tokenizer.encode(text)) / 64
    return " ".join(generator.choices(WORDS, k=int(num_tokens / per_word)))


class Round(NamedTuple):
    """The turns of one conversation."""

    first: Turn
    warm: Turn
    cold: Turn
    """The second turn, without what the first one has left."""


def one_round(engine: Engine, history: int, number: int) -> Round:
    """Two turns of a new conversation."""
    messages = [{"role": "user", "content": message(engine, history, random.Random(number))}]
    first = ask(engine, messages, "warm", REASONING_TOKENS)
    messages += [
        {"role": "assistant", "content": "It is on its way."},
        {"role": "user", "content": "And when will it be here?"},
    ]
    order = ("warm", f"cold {history} {number}")
    turns = {salt: ask(engine, messages, salt, 8) for salt in (order if number % 2 else order[::-1])}
    assert turns[order[0]].tokens == turns[order[1]].tokens, "warm and cold answers differ"
    return Round(first, turns[order[0]], turns[order[1]])


def peer_turn(python: str, model: str, turns: Round) -> str:
    """What llama.cpp needs for the second turn of the same conversation."""
    script = Path(__file__).with_name("second_turn_peer.py")
    line = json.dumps([[*turns.first.prompt, *turns.first.tokens], turns.warm.prompt])
    done = subprocess.run([python, str(script), model, "2"], input=line, text=True, capture_output=True, check=True)
    found = json.loads(done.stdout)
    return f"{'':>9}llama.cpp: {found['first_ms']:.1f} ms, {found['kept']:,} tokens kept"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--chat-template", type=Path, metavar="FILE")
    parser.add_argument("--history", type=int, nargs="+", default=[1900, 2100, 8000], metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-cache-memory", type=int, default=2 << 30, metavar="BYTES")
    parser.add_argument("--peer-python", metavar="PY", help="Python interpreter with llama-cpp-python")
    args = parser.parse_args()
    options = EngineOptions(max_num_seqs=4, max_model_len=16_384, kv_cache_memory_bytes=args.kv_cache_memory)
    template = None if args.chat_template is None else args.chat_template.read_text()
    model, config = load_model(args.model, LoadOptions(options, chat_template=template))
    engine = Engine(model, config)
    print(" history  prompt  cached   warm ms   cold ms   ratio  least   most")
    for history in args.history:
        rounds = [one_round(engine, history, number) for number in range(args.rounds)]
        ratios = [turns.warm.first_ms / turns.cold.first_ms for turns in rounds]
        warm = statistics.median(turns.warm.first_ms for turns in rounds)
        cold = statistics.median(turns.cold.first_ms for turns in rounds)
        last = rounds[-1].warm
        print(
            f"{history:>8,} {len(last.prompt):>7,} {last.num_cached_tokens:>7,} {warm:>9.1f} {cold:>9.1f} "
            f"{statistics.median(ratios):>7.3f} {min(ratios):>6.3f} {max(ratios):>6.3f}"
        )
        if args.peer_python is not None:
            print(peer_turn(args.peer_python, args.model, rounds[-1]), flush=True)
    held = engine.scheduler.stats()
    print(
        f"pool: {held.num_blocks:,} blocks of {model.executor.geometry.bytes_per_block:,} bytes, groups {config.groups}"
    )
    model.close()


if __name__ == "__main__":
    main()
