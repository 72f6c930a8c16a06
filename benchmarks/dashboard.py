"""Dashboard under load: frames and long tasks of the page, and the processor time that an open page costs its server.

    python -m benchmarks.dashboard page     # 50 models, 64 streams, Chromium
    python -m benchmarks.dashboard cost     # 32 streams, with a page and without in turns

The cost is measured without a browser, which would take processor time from the server: a client sends the page's
requests at the same rate and reads the events as fast as they arrive. Intervals with and without the client alternate.
The load is paced, so both kinds of intervals have the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import psutil

if TYPE_CHECKING:
    from playwright.sync_api import Page

DENSITY = Path(__file__).resolve().parents[1] / "examples" / "density-50.yaml"
POLL_S = 2.0
POLLED = {"/v1/cluster": 1, "/v1/requests?limit=20": 1, "/v1/stats": 3, "/v1/logs?after=": 2}
"""Paths that the page polls, each with its interval in polls; the last path ends in the number of the last known
line."""
READY = "lockstep: ready on "
PROMPT = "My invoice of last month has one position twice, and nobody answers. What can I do? " * 3
MAX_TOKENS = 64
MARGIN_S = 2.0
"""Delay between the start of the streams and the opening of the page."""
WATCH = """() => {
  window.watched = { tasks: [], gaps: [] };
  new PerformanceObserver(list => {
    for (const task of list.getEntries()) window.watched.tasks.push([task.startTime, task.duration]);
  }).observe({ type: "longtask", buffered: true });
  let last = performance.now();
  const frame = now => { window.watched.gaps.push([now, now - last]); last = now; requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
}"""


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[str, psutil.Process]]:
    """Server process with its address."""
    command = [sys.executable, "-m", "lockstep", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        line = next((each for each in process.stdout if each.startswith(READY)), "")
        if not line:
            raise SystemExit("the server did not become ready")
        yield line.removeprefix(READY).split(",")[0].strip(), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def streaming(url: str, num_streams: int, models: Sequence[str], period_s: float) -> Iterator[None]:
    """Clients in a separate process, each of which begins a stream every period, or when one ends."""
    work = multiprocessing.get_context("spawn").Process(target=_stream_all, args=(url, num_streams, models, period_s))
    work.start()
    try:
        time.sleep(MARGIN_S)
        yield
    finally:
        work.terminate()
        work.join()


def _stream_all(url: str, num_streams: int, models: Sequence[str], period_s: float) -> None:
    async def stream(client: httpx2.AsyncClient, number: int) -> None:
        due_s = time.monotonic() + period_s * number / num_streams
        for turn in range(sys.maxsize):
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            due_s += period_s
            body = {
                "model": models[(number + turn) % len(models)],
                "messages": [{"role": "user", "content": f"{PROMPT}{number} {turn}"}],
                "stream": True,
                "max_tokens": MAX_TOKENS,
                "ignore_eos": True,
                "session_id": f"s{number}",
            }
            async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                async for _ in answer.aiter_raw():
                    pass

    async def all_of_them() -> None:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(timeout=60, limits=limits, trust_env=False, verify=False) as client:
            await asyncio.gather(*(stream(client, number) for number in range(num_streams)))

    asyncio.run(all_of_them())


def models_of(url: str) -> list[str]:
    """Names of all loaded models."""
    with httpx2.Client(base_url=url, trust_env=False, verify=False) as client:
        return [each["id"] for each in client.get("/v1/cluster").json()["models"] if each["state"] == "resident"]


def measured_page(page: Page, url: str, duration_s: float) -> dict[str, Any]:
    """Long tasks and gaps between frames of a newly opened page, as `[begin, duration]` in milliseconds."""
    page.add_init_script(f"({WATCH})()")
    page.goto(f"{url}/")
    page.wait_for_timeout(duration_s * 1e3)
    found: dict[str, Any] = page.evaluate("window.watched")
    found["rows"] = page.locator("#models tbody tr").count()
    found["requests"] = page.locator("#requests tbody tr").count()
    return found


def p99(values: Sequence[float]) -> float:
    """99th percentile by nearest rank; 0 for no values."""
    ordered = sorted(values)
    return ordered[max(0, -(-99 * len(ordered) // 100) - 1)] if ordered else 0.0


def page_under_load(num_streams: int, duration_s: float, step_ms: float) -> None:
    """Print frames and long tasks of the page during the streams."""
    from tests.browser import chromium

    with serving("--manifest", str(DENSITY), "--backend", "stub") as (url, _), chromium() as browser:
        models = models_of(url)
        with streaming(url, num_streams, models, step_ms * MAX_TOKENS / 1e3):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            found = measured_page(page, url, duration_s)
    tasks, gaps = [each for _, each in found["tasks"]], [each for _, each in found["gaps"]]
    print(f"{found['rows']} models, {num_streams} streams, {duration_s:g} s; {found['requests']} requests shown")
    print(f"long tasks (over 50 ms): {len(tasks)}, longest {max(tasks, default=0):.0f} ms; p99 {p99(tasks):.0f} ms")
    for began, lasted in found["tasks"]:
        print(f"  {lasted:.0f} ms at {began / 1e3:.2f} s")
    middle, most = statistics.median(gaps), max(gaps)
    print(f"frames: {len(gaps)}, gaps median {middle:.1f}, p99 {p99(gaps):.1f}, longest {most:.0f} ms")


async def watch(url: str) -> None:
    """Send the page's requests until cancelled."""
    async with httpx2.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False) as client:

        async def events() -> None:
            async with client.stream("GET", "/v1/events") as answer:
                async for _ in answer.aiter_raw():
                    pass

        following, last = asyncio.create_task(events()), 0
        try:
            for turn in range(sys.maxsize):
                due = [path for path, every in POLLED.items() if turn % every == 0]
                answers = await asyncio.gather(
                    *(client.get(f"{path}{last}" if path.endswith("=") else path) for path in due)
                )
                for path, answer in zip(due, answers, strict=True):
                    if path.endswith("=") and (lines := json.loads(answer.text)["data"]):
                        last = lines[-1]["number"]
                await asyncio.sleep(POLL_S)
        finally:
            following.cancel()


def _watch(url: str) -> None:
    asyncio.run(watch(url))


def cpu_s(process: psutil.Process) -> float:
    """Processor time of a process and its children so far."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def cost_of_a_page(arguments: Sequence[str], num_streams: int, rounds: int, duration_s: float, period_s: float) -> None:
    """Print the processor time of the server with and without an open page, alternately."""
    ratios: list[float] = []
    with serving(*arguments) as (url, server), streaming(url, num_streams, models_of(url), period_s):
        for number in range(rounds):
            spent: dict[bool, float] = {}
            for is_open in (True, False) if number % 2 else (False, True):
                watcher = multiprocessing.get_context("spawn").Process(target=_watch, args=(url,))
                if is_open:
                    watcher.start()
                time.sleep(MARGIN_S)
                before_s = cpu_s(server)
                time.sleep(duration_s)
                spent[is_open] = cpu_s(server) - before_s
                if is_open:
                    watcher.terminate()
                    watcher.join()
            ratios.append(spent[True] / spent[False] - 1)
            print(f"with {spent[True]:.2f} s, without {spent[False]:.2f} s: {100 * ratios[-1]:+.1f} %", flush=True)
    print(
        f"an open page costs its server {100 * statistics.median(ratios):+.2f} % (median of {rounds}, "
        f"{100 * min(ratios):+.1f} to {100 * max(ratios):+.1f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("page", "cost"))
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="duration of the page or of each turn in seconds (default: 60)"
    )
    parser.add_argument("--streams", type=int, help="at once; 64 beside the page, 32 for the cost")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="stub://one?step_ms=30", help="that the cost is measured with")
    parser.add_argument("--period", type=float, default=2.0, help="seconds from a stream's begin to its client's next")
    args = parser.parse_args()
    if args.what == "page":
        page_under_load(args.streams or 64, args.seconds, args.period * 1e3 / MAX_TOKENS)
    else:
        cost_of_a_page([args.model], args.streams or 32, args.rounds, args.seconds, args.period)


if __name__ == "__main__":
    main()
