"""Try real clients against a real server: `python -m tools.clients --cache DIR [--only NAME ...]`.

Each client is installed into an environment of its own below the cache directory, and kept there: Python's by pip,
programs of Node.js by npm, which must be there with Node.js 20 or later. Then a program of `programs/` plays its
scenarios against a server of the embedded model, which is started on a free port and ended again; agents have a server
of their own, whose answers are scripted. A table tells what failed; the exit code is 1 if anything did.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.clients.server import MODEL, ROOT, serving

INSTALL_S, PLAY_S = 1_800, 900
MAX_FAILURE_CHARS = 300


@dataclass(frozen=True, slots=True)
class Client:
    """One client."""

    name: str
    program: str
    """Module below `programs`."""
    packages: tuple[str, ...]
    before: tuple[str, ...] = ()
    """Packages to be installed first, so that those that follow do not choose others."""
    is_npm: bool = False
    """Whether the packages are npm's."""


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
    Client("claude-code", "claude_code", ("@anthropic-ai/claude-code",), is_npm=True),
    Client("codex", "codex_cli", ("@openai/codex",), is_npm=True),
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


def tried(client: Client, cache: Path, base_url: str) -> list[Result]:
    """All scenarios of one client, or why there are none."""
    environment = cache / client.name
    install = installed_by_npm if client.is_npm else installed_by_pip
    python, folder, failure = install(client, environment)
    if failure:
        return [Result(client.name, "", "installation", failure)]
    program = f"tools.clients.programs.{client.program}"
    path = os.pathsep.join([str(folder), os.environ.get("PATH", "")])
    output, failure = run([python, "-m", program, base_url, MODEL], PLAY_S, {"PATH": path})
    told = [json.loads(line) for line in output.splitlines() if line.startswith('{"client"')]
    results = [Result(**each) for each in told]
    if failure and not any(result.failure for result in results):  # it broke off
        results.append(Result(client.name, "", "the program", failure))
    return results


def installed_by_pip(client: Client, environment: Path) -> tuple[str, Path, str]:
    """The interpreter that plays a client, the folder of its commands, and what failed; empty: nothing did."""
    folder = environment / "bin"
    python = str(folder / "python")
    failure = run([sys.executable, "-m", "venv", str(environment)], INSTALL_S)[1]  # mends one that was left half made
    for packages in filter(None, (client.before, client.packages)):
        failure = failure or run([python, "-m", "pip", "install", "--quiet", *packages], INSTALL_S)[1]
    return python, folder, failure


def installed_by_npm(client: Client, environment: Path) -> tuple[str, Path, str]:
    """The same of a program of Node.js, which this interpreter starts."""
    if shutil.which("npm") is None:
        return sys.executable, environment, "npm is not installed; install Node.js 20 or later"
    environment.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--prefix", str(environment), "--no-fund", "--no-audit", *client.packages]
    return sys.executable, environment / "node_modules" / ".bin", run(command, INSTALL_S)[1]


def run(command: Sequence[str], timeout_s: float, variables: Mapping[str, str] | None = None) -> tuple[str, str]:
    """A command's standard output, and the end of what it said where it failed; empty: it did not."""
    environment = {**os.environ, **(variables or {})}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
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
