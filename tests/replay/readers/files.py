"""Small files of every format, and helpers to write and read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.replay.readers import ReadOptions, read_workload
from lockstep.replay.workload import WorkloadRequest

MOONCAKE = """{"timestamp": 3000, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 512, "output_length": 3, "hash_ids": [0]}
{"timestamp": 6500, "input_length": 20, "output_length": 0, "hash_ids": [9]}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:00,1,0
"""
WORKLOAD = """{
  "config": {"block_size": 16, "num_blocks": 20, "chunking": false},
  "requests": [
    {"id": "late", "prompt_tokens": 40, "max_output_tokens": 9, "output_tokens": 4, "arrival_tick": 7,
     "priority": "critical", "tenant": "shop", "prefix_hashes": ["system", 5]},
    {"id": 2, "prompt_tokens": 16, "max_output_tokens": 3, "prefix_hashes": ["system"], "priority": 3}
  ]
}
"""
VLLM_BENCH = json.dumps(
    {
        "date": "20261121-120000",
        "num_prompts": 3,
        "request_rate": "inf",
        "mean_ttft_ms": float("nan"),
        "input_lens": [10, 20, 30],
        "output_lens": [5, 0, 7],
        "ttfts": [0.1, 0.0, 0.2],
        "itls": [[0.01], [], [0.02]],
        "start_times": [100.5, 100.25, 101.0],
        "errors": ["", "refused", ""],
    }
)


def aiperf_record(start_ns: int, **metrics: float) -> dict[str, Any]:
    """Record as AIPerf writes it, with further fields that are not read."""
    return {
        "metadata": {"session_num": 0, "request_start_ns": start_ns, "benchmark_phase": "profiling"},
        "metrics": {name: {"value": value, "unit": "tokens"} for name, value in metrics.items()},
        "error": None,
    }


def as_lines(records: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


AIPERF = as_lines(
    [
        aiperf_record(2_000_000_500, input_sequence_length=40, output_sequence_length=8, output_token_count=6),
        aiperf_record(1_000_000_000, input_sequence_length=10, output_token_count=3),
    ]
)
FORMATS = {
    "mooncake": MOONCAKE,
    "azure": AZURE,
    "workload": WORKLOAD,
    "vllm bench": VLLM_BENCH,
    "aiperf": AIPERF,
}


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "file"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def requests_in(folder: Path, content: str | bytes, **options: Any) -> list[WorkloadRequest]:
    return list(read_workload(written(folder, content), ReadOptions(**options)).requests)
