"""Workloads of a comparison: define their requests, and compute statistics from the times of their tokens."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from lockstep.bench.runner import arrival_times
from lockstep.bench.samples import RandomLengths, Sample, TokenSegment, random_samples

Kind = Literal["grid", "prompts", "arrivals", "routed"]
SUITE = (
    "Explain in two sentences why the sky is blue.",
    "Write a function that reverses a linked list.",
    "A customer was charged twice for one order. Draft a short, friendly answer.",
    "List three differences between a process and a thread.",
)
"""Short prompts one after the other, as in scripts that compare local servers."""
SHORT, SHORT_OUTPUT = 32, 4
"""Tokens of the short prompts that arrive among long ones, and of their answers."""
NUM_LONG, SHORT_PER_LONG = 5, 16
NUM_ROUTED = 8
"""Number of requests of a routed workload, one after the other."""
FIGURES: Mapping[str, tuple[str, bool]] = {
    "output_throughput": ("output tok/s", True),
    "decode_throughput": ("decode tok/s", True),
    "ttft_ms": ("TTFT ms", False),
    "ttft_p99_ms": ("TTFT p99 ms", False),
    "request_ms": ("request ms", False),
    "hop_1_ms": ("hop 1 ms", False),
    "hop_2_ms": ("hop 2 ms", False),
    "cpu_ms_per_token": ("CPU ms/token", False),
    "memory_mb": ("MB", False),
}
"""Figures of a workload with their titles; True: more is better."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one workload: random prompts at once (grid), chat prompts one after the other (prompts), short
    prompts while long ones arrive (arrivals), or requests of two hops one after the other (routed)."""

    context: int
    """Tokens of each prompt; for arrivals, of the long prompts."""
    streams: int = 1
    output: int = 64
    kind: Kind = "grid"
    gap_s: float = 0.0
    """Mean time between the arrivals of two long prompts, in seconds."""

    @property
    def name(self) -> str:
        names: Mapping[Kind, str] = {
            "grid": f"{self.context}/{self.output} x{self.streams}",
            "prompts": f"{len(SUITE)} prompts",
            "arrivals": f"{SHORT} among {self.context}",
            "routed": "routed",
        }
        return names[self.kind]

    @property
    def num_prompt_tokens(self) -> int:
        """Total tokens of all random prompts."""
        return self.context * self.streams

    @property
    def cost(self) -> float:
        """Estimated duration in units of one prompt token; a step with few tokens takes as long as a dozen."""
        return self.num_prompt_tokens + self.output * (12.0 + self.streams)

    def samples(self, seed: int) -> tuple[Sample, ...]:
        """Requests in the order of their due times."""
        if self.kind == "prompts":
            return tuple(Sample(({"role": "user", "content": text},), self.output) for text in SUITE)
        if self.kind == "grid":
            samples = random_samples(self.streams, RandomLengths(self.context, self.output), seed)
            return _distinct(samples, self.context, self.streams)
        count = NUM_LONG * SHORT_PER_LONG
        short = random_samples(count, RandomLengths(SHORT, SHORT_OUTPUT), seed)
        long = _distinct(random_samples(NUM_LONG, RandomLengths(self.context, SHORT_OUTPUT), seed), self.context)
        due_s = arrival_times(count, SHORT_PER_LONG / max(self.gap_s, 1e-3), 1.0, seed)
        timed = [Sample(sample.recipe, SHORT_OUTPUT, at_s) for sample, at_s in zip(short, due_s, strict=True)]
        timed += [Sample(sample.recipe, SHORT_OUTPUT, self.gap_s * i) for i, sample in enumerate(long)]
        return tuple(sorted(timed, key=lambda sample: sample.at_s or 0.0))

    def counts(self, sample: Sample) -> bool:
        """True for requests that count in the figures; long prompts of arrivals are only load."""
        return self.kind != "arrivals" or sample.input_tokens != self.context


def _distinct(samples: Sequence[Sample], *key: int) -> tuple[Sample, ...]:
    """Samples with a key of their workload in their prompts, so that no prompt begins like that of another workload,
    which a prefix cache might hold."""
    segments = [[part for part in each.recipe if isinstance(part, TokenSegment)] for each in samples]
    return tuple(
        replace(each, recipe=tuple(part._replace(key=(*key, *part.key)) for part in parts))
        for each, parts in zip(samples, segments, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds from the start of the workload until a request was due or sent, and until each of its tokens arrived."""

    sent_s: float
    tokens_s: tuple[float, ...]
    """Times of tokens; for a routed request, the ends of its hops."""


@dataclass(slots=True)
class Done:
    """Measurements of one workload."""

    answers: Sequence[Answer]
    cpu_s: float | None = None
    """Processor time of the backend's processes; None: not measurable."""
    memory_mb: float | None = None


def figures(work: Workload, done: Done) -> dict[str, float]:
    """Figures of one workload, by their names in `FIGURES`."""
    answers = done.answers
    if work.kind == "routed":
        hops = [(a.tokens_s[0] - a.sent_s, a.tokens_s[-1] - a.tokens_s[0]) for a in answers]
        first, second = (statistics.median(each) * 1e3 for each in zip(*hops, strict=True))
        result = {"request_ms": statistics.median(map(sum, hops)) * 1e3, "hop_1_ms": first, "hop_2_ms": second}
    else:
        firsts_ms = [(answer.tokens_s[0] - answer.sent_s) * 1e3 for answer in answers]
        result = {"ttft_ms": statistics.median(firsts_ms)}
        if work.kind == "arrivals":
            result["ttft_p99_ms"] = float(np.percentile(firsts_ms, 99))
        else:
            result |= _speeds(work, answers)
            if done.cpu_s is not None:
                result["cpu_ms_per_token"] = done.cpu_s * 1e3 / sum(len(answer.tokens_s) for answer in answers)
    if done.memory_mb is not None:
        result["memory_mb"] = done.memory_mb
    return result


def _speeds(work: Workload, answers: Sequence[Answer]) -> dict[str, float]:
    """Tokens per second in total, and while every stream decodes: from the last stream's first token to the first
    stream's last one. The latter is omitted for less than four tokens each."""
    total = sum(len(answer.tokens_s) for answer in answers)
    if work.kind == "prompts":  # one after the other
        result = {"output_throughput": total / sum(answer.tokens_s[-1] - answer.sent_s for answer in answers)}
        windows = [(answer.tokens_s[0], answer.tokens_s[-1], [answer]) for answer in answers]
    else:
        result = {"output_throughput": total / max(answer.tokens_s[-1] for answer in answers)}
        begin_s, end_s = max(a.tokens_s[0] for a in answers), min(a.tokens_s[-1] for a in answers)
        windows = [(begin_s, end_s, list(answers))]
    spent_s = sum(end_s - begin_s for begin_s, end_s, _ in windows)
    count = sum(
        begin_s < at_s <= end_s for begin_s, end_s, inside in windows for answer in inside for at_s in answer.tokens_s
    )
    if count >= 4 * len(answers) and spent_s > 0:
        result["decode_throughput"] = count / spent_s
    return result
