"""Scaling of the engine: speed and time to first token by concurrency and prompt length, steps, memory per sequence.

    python -m tools.random_models gguf smollm2-135m Q8_0 model.gguf
    python -m benchmarks.scaling model.gguf --result-filename scaling.json

It is a comparison with one backend (`lockstep bench peers`), so its cells are measured like those of a comparison, and
`lockstep bench compare` reads its result. Cells with more prompt tokens than the limit are omitted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.comparison.backends import Engine, trial
from benchmarks.comparison.report import as_json
from benchmarks.comparison.rounds import OURS, Comparison, ComparisonOptions, run_comparison
from benchmarks.comparison.workloads import Workload
from lockstep.bench.prompts import Units
from lockstep.executors.machine import available_cores, machine_name
from lockstep.version import __version__

OWN = OURS["engine"]
TABLES: Mapping[str, tuple[str, Callable[[float, int], float]]] = {
    "Output tokens per second": ("output_throughput", lambda value, streams: value),
    "Time to first token, ms (median of simultaneous requests)": ("ttft_ms", lambda value, streams: value),
    "Step, ms, while every stream decodes": ("decode_throughput", lambda value, streams: streams / value * 1e3),
    "Processor time per output token, ms": ("cpu_ms_per_token", lambda value, streams: value),
}
"""Figure of each table, and the conversion to its displayed value."""


def table(comparison: Comparison, title: str) -> str:
    """Markdown table of one figure: a row per prompt length, a column per concurrency; medians of the rounds."""
    options, (figure, shown) = comparison.options, TABLES[title]
    lines = [f"### {title}", "", f"| prompt | {' | '.join(f'x{streams}' for streams in options.streams)} |"]
    lines.append(f"|---|{'---|' * len(options.streams)}")
    for context, output in options.contexts:
        cells = []
        for streams in options.streams:
            rounds = comparison.seen.get((Workload(context, streams, output).name, OWN), {}).values()
            values = [found[figure] for found in rounds if figure in found]
            value = shown(statistics.median(values), streams) if values else None
            cells.append("" if value is None else f"{value:,.{1 if value < 100 else 0}f}")
        lines.append(f"| {context:,} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def memory(model: str, prompts: Sequence[int], threads: int) -> tuple[str, dict[str, float]]:
    """Resident memory of new processes after one workload each, as Markdown and by the workload's name.

    A pool grows in huge pages of 2 MB, two per layer, so few sequences are not representative: many are compared with
        one.
    """
    one, many = Workload(1000, 1, 16), Workload(1000, 32, 16)
    lines = [
        "### Resident memory of a process after one workload",
        "",
        "| work | MB | tokens computed |",
        "|---|---|---|",
    ]
    found: dict[Workload, float] = {}
    for work in (one, many, *(Workload(prompt, 1, 16) for prompt in prompts if prompt > one.context)):
        print(f"memory of {work.name}", file=sys.stderr)
        engine = Engine(OWN, sys.executable, model, threads, [work])
        try:
            units = Units(ids=tuple(range(300, engine.vocabulary or 301)))
            engine.warm(work, units)
            found[work] = engine.run(work, units, 1).memory_mb or 0.0
        finally:
            engine.close()
        lines.append(f"| {work.name} | {found[work]:,.0f} | {tokens_of(work):,} |")
    each = (found[many] - found[one]) / (tokens_of(many) - tokens_of(one)) * 1e3
    lines += ["", f"A sequence takes {each:.1f} MB per 1,000 tokens (x{many.streams} beside x{one.streams}).", ""]
    return "\n".join(lines), {work.name: mb for work, mb in found.items()}


def tokens_of(work: Workload) -> int:
    """Number of tokens with KV in a process at the end, including those of the trial."""
    return sum(each.streams * (each.context + each.output) for each in (trial(work), work))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 200, 1000, 4000, 8000])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument(
        "--max-prompt-tokens",
        type=int,
        default=8192,
        help="maximum prompt tokens of a cell; larger cells are omitted (default: 8192)",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--limit-s",
        type=float,
        default=300.0,
        help="time limit of the grid in seconds; memory takes half a minute more",
    )
    parser.add_argument("--threads", type=int, default=0, help="threads; 0: all cores (default: 0)")
    parser.add_argument("--result-filename", type=Path)
    arguments = parser.parse_args()
    options = ComparisonOptions(
        arguments.model,
        tuple((prompt, arguments.output_len) for prompt in arguments.prompts),
        tuple(arguments.streams),
        max_prompt_tokens=arguments.max_prompt_tokens,
        rounds=arguments.rounds,
        limit_s=arguments.limit_s,
        peers=(),
        threads=arguments.threads,
        only="engines",
        suite=False,
    )
    comparison = run_comparison(options, lambda sentence: print(sentence, file=sys.stderr))
    print(f"{machine_name()}, Lockstep {__version__}, {Path(arguments.model).name}, {comparison.duration_s:.0f} s\n")
    for title in TABLES:
        print(table(comparison, title))
    result = as_json(comparison) | {"kind": "scaling"}
    if not comparison.was_interrupted:
        text, sizes = memory(arguments.model, arguments.prompts, arguments.threads or available_cores())
        print(text)
        result["figures"] |= {f"memory of {name} MB": {"values": [mb], "better": "less"} for name, mb in sizes.items()}
    if arguments.result_filename is not None:
        arguments.result_filename.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
