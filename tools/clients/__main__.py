"""Run real clients against a real server: `python -m tools.clients --cache DIR [--only NAME ...]`.

Each client is installed into its own environment below the cache directory and stays there: Python clients by pip,
clients for Node.js by npm, which must be installed with Node.js 20 or later. A program of `programs/` then runs its
scenarios against a server of the embedded model, which is started on a free port. Agents have a separate server with
scripted answers. A table lists failures; the exit code is 1 if there are any.
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

from tools.clients.server import EMBEDDER, MODEL, ROOT, serving, serving_vectors

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
    """Packages to install first, so that later ones do not choose other versions."""
    is_npm: bool = False
    """True if the packages are npm's."""
    uses_vectors: bool = False
    """True if it is for a server of an embedder and a reranker."""


CLIENTS = (
    Client("openai", "openai_sdk", ("openai",)),
    Client("litellm", "litellm_sdk", ("litellm", "mcp")),
    Client("langchain", "langchain_sdk", ("langchain", "langchain-openai")),
    Client("instructor", "instructor_sdk", ("instructor",)),
    Client("pydantic-ai", "pydantic_ai_sdk", ("pydantic-ai-slim[openai]",)),
    Client("openai-agents", "openai_agents_sdk", ("openai-agents",)),
    # A plain torch installs gigabytes of CUDA, which neither of the two uses.
    Client("guidellm", "guidellm_bench", ("guidellm", "torch==2.13.0"), ("torch==2.13.0",)),
    Client("aiperf", "aiperf_bench", ("aiperf",)),
    Client("openai-embeddings", "openai_vectors", ("openai",), uses_vectors=True),
    Client("cohere", "cohere_sdk", ("cohere",), uses_vectors=True),
    Client("langchain-vectors", "langchain_vectors", ("langchain-openai", "langchain-cohere"), uses_vectors=True),
    Client(
        "llama-index",
        "llama_index_vectors",
        (
            "llama-index-embeddings-openai-like",
            "llama-index-postprocessor-cohere-rerank",
            "llama-index-postprocessor-jinaai-rerank",
        ),
        uses_vectors=True,
    ),
    Client("claude-code", "claude_code", ("@anthropic-ai/claude-code",), is_npm=True),
    Client("codex", "codex_cli", ("@openai/codex",), is_npm=True),
)


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of one scenario."""

    client: str
    version: str
    scenario: str
    failure: str
    """Failure; empty: none."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.clients", description=(__doc__ or "").splitlines()[0])
    names = [client.name for client in CLIENTS]
    parser.add_argument("--cache", type=Path, required=True, help="folder of the clients' environments")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="clients to run (default: all)")
    asked = parser.parse_args(arguments)
    chosen = [client for client in CLIENTS if client.name in asked.only]
    results: list[Result] = []
    with serving() as base_url, serving_vectors() as vectors_url:
        for client in chosen:
            print(f"{client.name}: installing and running ...", file=sys.stderr, flush=True)
            url, model = (vectors_url, EMBEDDER) if client.uses_vectors else (base_url, MODEL)
            results += tried(client, asked.cache.resolve(), f"{url}/v1", model)
    print_table(results)
    return 1 if any(result.failure for result in results) else 0


def tried(client: Client, cache: Path, base_url: str, model: str) -> list[Result]:
    """Results of all scenarios of one client, or the failure of its installation."""
    environment = cache / client.name
    install = installed_by_npm if client.is_npm else installed_by_pip
    python, folder, failure = install(client, environment)
    if failure:
        return [Result(client.name, "", "installation", failure)]
    program = f"tools.clients.programs.{client.program}"
    path = os.pathsep.join([str(folder), os.environ.get("PATH", "")])
    output, failure = run([python, "-m", program, base_url, model], PLAY_S, {"PATH": path})
    told = [json.loads(line) for line in output.splitlines() if line.startswith('{"client"')]
    results = [Result(**each) for each in told]
    if failure and not any(result.failure for result in results):  # the program ended early
        results.append(Result(client.name, "", "the program", failure))
    return results


def installed_by_pip(client: Client, environment: Path) -> tuple[str, Path, str]:
    """Interpreter for a client, folder of its commands, and the failure; empty: none."""
    folder = environment / "bin"
    python = str(folder / "python")
    failure = run([sys.executable, "-m", "venv", str(environment)], INSTALL_S)[1]  # repairs an incomplete one
    for packages in filter(None, (client.before, client.packages)):
        failure = failure or run([python, "-m", "pip", "install", "--quiet", *packages], INSTALL_S)[1]
    return python, folder, failure


def installed_by_npm(client: Client, environment: Path) -> tuple[str, Path, str]:
    """The same for a Node.js program, which this interpreter starts."""
    if shutil.which("npm") is None:
        return sys.executable, environment, "npm is not installed; install Node.js 20 or later"
    environment.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--prefix", str(environment), "--no-fund", "--no-audit", *client.packages]
    return sys.executable, environment / "node_modules" / ".bin", run(command, INSTALL_S)[1]


def run(command: Sequence[str], timeout_s: float, variables: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Standard output of a command, and the end of its output if it failed; empty: success."""
    environment = {**os.environ, **(variables or {})}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"not finished after {timeout_s:g} s"
    said = (done.stderr or done.stdout).strip()
    return done.stdout, "" if done.returncode == 0 else said[-MAX_FAILURE_CHARS:] or f"exit code {done.returncode}"


def print_table(results: Sequence[Result]) -> None:
    """Print a Markdown table with one row per scenario."""
    print("| client | version | scenario | result |\n|---|---|---|---|")
    for result in results:
        told = " ".join(result.failure.split())[:MAX_FAILURE_CHARS].replace("|", "/")
        print(f"| {result.client} | {result.version} | {result.scenario} | {told or 'ok'} |")


if __name__ == "__main__":
    sys.exit(main())
