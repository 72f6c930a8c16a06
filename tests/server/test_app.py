"""What every answer has in common: ids, error shapes, logs; and that nothing a client sends becomes a 500."""

from __future__ import annotations

import json
import logging
from typing import Any, get_args

import httpx2
import pytest
from fastapi import APIRouter
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core.core_schema import ErrorType

from lockstep.server.access_log import hashed_by
from lockstep.server.app import ROUTERS
from lockstep.server.body import body_fault, has_lone_surrogate, structure_fault
from lockstep.server.errors import field_path, validation_http_error
from lockstep.server.options import ServerOptions
from lockstep.server.request_context import RequestContext
from lockstep.server.tracing import span_attributes
from lockstep.worker.logs import JsonFormatter, TextFormatter
from tests.server.process import ServerProcess
from tests.server.support import JSON, client_of, error_of, exchange

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=30,
)


def test_the_home_page_names_the_server_and_no_model(server: ServerProcess) -> None:
    with server.client() as client:
        body = client.get("/").json()
    assert body["name"] == "lockstep"
    assert "alpha" not in json.dumps(body), "the page needs no key, so it names no model"


@pytest.mark.parametrize("given_id", ["abc-123", "x" * 128, "!~"])
def test_a_sane_request_id_is_echoed(server: ServerProcess, given_id: str) -> None:
    with server.client() as client:
        assert client.get("/version", headers={"x-request-id": given_id}).headers["x-request-id"] == given_id


@pytest.mark.parametrize("given_id", ["", "x" * 129, "has space", "\x80"])
def test_another_request_id_is_replaced(server: ServerProcess, given_id: str) -> None:
    with server.client() as client:
        response = client.get("/nowhere", headers={b"x-request-id": given_id.encode("latin-1")})
    assert response.headers["x-request-id"].startswith("req-")


def test_requests_have_different_ids(server: ServerProcess) -> None:
    with server.client() as client:
        assert client.get("/ping").headers["x-request-id"] != client.get("/ping").headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/nowhere", 404, "not_found_error"),
        ("GET", "/../../etc/passwd", 404, "not_found_error"),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404, "not_found_error"),
        ("GET", "/static/..%2f..%2fetc/passwd", 404, "not_found_error"),
        ("GET", "/v1/models/../../etc/passwd", 404, "not_found_error"),
        ("GET", "/v1/models/%00", 404, "not_found_error"),
        ("DELETE", "/v1/models", 405, "invalid_request_error"),
        ("POST", "/health", 405, "invalid_request_error"),
        ("BREW", "/tokenize", 405, "invalid_request_error"),
    ],
)
def test_unknown_paths_and_methods_return_errors_of_one_shape(
    server: ServerProcess, method: str, path: str, status: int, kind: str
) -> None:
    request = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    head, _, body = exchange(server.base_url, request).partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    expected = 400 if method == "BREW" else status  # not HTTP's own method: refused by the parser
    assert lines[0].startswith(f"http/1.1 {expected} ")
    assert json.loads(body)["error"]["type"] == kind
    if expected == 405:
        assert any(line.startswith("allow: ") for line in lines)
    if expected != 400:
        assert any(line.startswith("x-request-id: ") for line in lines)


BODIES: dict[str, tuple[bytes, int, str | None, str]] = {
    "no JSON": (b"{", 400, None, "not valid JSON at character 1"),
    "no UTF-8": (b'{"prompt": "\xff"}', 400, None, "byte 12 is 0xff"),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), 400, None, "not UTF-8"),
    "UTF-16 without a mark": ('{"prompt": "a"}'.encode("utf-16-le"), 400, None, "byte 1 is 0x00"),
    "UTF-32 without a mark": ('{"prompt": "a"}'.encode("utf-32-be"), 400, None, "byte 0 is 0x00"),
    "too deep": (b"[" * 100_000, 400, None, "more than 128 levels deep"),
    "too deep, closed": (b'{"prompt":' * 200 + b"1" + b"}" * 200, 400, None, "more than 128 levels deep"),
    "half a pair": (b'{"prompt": "\\ud83d"}', 400, None, "surrogate"),
    "half a pair in a name": (b'{"prompt": "a", "session_id": "\\udc00"}', 400, None, "surrogate"),
    "wrong type": (b'{"prompt": 7}', 400, "prompt", "prompt is 7; it must be a string."),
    "a list": (b"[]", 400, None, "the body"),
    "a string": (b'"prompt"', 400, None, "the body"),
    "nothing": (b"", 400, None, "missing"),
    "unknown": (b'{"prompt": "a", "bogus": 1}', 400, "bogus", "bogus is not"),
    "nested": (b'{"messages": [{"role": "user", "content": "a"}, 5]}', 400, "messages[1]", "messages[1]"),
    "huge number": (b'{"tokens": [1' + b"0" * 5000 + b"]}", 400, None, "JSON"),
    "NaN": (b'{"prompt": NaN}', 400, "prompt", "string"),
    "10 MB": (b'{"prompt": "' + b"a" * 10_000_000 + b'"}', 413, None, "8388608 bytes"),
}


@pytest.mark.parametrize("case", BODIES)
def test_a_bad_body_is_refused_with_its_reason(server: ServerProcess, case: str) -> None:
    body, status, param, words = BODIES[case]
    with server.client() as client:
        response = client.post("/tokenize", content=body, headers=JSON)
    error = error_of(response)
    assert response.status_code == status
    assert error["param"] == param
    assert words in error["message"]
    assert "x-request-id" in response.headers


@pytest.mark.parametrize(
    ("type_", "context", "value", "message"),
    [
        ("int_parsing", {}, "ten", "is 'ten'; it must be a whole number."),
        ("float_type", {}, [], "is a list; it must be a number."),
        ("greater_than", {"gt": 0.0}, -1.5, "is -1.5; it must be greater than 0."),
        ("less_than_equal", {"le": 2**64 - 1}, 2**64, f"is {2**64}; it must be at most {2**64 - 1}."),
        ("string_too_long", {"max_length": 1}, "ab", "is a string of 2 characters; it must have at most 1 character."),
        ("too_short", {"min_length": 2}, {}, "is an empty object; it must have at least 2 entries."),
        ("literal_error", {"expected": "'True', False or None"}, "no", "is 'no'; it must be 'True', false or null."),
        ("none_required", {}, {}, "is an object; it must be null or left out."),
        ("missing", {}, {}, "is missing."),
        ("too_long", {}, [], "is an empty list; it must have the form that /openapi.json gives for it."),
    ],
)  # fmt: skip
def test_faults_of_validation_are_sentences_of_ours(
    type_: str, context: dict[str, object], value: object, message: str
) -> None:
    fault = {"type": type_, "loc": ("body", "x", 2), "msg": "Input should be other", "input": value, "ctx": context}
    error = validation_http_error([fault])
    assert (error.status, error.param, error.code) == (400, "x[2]", "invalid_parameter")
    assert error.message == f"x[2] {message}"


@pytest.mark.parametrize("type_", [each for each in get_args(ErrorType) if each not in ("value_error", "json_invalid")])
def test_no_fault_shows_the_text_of_pydantic(type_: str) -> None:
    """Neither of the faults that there are, nor of those that no body of ours has today."""
    text = "Input should be other, see https://errors.pydantic.dev"
    error = validation_http_error([{"type": type_, "loc": ("body", "x"), "msg": text, "input": "prose", "ctx": {}}])
    assert error.message.startswith("x is ")
    assert "should" not in error.message
    assert "pydantic" not in error.message
    assert "prose" not in error.message or type_ in (
        "int_parsing",
        "float_parsing",
        "bool_parsing",
        "literal_error",
        "enum",
    )


def test_a_body_of_another_type_is_refused(server: ServerProcess) -> None:
    with server.client() as client:
        form = client.post("/tokenize", data={"prompt": "a"})
        bare = client.post("/tokenize", content=b'{"prompt": "a"}')
        vendor = client.post("/tokenize", content=b'{"prompt": "a"}', headers={"Content-Type": "application/x+json"})
    assert (form.status_code, bare.status_code, vendor.status_code) == (415, 415, 200)
    assert "Content-Type: application/json" in error_of(form)["message"]


def test_a_refusal_repeats_no_prose(server: ServerProcess) -> None:
    """A client's text in an error body would be in its logs, and through them elsewhere."""
    with server.client() as client:
        response = client.post("/tokenize", json={"prompt": ["my secret"]})
        log = server.stderr
    assert response.status_code == 400
    assert "secret" not in response.text + log


@given(VALUES)
def test_depth_is_counted_as_the_parser_sees_it(value: Any) -> None:
    def depth(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    body = json.dumps(value, ensure_ascii=False).encode()
    for limit in range(depth(value) + 2):
        assert (structure_fault(body, limit) is not None) == (depth(value) > limit)


@given(st.text(st.characters(exclude_categories=()), max_size=20))
def test_a_half_pair_is_found_in_any_text(text: str) -> None:
    body = json.dumps(text).encode()
    try:
        json.loads(body).encode()
        is_whole = True
    except UnicodeEncodeError:
        is_whole = False
    assert has_lone_surrogate(body) == (not is_whole)


def test_depth_is_linear_in_hostile_text() -> None:
    """Unclosed strings and endless escapes are what makes naive scanners quadratic; these would take minutes."""
    for body in (b'["' + b"\\" * 4_000_000, b'["' * 2_000_000, b"[" * 129 + b'"' + b"a" * 4_000_000):
        structure_fault(body)


def test_an_empty_body_needs_no_type() -> None:
    assert body_fault(b"", "") is None
    assert body_fault(b"{}", "application/json; charset=utf-8") is None


@pytest.mark.parametrize(
    ("loc", "path"),
    [
        (("body", "messages", 2, "content"), "messages[2].content"),
        (("body", "messages", 2, "content", "str"), "messages[2].content"),
        (("body", "stop", "list[str]", 0), "stop[0]"),
        (("body", "input", "(text)"), "input"),
        (("body",), None),
        (("query", "limit"), "limit"),
    ],
)
def test_fields_are_named_as_clients_write_them(loc: tuple[int | str, ...], path: str | None) -> None:
    assert field_path(loc) == path


async def test_a_defect_is_returned_without_details_and_logged_with_them(caplog: pytest.LogCaptureFixture) -> None:
    router = APIRouter()

    @router.get("/broken")
    async def broken() -> None:
        raise RuntimeError("the vault is open")

    async with client_of(routers=(*ROUTERS, router)) as client:
        response = await client.get("/broken", headers={"x-request-id": "r-1"})
    assert response.status_code == 500
    assert error_of(response) == {
        "message": "internal error: RuntimeError",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert response.headers["x-request-id"] == "r-1"
    assert "request r-1 failed" in caplog.text
    assert "the vault is open" in caplog.text


async def test_each_request_is_one_line_with_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lockstep.request")
    async with client_of() as client:
        await client.post("/tokenize", json={"prompt": "tell nobody"}, headers={"x-request-id": "r-2"})
        await client.get("/health")
    lines = [
        json.loads(JsonFormatter("server").format(record))
        for record in caplog.records
        if record.name == "lockstep.request"
    ]
    assert len(lines) == 1, "probes are logged at the debug level"
    expected = {"id": "r-2", "endpoint": "/tokenize", "status": 200, "model": "org/alpha", "level": "info"}
    assert expected.items() <= lines[0].items()
    assert lines[0]["total_ms"] > 0
    assert "nobody" not in json.dumps(lines)


async def test_prompts_are_logged_with_log_prompts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lockstep.request")
    async with client_of(options=ServerOptions(log_prompts=True)) as client:
        await client.post("/tokenize", json={"prompt": 'two "lines"\nhere'})
    text = TextFormatter("server").format(
        next(record for record in caplog.records if record.name == "lockstep.request")
    )
    assert json.loads(text.partition(" body=")[2].partition(" answers=")[0]) == r'{"prompt":"two \"lines\"\nhere"}'
    assert "\n" not in text, "what a client sends cannot forge a line"


@pytest.mark.parametrize("logs_user", [False, True])
async def test_log_lines_distinguish_users_by_hash_unless_users_are_logged(
    caplog: pytest.LogCaptureFixture, logs_user: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    seen: list[RequestContext] = []
    options = ServerOptions(log_user=logs_user)
    async with client_of(options=options, observers=(lambda record, _: seen.append(record),)) as client:
        for user in ("ada@example.com", "ada@example.com", "bob@example.com"):
            asked = {"user": user, "prompt": "x", "max_tokens": 1}
            await client.post("/v1/completions", json={**asked, "metadata": {"run": "7"}})
            chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
            await client.post("/v1/chat/completions", json={**chat, "safety_identifier": user})
            await client.post("/v1/responses", json={"input": "x", "prompt_cache_key": user, "max_output_tokens": 1})
            await client.post("/v1/embeddings", json={"input": "x", "user": user})
        metrics = (await client.get("/metrics")).text
    formats = (JsonFormatter("server"), TextFormatter("server"))
    lines = [format_.format(record) for record in caplog.records for format_ in formats]
    told = [json.loads(line)["metadata"] for line in lines if line.startswith("{") and "metadata" in line]
    assert all("@" in value for metadata in told for name, value in metadata.items() if name != "run") is logs_user
    assert {metadata["run"] for metadata in told if "run" in metadata} == {"7"}, (
        "what a client labels is its own to say"
    )
    people = [[value for name, value in metadata.items() if name != "run"] for metadata in told]
    ada, again, bob = people[:4], people[4:8], people[8:]
    assert ada == again != bob
    assert len({value for values in people for value in values}) == 2
    spans = [str(span_attributes(record)) for record in seen]
    assert any("example.com" in text for text in (*lines, metrics, *spans)) is logs_user


async def test_a_hash_of_one_run_is_no_use_in_another() -> None:
    assert hashed_by(b"a" * 16)("ada") == hashed_by(b"a" * 16)("ada") != hashed_by(b"b" * 16)("ada")


async def test_access_log_can_be_disabled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "lockstep.request")
    async with client_of(options=ServerOptions(log_requests=False)) as client:
        await client.get("/v1/models")
    assert "lockstep.request" not in {record.name for record in caplog.records}


async def test_observers_see_routes_not_paths() -> None:
    """Else every path that a client invents would be a metric of its own."""
    seen: list[RequestContext] = []
    async with client_of(observers=(lambda record, _: seen.append(record),)) as client:
        for path in ("/v1/models/org/alpha", "/v1/models/nobody", "/made/up"):
            await client.get(path)
        await client.post("/tokenize", content=b"{")
    endpoints = [(record.endpoint, record.status) for record in seen]
    by_id = "/v1/models/{model_id:path}"
    assert endpoints == [(by_id, 200), (by_id, 404), ("unrouted", 404), ("/tokenize", 415)]


async def test_browsers_may_call_only_where_allowed() -> None:
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    keys = ServerOptions(api_keys=("k",), cors_origins=("https://a.example",))
    async with client_of(options=keys) as client:
        allowed = await client.options("/v1/models", headers=preflight)
        other = await client.options("/v1/models", headers={**preflight, "Origin": "https://b.example"})
        refused = await client.get("/v1/models", headers={"Origin": "https://a.example"})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    assert other.status_code == 400
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example", "a page can read why"
    async with client_of() as client:
        off = await client.get("/v1/models", headers={"Origin": "https://a.example"})
    assert "access-control-allow-origin" not in off.headers


async def test_a_refused_preflight_has_an_id_too() -> None:
    async with client_of() as client:
        response = await client.options("/v1/models")
    assert isinstance(response, httpx2.Response)
    assert response.status_code == 405
    assert response.headers["x-request-id"]
