"""Completions over HTTP: prompts of every form, echo, log-probabilities, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import openai
import pytest

from tests.server.frames import events_of, texts_of
from tests.server.living import Living


def test_choices_are_numbered_prompt_by_prompt(client: openai.OpenAI) -> None:
    def ask(prompt: Any, n: int) -> list[str]:
        answer = client.completions.create(model="pocket", prompt=prompt, n=n, seed=4, max_tokens=6)
        assert answer.object == "text_completion"
        assert answer.id.startswith("cmpl-")
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    prompts = ["One", "Two and two", "Three"]
    assert ask(prompts, 2) == [text for prompt in prompts for text in ask(prompt, 2)]


def test_a_prompt_may_be_its_tokens(client: openai.OpenAI, pocket: Living) -> None:
    tokens = pocket.post("/tokenize", {"prompt": "One more"}).json()["tokens"]
    answer = client.completions.create(model="pocket", prompt=["One more", tokens], temperature=0, max_tokens=8)
    assert answer.choices[0].text == answer.choices[1].text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2 * len(tokens)


def test_a_stream_of_several_prompts_is_their_texts(client: openai.OpenAI) -> None:
    prompts = ["One", "Two"]
    whole = client.completions.create(model="pocket", prompt=prompts, n=2, seed=1, max_tokens=12)
    texts = dict.fromkeys(range(4), "")
    finishes = {}
    for chunk in client.completions.create(model="pocket", prompt=prompts, n=2, seed=1, max_tokens=12, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert finishes == {choice.index: choice.finish_reason for choice in whole.choices}


def test_echo_begins_with_the_prompt(client: openai.OpenAI, pocket: Living) -> None:
    body = {"prompt": ["To be", "Or"], "echo": True, "max_tokens": 5, "seed": 2}
    echoed = pocket.post("/v1/completions", body).json()["choices"]
    plain = pocket.post("/v1/completions", {**body, "echo": False}).json()["choices"]
    streamed = pocket.post("/v1/completions", {**body, "stream": True})
    assert [choice["text"] for choice in echoed] == ["To be" + plain[0]["text"], "Or" + plain[1]["text"]]
    assert texts_of(events_of(streamed.text)) == {0: echoed[0]["text"], 1: echoed[1]["text"]}


@pytest.mark.parametrize("is_stream", [False, True])
def test_logprobs_lie_over_the_text(pocket: Living, is_stream: bool) -> None:
    body = {"prompt": "Hello", "logprobs": 2, "max_tokens": 16, "min_tokens": 16, "seed": 8, "stream": is_stream}
    answer = pocket.post("/v1/completions", body)
    if is_stream:
        events = events_of(answer.text)
        text = texts_of(events)[0]
        told = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
        logprobs = {key: [value for one in told for value in one[key]] for key in told[0]}
    else:
        [choice] = answer.json()["choices"]
        text, logprobs = choice["text"], choice["logprobs"]
    lie_over(text, logprobs["tokens"], logprobs["text_offset"])
    for token, top, logprob in zip(*(logprobs[key] for key in KEYS), strict=True):
        assert top[token] >= logprob, "of tokens that read the same, the likelier counts"
        assert 1 <= len(top) <= 3


def lie_over(text: str, tokens: Sequence[str], offsets: Sequence[int]) -> None:
    """The offsets cut the text into the tokens; characters that were left broken lie with the one behind them."""
    assert offsets[0] == 0
    pieces = [text[first:last] for first, last in pairwise([*offsets, len(text)])]
    assert "".join(pieces) == text
    for token, piece in zip(tokens, pieces, strict=True):
        assert BROKEN in token or piece.lstrip(BROKEN) == token, (token, piece)


KEYS = ("tokens", "top_logprobs", "token_logprobs")
BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What a token reads that is a part of a character."""


def test_echoed_logprobs_begin_with_the_prompts(pocket: Living) -> None:
    body = {"prompt": "Hello you", "echo": True, "logprobs": 1, "max_tokens": 3, "min_tokens": 3, "seed": 8}
    [choice] = pocket.post("/v1/completions", body).json()["choices"]
    logprobs = choice["logprobs"]
    lie_over(choice["text"], logprobs["tokens"], logprobs["text_offset"])
    assert choice["text"].startswith("Hello you")
    first, *others = logprobs["token_logprobs"]
    assert first is None
    assert logprobs["top_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in others)


def test_prompt_logprobs_have_vllms_shape(pocket: Living) -> None:
    body = {"prompt": "Hello you", "prompt_logprobs": 2, "max_tokens": 1, "return_token_ids": True}
    [choice] = pocket.post("/v1/completions", body).json()["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) + 1 == len(choice["prompt_token_ids"])
    for token, told in zip(choice["prompt_token_ids"][1:], others, strict=True):
        assert next(iter(told)) == str(token)
        assert len(told) in (2, 3)
        assert all(set(one) == {"logprob", "decoded_token"} for one in told.values())


def test_token_ids_on_request(pocket: Living) -> None:
    body = {"prompt": "Hello", "max_tokens": 4, "min_tokens": 4, "return_token_ids": True, "seed": 1}
    [choice] = pocket.post("/v1/completions", body).json()["choices"]
    detokenized = pocket.post("/detokenize", {"tokens": choice["token_ids"]}).json()
    assert detokenized["prompt"] == choice["text"]
    assert len(choice["token_ids"]) == 4
    streamed = events_of(pocket.post("/v1/completions", {**body, "stream": True}).text)
    assert [i for event in streamed for choice in event["choices"] for i in choice.get("token_ids", ())] == choice[
        "token_ids"
    ]


def test_a_bias_bans_a_token(stub: Living) -> None:
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    [choice] = stub.post("/v1/completions", body).json()["choices"]
    banned = choice["token_ids"][0]
    [other] = stub.post("/v1/completions", {**body, "logit_bias": {str(banned): -100}, "min_tokens": 1}).json()[
        "choices"
    ]
    assert other["token_ids"][0] != banned


def test_the_context_is_the_end_of_an_answer_without_limit(stub: Living) -> None:
    body = {"prompt": "x" * 8100, "max_tokens": None, "ignore_eos": True}
    answer = stub.post("/v1/completions", body).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 8192


def test_a_prompt_that_is_too_long_can_be_cut_to_its_end(stub: Living) -> None:
    body: dict[str, Any] = {"prompt": "y" * 9000 + "z", "max_tokens": 2}
    refused = stub.post("/v1/completions", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    cut = stub.post(
        "/v1/completions", {**body, "truncate_prompt_tokens": 3, "echo": True, "return_token_ids": True}
    ).json()
    assert cut["choices"][0]["prompt_token_ids"] == [*b"yyz"]
    assert cut["choices"][0]["text"].startswith("yyz")


def test_an_exceeded_deadline_returns_an_error_and_never_a_short_answer(stub: Living) -> None:
    body = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "deadline_ms": 30}
    late = stub.post("/v1/completions", body)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline")
    assert late.headers["x-should-retry"] == "false"
    *_, last = events_of(stub.post("/v1/completions", {**body, "stream": True}).text)
    assert last["error"]["code"] == "deadline"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt[1]"),
        ({"prompt": ["x", 1]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 65}, "logprobs"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"echo": "yes"}, "echo"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"messages": []}, "messages"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"model": "nobody"}, "model"),
    ],
)
def test_invalid_parameters_are_rejected_by_name(stub: Living, body: dict[str, object], param: str) -> None:
    answer = stub.post("/v1/completions", {"prompt": "x", "max_tokens": 1, **body})
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    assert answer.json()["error"]["param"] == param
