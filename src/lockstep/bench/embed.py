"""Embedding bench: measures an embedding model in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lockstep.errors import UsageError
from lockstep.shown import aligned

if TYPE_CHECKING:
    from lockstep.engine.llm import LLM

MAX_TEXTS = 100_000
"""Maximum number of texts of one measurement, and maximum length and batch size."""


@dataclass(frozen=True, slots=True)
class EmbedOptions:
    """Load of an embedding bench: texts of random tokens, for each length and batch size."""

    lengths: str = "16,64,256"
    """Tokens of each text, several numbers separated by commas."""
    batch_sizes: str = "1,8,32"
    """Texts per call, several numbers separated by commas."""
    num_texts: int = 64
    """Texts of one measurement, rounded up to whole batches."""
    rounds: int = 3
    """Measurements of each length and batch size, of which the fastest counts."""
    seed: int = 0
    """Seed of the texts."""

    def __post_init__(self) -> None:
        for name in ("num_texts", "rounds"):
            if not 1 <= getattr(self, name) <= MAX_TEXTS:
                raise UsageError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be from 1 to {MAX_TEXTS:,}"
                )
        if self.seed < 0:
            raise UsageError("--seed must not be negative")
        numbers_of("--lengths", self.lengths)
        numbers_of("--batch-sizes", self.batch_sizes)

    @property
    def largest_batch(self) -> int:
        return max(numbers_of("--batch-sizes", self.batch_sizes))


def numbers_of(flag: str, text: str) -> list[int]:
    """Numbers separated by commas; UsageError, with the flag, if one of them is not from 1 to `MAX_TEXTS`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(1 <= number <= MAX_TEXTS for number in numbers):
        raise UsageError(f"{flag} is {text!r}; it must be numbers from 1 to {MAX_TEXTS:,}, separated by commas")
    return numbers


def run_embed_bench(
    llm: LLM, options: EmbedOptions, report: Callable[[float], None] = lambda done: None
) -> dict[str, Any]:
    """Embed texts of each length in batches of each size; returns durations in seconds and throughputs per second.

    Args:
        report: called with the completed fraction.

    Raises:
        UsageError: the model generates text or scores documents.
        PromptTooLongError: a length is more than the model's longest text.
    """
    import numpy as np

    if llm.model.task != "embed":
        raise UsageError(f"model {llm.model.name!r} is no embedding model; add --task embed to measure it as one")
    lengths, sizes = numbers_of("--lengths", options.lengths), numbers_of("--batch-sizes", options.batch_sizes)
    rng = np.random.default_rng([options.seed, 5])
    num_cases, rows = len(lengths) * len(sizes), list[dict[str, Any]]()
    for length in lengths:
        for size in sizes:
            num_texts = -(-options.num_texts // size) * size
            texts = [tuple(text) for text in rng.integers(0, llm.model.vocab_size, (num_texts, length)).tolist()]
            batches = [texts[at : at + size] for at in range(0, num_texts, size)]
            llm.embed(batches[0])  # not measured
            duration_s, cpu_s = min(_measured(llm, batches) for _ in range(options.rounds))
            rows.append(_row(length, size, num_texts, duration_s, cpu_s))
            report(len(rows) / num_cases)
    return {"model_id": llm.model.name, **asdict(options), "results": rows}


def text_of(result: Mapping[str, Any]) -> str:
    """Table of a result: a line for each length and batch size."""
    rows = [("tokens", "batch", "texts/s", "tokens/s", "ms per call", "ms CPU per text")]
    rows += [
        (
            f"{row['length']}",
            f"{row['batch_size']}",
            f"{row['text_throughput']:.1f}",
            f"{row['token_throughput']:.0f}",
            f"{row['call_s'] * 1e3:.2f}",
            f"{row['cpu_s_per_text'] * 1e3:.2f}",
        )
        for row in result["results"]
    ]
    return aligned(rows)


def _measured(llm: LLM, batches: list[list[tuple[int, ...]]]) -> tuple[float, float]:
    """Duration and processor time of embedding all batches, in seconds."""
    cpu_s, started_s = time.process_time(), time.perf_counter()
    for batch in batches:
        llm.embed(batch)
    return time.perf_counter() - started_s, time.process_time() - cpu_s


def _row(length: int, size: int, num_texts: int, duration_s: float, cpu_s: float) -> dict[str, Any]:
    return {
        "length": length,
        "batch_size": size,
        "num_texts": num_texts,
        "duration": duration_s,
        "text_throughput": num_texts / duration_s,
        "token_throughput": num_texts * length / duration_s,
        "call_s": duration_s * size / num_texts,
        "cpu_s_per_text": cpu_s / num_texts,
    }
