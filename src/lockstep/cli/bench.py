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
"""Of the repository, in which the bench is run."""
_ENDPOINTS: Mapping[str, str] = {"openai-chat": "/v1/chat/completions", "openai": "/v1/completions"}

SaveResult = Annotated[bool, typer.Option("--save-result", help="Write the result as a JSON file.")]
ResultFile = Annotated[Path | None, typer.Option("--result-filename", help="Its name; implies --save-result.")]

bench_app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@bench_app.callback()
def _bench(context: typer.Context) -> None:
    """Measure a server, or the engine in this process."""
    show_help_without_command(context)


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """The server, the load and the figures that are wanted."""

    base_url: flags.BaseUrl = flags.DEFAULT_URL
    backend: Literal["openai-chat", "openai"] | None = None
    """openai-chat or openai, which is /v1/completions."""
    endpoint: str | None = None
    """Path of the endpoint, by default the backend's."""
    model: flags.RemoteModel = None
    api_key: flags.ApiKey = None
    dataset: Annotated[str, Flag(also=("dataset-name",))] = "random"
    """random, trace:FILE or jsonl:FILE."""
    random_input_len: int = 1024
    """Tokens of a prompt, without the chat template's."""
    random_output_len: int = 128
    """Tokens of an answer; also of JSONL lines that do not say."""
    random_range_ratio: float = 0.0
    """Lengths vary by this part, 0 to below 1."""
    random_prefix_len: int = 0
    """Tokens that all prompts share, in front."""
    num_prompts: Annotated[int | None, Flag(also=("trace-limit",))] = None
    """Requests at most; None: 100 random ones, files whole."""
    request_rate: float = math.inf
    """Requests per second; inf sends all at once."""
    burstiness: float = 1.0
    """Shape of the gaps: 1 is Poisson, less is burstier."""
    max_concurrency: int | None = None
    """Requests that are open at once."""
    seed: int = 0
    """Same seed, same requests at the same times."""
    goodput: str = ""
    """Goals in ms, such as ttft:500,tpot:50 (also e2el)."""
    percentile_metrics: str = "ttft,tpot,itl,e2el"
    """Which of these to report."""
    metric_percentiles: str = "50,90,99"
    """Which percentiles to report."""
    save_result: SaveResult = False
    save_detailed: Annotated[bool, SWITCH] = False
    """The same with the figures of each request."""
    result_filename: ResultFile = None
    num_warmups: int = 0
    """Requests before the run that are not measured."""
    ignore_eos: Annotated[bool, SWITCH] = False
    """Ask for answers of the whole length."""
    temperature: float = 0.0
    """0 is greedy."""
    extra_body: flags.ExtraBody = None
    trace_speed: float = 1.0
    """Replay a trace so many times as fast."""
    trace_spread: Annotated[bool, SWITCH] = False
    """Spread requests of one timestamp up to the next, for coarse clocks."""
    candidate_url: str | None = None
    """A second server that also gets every request; the two servers alternate as the first."""
    candidate_api_key: str | None = None
    """The second server's key."""
    save_pairs: Path | None = None
    """Write what both answered, a pair a line, for `lockstep gate`."""

    def options(self, more_goals: list[str], *, shows_progress: bool) -> ServeOptions:
        """As the bench takes them; UsageError where a value cannot be, or two do not fit."""
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
                raise UsageError("--save-pairs and --candidate-api-key need a second server: --candidate-url URL")
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
    """Print the figures and say by the exit code what they are worth."""
    from lockstep.bench.statistics import failures, text_of, text_of_failures

    if as_json:
        print(json.dumps(result.figures))
    else:
        print(text_of(result.figures, options.metrics, options.percentiles))
        if "candidate" in result.figures:
            print("\nThe candidate:")
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
    """Measure the engine in this process: requests, tokens and processor time, with no server around it."""
    from lockstep.bench.throughput import run_throughput, text_of
    from lockstep.engine.llm import LLM

    check_outputs(((given.result_filename, "the result"),))
    engine = flags.checked(replace(given.pool, max_num_seqs=given.load.concurrency))
    loading = LoadOptions(engine, given.executor, given.cache_dir)
    with loading_progress(given.model) as progress:
        llm = LLM(given.model, loading, progress=progress)
    with llm, loading_progress(given.model) as progress:
        result = run_throughput(llm, given.load, lambda done: progress("requests", done / given.load.num_prompts))
    if given.save_result or given.result_filename is not None:
        _save(result, given.result_filename or Path(f"throughput-{llm.model.name}-{datetime.now():%Y%m%d-%H%M%S}.json"))
    print(json.dumps(result) if given.as_json else text_of(result))


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
    _print_faults([fault for result in results for fault in result["faults"]])


@bench_app.command()
@with_flags
def replay(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A workload or a trace, as for `lockstep replay`.")],
    settings: shared.Set = None,
    rounds: Annotated[int, typer.Option(help="Times that each way is run; the best counts.", min=1, max=100)] = 3,
    *,
    reading: shared.ReadFlags,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Measure replaying: requests per second, and that counting steps changes no decision; fails if it does."""
    from lockstep.bench.replay import run_replay_bench, text_of

    overrides, options = settings_of(settings), reading.options()
    result = run_replay_bench(file, overrides, options, rounds, lambda sentence: print(sentence, file=sys.stderr))
    print(json.dumps(result) if as_json else text_of(result))
    _print_faults(result["faults"])


bench_app.command()(bench_peers.peers)
bench_app.command()(bench_peers.compare)


def _print_faults(faults: Sequence[str]) -> None:
    """Print what is wrong with a result, and end the command with `EXIT_FAILED` if anything is."""
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        raise typer.Exit(EXIT_FAILED)


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


def _save(content: Mapping[str, Any], path: Path) -> None:
    write_file(path, json.dumps(content).encode() + b"\n", "the result")
