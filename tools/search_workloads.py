"""Search for example workloads whose replays have the published figures; writes the workloads.

    python -m tools.search_workloads [--seed 0] [--write examples]

The figures are those of the system that Lockstep replaces. Its inputs were not published, so workloads are drawn at
random until the scheduler gives exactly these figures, with blocks of 16 tokens, at most two tokens decoded in a tick,
blocks reserved at admission, and prompts computed whole. The same seed gives the same files.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.core.policy import DecodeOrder, SchedulerConfig
from lockstep.replay.readers.workload_json import PRIORITY_CLASSES
from lockstep.replay.simulator import Simulation
from lockstep.replay.workload import ArrivalUnit, Workload, WorkloadRequest

BLOCK_SIZE = 16
MAX_TRIALS = 1_000_000
"""Maximum number of trials of a search."""
PREFILL_BUDGETS = (64, 80, 96, 112, 128)


class Figures(NamedTuple):
    """Figures of a replay; None in a target: not published."""

    num_ticks: int
    num_reserved_blocks: int
    max_used_blocks: int
    num_decoded_tokens: int
    num_queue_pressure_ticks: int | None = None
    num_active_capacity_ticks: int | None = None
    max_queued: int | None = None
    max_active: int | None = None
    num_block_ticks: int | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A file to find: sums over its requests, the figures of its replay, and the values to draw."""

    file: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_blocks: int
    max_num_seqs: int
    classes: tuple[str, ...]
    max_arrival_tick: int
    figures: Figures
    decode_order: DecodeOrder = "weighted"


TARGETS = (
    Target(
        file="workload.json",
        num_requests=4,
        num_prompt_tokens=224,
        num_output_tokens=18,
        num_blocks=20,
        max_num_seqs=3,
        classes=("normal",),
        max_arrival_tick=5,
        figures=Figures(11, 18, 12, 18, num_queue_pressure_ticks=3, num_active_capacity_ticks=3),
    ),
    Target(
        file="workload_pressure.json",
        num_requests=8,
        num_prompt_tokens=432,
        num_output_tokens=48,
        num_blocks=15,
        max_num_seqs=3,
        classes=tuple(PRIORITY_CLASSES),
        max_arrival_tick=10,
        # 241 of 27 ticks x 15 blocks are an occupancy of 0.595062.
        figures=Figures(27, 35, 13, 48, max_queued=5, max_active=3, num_block_ticks=241),
        decode_order="priority",
    ),
)


def draw(rng: random.Random, target: Target) -> dict[str, Any]:
    """Workload file with the target's sums and prompts of whole blocks."""
    prompts = _parts(rng, target.num_prompt_tokens // BLOCK_SIZE, target.num_requests, 1, 8)
    outputs = _parts(rng, target.num_output_tokens, target.num_requests, 2, 12)
    arrivals = sorted([0] + [rng.randint(0, target.max_arrival_tick) for _ in prompts[1:]])
    classes = [rng.choice(target.classes) for _ in prompts]
    config = {
        "block_size": BLOCK_SIZE,
        "num_blocks": target.num_blocks,
        "max_model_len": 256,
        "max_num_seqs": target.max_num_seqs,
        "max_num_batched_tokens": 256,
        "max_num_prefill_tokens": rng.choice(PREFILL_BUDGETS),
        "max_num_decode_seqs": 2,
        "chunking": False,
        "admission": "reserve",
        "order": "priority",
    } | ({"decode_order": target.decode_order} if target.decode_order != "weighted" else {})
    requests = [
        {"id": f"request-{index}", "prompt_tokens": num_blocks * BLOCK_SIZE, "max_output_tokens": num_output}
        | ({"priority": name} if name != "normal" else {})
        | {"arrival_tick": arrival}
        for index, (num_blocks, num_output, name, arrival) in enumerate(
            zip(prompts, outputs, classes, arrivals, strict=True)
        )
    ]
    return {"config": config, "requests": requests}


def figures_of(drawn: dict[str, Any]) -> Figures:
    """Figures of a replay of the workload."""
    requests = tuple(
        WorkloadRequest(
            each["id"],
            each["prompt_tokens"],
            each["max_output_tokens"],
            each["max_output_tokens"],
            each["arrival_tick"],
            PRIORITY_CLASSES[each.get("priority", "normal")],
        )
        for each in drawn["requests"]
    )
    replay = Simulation(Workload("drawn", requests, ArrivalUnit.TICKS), SchedulerConfig(**drawn["config"])).run()
    totals = replay.totals
    return Figures(
        replay.num_ticks,
        replay.num_reserved_blocks,
        totals.max_used_blocks,
        totals.num_decoded_tokens,
        totals.num_queue_pressure_ticks,
        totals.num_active_capacity_ticks,
        totals.max_queued,
        totals.max_active,
        totals.num_block_ticks,
    )


def search(target: Target, seed: int) -> tuple[int, dict[str, Any]]:
    """First workload that fits, and the number of trials."""
    rng = random.Random(seed)
    for trial in range(1, MAX_TRIALS + 1):
        drawn = draw(rng, target)
        # Requests that can never be admitted would be refused; such a workload is not published.
        if max(each["prompt_tokens"] for each in drawn["requests"]) > drawn["config"]["max_num_prefill_tokens"]:
            continue
        found = figures_of(drawn)
        if all(wanted in (None, got) for wanted, got in zip(target.figures, found, strict=True)):
            return trial, drawn
    raise SystemExit(f"{target.file}: no workload found in {MAX_TRIALS} trials; use another seed")


def as_text(drawn: dict[str, Any]) -> str:
    """Text of the file: the config on separate lines, one request per line."""
    config = json.dumps(drawn["config"], indent=4).replace("\n}", "\n  }")
    requests = ",\n".join(f"    {json.dumps(request)}" for request in drawn["requests"])
    return f'{{\n  "config": {config},\n  "requests": [\n{requests}\n  ]\n}}\n'


def _parts(rng: random.Random, total: int, count: int, least: int, most: int) -> Sequence[int]:
    """``count`` numbers within limits that add up to ``total``."""
    while True:
        cuts = sorted(rng.sample(range(1, total), count - 1))
        parts = [end - begin for begin, end in zip([0, *cuts], [*cuts, total], strict=True)]
        if least <= min(parts) and max(parts) <= most:
            return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="directory for the files")
    options = parser.parse_args()
    for target in TARGETS:
        trial, drawn = search(target, options.seed)
        print(f"{target.file}: found in trial {trial}: {figures_of(drawn)._asdict()}")
        if options.write is None:
            print(as_text(drawn))
        else:
            (options.write / target.file).write_text(as_text(drawn))


if __name__ == "__main__":
    main()
