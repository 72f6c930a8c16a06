"""`GET /v1/requests`: what is open and what has ended, whose it is, and that nothing of its content is in it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any, get_args

import openai
import pytest

from lockstep.cluster.base import Hop
from lockstep.core.step import Limit
from lockstep.engine.deadlines import ManualClock
from lockstep.engine.engine import Engine
from lockstep.engine.loading import load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.outputs import WaitReason
from lockstep.engine.request import GenerationRequest
from lockstep.engine.wait_reasons import ADAPTER, PRIORITY, RETURNING, SESSION
from lockstep.executors.sampling_params import SamplingParams
from lockstep.server.options import ServerOptions
from lockstep.server.request_context import RequestContext
from lockstep.server.request_log import KINDS, MAX_SHOWN_CHARS, RequestLog, chosen, plain, waits_of
from lockstep.server.request_rows import Kind
from lockstep.worker.progress import LOADING, PLACE, Wait
from tests.server.process import IN_THREAD, ServerProcess, serve
from tests.server.support import client_of, error_of
from tests.waiting import HANG_S, until

CHAT = "/v1/chat/completions"
SECRET = "the dog is buried under the apple tree"


def asking(text: str = SECRET, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


def ended(log: RequestLog, **fields: Any) -> None:
    context = RequestContext(**{"request_id": "r", "endpoint": CHAT, "started_s": 0.0, "method": "POST", **fields})
    log.begin(context)
    context.status = context.status or 200
    log.end(context, 0.5)


def test_as_many_ended_ones_are_kept_as_may_be_and_the_newest_come_first() -> None:
    log = RequestLog(max_ended=4)
    for index in range(10):
        ended(log, request_id=f"r{index}")
    assert [row.id for row in chosen(log.rows())] == ["r9", "r8", "r7", "r6"]
    assert [row.id for row in chosen(log.rows(), limit=2)] == ["r9", "r8"]
    assert [row.id for row in chosen(log.rows(), after=9)] == ["r9"]


def test_filters_choose_by_model_session_status_and_state() -> None:
    log = RequestLog()
    hop = Hop("router", SECRET, "billing", "specialists.billing", 0.1, 3, 0, 1)
    ended(log, request_id="a", model="billing", hops=[hop], session_id="s")
    ended(log, request_id="b", model="legal", status=429)
    log.begin(RequestContext("c", CHAT, 0.0, method="POST", model="legal"))

    def ids(**wanted: Any) -> list[str]:
        return [row.id for row in chosen(log.rows(), **wanted)]

    assert ids(model="legal") == ["c", "b"]
    assert ids(model="router") == ["a"]
    assert ids(session_id="s") == ["a"]
    assert ids(status=429) == ["b"]
    assert ids(states=["waiting"]) == ["c"]
    assert ids(states=["ended"], model="legal") == ["b"]


def test_only_requests_to_models_are_listed_and_no_strangers() -> None:
    log = RequestLog()
    ended(log, endpoint="/tokenize")
    ended(log, endpoint="/v1/responses", method="GET")
    ended(log, status=401)
    assert list(log.rows()) == []


def test_names_of_clients_are_short_plain_text() -> None:
    assert (
        plain("a\x1b[31m\u202eb\n")
        == "a\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"
    )
    assert len(plain("x" * 1_000)) == MAX_SHOWN_CHARS


@pytest.fixture(scope="module")
def slow() -> Iterator[ServerProcess]:
    """A stub in a process of its own whose steps take their time."""
    with serve("stub://alpha?step_ms=20", "--served-model-name", "alpha", "--max-num-seqs", "1") as running:
        yield running


def rows_of(client: openai.OpenAI, query: str = "") -> list[dict[str, Any]]:
    found: Any = client.get(f"/requests{query}", cast_to=object)
    rows: list[dict[str, Any]] = found["data"]
    return rows


def test_request_row_is_updated_from_wait_to_end(slow: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{slow.base_url}/v1", api_key="none", max_retries=0, timeout=HANG_S) as client:
        endless = client.chat.completions.create(
            **{**asking(stream=True, model="alpha"), "max_tokens": 4000},
            extra_body={"ignore_eos": True, "session_id": "talk"},
            extra_headers={"x-request-id": "first"},
        )
        next(iter(endless))
        behind = threading.Thread(
            target=lambda: client.chat.completions.create(
                **asking(model="alpha"), extra_body={"ignore_eos": True}, extra_headers={"x-request-id": "second"}
            )
        )
        behind.start()
        until(lambda: len(rows_of(client, "?state=waiting&state=running")) == 2, "both are open")
        second, first = rows_of(client)
        assert (first["id"], first["state"], first["session_id"]) == ("first", "running", "talk")
        assert first["output_tokens"] > 0
        assert first["ttft_ms"] is not None
        assert (second["id"], second["state"], second["output_tokens"]) == ("second", "waiting", 0)
        assert [row["id"] for row in rows_of(client, f"?after={first['number']}")] == ["second"]
        endless.close()
        behind.join(HANG_S)
        until(lambda: not rows_of(client, "?state=waiting&state=running"), "both have ended")
        second, first = rows_of(client)
        assert (first["status"], first["finish_reasons"]) == (499, [])
        assert (second["status"], second["finish_reasons"], second["output_tokens"]) == (200, ["length"], 8)
        assert second["prompt_tokens"] > 0
        assert 0 < second["waited_ms"] < second["ttft_ms"] < second["total_ms"]
        assert SECRET not in str([first, second])


def test_a_key_sees_its_own_and_an_admin_key_everything() -> None:
    environment = {"LOCKSTEP_API_KEY": "key-one,key-two", "LOCKSTEP_ADMIN_KEY": "key-admin"}
    with serve("stub://alpha", *IN_THREAD, environment=environment) as running, running.client() as client:

        def ids(key: str) -> list[str]:
            response = client.get("/v1/requests", headers={"X-Api-Key": key})
            assert "key-one" not in response.text
            assert "key-admin" not in response.text
            return [row["id"] for row in response.json()["data"]]

        for key in ("key-one", "key-two"):
            headers = {"X-Api-Key": key, "x-request-id": f"of-{key[4:]}"}
            assert client.post(CHAT, json=asking(), headers=headers).status_code == 200
        assert client.post(CHAT, json=asking()).status_code == 401
        assert ids("key-one") == ["of-one"]
        assert ids("key-two") == ["of-two"]
        assert ids("key-admin") == ["of-two", "of-one"]
        assert error_of(client.get("/v1/requests"))["code"] == "invalid_api_key"


async def test_with_admin_keys_only_the_request_log_requires_one() -> None:
    async with client_of(options=ServerOptions(admin_keys=("a",))) as client:
        assert (await client.get("/v1/requests")).status_code == 401
        assert (await client.get("/v1/requests", headers={"X-Api-Key": "a"})).status_code == 200


async def test_wrong_filters_are_refused_by_name() -> None:
    async with client_of() as client:
        for query, param in (("limit=0", "limit"), ("state=gone", "state[0]"), ("after=-1", "after")):
            response = await client.get(f"/v1/requests?{query}")
            assert response.status_code == 400
            assert error_of(response)["param"] == param


POLICIES = (
    {
        "num_blocks": 10,
        "host_kv_memory_bytes": 64,
        "order": "priority",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 40,
        "max_num_decode_seqs": 3,
    },
    {"num_blocks": 12, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_num_prefill_tokens": 8, "max_skips": 1},
)


def test_every_wait_reason_of_an_engine_occurs_and_has_a_text() -> None:
    """What an engine says of a fixed load, small pools and all, is every limit that keeps somebody out."""
    limits: set[str] = set()
    kinds: set[str] = set()
    for policy in POLICIES:
        draw, clock = random.Random(7), ManualClock()
        model, config = load_model("stub://alpha", LoadOptions(EngineOptions(**policy)))
        engine = Engine(model, config, clock=clock)
        for step in range(400):
            for _ in range(draw.choice((0, 0, 1, 3)) if step < 60 else 0):
                params = SamplingParams(max_tokens=draw.randint(1, 40), ignore_eos=True, n=draw.choice((1, 1, 1, 2)))
                prompt = [65] * draw.randint(1, 90)
                engine.submit(GenerationRequest(prompt, params, priority=draw.randint(-1, 2)))
            clock.advance(10.0)
            if engine.has_work:
                engine.step()
                reasons = engine.take().waits
                limits |= {reason.limit for reason in reasons}
                told = list(waits_of([Wait("m", reason, 1.0, 2.0, config) for reason in reasons], 0.0))
                assert all(wait.reason for wait in told)
                kinds |= {wait.kind for wait in told}
    assert limits == {limit.name for limit in Limit if limit is not Limit.CHUNK} | {PRIORITY}
    assert kinds == set(get_args(Kind)) - {"model_loading", "session", "blocks_returning", "adapter"}, (
        "which no scheduler knows"
    )
    assert KINDS.keys() == limits | {LOADING, PLACE, SESSION, RETURNING, ADAPTER}


def test_budgets_of_an_encoder_are_shown_in_positions() -> None:
    _, config = load_model("stub://alpha", LoadOptions())
    reason = WaitReason(1, Limit.TOKENS.name, used=512, most=512)
    [wait] = waits_of([Wait("m", reason, 1.0, 2.0, config, num_stages=7)], 0.0)
    assert wait.reason == "the budget of 512 positions (7 for each token) is used up"
