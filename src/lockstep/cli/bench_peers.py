"""`lockstep bench peers` and `lockstep bench compare`: Lockstep beside other engines, and two results side by side.

The comparison with peers itself is in the repository's `benchmarks/comparison`, which is no part of a wheel.
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
    """The work, and who takes part."""

    contexts: str = "200,1000,4000"
    """Tokens of a prompt, where it differs with those of its answer: 200,1000:200."""
    streams: str = "1,8,32"
    """Requests at once; each with each context."""
    output_len: int = 64
    """Tokens of each answer, where a context does not say."""
    max_prompt_tokens: int = 8192
    """Maximum prompt tokens of a workload; larger workloads are omitted."""
    rounds: int = 3
    """Number of times that each backend does all the work, in turn."""
    limit_s: float = 1200.0
    """Of the whole comparison, loading included; what would not end by then is not begun."""
    peers: str = "llama.cpp,openvino-genai,mistral.rs,llama_cpp.server"
    """Which to start, where they are installed; empty: none."""
    peer_python: Path | None = None
    """Python that has llama-cpp-python, openvino-genai or mistralrs; None: this one."""
    threads: int = 0
    """Threads of each backend; 0: all cores."""
    only: Literal["all", "engines", "servers"] = "all"
    """Run only engines or only servers, and their work."""
    no_suite: Annotated[bool, SWITCH] = False
    """Without the four chat prompts of 32 tokens, one after the other."""
    no_grid: Annotated[bool, SWITCH] = False
    """Without contexts by streams."""
    arrivals: int = 0
    """Servers: short prompts arrive among long ones of so many tokens; 0: not."""
    routed: str | None = None
    """Servers: a manifest, the model behind every name, against clients that route."""


@with_flags
def peers(
    model: Annotated[str, typer.Argument(help="A GGUF file, which all can read.")],
    *,
    load: PeersFlags,
    peer_url: Annotated[
        list[str] | None, typer.Option(help="A running Ollama, llama-server or vLLM; may be repeated.")
    ] = None,
    result_filename: Annotated[Path | None, typer.Option(help="Write the result as a JSON file.")] = None,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Race against llama.cpp, OpenVINO GenAI and running servers: same model, same work, in rounds."""
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
    before: Annotated[Path, typer.Argument(metavar="A", help="A result: the JSON of any `lockstep bench`.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="A later one of the same work.")],
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Say which figures of two results moved beyond their noise; exit code 1 if any is worse."""
    from lockstep.bench.compare import as_json as content_of
    from lockstep.bench.compare import changes, read_figures, text_of

    found = changes(read_figures(before), read_figures(after))
    print(json.dumps(content_of(found)) if as_json else text_of(found))
    if any(change.verdict == "worse" for change in found):
        raise typer.Exit(EXIT_WORSE)


def _require_checkout() -> None:
    """Make the repository's `benchmarks` importable; UsageError if the package is not run from a checkout."""
    sys.path.insert(0, str(CHECKOUT))
    try:
        import benchmarks.comparison  # noqa: F401  to find out whether it is there
    except ModuleNotFoundError:
        raise UsageError(
            "`lockstep bench peers` needs a checkout of the repository: a wheel has no drivers of other engines; "
            "run `make peers` in a checkout, or run `pip install -e .` there and then this command"
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
        raise UsageError(f"{flag} has {text!r}; write whole numbers with commas, such as 200,1000") from None
