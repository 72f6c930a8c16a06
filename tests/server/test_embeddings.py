"""Embeddings of a real server, as OpenAI's own client sees them, and as the engine makes them."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import openai
import pytest

from lockstep import LLM, EngineOptions, LoadOptions
from lockstep.server.embeddings import EmbeddingBody, calls_of
from lockstep.server.generation import Caller
from lockstep.server.options import ServerOptions
from lockstep.server.vectors import MAX_OPEN_INPUTS
from tests.server.living import Living
from tests.server.process import ServerProcess

TEXTS = ["I was charged twice", "My login page shows an error", "Is a clause enforceable", "hi"]
SIZE = 256


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("pocket://", LoadOptions(EngineOptions(num_blocks=64))) as loaded:
        yield loaded


def vectors(client: openai.OpenAI, said: object, **more: object) -> npt.NDArray[np.float32]:
    """What the client asks for in base64 by itself."""
    made = client.embeddings.create(input=said, model="pocket", extra_body=more)  # type: ignore[arg-type]  # lists of any kind
    assert [each.index for each in made.data] == list(range(len(made.data)))
    return np.array([each.embedding for each in made.data], np.float32)


def test_vectors_are_the_engines_bit_for_bit(client: openai.OpenAI, llm: LLM) -> None:
    assert np.array_equal(vectors(client, TEXTS), llm.embed(TEXTS))
    assert np.array_equal(vectors(client, TEXTS[0]), llm.embed(TEXTS[:1]))
    raw = llm.embed(TEXTS, pooling="last", normalize=False)
    assert np.array_equal(vectors(client, TEXTS, pooling="last", normalize=False), raw)


def test_tokens_are_as_good_as_text(client: openai.OpenAI, llm: LLM) -> None:
    ids = [llm.model.tokenizer.encode(text) for text in TEXTS]
    expected = llm.embed(TEXTS)
    assert np.array_equal(vectors(client, ids), expected)
    assert np.array_equal(vectors(client, ids[2]), expected[2:3])
    assert np.array_equal(vectors(client, [ids[0], TEXTS[1]]), expected[:2])


def test_floats_and_base64_contain_the_same_vector(client: openai.OpenAI, served: ServerProcess) -> None:
    body = {"input": TEXTS[0], "model": "pocket"}
    with served.client() as http:
        floats = http.post("/v1/embeddings", json={**body, "encoding_format": "float"}).json()
        packed = http.post("/v1/embeddings", json={**body, "encoding_format": "base64"}).json()
        default = http.post("/v1/embeddings", json=body).json()
    assert default == floats
    unpacked = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    assert np.array_equal(unpacked, np.array(floats["data"][0]["embedding"], np.float32))
    assert {**packed, "data": None} == {**floats, "data": None}


def test_usage_counts_every_token_once(client: openai.OpenAI, llm: LLM) -> None:
    num_tokens = sum(len(llm.model.tokenizer.encode(text)) for text in TEXTS)
    usage = client.embeddings.create(input=TEXTS, model="pocket").usage
    assert (usage.prompt_tokens, usage.total_tokens) == (num_tokens, num_tokens)


def test_many_inputs_take_their_turns(client: openai.OpenAI, llm: LLM) -> None:
    """More than are in the queue at once."""
    count = 3 * MAX_OPEN_INPUTS + 1
    texts = [f"number {index}" for index in range(count)]
    assert np.array_equal(vectors(client, texts)[::50], llm.embed(texts[::50]))


def test_long_inputs_are_rejected_unless_truncation_is_requested(client: openai.OpenAI, llm: LLM) -> None:
    ids = [7] * 3_000
    with pytest.raises(openai.BadRequestError, match=r"input: the text has 3000 tokens") as caught:
        vectors(client, ids)
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    assert np.array_equal(vectors(client, ids, truncate_prompt_tokens=9), llm.embed([ids[:9]]))


def test_vectors_are_cut_to_fewer_dimensions_and_have_length_one_again(client: openai.OpenAI) -> None:
    whole, cut = vectors(client, "hi", dimensions=SIZE), vectors(client, "hi", dimensions=100)
    assert whole.shape == (1, SIZE)
    assert np.allclose(np.linalg.norm(cut, axis=1), 1.0)
    assert np.allclose(cut * np.linalg.norm(whole[:, :100]), whole[:, :100], atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="dimensions is 300; this model's vectors have 256") as caught:
        vectors(client, "hi", dimensions=300)
    assert caught.value.param == "dimensions"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [[1], [99_999_999]]}, "input[1]"),
        ({"input": [[1], [-1]]}, "input[1][0]"),
        ({"input": ["a", "b", 7]}, "input[2]"),
        ({"input": ["a", ["b"]]}, "input[1][0]"),
        ({"input": ["x"] * 2_049}, "input"),
        ({"input": ["a", "x " * 9_000]}, "input[1]"),
        ({"input": None}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"dimensions": 0}, "dimensions"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_invalid_parameters_are_rejected_by_name(
    served: ServerProcess, wrong: Mapping[str, object], param: str
) -> None:
    with served.client() as http:
        answer = http.post("/v1/embeddings", json={"input": "hi", "model": "pocket", **wrong})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_a_model_without_hidden_states_rejects_embeddings(stub: Living) -> None:
    answer = stub.post("/v1/embeddings", {"input": ["a", "b"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "pooling")


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="The model `other` does not exist"):
        client.embeddings.create(input="hi", model="other")


def test_calls_have_the_caller_and_the_limits_of_the_server() -> None:
    options = ServerOptions(queue_timeout_s=3.0, request_timeout_s=9.0)
    body = EmbeddingBody.model_validate({"input": ["a", [1, 2]]})
    (name, first), (_, second) = calls_of(body, Caller("key", options))
    assert (name, first.prompt, second.prompt) == ("input[0]", "a", (1, 2))
    assert (first.tenant, first.queue_deadline_s, first.deadline_s, first.pooling) == ("key", 3.0, 9.0, "model")
