"""Comparison of whole steps: this checkout's executor, another checkout's and llama.cpp, alternately, in separate
processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

BACKEND_SCRIPT = Path(__file__).with_name("step_backend.py")
ROOT = BACKEND_SCRIPT.parents[1]
STEPS = (
    ("x1 at 200", (1, 200, 1), 8),
    ("x8 at 200", (8, 200, 1), 6),
    ("x32 at 200", (32, 200, 1), 4),
    ("x1 at 800", (1, 800, 1), 8),
    ("x8 at 800", (8, 800, 1), 6),
    ("x32 at 800", (32, 800, 1), 4),
    ("prefill 512", (1, 0, 512), 2),
    ("prefill 2,000", (1, 0, 2000), 1),
)
"""Name; streams, context tokens and new tokens of each; and number of runs per turn."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One backend: its name in the table, the arguments of its process, and the location of its sources."""

    name: str
    engine: str
    python: str
    isa: str | None = None
    sources: Path | None = None
    cache_dir: str | None = None
    """Folder of its packed weights; None: the user's cache."""


class Running:
    """A backend's process."""

    def __init__(self, backend: Backend, model: str, threads: int) -> None:
        command = [backend.python, str(BACKEND_SCRIPT), backend.engine, model, str(threads)]
        command += [backend.isa] if backend.isa else []
        environ = dict(os.environ)
        if backend.sources is not None:
            environ["PYTHONPATH"] = str(backend.sources)
        if backend.cache_dir is not None:
            environ["XDG_CACHE_HOME"] = backend.cache_dir
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, stderr=subprocess.DEVNULL
        )
        self.load_s = float(self._read()["load_s"])

    def ask(self, what: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args!r}: ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def run_in_turns(backends: Sequence[Backend], model: str, threads: int, turns: int, steps: Sequence[str]) -> None:
    """Print a table: median (minimum) milliseconds per step and backend, and ratios to the first backend."""
    running = [Running(each, model, threads) for each in backends]
    names = [each.name for each in backends]
    print(f"{Path(model).name}, {threads} threads; loaded in " + ", ".join(
        f"{each.load_s:.2f} s ({name})" for name, each in zip(names, running, strict=True)
    ))  # fmt: skip
    print("| step | " + " | ".join(names) + " | " + " | ".join(f"{name} / {names[0]}" for name in names[1:]) + " |")
    print("|---|" + "---|" * (2 * len(names) - 1))
    for name, (streams, past, length), repeats in STEPS:
        if steps and name not in steps:
            continue
        times: list[list[float]] = [[] for _ in running]
        for _ in range(turns):
            for each, found in zip(running, times, strict=True):
                found += each.ask([streams, past, length, repeats])
        ms = [median(found) * 1e3 for found in times]
        cells = [f"{mid:.2f} ({min(found) * 1e3:.2f})" for mid, found in zip(ms, times, strict=True)]
        print(f"| {name} | " + " | ".join([*cells, *(f"{other / ms[0]:.2f}" for other in ms[1:])]) + " |", flush=True)
    for name, each in zip(names, running, strict=True):
        print(f"memory of {name}: " + ", ".join(f"{kind} {size} MB" for kind, size in each.ask("memory").items()))
        each.close()


def backends_of(baseline: Path | None, peer_python: str | None, isa: str | None, peer_repacks: bool) -> list[Backend]:
    """Backends to compare: this checkout's executor first, then the others."""
    peer = "llama.cpp" if peer_repacks else "llama.cpp-as-stored"
    found = [Backend("native", "native", sys.executable, isa)]
    if baseline is not None:
        found.append(Backend(baseline.name, "native", sys.executable, isa, baseline / "src"))
    return [*found, *([Backend("llama.cpp", peer, peer_python)] if peer_python else [])]
