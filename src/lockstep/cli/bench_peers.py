"""`lockstep bench peers` compares Lockstep with other engines; `lockstep bench compare` compares two results.

The code of the first one is in the repository's `benchmarks/comparison`, which is not part of a wheel.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lockstep.cli import options as flags
from lockstep.cli.flag_groups import SWITCH, with_flags
from lockstep.cli.writing import check_outputs, write_file
from lockstep.errors import UsageError

EXIT_INTERRUPTED = 130
EXIT_WORSE = 1
CHECKOUT = Path(__file__).absolute().parents[3]
"""Root of the repository if the package is installed from a checkout; a wheel has none."""


@dataclass(frozen=True, slots=True)
class PeersFlags:
    """Flags for the workloads and the backends of a comparison."""

    contexts: str = "200,1000,4000"
    """Prompt lengths in tokens; LENGTH:OUTPUT also sets the length of the answers, e.g. 200,1000:200."""
    streams: str = "1,8,32"
    """Numbers of concurrent requests; each is combined with each context."""
    output_len: int = 64
    """Tokens of each answer, for contexts without an own length of answers."""
    max_prompt_tokens: int = 8192
    """Maximum prompt tokens of a workload; larger workloads are omitted."""
    rounds: int = 3
    """Number of rounds; in each, every backend runs all workloads in turn."""
    limit_s: float = 1200.0
    """Maximum seconds of the whole comparison, loading included; workloads that would exceed it are not started."""
    peers: str = "llama.cpp,openvino-genai,mistral.rs,llama_cpp.server"
    """Backends to start if they are installed; empty: none."""
    peer_python: Path | None = None
    """Python interpreter with llama-cpp-python, openvino-genai or mistralrs; None: this one."""
    threads: int = 0
    """Threads of each backend; 0: all cores."""
    only: Literal["all", "engines", "servers"] = "all"
    """Run only engines or only servers, with their workloads."""
    no_suite: Annotated[bool, SWITCH] = False
    """Leave out the workload of four sequential chat prompts of 32 tokens."""
    no_grid: Annotated[bool, SWITCH] = False
    """Leave out the workloads of --contexts and --streams."""
    arrivals: int = 0
    """For servers: length in tokens of long prompts, during which short ones arrive; 0: no such workload."""
    routed: str | None = None
    """For servers: manifest of a router, which Lockstep serves with the model behind every name; clients of the other
    servers route themselves."""


@with_flags
def peers(
    model: Annotated[str, typer.Argument(help="GGUF file that all backends load.")],
    *,
    load: PeersFlags,
    peer_url: Annotated[
        list[str] | None, typer.Option(help="URL of a running Ollama, llama-server or vLLM; may be repeated.")
    ] = None,
    result_filename: Annotated[Path | None, typer.Option(help="JSON file for the result.")] = None,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Compare with llama.cpp, OpenVINO GenAI and running servers: same model, same workloads, in rounds."""
    _require_checkout()
    from benchmarks.comparison.report import as_json as result_of
    from benchmarks.comparison.report import text_of
    from benchmarks.comparison.rounds import ComparisonOptions, run_comparison

    options = ComparisonOptions(
        model=model,
        contexts=tuple(_lengths(part, load.output_len) for part in load.contexts.split(",")),
        streams=_numbers(load.streams, ",", "--streams"),
        max_prompt_tokens=load.max_prompt_tokens,
        rounds=load.rounds,
        limit_s=load.limit_s,
        peers=tuple(filter(None, load.peers.split(","))),
        peer_python=str(load.peer_python or sys.executable),
        peer_urls=tuple(peer_url or ()),
        threads=load.threads,
        suite=not load.no_suite,
        grid=not load.no_grid,
        only=load.only,
        arrivals=load.arrivals,
        routed=load.routed,
    )
    check_outputs(((result_filename, "the result"),))
    comparison = run_comparison(options, lambda sentence: print(sentence, file=sys.stderr))
    result = result_of(comparison)
    if result_filename is not None:
        write_file(result_filename, _lines(result), "the result")
    print(json.dumps(result) if as_json else text_of(comparison))
    if comparison.was_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="Result of any `lockstep bench`, as JSON.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Later result of the same bench.")],
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Show which metrics of two results changed beyond their noise; exit code 1 if any is worse."""
    from lockstep.bench.compare import as_json as content_of
    from lockstep.bench.compare import changes, read_figures, text_of

    found = changes(read_figures(before), read_figures(after))
    print(json.dumps(content_of(found)) if as_json else text_of(found))
    if any(change.verdict == "worse" for change in found):
        raise typer.Exit(EXIT_WORSE)


def _require_checkout() -> None:
    """Make the repository's `benchmarks` importable; UsageError if the package does not run from a checkout."""
    sys.path.insert(0, str(CHECKOUT))
    try:
        import benchmarks.comparison  # noqa: F401  a check that it exists
    except ModuleNotFoundError:
        raise UsageError(
            "`lockstep bench peers` requires a checkout of the repository, because a wheel has no drivers of other "
            "engines; run `make peers` in a checkout, or run `pip install -e .` there and then this command"
        ) from None


def _lines(result: dict[str, Any]) -> bytes:
    return (json.dumps(result, indent=1) + "\n").encode()


def _lengths(text: str, output_len: int) -> tuple[int, int]:
    """Tokens of a prompt and of its answer, from `200` or `1000:200`."""
    prompt, *rest = _numbers(text, ":", "--contexts")
    return prompt, rest[0] if rest else output_len


def _numbers(text: str, separator: str, flag: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(separator))
    except ValueError:
        raise UsageError(f"{flag} is {text!r}; it must be whole numbers with commas, such as 200,1000") from None
