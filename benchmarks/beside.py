"""Effect of bulk work on clients: time to first token with and without a batch or a million tokens of embeddings.

    python -m benchmarks.beside batch
    python -m benchmarks.beside embeddings
    python -m benchmarks.beside batch --model hf://Qwen/Qwen3-0.6B --rate 1 --input-len 256
    python -m benchmarks.beside embeddings --model qwen3.gguf --embedder minilm --rate 0.5 --embedding-len 250

One server is loaded by an open loop of clients in turns, each with new prompts: alternately without other work and with
more bulk work than the turn can complete. With --embedder, another model of the same process computes the embeddings.
The ratio of the two p95 values has a 95 % interval, by bootstrap over the pairs of turns and the requests in them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import httpx2
import numpy as np

from benchmarks.comparison.backends import own_server, start_server
from lockstep.bench.samples import RandomLengths
from lockstep.bench.serve import Dataset, ServeOptions, run_serve
from lockstep.executors.machine import available_cores, machine_name

SERVED = 32
ENDED = ("completed", "failed", "expired", "cancelled")
BOOTSTRAPS = 4_000
LEVEL = (2.5, 97.5)
WAIT_LIMIT_S = 120.0
CLIENTS_MODEL, EMBEDDER = "clients", "embedder"


def two_models_server(model: str, embedder: str, priority: str, threads: int, folder: Path) -> list[str]:
    """Command of `lockstep serve` with the clients' model and one for embeddings, in one process."""
    manifest = folder / "manifest.yaml"
    models = {CLIENTS_MODEL: {"source": model}, EMBEDDER: {"source": embedder, "task": "embed", "priority": priority}}
    manifest.write_text(json.dumps({"cluster": "beside", "models": models}))
    flags = ("--threads", str(threads), "--log-level", "warning")
    return [sys.executable, "-m", "lockstep", "serve", "--manifest", str(manifest), *flags, "--port"]


class BulkWork(Protocol):
    """Bulk work for a server in addition to its clients' requests."""

    unit: str

    def running(self) -> AbstractContextManager[list[int]]:
        """Run bulk work until the block ends; the list then holds the number of completed units."""
        ...


class Embeddings:
    """Embedding requests of a thousand inputs each, one after the other: about the maximum tokens of a body."""

    unit = "prompt tokens"
    NUM_INPUTS = 1_000

    def __init__(self, url: str, model: str, num_tokens: int) -> None:
        self._url = url
        self._body = {"model": model, "input": [[1 + index % 250] * num_tokens for index in range(self.NUM_INPUTS)]}

    @contextmanager
    def running(self) -> Iterator[list[int]]:
        client = httpx2.Client(base_url=self._url, timeout=None, trust_env=False)
        stopping = threading.Event()

        def work() -> None:
            while not stopping.is_set():
                try:
                    client.post("/v1/embeddings", json=self._body).raise_for_status()
                except httpx2.HTTPStatusError as error:
                    failures.append(error.response.text)
                    return
                except httpx2.HTTPError:
                    return  # the block has ended

        done: list[int] = []
        failures: list[str] = []
        before = self._prompt_tokens()
        worker = threading.Thread(target=work)
        worker.start()
        while self._prompt_tokens() == before and not failures:
            time.sleep(0.02)
        try:
            yield done
        finally:
            done.append(self._prompt_tokens() - before)
            stopping.set()
            client.close()
            worker.join()
        if failures:
            raise SystemExit(f"embeddings failed: {failures[0]}")

    def _prompt_tokens(self) -> int:
        text = httpx2.get(f"{self._url}/metrics", trust_env=False).text
        return int(
            sum(float(each) for each in re.findall(r"^lockstep:prompt_tokens_total\S* (\S+)$", text, re.MULTILINE))
        )


class Batches:
    """Batches of a server's Batch API."""

    unit = "requests"

    def __init__(self, url: str, model: str, num_requests: int, output_len: int) -> None:
        self._client = httpx2.Client(base_url=url, timeout=60.0, trust_env=False)
        lines = [
            {
                "custom_id": f"request-{index}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": model,
                    "messages": [
                        {"role": "user", "content": f"Please tell me about the order number {index}, briefly."}
                    ],
                    "max_tokens": output_len,
                    "ignore_eos": True,
                },
            }
            for index in range(num_requests)
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        files = {"file": ("requests.jsonl", content)}
        self._file = (
            self._client.post("/v1/files", files=files, data={"purpose": "batch"}).raise_for_status().json()["id"]
        )

    @contextmanager
    def running(self) -> Iterator[list[int]]:
        body = {"input_file_id": self._file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = self._client.post("/v1/batches", json=body).raise_for_status().json()
        self._until(batch["id"], "in_progress")
        done: list[int] = []
        try:
            yield done
        finally:
            self._client.post(f"/v1/batches/{batch['id']}/cancel").raise_for_status()
            counts = self._until(batch["id"], *ENDED)["request_counts"]
            done.append(counts["completed"])
        if counts["completed"] == counts["total"]:
            raise SystemExit("the batch ended before its turn; increase --batch-requests")

    def _until(self, batch_id: str, *statuses: str) -> dict[str, Any]:
        until_s = time.monotonic() + WAIT_LIMIT_S
        while time.monotonic() < until_s:
            batch: dict[str, Any] = self._client.get(f"/v1/batches/{batch_id}").raise_for_status().json()
            if batch["status"] in statuses:
                return batch
            time.sleep(0.05)
        raise SystemExit(f"the batch did not become {' or '.join(statuses)} within {WAIT_LIMIT_S:g} s")


def ratio_with_interval(
    without: Sequence[Sequence[float]], beside: Sequence[Sequence[float]]
) -> tuple[float, float, float]:
    """Ratio of the two p95 values over all turns with its interval, by resampling pairs of turns and their requests."""
    random = np.random.default_rng(0)
    sides = [[np.asarray(turn) for turn in side] for side in (without, beside)]
    drawn = []
    for _ in range(BOOTSTRAPS):
        turns = random.integers(len(without), size=len(without))
        picked = [np.concatenate([random.choice(side[turn], len(side[turn])) for turn in turns]) for side in sides]
        drawn.append(np.percentile(picked[1], 95) / np.percentile(picked[0], 95))
    whole = [np.percentile(np.concatenate(side), 95) for side in sides]
    low, high = np.percentile(drawn, LEVEL)
    return float(whole[1] / whole[0]), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("beside", choices=("batch", "embeddings"))
    parser.add_argument("--model", default="pocket://")
    parser.add_argument("--embedder", help="another model, for the embeddings, in the same process")
    parser.add_argument("--embedder-priority", default="normal", help="its priority in the manifest (default: normal)")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=60, help="client requests per turn (default: 60)")
    parser.add_argument("--rate", type=float, default=5.0, help="client requests per second (default: 5)")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--batch-requests", type=int, default=20_000)
    parser.add_argument("--batch-output-len", type=int, default=64)
    parser.add_argument("--embedding-len", type=int, default=500, help="tokens per input of 1,000 inputs")
    arguments = parser.parse_args()
    command, embedder = own_server(arguments.model, available_cores(), SERVED), arguments.embedder
    folder = TemporaryDirectory()
    if embedder is not None:
        priority = arguments.embedder_priority
        command = two_models_server(arguments.model, embedder, priority, available_cores(), Path(folder.name))
    server = start_server("served", command)
    target = server.target
    try:
        bulk: BulkWork = (
            Batches(target.url, server.model, arguments.batch_requests, arguments.batch_output_len)
            if arguments.beside == "batch"
            else Embeddings(target.url, EMBEDDER if embedder else server.model, arguments.embedding_len)
        )
        lengths = RandomLengths(arguments.input_len, arguments.output_len)
        options = {"num_prompts": arguments.requests, "request_rate": arguments.rate, "ignore_eos": True}

        def turn(seed: int) -> list[float]:
            made = ServeOptions(target, Dataset("random"), lengths, seed=seed, shows_progress=False, **options)
            return [outcome.ttft_s for outcome in run_serve(made, lambda text: None).outcomes if outcome.is_success]

        turn(0)
        times: dict[str, list[list[float]]] = {"without": [], "beside": []}
        answered, beside_s = 0, 0.0
        for number in range(1, arguments.rounds + 1):
            for side in ("without", "beside") if number % 2 else ("beside", "without"):
                seed = 2 * number + (side == "beside")  # new prompts: none is in the cache
                if side == "without":
                    times[side].append(turn(seed))
                    continue
                begin_s = time.monotonic()
                with bulk.running() as done:
                    times[side].append(turn(seed))
                answered, beside_s = answered + sum(done), beside_s + time.monotonic() - begin_s
            shown = {side: f"{np.percentile(found[-1], 95) * 1e3:.1f} ms" for side, found in times.items()}
            print(f"round {number}: p95 without {shown['without']}, beside {shown['beside']}", flush=True)
    finally:
        server.close()
        folder.cleanup()
    ratio, low, high = ratio_with_interval(times["without"], times["beside"])
    models = arguments.model if embedder is None else f"{arguments.model} beside {embedder}"
    print(f"{machine_name()}, {models}, {arguments.requests * arguments.rounds} requests a side")
    for side, found in times.items():
        whole = np.concatenate(found) * 1e3
        print(f"TTFT {side}: p50 {np.percentile(whole, 50):.1f} ms, p95 {np.percentile(whole, 95):.1f} ms")
    print(f"p95 beside / without: {ratio:.2f} ({low:.2f} to {high:.2f})")
    print(f"{arguments.beside} meanwhile: {answered:,} {bulk.unit}, {answered / beside_s:,.1f} a second")


if __name__ == "__main__":
    main()
