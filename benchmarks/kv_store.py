"""Restored KV: time to first token from host memory and disk against recomputation, and its effect on a running stream.

    python -m tools.random_models gguf smollm2-135m Q8_0 model.gguf
    python -m benchmarks.kv_store model.gguf

The ways alternate in each round, so that other load affects all of them; ratios are medians over rounds with minimum
and maximum. Files that must be read from the disk itself are written through and dropped from the page cache. The raw
read speed of the disk is printed for comparison.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

from lockstep.engine import kv_store
from lockstep.engine.engine import Engine
from lockstep.engine.kv_files import claim_host_folder
from lockstep.engine.kv_store import KVStore
from lockstep.engine.kv_tiers import KVStoreOptions, KVTierName
from lockstep.engine.loading import load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.outputs import RequestOutput
from lockstep.engine.request import GenerationRequest
from lockstep.executors.sampling_params import SamplingParams

COMPUTED, HOST, CACHED, DISK = WAYS = ("computed", "host", "page cache", "disk")
GIGABYTE = 1 << 30
ALONE_S = 3.0


def prompt(number: int, length: int) -> tuple[int, ...]:
    rng = random.Random(number)
    return tuple(rng.randrange(1000, 4000) for _ in range(length))


def request(tokens: tuple[int, ...], session: str | None, max_tokens: int = 1) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(tokens, params, session_id=session, session_owner="bench", max_active_sessions=1024)


def answer(engine: Engine, one_request: GenerationRequest) -> tuple[float, RequestOutput]:
    """Seconds to the end of a one-token answer, and the answer."""
    begin = time.perf_counter()
    request_id = engine.submit(one_request)
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


def forget(folder: Path) -> None:
    """Drop a store's files from the page cache, so that the next read comes from the disk."""
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_speed(folder: Path) -> float:
    """Sequential read speed of a store's files in bytes per second, without a model."""
    forget(folder)
    begin = time.perf_counter()
    num_bytes = sum(len(path.read_bytes()) for path in sorted(folder.rglob("*.kv")))
    return num_bytes / (time.perf_counter() - begin)


def first_tokens(engine: Engine, store: KVStore, length: int, rounds: int) -> None:
    """Measure the time to the first token of a prompt in each way."""
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    tokens = prompt(1, length)
    expected = answer(engine, request(tokens, "s"))[1].completions[0].token_ids
    for _ in range(rounds):
        for way in WAYS:
            engine.sessions.sweep()
            assert store.flush(60.0)
            engine.scheduler.reset_prefix_cache()
            if way in (CACHED, DISK):
                host = store.tiers._files[KVTierName.HOST]
                for key in host:
                    host.remove(key)
            if way == DISK:
                forget(Path(store.options.disk_dir))
            one_request = request(tokens, "s")
            if way == COMPUTED:  # with a unique salt, nothing in the cache matches
                one_request = GenerationRequest(tokens, one_request.params, cache_salt="other")
            seconds, output = answer(engine, one_request)
            assert output.completions[0].token_ids == expected, way
            assert bool(output.num_cached_tokens) == (way != COMPUTED), way
            taken[way].append(seconds)
    for way in WAYS:
        ratios = [a / b for a, b in zip(taken[way], taken[COMPUTED], strict=True)]
        print(
            f"{length} tokens, {way:10}{statistics.median(taken[way]) * 1e3:9.0f} ms"
            f"   x{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    print(f"read speed of the disk: {read_speed(Path(store.options.disk_dir)) / 1e6:.0f} MB/s")


def gaps_of_a_stream(engine: Engine, begin: Callable[[], None], is_over: Callable[[], bool]) -> list[float]:
    """Milliseconds between the tokens of a running stream, from the begin of an activity to its end."""
    ends: list[float] = []
    stream = engine.submit(request(prompt(2, 64), None, 1500), lambda output: ends.append(time.perf_counter()))
    while len(ends) < 20:
        engine.step()
    begin()
    first = len(ends) - 1
    while not is_over() and not engine.is_complete(stream):
        engine.step()
    assert not engine.is_complete(stream), "the stream ended first; reduce --bytes"
    gaps = [(b - a) * 1e3 for a, b in pairwise(ends[first:])]
    engine.abort(stream)
    engine.run_until_idle()
    return gaps


def streams_beside(engine: Engine, store: KVStore, num_bytes: int, length: int) -> None:
    """Gaps of a stream alone, while ``num_bytes`` are stored, and while they are loaded."""
    length_kept = (length - 2) // engine.config.block_size * engine.config.block_size
    per_session = length_kept // engine.config.block_size * engine.model.executor.geometry.bytes_per_block
    count = -(-num_bytes // per_session)
    requests = [request(prompt(100 + number, length), f"g{number}") for number in range(count)]
    kv = engine.sessions.kv
    assert kv is not None

    def show(name: str, begin: Callable[[], None], is_over: Callable[[], bool]) -> None:
        started, used = time.perf_counter(), time.process_time()
        gaps = gaps_of_a_stream(engine, begin, is_over)
        print(
            f"gaps of a stream, {name}: median {statistics.median(gaps):.0f} ms, largest {max(gaps):.0f} ms"
            f" ({len(gaps)} in {time.perf_counter() - started:.1f} s, {time.process_time() - used:.1f} s of processors)"
        )

    until: list[float] = []
    show("alone", lambda: until.append(time.perf_counter() + ALONE_S), lambda: time.perf_counter() > until[0])
    nothing_is_kept = patch.object(kv_store, "MAX_SAVING_BYTES", 0)
    nothing_is_kept.start()
    for each in requests:
        answer(engine, each)
    size = f"{count * per_session / 1e9:.2f} GB"
    show(f"while {size} are stored", nothing_is_kept.stop, lambda: not kv._unsaved and store.flush(0.0))
    engine.sessions.sweep()
    assert store.flush(120.0)
    open_ids: list[int] = []
    show(
        f"while {size} are loaded",
        lambda: open_ids.extend(engine.submit(each) for each in requests),
        lambda: all(map(engine.is_complete, open_ids)),
    )
    outputs = [engine.result(each) for each in open_ids]
    assert all(output is not None and output.num_cached_tokens == length_kept for output in outputs)


def main() -> None:
    """Load the model and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="artifact, such as one of tools.random_models")
    parser.add_argument("--length", type=int, default=2000, help="tokens of the prompt (default: 2000)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--bytes", type=int, default=GIGABYTE, help="bytes stored and loaded during a stream; 0: no stream"
    )
    args = parser.parse_args()
    model, config = load_model(args.model, LoadOptions(EngineOptions(num_blocks=2048)))
    with tempfile.TemporaryDirectory() as folder, stores(Path(folder)) as store:
        engine = Engine(model, config, store=store)
        first_tokens(engine, store, args.length, args.rounds)
        if args.bytes:
            streams_beside(engine, store, args.bytes, min(args.length, config.max_model_len - 8))
    model.close()


if __name__ == "__main__":
    main()
