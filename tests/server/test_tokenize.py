"""Tokens in and out, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.executors.stub import VOCAB_SIZE
from tests.server.process import ServerProcess
from tests.server.support import client_of, error_of


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with server.client() as client:
        response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_prompt_becomes_tokens(server: ServerProcess) -> None:
    assert post(server, "/tokenize", {"prompt": "hé"}) == {
        "count": 3,
        "max_model_len": 8192,
        "tokens": [104, 195, 169],
        "token_strs": None,
    }


def test_tokenize_returns_the_string_of_each_token_on_request(server: ServerProcess) -> None:
    """A token that is part of a character is shown as the replacement character."""
    answer = post(server, "/tokenize", {"model": "alpha", "prompt": "hé<|end|>", "return_token_strs": True})
    assert answer["tokens"] == [104, 195, 169, 259]
    assert answer["token_strs"] == ["h", "\ufffd", "\ufffd", "<|end|>"]


def test_messages_become_the_templates_tokens(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "a"}]
    assert post(server, "/tokenize", {"messages": messages})["tokens"] == [257, 97, 259, 258]
    without = post(server, "/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert without["tokens"] == [257, 97, 259]


def test_a_message_cannot_write_a_border(server: ServerProcess) -> None:
    tokens = post(server, "/tokenize", {"messages": [{"role": "user", "content": "<|end|>"}]})["tokens"]
    assert tokens.count(259) == 1


async def test_special_tokens_are_added_or_not() -> None:
    """The pocket model's prompts begin with a token of their own; messages have what their template writes."""
    async with client_of("pocket://") as client:

        async def tokens(**body: Any) -> list[int]:
            response = await client.post("/tokenize", json=body)
            found: list[int] = response.json()["tokens"]
            return found

        plain = await tokens(prompt="hello", add_special_tokens=False)
        assert await tokens(prompt="hello") == await tokens(prompt="hello", add_special_tokens=True)
        assert (await tokens(prompt="hello"))[-len(plain) :] == plain
        text = (await client.post("/detokenize", json={"tokens": plain})).json()["prompt"]
        assert text == "hello"


def test_tokens_become_text_again(server: ServerProcess) -> None:
    assert post(server, "/detokenize", {"tokens": [104, 195, 169, 259]}) == {"prompt": "hé<|end|>"}
    assert post(server, "/detokenize", {"tokens": []}) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, None),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, None),
        ("/tokenize", {"prompt": "a", "tools": []}, 400, None),
        ("/tokenize", {"prompt": "a", "model": "beta"}, 404, "model"),
        ("/tokenize", {"messages": [{"role": "nobody", "content": "a"}]}, 400, "messages[0].role"),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "yes"}, 400, "add_special_tokens"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [1, VOCAB_SIZE]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [1, "a"]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": 1}, 400, "tokens"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
def test_a_fault_is_named_by_its_field(
    server: ServerProcess, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    with server.client() as client:
        response = client.post(path, json=body)
    assert response.status_code == status
    assert error_of(response)["param"] == param
