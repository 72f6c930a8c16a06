"""Pictures of the documentation: `python -m tools.pictures [replay] [gate] [dashboard]` writes docs/*.png.

Replays use an example, the sweep uses random chats. The gate's pairs are random too: the candidate has equal answers,
and is six percent slower in one of two segments. The dashboard is that of `tools.dashboard_pictures`.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser

from tests.browser import chromium
from tools import dashboard_pictures

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
WIDTH = 1180
SEED, NUM_PAIRS = 14, 5000
SLOWER = {"chat": 1.0, "code": 1.06}
PRESSURE = "examples/workload_pressure.json"
SWEEP = (
    "sweep chats.jsonl --grid max_num_seqs=8,16,24,32,48 --grid max_num_batched_tokens=256,512,1024 --cost cost.json"
    " --objective ttft_p99 --objective tpot_p99 --slo ttft:1000,tpot:40 --slo-percent 95"
)
REPLAYS = {
    "replay-report": (["replay", PRESSURE], 1700),
    "replay-comparison": (["diff", PRESSURE, "--set-b", "max_num_seqs=2"], 2200),
    "replay-sweep": (SWEEP.split(), 900),
}
"""By the picture's name: the command, and the height of the picture in pixels."""


def write_chats(path: Path) -> None:
    """Write a trace in Mooncake's format: 1,100 chats in one minute, some of them long."""
    draw = random.Random(SEED)
    times = sorted(draw.uniform(0, 60_000) for _ in range(1100))
    with path.open("w") as file:
        for time_ms in times:
            tokens = {
                "input_length": int(draw.lognormvariate(5.3, 0.9)),
                "output_length": int(draw.lognormvariate(4, 0.7)),
            }
            file.write(json.dumps({"timestamp": int(time_ms), **tokens, "hash_ids": []}) + "\n")


def write_prices(path: Path) -> None:
    prices = {"constant_ps": 5_000, "prefill_token_ps": 30, "decode_seq_ps": 300, "context_token_ps": 0.5}
    path.write_text(json.dumps({name: int(value * 1e6) for name, value in prices.items()}))


def write_pairs(path: Path) -> None:
    """Write latencies of both sides with a queue that grows and shrinks, equal tokens and a few routes."""
    draw = random.Random(SEED)
    load = 0.0
    with path.open("w") as file:
        for index in range(NUM_PAIRS):
            load = 0.95 * load + draw.gauss(0, 0.1)
            segment = draw.choice(sorted(SLOWER))
            pair: dict[str, object] = {"request_id": f"req-{index}", "model": "support-7b", "segment": segment}
            for side, factor in (("baseline", 1.0), ("candidate", SLOWER[segment])):
                base_ms = 40 * draw.lognormvariate(load, 0.12) * factor
                gaps_ms = [9 * draw.lognormvariate(load / 2, 0.2) * factor for _ in range(8)]
                pair[side] = {
                    "ts": index / 4,
                    "backend": "vllm",
                    "accelerator": "h100",
                    "model_version": f"2026-{10 if side == 'baseline' else 11}",
                    "ttft_ms": base_ms,
                    "token_latencies_ms": gaps_ms,
                    "latency_ms": base_ms + sum(gaps_ms),
                    "token_ids": [index, *range(8)],
                }
            file.write(json.dumps(pair) + "\n")


def report(words: list[str], page: Path) -> None:
    """Write a command's page; the exit code is a verdict and not checked."""
    command = [sys.executable, "-m", "lockstep", *words, "--html", str(page)]
    subprocess.run(command, cwd=page.parent, check=False, stdout=subprocess.DEVNULL)


def replay_pictures(browser: Browser, folder: Path) -> None:
    (folder / "examples").symlink_to(ROOT / "examples")
    write_chats(folder / "chats.jsonl")
    write_prices(folder / "cost.json")
    for name, (words, height) in REPLAYS.items():
        page = folder / f"{name}.html"
        report(words, page)
        for scheme in SCHEMES:
            tab = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme=scheme)
            tab.goto(page.as_uri())
            tab.screenshot(path=DOCS / f"{name}-{scheme}.png")
            tab.close()


def gate_pictures(browser: Browser, folder: Path) -> None:
    pairs, page = folder / "pairs.jsonl", folder / "gate.html"
    write_pairs(pairs)
    report(["gate", str(pairs), "--set", "mode=sequential"], page)
    for scheme in SCHEMES:
        tab = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme=scheme)
        tab.goto(page.as_uri())
        tab.locator("section", has=tab.locator("#distributions")).screenshot(path=DOCS / f"gate-{scheme}.png")
        tab.close()


def main() -> None:
    wanted = set(sys.argv[1:]) or {"replay", "gate", "dashboard"}
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        if "replay" in wanted:
            replay_pictures(browser, Path(folder))
        if "gate" in wanted:
            gate_pictures(browser, Path(folder))
    if "dashboard" in wanted:
        dashboard_pictures.main()


if __name__ == "__main__":
    main()
