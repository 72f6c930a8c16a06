"""The remote tier against a real second server: what passes through, and what ends when the client leaves."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import psutil
import pytest

from lockstep.cluster.base import Event, EventStream
from lockstep.core.request import FinishReason
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.errors import DeadlineError, InvalidParameterError, RequestFailedError, UnavailableError
from lockstep.executors.constraint import Constraint
from lockstep.executors.sampling_params import SamplingParams
from tests.cluster.remotes import KEY, answer_of, call, events_of, remote, tokens_of
from tests.server.process import IN_THREAD, ServerProcess, serve
from tests.systems import ClockedSystem
from tests.waiting import HANG_S, eventually

STEP_S = 0.02
ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True)
_GAUGE = re.compile(r"^lockstep:num_requests_(?:running|waiting)\{.*\} (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def upstream() -> Iterator[ServerProcess]:
    """A stub that takes its time for every token, and asks for a key."""
    source = f"stub://alpha?step_ms={STEP_S * 1000:g}"
    with serve(source, *IN_THREAD, "--served-model-name", "served", "--api-key", KEY) as server:
        yield server


def url(server: ServerProcess) -> str:
    return f"{server.base_url}/v1"


def direct(server: ServerProcess, **body: Any) -> dict[str, Any]:
    with server.client(api_key=KEY) as client:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer: dict[str, Any] = client.post(path, json=body).raise_for_status().json()
    return answer


async def last_of(stream: EventStream) -> Event:
    async with asyncio.timeout(HANG_S):
        return [event async for events in stream for event in events][-1]


async def computing(server: ServerProcess, num_requests: int) -> None:
    """Wait until so many are computed there."""

    def num_there() -> float:
        with server.client(api_key=KEY) as client:
            found = _GAUGE.findall(client.get("/metrics").text)
        assert found
        return sum(map(float, found))

    async def are_there() -> bool:
        return await asyncio.to_thread(num_there) == num_requests

    await eventually(are_there)


async def settled(server: ServerProcess) -> None:
    """Nothing is computed there any more."""
    await computing(server, 0)


async def test_an_answer_is_the_other_servers_with_its_usage(upstream: ServerProcess) -> None:
    messages = [{"role": "user", "content": "I was charged twice."}]
    params = SamplingParams(max_tokens=12, seed=7, temperature=0.8, ignore_eos=True, n=2)
    async with remote(url(upstream)) as model:
        output = answer_of(await events_of(model, GenerationRequest(Conversation(messages), params)))
    expected = direct(upstream, messages=messages, max_tokens=12, seed=7, temperature=0.8, ignore_eos=True, n=2)
    assert [c.text for c in output.completions] == [c["message"]["content"] for c in expected["choices"]]
    assert {c.finish_reason for c in output.completions} == {FinishReason.LENGTH}
    assert output.num_prompt_tokens == expected["usage"]["prompt_tokens"]
    assert output.num_output_tokens == expected["usage"]["completion_tokens"] == 24
    assert output.prompt_token_ids == ()


async def test_a_prompt_is_completed(upstream: ServerProcess) -> None:
    async with remote(url(upstream)) as model:
        output = answer_of(await events_of(model, GenerationRequest("Once upon", SamplingParams(max_tokens=5, seed=1))))
    expected = direct(upstream, prompt="Once upon", max_tokens=5, seed=1)
    assert output.text == expected["choices"][0]["text"]


async def test_tokens_come_as_they_are_produced(upstream: ServerProcess) -> None:
    """Ten of them are read while the answer goes on."""
    async with remote(url(upstream)) as model, aclosing(model.stream(call(params=ENDLESS))) as stream:
        for _ in range(10):
            await anext(stream)
        await computing(upstream, 1)
    await settled(upstream)


async def test_leaving_ends_the_generation_there(upstream: ServerProcess) -> None:
    async with remote(url(upstream)) as model:
        streams = [model.stream(call(params=ENDLESS)) for _ in range(4)]
        for stream in streams:
            await anext(stream)
            await anext(stream)
        assert model.num_open == 4
        for stream in streams:
            await stream.aclose()
        assert model.num_open == 0
    await settled(upstream)


async def test_a_task_that_is_cancelled_ends_the_generation_there(upstream: ServerProcess) -> None:
    async with remote(url(upstream)) as model:
        task = asyncio.create_task(events_of(model, call(params=ENDLESS)))
        await computing(upstream, 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await settled(upstream)


async def test_a_deadline_ends_the_answer_on_both_sides(upstream: ServerProcess) -> None:
    async with remote(url(upstream)) as model:
        with pytest.raises(DeadlineError):
            await events_of(model, call(params=ENDLESS, deadline_s=0.3))
    await settled(upstream)


async def test_all_calls_can_be_ended_with_an_error(upstream: ServerProcess) -> None:
    async with remote(url(upstream)) as model:
        tasks = [asyncio.create_task(events_of(model, call(params=ENDLESS))) for _ in range(3)]
        await computing(upstream, 3)
        model.abort_all(UnavailableError("draining"))
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(error) for error in ended] == ["draining"] * 3
    await settled(upstream)


async def test_closing_ends_open_calls(upstream: ServerProcess) -> None:
    async with remote(url(upstream)) as model:
        tasks = [asyncio.create_task(events_of(model, call(params=ENDLESS))) for _ in range(3)]
        await computing(upstream, 3)
        await model.close()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in ended] == [UnavailableError] * 3
    await settled(upstream)


async def test_remote_answers_obey_constraints(upstream: ServerProcess) -> None:
    for constraint in (Constraint.choice(["billing", "legal"]), Constraint.json_schema({"enum": ["billing", "legal"]})):
        async with remote(url(upstream)) as model:
            output = answer_of(
                await events_of(model, call(params=SamplingParams(max_tokens=30, constraint=constraint)))
            )
        assert output.text.strip('"') in ("billing", "legal")


@pytest.mark.parametrize(
    ("params", "more", "param"),
    [
        (SamplingParams(top_p=7.0), {}, "top_p"),
        (SamplingParams(), {"cache_salt": "x" * 1000}, "cache_salt"),
        (SamplingParams(logprobs=2), {}, "logprobs"),
        (SamplingParams(), {"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
    ids=["there", "there, of vLLM", "here", "here, of vLLM"],
)
async def test_unsupported_parameters_are_rejected_by_name(
    upstream: ServerProcess, params: SamplingParams, more: dict[str, Any], param: str
) -> None:
    async with remote(url(upstream)) as model:
        with pytest.raises(InvalidParameterError, match=r"remote (model|server of) 'far'") as caught:
            await events_of(model, call(params=params, **more))
    assert caught.value.param == param


async def test_a_name_or_key_that_is_not_taken_there_is_the_operators_fault(upstream: ServerProcess) -> None:
    async with remote(upstream.base_url) as model:
        with pytest.raises(RequestFailedError, match="base_url"):
            await events_of(model)
    with serve("stub://alpha", *IN_THREAD, "--served-model-name", "served", "--api-key", "another") as other:
        async with remote(url(other)) as model:
            with pytest.raises(RequestFailedError, match=r"rejected our API key.*FAR_KEY") as caught:
                await events_of(model)
    assert KEY not in str(caught.value)


def connections_to(server: ServerProcess) -> set[int]:
    """Our ports of the open connections to a server."""
    port = int(server.base_url.rpartition(":")[2])
    open_now = [each for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_ESTABLISHED]
    return {each.laddr.port for each in open_now if each.raddr and each.raddr.port == port}


async def test_one_connection_serves_calls_in_a_row(upstream: ServerProcess) -> None:
    async with remote(url(upstream)) as model:
        before = connections_to(upstream)
        for _ in range(3):
            assert tokens_of(await events_of(model, call(params=SamplingParams(max_tokens=2))))[-1].is_final
        assert len(connections_to(upstream) - before) == 1


async def test_a_server_that_dies_in_mid_stream_ends_the_answer_and_a_new_one_is_found() -> None:
    with serve("stub://alpha?step_ms=20", *IN_THREAD, "--served-model-name", "served") as server:
        port = server.base_url.rpartition(":")[2]
        now_s = 100.0
        async with remote(url(server), num_failures=1, system=ClockedSystem(lambda: now_s)) as model:
            async with aclosing(model.stream(call(params=ENDLESS))) as stream:
                await anext(stream)
                server.signal(signal.SIGKILL)
                with pytest.raises(RequestFailedError, match=r"'far' closed the connection"):
                    await last_of(stream)
            with pytest.raises(UnavailableError, match="gets no requests now"):
                await events_of(model)
            assert not model.health().ready
            with serve("stub://alpha", *IN_THREAD, "--served-model-name", "served", "--port", port):
                now_s += 1.0
                assert model.health().ready
                answer_of(await events_of(model))
                assert model.health().ready
