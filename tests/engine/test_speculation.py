"""Speculative decoding changes no byte: answers, streams, log-probabilities and cached content are those of plain
decoding, with right drafts and with wrong ones at any place."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.policy import SchedulerConfig
from lockstep.core.step import StepEvents, StepPlan, StepResult
from lockstep.engine.draft_counts import FLAT_PRICES, Price, Prices
from lockstep.engine.drafter import LEARNING_TOKENS, Drafter, Drafts, Speculator
from lockstep.engine.engine import Engine
from lockstep.engine.generation import Generation
from lockstep.engine.loading import LoadedModel, load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.output_rules import Reasoning, ThinkTags
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.engine.speculative_config import SpeculativeConfig
from lockstep.errors import TraceError
from lockstep.executors.constraint import Constraint
from lockstep.executors.sampling_params import SamplingParams
from tests.engine.conftest import Pocket
from tests.engine.hybrid_engines import Answer, answers, hybrid_engine, request, text, write_hybrid

TEXT = "Order 66-12: two blue lamps, one blue chair.\nThe order again, word by word: Order 66-12: two blue lamps,"
SCHEMA = Constraint.json_schema(
    {
        "type": "object",
        "properties": {"status": {"enum": ["open", "closed"]}, "note": {"type": "string", "maxLength": 20}},
        "required": ["status", "note"],
        "additionalProperties": False,
    }
)
KINDS: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 5},
    "top-p": {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "seed": 9},
    "penalties": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
    "greedy presence": {"temperature": 0.0, "presence_penalty": 1.0},
    "bias": {"temperature": 0.0, "logit_bias": {40: 4.0, 41: -3.0}},
    "logprobs": {"temperature": 0.8, "seed": 2, "logprobs": 3},
    "stop": {"temperature": 0.9, "seed": 4, "stop": ("e", " th"), "min_tokens": 5},
    "shown stop": {"temperature": 0.9, "seed": 6, "stop": ("a",), "include_stop_str_in_output": True, "min_tokens": 3},
    "bad words": {"temperature": 0.0, "bad_words": ("the", "blue", "e")},
    "long": {"temperature": 0.6, "seed": 8, "min_tokens": 30, "ignore_eos": True},
    "schema": {"temperature": 0.9, "seed": 1, "constraint": SCHEMA},
    "schema with logprobs": {"temperature": 0.9, "seed": 1, "constraint": SCHEMA, "logprobs": 0},
    "regex": {"temperature": 1.0, "seed": 7, "constraint": Constraint.regex("(ab|ba|[0-9]{3}){2,9}")},
    "choice": {"temperature": 1.0, "seed": 7, "constraint": Constraint.choice(["blue lamps", "blue chairs", "none"])},
    "siblings": {"temperature": 1.0, "seed": 11, "n": 3},
}


def request_of(kind: str) -> GenerationRequest:
    params = {"max_tokens": 40, **KINDS[kind]}
    reasoning = Reasoning(ThinkTags("<think>", "</think>"), is_open=True) if kind == "seeded" else None
    return GenerationRequest(f"{kind}: {TEXT}", SamplingParams(**params), reasoning=reasoning)


class Known:
    """A drafter with the answers, which makes a draft wrong at a place."""

    def __init__(self, answers: Mapping[tuple[Sequence[int], int], Sequence[int]], seed: int, wrong_at: int) -> None:
        self._answers = answers
        self._rng = random.Random(seed)
        self._wrong_at = wrong_at
        """Place of the first wrong draft; negative: a random one, or none."""
        self.num_ended = 0

    def propose(self, generations: Iterable[Generation]) -> Drafts:
        drafts: dict[int, list[int]] = {}
        for generation in generations:
            answer = self._answers[generation.live.prompt_ids, generation.index]
            if generation.num_output and self._rng.random() < 0.9:
                count = self._rng.randint(1, 6)
                tokens = [*answer[generation.num_output :], 7, 7, 7, 7, 7, 7][:count]
                wrong = self._wrong_at if self._wrong_at >= 0 else self._rng.randrange(2 * count)
                if wrong < count:
                    tokens[wrong] = (tokens[wrong] + 1 + self._rng.randrange(100)) % 250
                drafts[generation.seq_id] = tokens
        return drafts

    def ended(self, generation: Generation) -> None:
        self.num_ended += 1


class Served:
    """Everything that clients, the cache and a follower of KV get."""

    def __init__(self, pocket: Pocket, drafter: Drafter | None, **limits: Any) -> None:
        model, config = pocket
        self.steps: list[tuple[StepPlan, StepResult, StepEvents]] = []
        self.engine = Engine(
            model,
            replace(config, **limits),
            drafter=drafter,
            observer=lambda *step: self.steps.append(step),
        )
        self.outputs: dict[int, list[TokenOutput]] = {}
        self.news: set[object] = set()

    def serve(self, requests: Sequence[GenerationRequest]) -> list[object]:
        """Serve requests together. Returns what each client gets, apart from times."""
        engine = self.engine
        engine.scheduler.follow_contents()
        ids = []
        for each in requests:
            outputs: list[TokenOutput] = []
            request_id = engine.submit(each, outputs.append)
            self.outputs[request_id] = outputs
            ids.append(request_id)
        while engine.has_work:
            engine.step()
            engine.scheduler.check()
        self.news |= {news for news in engine.scheduler.drain_contents() if news[1]}
        assert engine.scheduler.num_held_blocks == 0
        return [self._got(request_id) for request_id in ids]

    def _got(self, request_id: int) -> object:
        outputs = self.outputs[request_id]
        whole = outputs[-1].request
        assert whole is not None
        by_sequence: dict[int, list[object]] = {}
        for each in outputs:
            parts = each.token_ids, each.text, each.reasoning, each.finish_reason, each.stop_reason, each.logprobs
            by_sequence.setdefault(each.index, []).append(parts)
        return by_sequence, whole.completions, whole.prompt_logprobs

    @property
    def num_accepted(self) -> int:
        return sum(sum(result.num_accepted) for _, result, _ in self.steps)


def whole_answers(served: Served) -> dict[tuple[Sequence[int], int], Sequence[int]]:
    answers: dict[tuple[Sequence[int], int], Sequence[int]] = {}
    for outputs in served.outputs.values():
        whole = outputs[-1].request
        assert isinstance(whole, RequestOutput)
        for completion in whole.completions:
            answers[whole.prompt_token_ids, completion.index] = completion.token_ids
    return answers


@pytest.fixture(scope="module")
def plain(pocket: Pocket) -> tuple[Served, dict[str, object]]:
    """Every kind of request alone, without drafts."""
    served = Served(pocket, None)
    return served, {kind: served.serve([request_of(kind)])[0] for kind in KINDS}


@pytest.mark.parametrize("wrong_at", [*range(4), -1, 99])
def test_answers_alone_are_those_of_plain_decoding(
    pocket: Pocket, plain: tuple[Served, dict[str, object]], wrong_at: int
) -> None:
    """With the first wrong draft at each place, at random ones, and nowhere; streams have the same pieces, and the
    cache has the same contents."""
    known = Known(whole_answers(plain[0]), seed=wrong_at, wrong_at=wrong_at)
    served = Served(pocket, known)
    for kind in KINDS:
        assert served.serve([request_of(kind)]) == [plain[1][kind]], kind
    assert served.news == plain[0].news
    assert (served.num_accepted > 0) == (wrong_at != 0)
    assert known.num_ended == len(whole_answers(served))


@pytest.mark.parametrize("seed", range(3))
def test_answers_in_batches_with_preemption_are_those_of_plain_decoding(
    pocket: Pocket, plain: tuple[Served, dict[str, object]], seed: int
) -> None:
    """A pool that holds a few sequences, swapped or computed again, and prompts that hit the cache."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    kinds = [*KINDS, *["long"] * 8]
    rng.shuffle(kinds)
    served = Served(
        pocket,
        Known(whole_answers(plain[0]), seed, -1),
        num_blocks=10,
        num_host_blocks=rng.choice([0, 20]),
        max_num_batched_tokens=rng.choice([48, 80, 512]),
        max_num_seqs=8,
    )
    assert served.serve([request_of(kind) for kind in kinds]) == [plain[1][kind] for kind in kinds]
    assert served.engine.scheduler.stats().num_preemptions > 0
    assert served.num_accepted > 0


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_the_methods_change_no_answer_and_accept_drafts(
    pocket: Pocket, plain: tuple[Served, dict[str, object]], method: Any
) -> None:
    """Also when earlier answers of the same prompts are known."""
    config = SpeculativeConfig(method, num_speculative_tokens=6, prompt_lookup_max=3)
    served = Served(pocket, Speculator(config, FLAT_PRICES))
    num_steps = []
    for _ in range(2):
        assert served.serve([request_of(kind) for kind in KINDS]) == [plain[1][kind] for kind in KINDS]
        num_steps.append(len(served.steps))
    assert served.num_accepted > 0
    if method == "suffix":
        assert num_steps[1] - num_steps[0] < num_steps[0], "answers that were given before take fewer steps"


def test_metrics_count_drafts_and_accepted_ones_by_place(
    pocket: Pocket, plain: tuple[Served, dict[str, object]]
) -> None:
    served = Served(pocket, Known(whole_answers(plain[0]), 1, wrong_at=2))
    served.serve([request_of("greedy")])
    metrics = served.engine.metrics()
    proposed = [sum(plan.drafts) for plan, _, _ in served.steps if plan.drafts]
    assert metrics.counters["spec_decode_num_drafts"] == len(proposed)
    assert metrics.counters["spec_decode_num_draft_tokens"] == sum(proposed)
    assert metrics.counters["spec_decode_num_accepted_tokens"] == served.num_accepted
    by_place = metrics.labelled_counters["spec_decode_num_accepted_tokens_per_pos"].values
    assert sum(by_place.values()) == served.num_accepted
    assert by_place["0"] >= by_place["1"] > 0
    assert not any(count for place, count in by_place.items() if int(place) >= 2)


@pytest.fixture(scope="module")
def stub() -> Iterator[tuple[LoadedModel, SchedulerConfig]]:
    model, config = load_model("stub://alpha?nan_every=9", LoadOptions(EngineOptions(num_blocks=64)))
    yield model, config
    model.close()


def test_invalid_logits_of_a_draft_fail_the_request_like_those_of_a_step(
    stub: tuple[LoadedModel, SchedulerConfig],
) -> None:
    """The tokens before them are delivered."""

    class Right:
        def propose(self, generations: Iterable[Generation]) -> Drafts:
            answer = b"[stub:alpha] ok len=5 max=100"
            return {each.seq_id: answer[each.num_output :][:4] for each in generations if each.num_output}

        def ended(self, generation: Generation) -> None: ...

    served = Served(stub, Right())
    outputs: list[TokenOutput] = []
    served.engine.submit(GenerationRequest("hello", SamplingParams(max_tokens=100, temperature=0.0)), outputs.append)
    served.engine.run_until_idle()
    assert "".join(output.text for output in outputs) == "[stub:al"
    assert outputs[-1].error is not None
    assert served.engine.scheduler.num_held_blocks == 0
    assert sum(sum(result.num_tokens) for _, result, _ in served.steps) == 9


def test_models_with_windows_have_the_same_answers_and_reuse_the_same_blocks(tmp_path: Path) -> None:
    """Two turns of conversations, alone and together."""
    draw = random.Random(3)
    heads = [text(draw, 40 + 30 * number) for number in range(3)]

    def turns(engine: Engine) -> list[tuple[Answer, int]]:
        seen: list[tuple[Answer, int]] = []
        prompts = heads
        for _ in range(2):
            found = [*answers(engine, [request(prompts[0])]), *answers(engine, [request(each) for each in prompts[1:]])]
            seen += [(answer, answer.num_cached_tokens) for answer in found]
            prompts = [(*prompt, *answer.tokens, 7) for prompt, answer in zip(prompts, found, strict=True)]
        return seen

    with hybrid_engine(write_hybrid(tmp_path, "tiny-gemma3")) as engine:
        assert len(engine.config.groups) > 1
        assert engine.config.allows_drafts
        expected = turns(engine)
        known: dict[tuple[Sequence[int], int], Sequence[int]] = {}
        for prompt, (answer, _) in zip(heads, expected, strict=False):
            known[prompt, 0] = answer.tokens
            known[(*prompt, *answer.tokens, 7), 0] = ()
        for key, (answer, _) in zip([*known][1::2], expected[3:], strict=True):
            known[key] = answer.tokens
        drafting = Engine(engine.model, engine.config, drafter=Known(known, 1, -1))
        drafting.scheduler.reset_prefix_cache()
        assert turns(drafting) == expected
        assert drafting.metrics().counters["spec_decode_num_accepted_tokens"] > 0


class Drafting(Speculator):
    """A speculator that records the lengths of the sequences that it drafts for."""

    def __init__(self, prices: Prices) -> None:
        super().__init__(SpeculativeConfig("suffix", num_speculative_tokens=4), prices)
        self.drafted_at: list[int] = []

    def propose(self, generations: Iterable[Generation]) -> Drafts:
        drafts = super().propose(generations)
        self.drafted_at += [each.num_output for each in generations if each.seq_id in drafts]
        return drafts


def drafted_at(pocket: Pocket, second_us: int) -> list[int]:
    """Output tokens before each row with drafts, of an answer that a constraint makes repeat, where a step of two rows
    takes this time and one of one row 1,000 us."""
    speculator = Drafting(Prices((Price(1, 1000), Price(2, second_us))))
    params = SamplingParams(temperature=0.0, max_tokens=120, constraint=Constraint.regex("(abcdefgh){60}"), logprobs=0)
    Served(pocket, speculator).serve([GenerationRequest("repeat", params)])
    return speculator.drafted_at


def test_acceptance_is_learnt_also_where_no_draft_pays_yet(pocket: Pocket) -> None:
    """Where a row costs more than assumed guesses are worth, drafts begin once enough guesses were right; where it
    costs more than any guess, there are none."""
    cheap, dear = (drafted_at(pocket, second_us) for second_us in (1100, 1700))
    assert cheap[0] < dear[0]
    assert dear[0] > LEARNING_TOKENS
    assert drafted_at(pocket, 1960) == []


def test_a_speculator_is_restored_from_its_text() -> None:
    speculator = Speculator(SpeculativeConfig("suffix"), Prices((Price(1, 1000), Price(2, 1700)), 40))
    restored = Speculator.of(speculator.text())
    assert (restored.config, restored.prices) == (speculator.config, speculator.prices)
    with pytest.raises(TraceError):
        Speculator.of('{"config": {"method": "suffix"}, "step_us": [[1, 1000]]}')
