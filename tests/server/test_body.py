"""Large requests: refused by what can be counted quickly, read like short ones, and bounded in what they hold."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import PromptTooLongError, QueueFullError
from lockstep.server.answer_response import all_of
from lockstep.server.app import create_app
from lockstep.server.body import _WINDOW, MAX_CONTAINERS, MAX_MEMBERS, parsed, skeleton_of, structure_fault
from lockstep.server.fields import MAX_VALUES
from lockstep.server.options import ServerOptions
from lockstep.server.serving import MAX_INLINE_BYTES, MAX_LONG_BODIES
from tests.cluster.support import one_model
from tests.server.living import Living, living
from tests.server.support import error_of
from tests.waiting import HANG_S, until

PADDING = " " * MAX_INLINE_BYTES
"""Makes a body long and says nothing."""
LONG = "word " * 100_000
TOO_LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": LONG}),
    "one of several prompts": ("/v1/completions", {"prompt": ["short", LONG]}),
    "one message": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    "many messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG[:5_000]}] * 100}),
    "text parts": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG[:5_000]}] * 100}]},
    ),
    "response": ("/v1/responses", {"input": LONG}),
    "embedding": ("/v1/embeddings", {"input": [LONG]}),
    "prompt to tokenise": ("/tokenize", {"prompt": LONG}),
    "messages to tokenise": ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
}


@pytest.mark.parametrize("case", TOO_LONG)
def test_text_longer_than_any_context_is_rejected_by_its_characters(pocket: Living, case: str) -> None:
    path, body = TOO_LONG[case]
    refused = pocket.post(path, body)
    assert refused.status_code == 400
    error = error_of(refused)
    assert error["code"] == "context_length_exceeded"
    assert " characters, but the " in error["message"], "its tokens were not counted"


@pytest.mark.parametrize(("path", "member"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
def test_of_many_prompts_the_first_that_is_too_long_refuses_all_and_nothing_of_them_is_kept(
    pocket: Living, path: str, member: str
) -> None:
    """Each is too long, and told so only by its tokens; what the refusals hold of them needs no collection to go."""
    long = " ".join(str(number) for number in range(1_500))
    before = weakref.WeakSet(refusals())
    gc.disable()
    try:
        error = error_of(pocket.post(path, {member: ["short", *[long] * 1_000]}))
        assert error["code"] == "context_length_exceeded"
        assert " tokens, but the " in error["message"], "they were counted"
        until(lambda: pocket.get("/load").json()["server_load"] == 0, "the request is over")
        until(lambda: not [one for one in refusals() if one not in before], "its refusals are gone")
    finally:
        gc.enable()


def refusals() -> list[PromptTooLongError]:
    return [one for one in gc.get_objects() if type(one) is PromptTooLongError]


async def test_work_on_several_items_starts_in_order_and_ends_with_the_first_failure() -> None:
    begun: list[int] = []

    async def work(number: int) -> int:
        begun.append(number)
        await asyncio.sleep(0)
        if number in (100, 103):
            for _ in range(110 - number):  # the second fails first
                await asyncio.sleep(0)
            raise ValueError(number)
        return -number

    assert await all_of(work, range(50), 7) == [-number for number in range(50)]
    begun.clear()
    with pytest.raises(ValueError, match="100"):
        await all_of(work, range(50, 1_000), 7)
    assert begun == list(range(50, 107))


def test_a_text_that_is_cut_may_be_longer_than_the_context(stub: Living) -> None:
    body = {"prompt": "a" * 200_000, "truncate_prompt_tokens": 5, "max_tokens": 1}
    answer = stub.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 5


def test_token_ids_beyond_the_context_are_refused_by_their_number(stub: Living) -> None:
    error = error_of(stub.post("/v1/completions", {"prompt": [65] * 100_000}))
    assert error["code"] == "context_length_exceeded"
    assert "has 100000 tokens" in error["message"]


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("guided_regex", "a" * 100_000),
        ("guided_json", {"enum": ["a"] * 100_000}),
        ("structured_outputs", {"json": {"enum": ["a"] * 100_000}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a"] * 100_000}}}),
    ],
)
def test_a_constraint_that_is_too_long_is_named_as_it_was_sent(stub: Living, param: str, value: object) -> None:
    error = error_of(stub.post("/v1/completions", {"prompt": "a", param: value}))
    assert (error["param"], error["code"]) == (param, "invalid_parameter")


def padded(body: bytes) -> bytes:
    return body[:1] + PADDING.encode() + body[1:]


FAULTY = [
    b'{"prompt": "a", "max_tokens": 3}',
    b'{"prompt": "a", "max_tokens": "3"}',
    b'{"prompt": "a", "unknown": 1}',
    b'{"prompt": ["a", 5], "max_tokens": 1}',
    b'{"prompt": [1, 2, "3"]}',
    b'{"model": "nobody", "prompt": "a"}',
    b'{"prompt": "a"',
    b'{"prompt": tru}',
    b"[1]",
    b"{}",
    b'"text"',
]


@pytest.mark.parametrize("body", FAULTY)
def test_a_long_body_is_answered_as_a_short_one(stub: Living, body: bytes) -> None:
    def answer(sent: bytes) -> tuple[int, Any]:
        with stub.client() as client:
            response = client.post("/v1/completions", content=sent, headers={"Content-Type": "application/json"})
        told = response.json()
        if "error" in told:
            told["error"]["message"] = told["error"]["message"].split(" at character ")[0]
            return response.status_code, told
        return response.status_code, told["choices"]

    assert answer(padded(body)) == answer(body)


@pytest.mark.parametrize("index", [0, 1_023, 1_024, 2_999])
def test_a_fault_in_a_long_list_is_named_by_its_place(stub: Living, index: int) -> None:
    tokens: list[Any] = [65] * 3_000
    tokens[index] = -1
    error = error_of(stub.post("/v1/completions", {"prompt": tokens}))
    assert error["param"] == f"prompt[{index}]"
    assert error["message"] == f"prompt[{index}] is -1; it must be at least 0."
    messages: list[Any] = [{"role": "user", "content": "a"}] * 3_000
    messages[index] = {"role": "user", "content": 5}
    error = error_of(stub.post("/v1/chat/completions", {"messages": messages}))
    assert error["param"] == f"messages[{index}].content"
    items: list[Any] = [{"role": "user", "content": "a"}] * 3_000
    items[index] = {"role": "nobody", "content": "a"}
    error = error_of(stub.post("/v1/responses", {"input": items}))
    assert error["param"] == f"input[{index}].role"


def test_a_list_that_is_too_long_is_refused_by_its_length(stub: Living) -> None:
    error = error_of(stub.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 20_000}))
    assert error["param"] == "messages"
    assert "20000" in error["message"]


def outcome(read: Callable[[], object]) -> object:
    """What is read, or what is wrong and where."""
    try:
        return read()
    except json.JSONDecodeError as error:
        return error.msg, error.pos


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES, st.integers(0, 30), st.sampled_from(["", "x", "]", ",", "\x00", "\\"]))
def test_text_of_many_values_is_read_as_json_reads_it(value: object, cut: int, noise: str) -> None:
    """Whole, or broken somewhere in the middle."""
    text = json.dumps(value)
    for body in (f"[0,{text}]", f"[0,{text[:cut]}{noise}{text[cut:]}]"):
        assert outcome(lambda: parsed(body.encode(), 0)) == outcome(lambda: json.loads(body))  # noqa: B023 - called here


def test_objects_and_lists_are_bounded_in_number_and_in_members() -> None:
    assert structure_fault(b"[" + b"[]," * (MAX_CONTAINERS - 2) + b"[]]") is None
    assert "objects and lists" in str(structure_fault(b"[" + b"[]," * MAX_CONTAINERS + b"[]]"))
    for colon in (":", " :", "\n\t:"):
        members = ",".join(f'"{number}"{colon}[":", {{}}]' for number in range(MAX_MEMBERS)).encode()
        assert structure_fault(b"{" + members + b"}") is None
        fault = structure_fault(b'[{"a":{' + members + b',"more":1}}]')
        assert "members" in str(fault)


def test_values_are_bounded_in_number() -> None:
    assert structure_fault(b"[" + b"1," * (MAX_VALUES - 1) + b"1]") is None
    assert "values" in str(structure_fault(b"[" + b"1," * MAX_VALUES + b"1]"))
    assert structure_fault(json.dumps(["a,b" * MAX_VALUES]).encode()) is None, "commas in text part no values"


@given(VALUES, st.text(st.sampled_from('\\"[,: a'), max_size=40), st.integers(0, 12))
def test_the_skeleton_of_json_is_its_structure(value: object, text: str, shift: int) -> None:
    """Wherever a window of the scan ends: before, in or after what is escaped."""

    def skeleton(value: object) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f":{skeleton(inner)}" for inner in value.values()) + "}"
        return "[" + ",".join(map(skeleton, value)) + "]" if isinstance(value, list) else ""

    whole = [text, value, "x" * (_WINDOW - shift), text, value]
    assert skeleton_of(json.dumps(whole).encode()).decode() == skeleton(whole)


@given(st.integers(0, 2**32 - 1))
def test_colons_in_text_are_no_members(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choice(':"\\{}[], a') for _ in range(300))
    assert structure_fault(json.dumps([text * 200] * 3).encode()) is None


def test_the_bytes_of_long_bodies_are_bounded_and_given_back() -> None:
    """They are counted from the head that announces them, and short ones pass beside them."""
    size = 100_000
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with living("stub://alpha", ServerOptions(max_body_bytes=size)) as server:
        with ExitStack() as clients:
            for _ in range(MAX_LONG_BODIES):
                client = clients.enter_context(socket.create_connection(server.address, timeout=HANG_S))
                client.sendall(f"{head}content-length: {size}\r\n\r\n{{".encode())
            body = {"prompt": "a", "max_tokens": 1}
            until(lambda: server.get("/load").json()["server_load"] == MAX_LONG_BODIES, "all are being read")
            refused = server.post("/v1/completions", {**body, "x": LONG[: size - 200]})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert error_of(refused)["code"] == "too_many_bytes"
            assert server.post("/v1/completions", body).status_code == 200, "short ones are not counted"
        until(lambda: server.get("/load").json()["server_load"] == 0, "all have left")
        long = json.dumps(body) + " " * (size - 1_000)
        with server.client() as http:
            answers = [
                http.post("/v1/completions", content=long, headers={"Content-Type": "application/json"}).status_code
                for _ in range(MAX_LONG_BODIES + 1)
            ]
        assert set(answers) == {200}


async def test_a_long_body_is_rejected_with_queue_full_when_the_workbench_is_full() -> None:
    """It was checked already, and nothing is wrong with it."""

    class FullAfterOne:
        """Where long work is done, once."""

        num_done = 0

        async def do(self, work: Callable[[], Any], num_bytes: int) -> Any:
            self.num_done += 1
            if self.num_done > 1:
                raise QueueFullError("too much long work waits; try again later")
            return work()

    cluster = one_model("stub://alpha", ("alpha",))
    await cluster.start()
    try:
        app = create_app(cluster)
        object.__setattr__(app.state.serving, "bench", FullAfterOne())
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://test") as client:
            refused = await client.post("/v1/completions", json={"prompt": "a" * (2 * MAX_INLINE_BYTES)})
    finally:
        await cluster.close()
    assert (refused.status_code, error_of(refused)["code"]) == (429, "queue_full")


def test_requests_are_answered_while_a_long_text_is_tokenised() -> None:
    """One that the context would hold, so that nothing but tokenising answers it."""
    answers: list[httpx2.Response] = []
    with living("stub://alpha?max_model_len=3000000") as server:
        asking = threading.Thread(target=lambda: answers.append(server.post("/tokenize", {"prompt": "ab " * 60_000})))
        asking.start()
        num_between = 0
        while not answers:
            assert server.get("/health").status_code == 200
            assert server.post("/tokenize", {"prompt": "short"}).json()["count"] == 5
            num_between += not answers
        asking.join()
    assert answers[0].json()["count"] == 180_000
    assert num_between >= 1
