"""`lockstep bench`: load generators for servers, and for the engine in this process."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lockstep.bench.embed import EmbedOptions
from lockstep.bench.throughput import ThroughputOptions
from lockstep.cli import bench_peers
from lockstep.cli import options as flags
from lockstep.cli import replay_options as shared
from lockstep.cli.flag_groups import SWITCH, Flag, OptionFlags, show_help_without_command, with_flags
from lockstep.cli.progress import loading_progress
from lockstep.cli.replay_options import settings_of
from lockstep.cli.writing import check_outputs, write_file
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.errors import UsageError
from lockstep.executors.options import ExecutorOptions

if TYPE_CHECKING:
    from lockstep.bench.protocol import Target
    from lockstep.bench.serve import ServeOptions, ServeResult

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
EXAMPLES = Path("examples")
"""Directory of the repository's example manifests, relative to its root, where `lockstep bench cluster` is run."""
_ENDPOINTS: Mapping[str, str] = {"openai-chat": "/v1/chat/completions", "openai": "/v1/completions"}

SaveResult = Annotated[bool, typer.Option("--save-result", help="Write the result to a JSON file.")]
ResultFile = Annotated[Path | None, typer.Option("--result-filename", help="Result file; implies --save-result.")]

bench_app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@bench_app.callback()
def _bench(context: typer.Context) -> None:
    """Measure a server, or the engine in this process."""
    show_help_without_command(context)


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """Flags for the server, the load and the reported metrics."""

    base_url: flags.BaseUrl = flags.DEFAULT_URL
    backend: Literal["openai-chat", "openai"] | None = None
    """API of the server: openai-chat, or openai for /v1/completions; None: that of --endpoint, or openai-chat."""
    endpoint: str | None = None
    """Path of the endpoint; None: that of --backend."""
    model: flags.RemoteModel = None
    api_key: flags.ApiKey = None
    dataset: Annotated[str, Flag(also=("dataset-name",))] = "random"
    """Source of the requests: random, trace:FILE or jsonl:FILE."""
    random_input_len: int = 1024
    """Tokens of a random prompt, without those of the chat template."""
    random_output_len: int = 128
    """Tokens of an answer, for random prompts and for JSONL lines without a length."""
    random_range_ratio: float = 0.0
    """Relative variation of random lengths, from 0 to below 1."""
    random_prefix_len: int = 0
    """Tokens of a common prefix of all random prompts."""
    num_prompts: Annotated[int | None, Flag(also=("trace-limit",))] = None
    """Maximum number of requests; None: 100 random ones, files whole."""
    request_rate: float = math.inf
    """Requests per second; inf sends all at once."""
    burstiness: float = 1.0
    """Shape of the gaps between requests: 1 is Poisson, less is burstier."""
    max_concurrency: int | None = None
    """Maximum number of open requests; None: no limit."""
    seed: int = 0
    """Seed of the requests and their times."""
    goodput: str = ""
    """Latency goals in ms for goodput, e.g. ttft:500,tpot:50 (also e2el)."""
    percentile_metrics: str = "ttft,tpot,itl,e2el"
    """Latency metrics to report."""
    metric_percentiles: str = "50,90,99"
    """Percentiles to report."""
    save_result: SaveResult = False
    save_detailed: Annotated[bool, SWITCH] = False
    """Write the result to a JSON file, with the metrics of each request."""
    result_filename: ResultFile = None
    num_warmups: int = 0
    """Number of unmeasured requests before the run."""
    ignore_eos: Annotated[bool, SWITCH] = False
    """Request answers of full length, with no end at an end-of-sequence token."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    extra_body: flags.ExtraBody = None
    trace_speed: float = 1.0
    """Speed-up of a trace: its gaps between arrivals are divided by this number."""
    trace_spread: Annotated[bool, SWITCH] = False
    """Spread requests with the same timestamp evenly up to the next timestamp, for traces with coarse clocks."""
    candidate_url: str | None = None
    """URL of a second server that receives every request, too; the two servers alternate in going first."""
    candidate_api_key: str | None = None
    """API key of the second server."""
    save_pairs: Path | None = None
    """File for the answers of both servers, one pair per line, as input of `lockstep gate`."""

    def options(self, more_goals: list[str], *, shows_progress: bool) -> ServeOptions:
        """Options of the bench; UsageError if a value is invalid or two flags contradict each other."""
        from lockstep.bench.protocol import Target
        from lockstep.bench.samples import RandomLengths
        from lockstep.bench.serve import Dataset, ServeOptions
        from lockstep.bench.statistics import GOALS, parse_metrics, parse_percentiles
        from lockstep.replay.metrics import parse_goals

        backend, endpoint = _endpoint(self.backend, self.endpoint)
        lengths = (self.random_input_len, self.random_output_len, self.random_range_ratio, self.random_prefix_len)
        return ServeOptions(
            target=Target.parse(self.base_url, self.api_key),
            dataset=Dataset.parse(self.dataset),
            lengths=RandomLengths(*lengths),
            backend=backend,
            endpoint=endpoint,
            model=self.model,
            num_prompts=self.num_prompts,
            request_rate=self.request_rate,
            burstiness=self.burstiness,
            max_concurrency=self.max_concurrency,
            seed=self.seed,
            goals=parse_goals(_goals_text(self.goodput, more_goals), "--goodput", GOALS),
            metrics=parse_metrics(self.percentile_metrics),
            percentiles=parse_percentiles(self.metric_percentiles),
            num_warmups=self.num_warmups,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            extra_body=tuple(flags.extra_fields(self.extra_body).items()),
            trace_speed=self.trace_speed,
            trace_spread=self.trace_spread,
            shows_progress=shows_progress,
            candidate=self._candidate(),
        )

    def _candidate(self) -> Target | None:
        from lockstep.bench.protocol import Target

        if self.candidate_url is None:
            if self.save_pairs is not None or self.candidate_api_key is not None:
                raise UsageError("--save-pairs and --candidate-api-key require --candidate-url URL")
            return None
        return Target.parse(self.candidate_url, self.candidate_api_key, "--candidate-url")


@bench_app.command()
@with_flags
def serve(
    more_goals: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="")] = None,
    *,
    load: ServeFlags,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Measure any OpenAI-compatible server in an open loop; the result's keys are those of `vllm bench serve`."""
    from lockstep.bench.serve import lines_of, run_serve

    options = load.options(more_goals or [], shows_progress=not as_json)
    check_outputs(((load.result_filename, "the result"), (load.save_pairs, "the pairs")))
    result = run_serve(options, lambda sentence: print(sentence, file=sys.stderr))
    content = result.as_json(detailed=load.save_detailed)
    if load.save_result or load.save_detailed or load.result_filename is not None:
        _save(content, load.result_filename or _file_name(content))
    if load.save_pairs is not None:
        pairs = lines_of(result.pairs, options.seed, result.figures["model_id"])
        write_file(load.save_pairs, pairs, "the pairs")
        print(f"{len(result.pairs)} pairs in {load.save_pairs}: lockstep gate {load.save_pairs}", file=sys.stderr)
    _print_result(result, options, as_json)


def _print_result(result: ServeResult, options: ServeOptions, as_json: bool) -> None:
    """Print the metrics; exit with a code above 0 if the run was interrupted or no request completed."""
    from lockstep.bench.statistics import failures, text_of, text_of_failures

    if as_json:
        print(json.dumps(result.figures))
    else:
        print(text_of(result.figures, options.metrics, options.percentiles))
        if "candidate" in result.figures:
            print("\nCandidate:")
            print(text_of(result.figures | result.figures["candidate"], options.metrics, options.percentiles))
    reasons = failures(result.outcomes)
    if reasons:
        print(text_of_failures(reasons), file=sys.stderr)
    if result.was_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not result.figures["completed"]:
        raise typer.Exit(EXIT_FAILED)


THROUGHPUT_FLAGS = OptionFlags(
    ThroughputOptions,
    dict.fromkeys(
        ("num_prompts", "input_len", "output_len", "concurrency", "num_warmups", "temperature", "seed"), Flag()
    ),
)


@dataclass(frozen=True, slots=True)
class ThroughputRun:
    """Flags of `lockstep bench throughput`."""

    model: flags.Model
    load: Annotated[ThroughputOptions, THROUGHPUT_FLAGS] = field(default_factory=ThroughputOptions)
    save_result: SaveResult = False
    result_filename: ResultFile = None
    pool: flags.Pool = field(default_factory=EngineOptions)
    executor: flags.Executor = field(default_factory=ExecutorOptions)
    cache_dir: flags.CacheDir = None
    as_json: flags.Json = False
    debug: flags.Debug = False


@bench_app.command()
@with_flags
def throughput(given: ThroughputRun) -> None:
    """Measure the engine in this process, without a server: requests, tokens and processor time."""
    from lockstep.bench.throughput import run_throughput, text_of
    from lockstep.engine.llm import LLM

    check_outputs(((given.result_filename, "the result"),))
    engine = flags.checked(replace(given.pool, max_num_seqs=given.load.concurrency))
    loading = LoadOptions(engine, given.executor, given.cache_dir)
    with loading_progress(given.model) as progress:
        llm = LLM(given.model, loading, progress=progress)
    with llm, loading_progress(given.model) as progress:
        result = run_throughput(llm, given.load, lambda done: progress("requests", done / given.load.num_prompts))
    _save_named(result, given.save_result, given.result_filename, "throughput")
    print(json.dumps(result) if given.as_json else text_of(result))


EMBED_FLAGS = OptionFlags(
    EmbedOptions, dict.fromkeys(("lengths", "batch_sizes", "num_texts", "rounds", "seed"), Flag())
)


@dataclass(frozen=True, slots=True)
class EmbedRun:
    """Flags of `lockstep bench embed`."""

    model: flags.Model
    load: Annotated[EmbedOptions, EMBED_FLAGS] = field(default_factory=EmbedOptions)
    task: flags.TaskFlag = None
    save_result: SaveResult = False
    result_filename: ResultFile = None
    pool: flags.Pool = field(default_factory=EngineOptions)
    executor: flags.Executor = field(default_factory=ExecutorOptions)
    cache_dir: flags.CacheDir = None
    as_json: flags.Json = False
    debug: flags.Debug = False


@bench_app.command()
@with_flags
def embed(given: EmbedRun) -> None:
    """Measure an embedding model in this process: texts and tokens per second, by length and number of texts."""
    from lockstep.bench.embed import run_embed_bench, text_of
    from lockstep.engine.llm import LLM

    check_outputs(((given.result_filename, "the result"),))
    engine = flags.checked(replace(given.pool, max_num_seqs=given.load.largest_batch))
    loading = LoadOptions(engine, given.executor, given.cache_dir, task=given.task)
    with loading_progress(given.model) as progress:
        llm = LLM(given.model, loading, progress=progress)
    with llm, loading_progress(given.model) as progress:
        result = run_embed_bench(llm, given.load, lambda done: progress("texts", done))
    _save_named(result, given.save_result, given.result_filename, "embed")
    print(json.dumps(result) if given.as_json else text_of(result))


@bench_app.command()
def cluster(
    examples: Annotated[Path, typer.Option(metavar="DIR", help="Directory with the suites' manifests.")] = EXAMPLES,
    num_calls: Annotated[int, typer.Option(help="Sequential and concurrent calls.", min=1, max=100_000)] = 200,
    worker: Annotated[
        Literal["process", "thread"], typer.Option(help="Run engines in a process or in a thread of this one.")
    ] = "process",
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Measure the cost of routing and of many models, with stub models; fails if a manifest does not boot correctly."""
    from lockstep.bench.cluster import ClusterBenchOptions, run_cluster_bench, text_of

    options = ClusterBenchOptions(examples, num_calls, worker)
    results = run_cluster_bench(options, lambda suite: print(f"measuring {suite}", file=sys.stderr))
    print(json.dumps(results) if as_json else text_of(results))
    _print_faults([fault for result in results for fault in result["faults"]])


@bench_app.command()
@with_flags
def replay(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A workload or a trace, as for `lockstep replay`.")],
    settings: shared.Set = None,
    rounds: Annotated[int, typer.Option(help="Runs per method, of which the fastest counts.", min=1, max=100)] = 3,
    *,
    reading: shared.ReadFlags,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Measure the speed of replays, and check that computing repeated steps at once changes no decision."""
    from lockstep.bench.replay import run_replay_bench, text_of

    overrides, options = settings_of(settings), reading.options()
    result = run_replay_bench(file, overrides, options, rounds, lambda sentence: print(sentence, file=sys.stderr))
    print(json.dumps(result) if as_json else text_of(result))
    _print_faults(result["faults"])


bench_app.command()(bench_peers.peers)
bench_app.command()(bench_peers.compare)


def _print_faults(faults: Sequence[str]) -> None:
    """Print the faults of a result, and exit with `EXIT_FAILED` if there are any."""
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        raise typer.Exit(EXIT_FAILED)


def _endpoint(backend: str | None, endpoint: str | None) -> tuple[str, str]:
    """Backend and path of the endpoint; if only one of them is given, it determines the other."""
    if endpoint is None:
        backend = backend or "openai-chat"
        return backend, _ENDPOINTS[backend]
    for name, path in _ENDPOINTS.items():
        if endpoint.endswith(path.removeprefix("/v1")):
            if backend not in (None, name):
                raise UsageError(f"--endpoint {endpoint} requires --backend {name}, but --backend is {backend}")
            return name, endpoint
    raise UsageError(f"--endpoint is {endpoint!r}; it must end with {' or '.join(_ENDPOINTS.values())}")


def _goals_text(goodput: str, more: list[str]) -> str:
    """Goals as one text. vLLM's form is ``--goodput ttft:500 tpot:50``, in which all but the first are arguments."""
    if more and not goodput:
        raise UsageError(f"unexpected argument {more[0]!r}; `lockstep bench serve` takes options only")
    return " ".join([goodput, *more])


def _file_name(content: Mapping[str, Any]) -> Path:
    limit = content["max_concurrency"]
    concurrency = "" if limit is None else f"-concurrency{limit}"
    model = str(content["model_id"]).rsplit("/", 1)[-1]
    return Path(f"{content['backend']}-{content['request_rate']}qps{concurrency}-{model}-{content['date']}.json")


def _save_named(result: Mapping[str, Any], is_saved: bool, path: Path | None, kind: str) -> None:
    """Write a result if a flag requests it; without a path, to a file that is named after the model and the time."""
    if is_saved or path is not None:
        _save(result, path or Path(f"{kind}-{result['model_id']}-{datetime.now():%Y%m%d-%H%M%S}.json"))


def _save(content: Mapping[str, Any], path: Path) -> None:
    write_file(path, json.dumps(content).encode() + b"\n", "the result")
