"""`lockstep bench`: load generators for servers, and for the engine in this process."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lockstep.cli import bench_options as load
from lockstep.cli import options as flags
from lockstep.cli import replay_options as asked
from lockstep.cli.flag_groups import show_help_without_command, with_flags
from lockstep.cli.progress import loading_progress
from lockstep.cli.replay_options import settings_of
from lockstep.engine.options import LoadOptions
from lockstep.errors import UsageError

EXIT_ALL_FAILED = 1
EXIT_INTERRUPTED = 130
EXAMPLES = Path("examples")
"""Of the repository, in which the bench is run."""
_ENDPOINTS: Mapping[str, str] = {"openai-chat": "/v1/chat/completions", "openai": "/v1/completions"}

bench_app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@bench_app.callback()
def _bench(context: typer.Context) -> None:
    """Measure a server, or the engine in this process."""
    show_help_without_command(context)


@bench_app.command()
def serve(
    more_goals: load.MoreGoals = None,
    base_url: load.BaseUrl = load.DEFAULT_URL,
    backend: load.Backend = None,
    endpoint: load.Endpoint = None,
    model: load.RemoteModel = None,
    api_key: load.ApiKey = None,
    dataset: load.Dataset = "random",
    random_input_len: load.RandomInputLen = 1024,
    random_output_len: load.RandomOutputLen = 128,
    random_range_ratio: load.RandomRangeRatio = 0.0,
    random_prefix_len: load.RandomPrefixLen = 0,
    num_prompts: load.NumPrompts = None,
    request_rate: load.RequestRate = math.inf,
    burstiness: load.Burstiness = 1.0,
    max_concurrency: load.MaxConcurrency = None,
    seed: load.Seed = 0,
    goodput: load.Goodput = "",
    percentile_metrics: load.PercentileMetrics = "ttft,tpot,itl,e2el",
    metric_percentiles: load.MetricPercentiles = "50,90,99",
    save_result: load.SaveResult = False,
    save_detailed: load.SaveDetailed = False,
    result_filename: load.ResultFile = None,
    num_warmups: load.NumWarmups = 0,
    ignore_eos: load.IgnoreEos = False,
    temperature: load.Temperature = 0.0,
    extra_body: load.ExtraBody = None,
    trace_speed: load.TraceSpeed = 1.0,
    trace_spread: load.TraceSpread = False,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Measure any OpenAI-compatible server in an open loop; the result's keys are those of `vllm bench serve`."""
    from lockstep.bench.protocol import Target
    from lockstep.bench.samples import RandomLengths
    from lockstep.bench.serve import Dataset, ServeOptions, run_serve
    from lockstep.bench.statistics import GOALS, parse_metrics, parse_percentiles
    from lockstep.replay.metrics import parse_goals

    chosen, path = _endpoint(backend, endpoint)
    options = ServeOptions(
        target=Target.parse(base_url, api_key),
        dataset=Dataset.parse(dataset),
        lengths=RandomLengths(random_input_len, random_output_len, random_range_ratio, random_prefix_len),
        backend=chosen,
        endpoint=path,
        model=model,
        num_prompts=num_prompts,
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        seed=seed,
        goals=parse_goals(_goals_text(goodput, more_goals or []), "--goodput", GOALS),
        metrics=parse_metrics(percentile_metrics),
        percentiles=parse_percentiles(metric_percentiles),
        num_warmups=num_warmups,
        ignore_eos=ignore_eos,
        temperature=temperature,
        extra_body=tuple(load.extra_fields(extra_body).items()),
        trace_speed=trace_speed,
        trace_spread=trace_spread,
        shows_progress=not as_json,
    )
    result = run_serve(options, lambda sentence: print(sentence, file=sys.stderr))
    content = result.as_json(detailed=save_detailed)
    if save_result or save_detailed or result_filename is not None:
        _save(content, result_filename or _file_name(content))
    _print_result(result, options, as_json)


def _print_result(result: Any, options: Any, as_json: bool) -> None:
    """Print the figures and say by the exit code what they are worth."""
    from lockstep.bench.statistics import failures, text_of, text_of_failures

    if as_json:
        print(json.dumps(result.figures))
    else:
        print(text_of(result.figures, options.metrics, options.percentiles))
    reasons = failures(result.outcomes)
    if reasons:
        print(text_of_failures(reasons), file=sys.stderr)
    if result.was_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not result.figures["completed"]:
        raise typer.Exit(EXIT_ALL_FAILED)


@bench_app.command()
@with_flags
def throughput(
    model: flags.Model,
    num_prompts: Annotated[int, typer.Option(help="Requests.")] = 64,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 200,
    output_len: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    concurrency: Annotated[int, typer.Option(help="Requests in the engine at once.")] = 32,
    num_warmups: Annotated[int, typer.Option(help="Requests before the run that are not measured.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Same seed, same requests.")] = 0,
    save_result: load.SaveResult = False,
    result_filename: load.ResultFile = None,
    *,
    pool: flags.Pool,
    openvino: flags.OpenVINO,
    cache_dir: flags.CacheDir = None,
    probe: flags.Probe = False,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Measure the engine in this process: requests, tokens and processor time, with no server around it."""
    from lockstep.bench.throughput import ThroughputOptions, run_throughput
    from lockstep.engine.llm import LLM

    options = ThroughputOptions(num_prompts, input_len, output_len, concurrency, temperature, seed, num_warmups)
    engine = flags.checked(replace(pool, max_num_seqs=concurrency))
    loading = LoadOptions(engine, openvino, cache_dir, probe)
    with loading_progress(model) as progress:
        llm = LLM(model, loading, progress=progress)
    with llm, loading_progress(model) as progress:
        result = run_throughput(llm, options, lambda done: progress("requests", done / num_prompts))
    if save_result or result_filename is not None:
        _save(result, result_filename or Path(f"throughput-{llm.model.name}-{_now()}.json"))
    print(json.dumps(result) if as_json else _throughput_text(result))


@bench_app.command()
def cluster(
    examples: Annotated[Path, typer.Option(metavar="DIR", help="Where the manifests of the suites are.")] = EXAMPLES,
    num_calls: Annotated[int, typer.Option(help="Of each suite, alone and together.", min=1, max=100_000)] = 200,
    worker: Annotated[
        Literal["process", "thread"], typer.Option(help="Where the engines run; as in `lockstep serve`.")
    ] = "process",
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Measure what routing and many models cost, on stub models; fails if a manifest does not boot as it must."""
    from lockstep.bench.cluster import ClusterBenchOptions, run_cluster_bench, text_of

    options = ClusterBenchOptions(examples, num_calls, worker)
    results = run_cluster_bench(options, lambda suite: print(f"measuring {suite}", file=sys.stderr))
    print(json.dumps(results) if as_json else text_of(results))
    faults = [fault for result in results for fault in result["faults"]]
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        raise typer.Exit(EXIT_ALL_FAILED)


@bench_app.command()
@with_flags
def replay(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A workload or a trace, as for `lockstep replay`.")],
    settings: asked.Set = None,
    rounds: Annotated[int, typer.Option(help="Times that each way is run; the best counts.", min=1, max=100)] = 3,
    *,
    reading: asked.ReadFlags,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Measure replaying: requests per second, and that counting steps changes no decision; fails if it does."""
    from lockstep.bench.replay import run_replay_bench, text_of

    overrides, options = settings_of(settings), reading.options()
    result = run_replay_bench(file, overrides, options, rounds, lambda sentence: print(sentence, file=sys.stderr))
    print(json.dumps(result) if as_json else text_of(result))
    for fault in result["faults"]:
        print(fault, file=sys.stderr)
    if result["faults"]:
        raise typer.Exit(EXIT_ALL_FAILED)


def _throughput_text(result: Mapping[str, Any]) -> str:
    return (
        f"{result['request_throughput']:.2f} requests/s, {result['output_throughput']:.1f} output tokens/s, "
        f"{result['total_token_throughput']:.1f} total tokens/s, "
        f"{result['cpu_s_per_token'] * 1e3:.3f} ms CPU per output token"
    )


def _endpoint(backend: str | None, endpoint: str | None) -> tuple[str, str]:
    """Backend and path; each follows from the other where only one is given."""
    if endpoint is None:
        backend = backend or "openai-chat"
        return backend, _ENDPOINTS[backend]
    for name, path in _ENDPOINTS.items():
        if endpoint.endswith(path.removeprefix("/v1")):
            if backend not in (None, name):
                raise UsageError(f"--endpoint {endpoint} is that of --backend {name}, not of {backend}")
            return name, endpoint
    raise UsageError(f"--endpoint is {endpoint!r}; it must end with {' or '.join(_ENDPOINTS.values())}")


def _goals_text(goodput: str, more: list[str]) -> str:
    """vLLM writes goals as several words, ``--goodput ttft:500 tpot:50``: the further ones arrive as arguments."""
    if more and not goodput:
        raise UsageError(f"unexpected argument {more[0]!r}; `lockstep bench serve` takes options only")
    return " ".join([goodput, *more])


def _file_name(content: Mapping[str, Any]) -> Path:
    limit = content["max_concurrency"]
    concurrency = "" if limit is None else f"-concurrency{limit}"
    model = str(content["model_id"]).rsplit("/", 1)[-1]
    return Path(f"{content['backend']}-{content['request_rate']}qps{concurrency}-{model}-{content['date']}.json")


def _now() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S")


def _save(content: Mapping[str, Any], path: Path) -> None:
    try:
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--result-filename {path} cannot be written ({error})") from None
    print(f"result written to {path}", file=sys.stderr)
