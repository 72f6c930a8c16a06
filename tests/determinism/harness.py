"""Runs one request in many circumstances through the real engine, and keeps every bit of what it got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.core.policy import SchedulerConfig
from lockstep.engine.engine import Engine
from lockstep.engine.loading import LoadedModel
from lockstep.engine.outputs import RequestOutput
from lockstep.engine.request import GenerationRequest
from lockstep.executors.sampling_params import SamplingParams

PROMPT_TOKENS = 203
NEW_TOKENS = 40
NUM_LOGPROBS = 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=NUM_LOGPROBS, ignore_eos=True)
SEEDED = SamplingParams(
    temperature=0.9, top_p=0.95, seed=11, max_tokens=NEW_TOKENS, logprobs=NUM_LOGPROBS, ignore_eos=True
)
SAMPLINGS: Mapping[str, SamplingParams] = {"greedy": GREEDY, "seeded": SEEDED}


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens and the exact bits of their log-probabilities."""

    tokens: tuple[int, ...]
    logprobs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A circumstance: configuration, company and what must have happened for the case to mean anything."""

    name: str
    config: Mapping[str, object]
    num_others: int = 0
    others_first: bool = False
    """Whether the others run to their end before: fills the cache and shuffles the free blocks."""
    warm: bool = False
    """Whether the same prompt has run before."""
    preempts: bool = False
    """Whether the request must have been preempted."""
    priority: int = 0


class Subject:
    """A loaded model whose requests can be asked under any configuration that its pool allows."""

    def __init__(self, model: LoadedModel, config: SchedulerConfig, seed: int = 20) -> None:
        self.model = model
        self.config = config
        rng = np.random.default_rng(seed)
        self.prompt = self._ids(rng, PROMPT_TOKENS)
        self._rng_seed = seed + 1

    def _ids(self, rng: np.random.Generator, length: int) -> list[int]:
        return [int(token) for token in rng.integers(3, min(self.model.vocab_size, 4000), length)]

    def others(self, count: int) -> list[GenerationRequest]:
        """Ragged company: prompts of 1 to 150 tokens, greedy and seeded, with and without log-probabilities."""
        rng = np.random.default_rng(self._rng_seed)
        requests = []
        for index in range(count):
            params = SamplingParams(
                temperature=0.0 if index % 2 else 1.0,
                seed=index,
                max_tokens=int(rng.integers(1, 60)),
                logprobs=1 if index % 3 == 0 else None,
                ignore_eos=True,
            )
            requests.append(GenerationRequest(self._ids(rng, int(rng.integers(1, 150))), params))
        return requests

    def ask(self, case: Case, params: SamplingParams) -> tuple[Answer, RequestOutput]:
        """The answer to the prompt under a case's circumstances."""
        engine = Engine(self.model, replace(self.config, **case.config))  # type: ignore[arg-type]  # fields by name
        target = GenerationRequest(self.prompt, params, priority=case.priority)
        others = self.others(case.num_others)
        if case.warm:
            engine.submit(target)
            engine.run_until_idle()
        if case.others_first:
            for other in others:
                engine.submit(other)
            engine.run_until_idle()
            others = []
        middle = len(others) // 2
        queue: Sequence[GenerationRequest] = [*others[:middle], target, *others[middle:]]
        ids = [engine.submit(request) for request in queue]
        engine.run_until_idle()
        engine.scheduler.check()
        outputs = [engine.result(request_id) for request_id in ids]
        output = outputs[middle]
        assert output is not None
        assert output.error is None, output.error
        return answer_of(output), output


def answer_of(output: RequestOutput) -> Answer:
    completion = output.completions[0]
    assert completion.logprobs is not None
    bits = tuple(f"{entry.logprob.hex()} {[(i, p.hex()) for i, p in entry.top]}" for entry in completion.logprobs)
    return Answer(completion.token_ids, bits)


ALONE = Case("alone", {})
_TIGHT = {"num_blocks": 14, "max_num_batched_tokens": 96}

CASES: tuple[Case, ...] = (
    Case("again", {}),
    *(Case(f"batched with {count}", {}, num_others=count) for count in (1, 2, 7, 31)),
    *(Case(f"chunks of {size}", {"max_chunk_tokens": size}) for size in (3, 5, 32, 64, 100, 101)),
    Case(
        "ragged chunks beside 9",
        {"max_num_batched_tokens": 83, "max_chunk_tokens": 29, "max_num_seqs": 64},
        num_others=9,
    ),
    Case("decode width 2", {"max_num_decode_seqs": 2}, num_others=5),
    Case("without a cache", {"enable_prefix_caching": False}, num_others=3),
    Case("warm prefix", {}, warm=True),
    Case("warm prefix, batched with 7", {}, num_others=7, warm=True),
    Case("other block tables", {}, num_others=12, others_first=True),
    Case(
        "swapped out and in",
        {**_TIGHT, "num_host_blocks": 64, "max_num_seqs": 8},
        num_others=7,
        preempts=True,
        priority=1,
    ),
    Case(
        "partly swapped, partly recomputed",
        {**_TIGHT, "num_host_blocks": 2, "max_num_seqs": 8},
        num_others=7,
        preempts=True,
        priority=1,
    ),
    Case(
        "recomputed",
        {**_TIGHT, "num_host_blocks": 0, "preemption": "recompute", "max_num_seqs": 8},
        num_others=7,
        preempts=True,
        priority=1,
    ),
)

MATRIX: tuple[Case, ...] = (
    *(Case(f"batched with {count}", {}, num_others=count) for count in range(1, 32)),
    *(Case(f"chunks of {size}", {"max_chunk_tokens": size}) for size in range(3, PROMPT_TOKENS + 1)),
    *(
        Case(
            f"chunks of {size} beside {count}",
            {"max_chunk_tokens": size, "max_num_batched_tokens": 64 + size},
            num_others=count,
        )
        for size in (3, 7, 31, 33, 100)
        for count in (1, 6, 17, 31)
    ),
    *CASES,
)
