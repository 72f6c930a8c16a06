"""KV that comes back: the time to a first token from host memory and from disk, beside computing the prompt again, and
the gaps of a stream that runs meanwhile.

    python -m tools.random_models gguf smollm2-135m Q8_0 model.gguf
    python -m benchmarks.kv_store model.gguf

The three ways take turns in each round, so that what else the machine does hits all of them; ratios are medians over
the rounds, with the least and the largest.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from lockstep.engine.engine import Engine
from lockstep.engine.kv_files import claim_host_folder
from lockstep.engine.kv_store import KVStore
from lockstep.engine.kv_tiers import KVStoreOptions
from lockstep.engine.loading import load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.outputs import RequestOutput
from lockstep.engine.request import GenerationRequest
from lockstep.executors.sampling_params import SamplingParams

WAYS = ("computed", "host", "disk")
GIGABYTE = 1 << 30


def prompt(number: int, length: int) -> tuple[int, ...]:
    rng = random.Random(number)
    return tuple(rng.randrange(1000, 8000) for _ in range(length))


def request(tokens: tuple[int, ...], session: str | None, max_tokens: int = 1) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(tokens, params, session_id=session, session_owner="bench")


def answer(engine: Engine, asked: GenerationRequest) -> tuple[float, RequestOutput]:
    """Seconds to the end of a one-token answer, and the answer."""
    begin = time.perf_counter()
    request_id = engine.submit(asked)
    engine.run_until_idle()
    output = engine.result(request_id)
    assert output is not None
    return time.perf_counter() - begin, output


@contextmanager
def stores(folder: Path) -> Iterator[KVStore]:
    host = claim_host_folder()
    options = KVStoreOptions(str(host.path), 4 * GIGABYTE, str(folder), 4 * GIGABYTE)
    store = KVStore(options)
    try:
        yield store
    finally:
        store.close(60.0)
        host.remove()


def first_tokens(engine: Engine, store: KVStore, length: int, rounds: int) -> None:
    """Time to the first token of a prompt, three ways."""
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    tokens = prompt(1, length)
    expected = answer(engine, request(tokens, "s"))[1].completions[0].token_ids
    for _ in range(rounds):
        for way in WAYS:
            engine.sessions.sweep()
            assert store.flush(60.0)
            engine.scheduler.reset_prefix_cache()
            if way == "disk":
                for path in Path(store.options.host_dir).rglob("*.kv"):
                    path.unlink()
            asked = request(tokens, "s")
            if way == "computed":  # under a salt, nothing that was kept is found
                asked = GenerationRequest(tokens, asked.params, cache_salt="other")
            seconds, output = answer(engine, asked)
            assert output.completions[0].token_ids == expected, way
            assert bool(output.num_cached_tokens) == (way != "computed"), way
            taken[way].append(seconds)
    for way in WAYS:
        ratios = [a / b for a, b in zip(taken[way], taken["computed"], strict=True)]
        print(
            f"{length} tokens, {way:9}{statistics.median(taken[way]) * 1e3:9.0f} ms"
            f"   x{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )


def gaps_of_a_stream(engine: Engine, store: KVStore, num_bytes: int, length: int) -> None:
    """Gaps between the tokens of a running stream, without company and while so many bytes come back."""
    per_session = (length - 2) // engine.config.block_size * engine.model.executor.geometry.bytes_per_block
    count = -(-num_bytes // per_session)
    for number in range(count):
        answer(engine, request(prompt(100 + number, length), f"g{number}"))
    engine.sessions.sweep()
    assert store.flush(120.0)
    for name, coming in (("alone", 0), (f"beside {count * per_session / 1e9:.2f} GB", count)):
        ends: list[float] = []
        engine.submit(request(prompt(2, 64), None, 200), lambda output, ends=ends: ends.append(time.perf_counter()))  # type: ignore[misc]  # bound at once
        while len(ends) < 20:
            engine.step()
        for number in range(coming):
            tokens = prompt(100 + number, length)
            engine.submit(request(tokens, f"g{number}"), lambda output: None)
        engine.run_until_idle()
        gaps = [(b - a) * 1e3 for a, b in pairwise(ends)]
        print(f"gaps of a stream, {name}: median {statistics.median(gaps):.0f} ms, largest {max(gaps):.0f} ms")


def main() -> None:
    """Load the model and print both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="artifact; see tools.random_models")
    parser.add_argument("--length", type=int, default=2000, help="tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=GIGABYTE, help="that come back beside a stream; 0: no stream")
    args = parser.parse_args()
    model, config = load_model(args.model, LoadOptions(EngineOptions(num_blocks=2048), probe=False))
    with tempfile.TemporaryDirectory() as folder, stores(Path(folder)) as store:
        engine = Engine(model, config, store=store)
        first_tokens(engine, store, args.length, args.rounds)
        if args.bytes:
            gaps_of_a_stream(engine, store, args.bytes, min(args.length, config.max_model_len - 8))
    model.close()


if __name__ == "__main__":
    main()
