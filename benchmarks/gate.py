"""Time and memory of a verdict over many pairs, from Parquet and from JSON lines.

    python -m benchmarks.gate [--pairs 1000000] [--layouts parquet jsonl] [--folder FOLDER] [--seed 1] [--sequential]

Each request has 64 token ids and 64 gaps per side, in 10 segments. DuckDB generates the data, which stays in the folder
if one is given. Each verdict runs in a separate process: figures are wall and processor seconds, and peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import duckdb

NUM_TOKENS = 64
NUM_SEGMENTS = 10
RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes per unit of the system's memory figures."""


def make(folder: Path, pairs: int, layout: str, seed: int) -> list[Path]:
    """Write the files of both sides; returns the baseline's first."""
    paths = [folder / f"{side}-{pairs}.{layout}" for side in ("baseline", "candidate")]
    for number, path in enumerate(paths):
        if path.exists():
            continue
        with duckdb.connect(config={"memory_limit": "2GB"}) as connection:
            connection.execute(
                f"COPY (SELECT 'request-' || i AS request_id, 1.7e9 + i / 100 AS ts, 'support-7b' AS model,"
                f" 'segment-' || i % {NUM_SEGMENTS} AS segment, 'b1f6c0d2' AS artifact, 'vllm' AS backend,"
                " 'h100' AS accelerator, 'route-' || i % 4 AS route_id, 'continuous-batching' AS scheduler,"
                f" round(600 + 200 * ({_uniform('i', seed + number)}), 3) AS latency_ms,"
                f" round(40 + 20 * ({_uniform('i', seed + number + 2)}), 3) AS ttft_ms,"
                f" list_transform(range({NUM_TOKENS}), lambda t: (hash(i, t) % 50000)::BIGINT) AS token_ids,"
                f" list_transform(range({NUM_TOKENS}), lambda t: round(8 + 4 * ({_uniform('i, t', seed + number)}), 3))"
                f" AS token_latencies_ms FROM range({pairs}) r(i)) TO '{path}'"
                f" (FORMAT {'parquet' if layout == 'parquet' else 'json'})"
            )
    return paths


def _uniform(of: str, seed: int) -> str:
    return f"hash({of}, {seed}) / 18446744073709551616.0"


def measure(paths: list[Path], arguments: list[str]) -> list[str]:
    """Figures of one verdict as text."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "lockstep", "gate", *map(str, paths), "--json", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    verdict = json.loads(process.stdout.read())
    _, _, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began
    return [
        f"{wall_s:6.1f} s",
        f"{usage.ru_utime + usage.ru_stime:6.1f} processor-s",
        f"{usage.ru_maxrss * RSS_UNIT / 1e6:8,.0f} MB at most",
        f"{verdict['joining']['pairs']:,} pairs: {verdict['decision']}",
    ]


def main() -> None:
    """Measure the layouts given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--layouts", nargs="+", default=["parquet", "jsonl"], choices=["parquet", "jsonl"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sequential", action="store_true")
    options = parser.parse_args()
    arguments = ["--set", "mode=sequential"] if options.sequential else []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for layout in options.layouts:
            paths = make(folder, options.pairs, layout, options.seed)
            size = sum(path.stat().st_size for path in paths) / 1e6
            print(f"{layout:8} {size:8,.0f} MB", *measure(paths, arguments), flush=True)


if __name__ == "__main__":
    main()
