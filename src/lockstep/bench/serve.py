"""Server bench: runs a load against a server, and computes the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from lockstep.bench.client import Outcome
from lockstep.bench.prompts import Calibration, RequestTemplate, calibrate, prompt_of
from lockstep.bench.protocol import Target
from lockstep.bench.remote import RemoteServer
from lockstep.bench.runner import PlannedRequest, Run, RunProgress, arrival_times, run_load, shown_progress
from lockstep.bench.samples import MAX_SAMPLES, RandomLengths, Sample, jsonl_samples, random_samples, trace_samples
from lockstep.bench.statistics import figures, per_request
from lockstep.errors import UsageError
from lockstep.replay.readers import ReadOptions

DEFAULT_NUM_PROMPTS = 100
"""Default number of random requests. Files are read completely."""
_CHAT = "/chat/completions"


@dataclass(frozen=True, slots=True)
class Dataset:
    """Source of requests."""

    kind: Literal["random", "trace", "jsonl"]
    path: Path | None = None

    @classmethod
    def parse(cls, text: str) -> Dataset:
        """Parse ``random``, ``trace:FILE`` or ``jsonl:FILE``; UsageError for any other text."""
        kind, _, name = text.partition(":")
        if text == "random":
            return cls("random")
        if kind == "trace" and name:
            return cls("trace", Path(name).expanduser())
        if kind == "jsonl" and name:
            return cls("jsonl", Path(name).expanduser())
        raise UsageError(f"--dataset is {text!r}; it must be random, trace:FILE or jsonl:FILE")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of a server bench: the load and the reported metrics."""

    target: Target
    dataset: Dataset
    lengths: RandomLengths
    """Lengths of random requests. The output length also applies to JSON lines without one."""
    backend: str = "openai-chat"
    endpoint: str = "/v1/chat/completions"
    model: str | None = None
    num_prompts: int | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0
    goals: Mapping[str, float] = field(default_factory=dict)
    metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    percentiles: tuple[float, ...] = (50.0, 90.0, 99.0)
    num_warmups: int = 0
    ignore_eos: bool = False
    temperature: float | None = 0.0
    extra_body: tuple[tuple[str, Any], ...] = ()
    trace_speed: float = 1.0
    trace_spread: bool = False
    shows_progress: bool = True
    candidate: Target | None = None
    """Second server, which receives each request, too; None: there is none."""

    def __post_init__(self) -> None:
        if not self.request_rate > 0 or not self.burstiness > 0 or not self.trace_speed > 0:
            raise UsageError("--request-rate, --burstiness and --trace-speed must be above 0 (inf sends all at once)")
        if self.num_prompts is not None and not 1 <= self.num_prompts <= MAX_SAMPLES:
            raise UsageError(f"--num-prompts is {self.num_prompts}; it must be from 1 to {MAX_SAMPLES:,}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise UsageError(f"--max-concurrency is {self.max_concurrency}; it must be at least 1")
        if self.num_warmups < 0 or self.seed < 0:
            raise UsageError("--num-warmups and --seed must not be negative")
        self._check_combinations()

    def _check_combinations(self) -> None:
        """Reject options that have no effect."""
        is_trace, has_rate = self.dataset.kind == "trace", not math.isinf(self.request_rate)
        if is_trace and has_rate:
            raise UsageError("--request-rate does not apply to a trace, which has its own times; see --trace-speed")
        if self.burstiness != 1.0 and not has_rate:
            raise UsageError("--burstiness requires --request-rate, because it shapes the gaps between requests")
        if not is_trace and (self.trace_speed != 1.0 or self.trace_spread):
            raise UsageError("--trace-speed and --trace-spread require --dataset trace:FILE")

    @property
    def is_chat(self) -> bool:
        return self.endpoint.endswith(_CHAT)

    @property
    def is_timed(self) -> bool:
        """True if requests have due times, from which latencies are measured."""
        return self.dataset.kind == "trace" or not math.isinf(self.request_rate)


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """Outcomes of one request on both servers; None: interrupted before the end."""

    index: int
    """Index of the request in the data set."""
    baseline: Outcome | None
    candidate: Outcome | None


@dataclass(frozen=True, slots=True)
class ServeResult:
    """Metrics of a run, and the outcomes that they are computed from."""

    figures: dict[str, Any]
    """Metrics by name, in the form of the JSON output."""
    outcomes: list[Outcome]
    was_interrupted: bool
    pairs: tuple[AnswerPair, ...] = ()
    """Outcomes of each request on both servers; empty without a candidate."""

    def as_json(self, *, detailed: bool) -> dict[str, Any]:
        return self.figures | (per_request(self.outcomes) if detailed else {})


def samples_of(options: ServeOptions) -> tuple[Sample, ...]:
    """Requests of the data set. Those of a trace have due times."""
    dataset, limit = options.dataset, options.num_prompts or MAX_SAMPLES
    if dataset.path is None:
        return random_samples(options.num_prompts or DEFAULT_NUM_PROMPTS, options.lengths, options.seed)
    if dataset.kind == "trace":
        seed = options.seed if options.trace_spread else None
        return trace_samples(dataset.path, ReadOptions(options.trace_speed, limit, seed))
    try:
        with dataset.path.open(encoding="utf-8") as lines:
            return jsonl_samples(lines, dataset.path.name, options.lengths.output_tokens, limit)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--dataset {dataset.kind}:{dataset.path} cannot be read ({error})") from None


def run_serve(options: ServeOptions, report: Callable[[str], None]) -> ServeResult:
    """Measure a server.

    Args:
        report: called with a line about each stage.

    Raises:
        UsageError, TraceError: the data set cannot be read.
        RemoteError: the server cannot be reached. Failures of single requests are part of the result.
    """
    samples = samples_of(options)
    if not options.is_chat and any(isinstance(part, dict) for sample in samples for part in sample.recipe):
        raise UsageError("the data set has conversations (messages), which require --backend openai-chat")
    with RemoteServer(options.target) as remote:
        model = remote.model_or_first(options.model)
        template = RequestTemplate(model, options.is_chat, options.temperature, options.ignore_eos, options.extra_body)
        calibration = calibrate(remote, template, options.endpoint, samples, options.seed)
    jobs = _jobs(options, template, calibration, samples)
    targets = [options.target, *([] if options.candidate is None else [options.candidate])]
    if options.num_warmups:
        of_each = options.num_warmups * len(targets)
        warmups = [replace(jobs[i % len(jobs)], due_s=None, prompt_tokens=None) for i in range(of_each)]
        report(f"{options.num_warmups} warm-up requests")
        warm = run_load(targets, warmups, options.max_concurrency, RunProgress(len(warmups)))
        if warm.was_interrupted:
            raise KeyboardInterrupt
    where = " and ".join(f"{target.url}{options.endpoint}" for target in targets)
    report(f"{len(samples)} requests to {where}, model {model}, prompts {calibration.units.method}")
    with shown_progress(len(jobs), options.shows_progress) as run_progress:
        run = run_load(targets, jobs, options.max_concurrency, run_progress)
    result = _result(options, model, jobs, run)
    if options.candidate is None:
        return result
    return _with_pairs(options, result, pairs_of(jobs, run.outcomes))


def _jobs(
    options: ServeOptions, template: RequestTemplate, calibration: Calibration, samples: Sequence[Sample]
) -> list[PlannedRequest]:
    times: Sequence[float | None] = [sample.at_s for sample in samples]
    if options.dataset.kind != "trace":
        due = arrival_times(len(samples), options.request_rate, options.burstiness, options.seed)
        times = due if options.is_timed else [None] * len(samples)

    def writer(index: int, sample: Sample, target: Target) -> Callable[[], bytes]:
        def write() -> bytes:
            prompt = prompt_of(sample, calibration.units, options.seed, calibration.corrections)
            body = template.body(prompt, sample.output_tokens)
            return target.post(options.endpoint, body, {"X-Request-Id": request_id(options.seed, index)})

        return write

    targets = list(enumerate([options.target] if options.candidate is None else [options.target, options.candidate]))
    return [
        PlannedRequest(at_s, writer(index, sample, target), sample.input_tokens, side)
        for index, (at_s, sample) in enumerate(zip(times, samples, strict=True))
        for side, target in (targets if index % 2 == 0 else reversed(targets))
    ]


def _with_pairs(options: ServeOptions, result: ServeResult, pairs: Sequence[AnswerPair]) -> ServeResult:
    """Add the pairs and the candidate's metrics to a result."""
    done = [pair.candidate for pair in pairs if pair.candidate is not None]
    duration_s = float(result.figures["duration"])
    candidate = figures(done, duration_s, options.metrics, options.percentiles, options.goals)
    return replace(result, figures=result.figures | {"candidate": candidate}, pairs=tuple(pairs))


def _result(options: ServeOptions, model: str, jobs: Sequence[PlannedRequest], run: Run) -> ServeResult:
    outcomes = [outcome for job, outcome in zip(jobs, run.outcomes, strict=True) if outcome and job.target == 0]
    total_tokens = sum(outcome.output_tokens for outcome in outcomes)
    delays_ms = [outcome.send_delay_s * 1e3 for outcome in outcomes] or [0.0]
    rate = "inf" if math.isinf(options.request_rate) else options.request_rate
    result: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": options.backend,
        "model_id": model,
        "num_prompts": sum(job.target == 0 for job in jobs),
        "request_rate": rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }
    result |= figures(outcomes, run.duration_s, options.metrics, options.percentiles, options.goals)
    result |= {
        "interrupted": sum(job.target == 0 for job in jobs) - len(outcomes),
        "client_cpu_us_per_token": run.cpu_s * 1e6 / total_tokens if total_tokens else None,
        "p99_send_delay_ms": float(np.percentile(delays_ms, 99)),
    }
    return ServeResult(result, outcomes, run.was_interrupted)


def request_id(seed: int, index: int) -> str:
    """Id of a request on both servers, for their logs and recordings."""
    return f"bench-{seed}-{index}"


def pairs_of(jobs: Sequence[PlannedRequest], outcomes: Sequence[Outcome | None]) -> list[AnswerPair]:
    """Pair the outcomes of a run in which two successive jobs, in either order, are the same request."""
    pairs = []
    for index in range(len(jobs) // 2):
        both = {jobs[at].target: outcomes[at] for at in (2 * index, 2 * index + 1)}
        pairs.append(AnswerPair(index, both[0], both[1]))
    return pairs


def lines_of(pairs: Iterable[AnswerPair], seed: int, model: str) -> bytes:
    """Pairs as JSON lines for `lockstep gate`, without pairs that were interrupted on both servers."""
    encode = msgspec.json.encode
    lines = []
    for pair in pairs:
        sides = {"baseline": pair.baseline, "candidate": pair.candidate}
        ended = {side: _observation(outcome) for side, outcome in sides.items() if outcome is not None}
        if ended:
            line = {"request_id": request_id(seed, pair.index), "index": pair.index, "model": model, **ended}
            lines.append(encode(line) + b"\n")
    return b"".join(lines)


def _observation(outcome: Outcome) -> dict[str, Any]:
    """Fields of an answer's observation. Times are in milliseconds, except the start ``ts`` in seconds."""
    if not outcome.is_success:
        return {"ts": outcome.start_s, "ok": False, "error": outcome.error}
    return {
        "ts": outcome.start_s,
        "ok": True,
        "latency_ms": outcome.e2el_s * 1e3,
        "ttft_ms": outcome.ttft_s * 1e3,
        "token_latencies_ms": [gap_s * 1e3 for gap_s in outcome.itl_s],
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens": outcome.output_tokens,
        "text": outcome.text,
    }
