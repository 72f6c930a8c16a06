"""Replayed tokens give the engine's outputs, for any division into steps."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from lockstep.core.request import FinishReason
from lockstep.engine.llm import LLM
from lockstep.engine.outputs import RequestOutput
from lockstep.engine.request import GenerationRequest
from lockstep.engine.token_replay import TokenReplay
from lockstep.errors import InvalidParameterError
from lockstep.executors.sampling_params import SamplingParams

SEEDS = range(30)
MAX_LEN = 4096


@pytest.fixture(scope="module")
def pocket() -> Iterator[LLM]:
    with LLM("pocket://") as llm:
        yield llm


def asked(
    llm: LLM, params: SamplingParams, text: str = "my invoice is wrong"
) -> tuple[GenerationRequest, RequestOutput]:
    """A request, its prompt in token ids, and the engine's answer."""
    ids = llm.model.tokenizer.encode(text)
    (output,) = llm.generate(ids, params)
    return GenerationRequest(ids, params), output


def replayed(llm: LLM, request: GenerationRequest, output: RequestOutput, draw: random.Random) -> RequestOutput | None:
    """Whole answer, replayed in steps of random lengths, its sequences alternating."""
    replay = TokenReplay(llm.model.tokenizer, request, MAX_LEN, 0.0, num_cached_tokens=output.num_cached_tokens)
    left = {each.index: list(each.token_ids) for each in output.completions}
    last, texts = None, dict.fromkeys(left, "")
    while any(left.values()) and not replay.is_complete:
        index = draw.choice([index for index, tokens in left.items() if tokens])
        num = draw.randrange(1, 5)
        step, left[index] = left[index][:num], left[index][num:]
        end = None if left[index] else output.completions[index].finish_reason
        for told in replay.append(index, step, end, 1.0):
            last = told
            texts[told.index] += told.text
    assert last is not None
    if last.request is not None:
        assert {each.index: each.text for each in last.request.completions} == texts
    return last.request


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_request_gets_the_same_text_ends_and_counts(seed: int, pocket: LLM) -> None:
    draw = random.Random(seed)
    params = SamplingParams(
        max_tokens=draw.randrange(1, 40),
        temperature=1.0,
        seed=seed,
        n=draw.choice((1, 1, 3)),
        ignore_eos=draw.random() < 0.5,
        stop=tuple(draw.sample(["e", " y", "ing", "?", "zz"], k=draw.randrange(3))),
        include_stop_str_in_output=draw.random() < 0.3,
        skip_special_tokens=draw.random() < 0.5,
    )
    request, output = asked(pocket, params)
    again = replayed(pocket, request, output, draw)
    assert again is not None, f"seed {seed}"
    assert (again.completions, again.prompt_token_ids) == (output.completions, output.prompt_token_ids), f"seed {seed}"
    assert again.num_cached_tokens == output.num_cached_tokens


def test_rules_of_the_repeated_request_can_end_an_answer_early() -> None:
    draw = random.Random(0)
    with LLM("stub://alpha") as stub:
        request, output = asked(stub, SamplingParams(max_tokens=40), "abc")
        assert output.text == "[stub:alpha] ok len=3 max=40"
        stopped = replayed(stub, replace(request, params=replace(request.params, stop=(" ok",))), output, draw)
        short = replayed(stub, replace(request, params=replace(request.params, max_tokens=4)), output, draw)
    assert stopped is not None
    assert short is not None
    assert (stopped.text, stopped.completions[0].stop_reason) == ("[stub:alpha]", " ok")
    assert (short.text, short.completions[0].finish_reason) == ("[stu", FinishReason.LENGTH)


def test_a_request_that_no_engine_accepts_is_rejected(pocket: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="temperature"):
        TokenReplay(pocket.model.tokenizer, GenerationRequest((1,), SamplingParams(temperature=-1.0)), MAX_LEN, 0.0)
    with pytest.raises(InvalidParameterError, match="prompt is empty"):
        TokenReplay(pocket.model.tokenizer, GenerationRequest(()), MAX_LEN, 0.0)
