"""Try real clients against a real server: `python -m tools.clients --cache DIR [--only NAME ...]`.

Each client is installed into an environment of its own below the cache directory, and kept there. Then a program of
`programs/` plays its scenarios against a server of the embedded model, which is started on a free port and ended
again. A table tells what failed; the exit code is 1 if anything did.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = "pocket"
INSTALL_S, PLAY_S, STOP_S = 1_800, 900, 30
MAX_FAILURE_CHARS = 300
_READY = re.compile(r"ready on (http://\S+),")


@dataclass(frozen=True, slots=True)
class Client:
    """One client."""

    name: str
    program: str
    """Module below `programs`."""
    packages: tuple[str, ...]
    before: tuple[str, ...] = ()
    """Packages to be installed first, so that those that follow do not choose others."""


CLIENTS = (
    Client("openai", "openai_sdk", ("openai",)),
    Client("litellm", "litellm_sdk", ("litellm", "mcp")),
    Client("langchain", "langchain_sdk", ("langchain", "langchain-openai")),
    Client("instructor", "instructor_sdk", ("instructor",)),
    Client("pydantic-ai", "pydantic_ai_sdk", ("pydantic-ai-slim[openai]",)),
    Client("openai-agents", "openai_agents_sdk", ("openai-agents",)),
    # A plain torch pulls gigabytes of CUDA; neither of the two computes with it.
    Client("guidellm", "guidellm_bench", ("guidellm", "torch==2.13.0"), ("torch==2.13.0",)),
    Client("aiperf", "aiperf_bench", ("aiperf",)),
)


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one scenario."""

    client: str
    version: str
    scenario: str
    failure: str
    """Empty: none."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.clients", description=(__doc__ or "").splitlines()[0])
    names = [client.name for client in CLIENTS]
    parser.add_argument("--cache", type=Path, required=True, help="where the clients' environments are kept")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="the clients to try; default: all")
    asked = parser.parse_args(arguments)
    chosen = [client for client in CLIENTS if client.name in asked.only]
    results: list[Result] = []
    with serving() as base_url:
        for client in chosen:
            print(f"{client.name}: installing and playing ...", file=sys.stderr, flush=True)
            results += tried(client, asked.cache.resolve(), f"{base_url}/v1")
    print_table(results)
    return 1 if any(result.failure for result in results) else 0


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """A server of the embedded model, until the block ends; gives its base URL."""
    command = [sys.executable, "-m", "lockstep", "serve", "pocket://", "--served-model-name", MODEL, "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None, "it has a pipe"
        try:
            ready = next((match for line in process.stdout if (match := _READY.search(line))), None)
            if ready is None:
                raise SystemExit("the server did not start; `lockstep serve pocket://` says why")
            yield ready[1]
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def tried(client: Client, cache: Path, base_url: str) -> list[Result]:
    """All scenarios of one client, or why there are none."""
    environment = cache / client.name
    python = environment / "bin" / "python"
    failure = run([sys.executable, "-m", "venv", str(environment)], INSTALL_S)[1]  # mends one that was left half made
    for packages in filter(None, (client.before, client.packages)):
        failure = failure or run([str(python), "-m", "pip", "install", "--quiet", *packages], INSTALL_S)[1]
    if failure:
        return [Result(client.name, "", "installation", failure)]
    program = f"tools.clients.programs.{client.program}"
    output, failure = run([str(python), "-m", program, base_url, MODEL], PLAY_S)
    told = [json.loads(line) for line in output.splitlines() if line.startswith('{"client"')]
    results = [Result(**each) for each in told]
    if failure and not any(result.failure for result in results):  # it broke off
        results.append(Result(client.name, "", "the program", failure))
    return results


def run(command: Sequence[str], timeout_s: float) -> tuple[str, str]:
    """A command's standard output, and the end of what it said where it failed; empty: it did not."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return "", f"not done after {timeout_s:g} s"
    said = (done.stderr or done.stdout).strip()
    return done.stdout, "" if done.returncode == 0 else said[-MAX_FAILURE_CHARS:] or f"exit code {done.returncode}"


def print_table(results: Sequence[Result]) -> None:
    """A row per scenario, as Markdown."""
    print("| client | version | scenario | result |\n|---|---|---|---|")
    for result in results:
        told = " ".join(result.failure.split())[:MAX_FAILURE_CHARS].replace("|", "/")
        print(f"| {result.client} | {result.version} | {result.scenario} | {told or 'ok'} |")


if __name__ == "__main__":
    sys.exit(main())
