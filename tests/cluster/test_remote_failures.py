"""A server that misbehaves: whatever it does, the call ends, with an error that fits."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import aclosing

import pytest

from lockstep.cluster.breaker import BreakerState
from lockstep.cluster.completion_chunks import MAX_REASON_CHARS
from lockstep.cluster.remote_exchange import CallDeadlines
from lockstep.cluster.remote_messages import AnswerLimits
from lockstep.core.request import FinishReason
from lockstep.errors import (
    DeadlineError,
    InvalidParameterError,
    LockstepError,
    PromptTooLongError,
    QueueDeadlineError,
    RemoteFailedError,
    UnavailableError,
)
from lockstep.executors.sampling_params import SamplingParams
from lockstep.worker.logs import FIELDS
from tests.cluster.remotes import (
    HEAD,
    KEY,
    Reply,
    answer_of,
    call,
    chunk,
    crooked,
    event,
    events_of,
    refuses,
    remote,
    says,
    tokens_of,
    whole,
)
from tests.systems import ClockedSystem
from tests.waiting import HANG_S, eventually

BEGUN = HEAD + chunk({"role": "assistant", "content": "Once"})
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n<h1>Welcome</h1>"
CUT_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 9999\r\n\r\n"
PINGS: list[bytes | float] = [b": ping\n\n", 0.2] * round(HANG_S / 0.2)
FAILURES: dict[str, tuple[Reply, type[LockstepError], str]] = {
    "500": (refuses(500, {"error": {"message": "boom"}}), RemoteFailedError, "failed with status 500"),
    "500, no JSON": (refuses(500), RemoteFailedError, "failed with status 500"),
    "502": (refuses(502, "bad gateway"), RemoteFailedError, "failed with status 502"),
    "504": (refuses(504), DeadlineError, "504"),
    "redirect": (refuses(307, None, "Location: http://example.com/"), RemoteFailedError, "redirect"),
    "nothing": (says(), RemoteFailedError, "broke the connection"),
    "not HTTP": (says(b"220 mail.example.com ESMTP\r\n"), RemoteFailedError, "broke the connection"),
    "no event": (says(HEAD), RemoteFailedError, "before it answered"),
    "cut": (says(BEGUN), RemoteFailedError, "in the middle of its answer"),
    "cut in an event": (says(BEGUN + b'data: {"choi'), RemoteFailedError, "in the middle of its answer"),
    "cut in the body": (says(CUT_HEAD + chunk({"content": "a"})), RemoteFailedError, "in the middle of its answer"),
    "early [DONE]": (says(BEGUN + event(b"[DONE]")), RemoteFailedError, "in the middle of its answer"),
    "no JSON": (says(BEGUN + event(b"{nonsense")), RemoteFailedError, "not a completion chunk"),
    "another JSON": (says(BEGUN + event({"choices": 7})), RemoteFailedError, "not a completion chunk"),
    "an endless event": (says(HEAD + b"data: " + b"x" * 2_000_000), RemoteFailedError, "cannot be read"),
    "choice 7": (says(BEGUN + chunk({"content": "a"}, index=7)), RemoteFailedError, "choice index 7"),
    "a call": (says(BEGUN + chunk({"tool_calls": [{"index": 0}]})), RemoteFailedError, "a tool call"),
    "content type": (says(PLAIN), RemoteFailedError, "text/html"),
    "error frame": (
        says(BEGUN + event({"error": {"message": "boom"}})),
        RemoteFailedError,
        "ended its answer with an error",
    ),
    "error frame first": (says(HEAD + event({"error": "boom"})), RemoteFailedError, "ended its answer with an error"),
    "ending": (says(BEGUN + chunk({}, "abort")), RemoteFailedError, "'abort'"),
}
SILENCES = {
    "slow first byte": (says(HANG_S), "did not start"),
    "slow first event": (says(HEAD, HANG_S), "did not start"),
    "pings and no event": (says(HEAD, *PINGS), "did not start"),
    "silence in the middle": (says(BEGUN, HANG_S), "sent nothing|did not start"),  # where even the beginning is slow
}


@pytest.mark.parametrize("name", FAILURES)
async def test_every_failure_has_its_error_and_counts(name: str) -> None:
    reply, kind, match = FAILURES[name]
    async with crooked(reply) as server, remote(server.url, num_failures=1) as model:
        with pytest.raises(LockstepError, match=match) as caught:
            await events_of(model)
        assert type(caught.value) is kind
        assert model.state is BreakerState.OPEN


@pytest.mark.parametrize("name", SILENCES)
async def test_silent_server_fails_at_the_timeout_and_counts_as_a_failure(name: str) -> None:
    reply, match = SILENCES[name]
    async with crooked(reply) as server, remote(server.url, num_failures=1, silence_s=0.3) as model:
        with pytest.raises(DeadlineError, match=match):
            await events_of(model)
        assert model.state is BreakerState.OPEN


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, {"message": "top_p: too high", "param": "top_p"}, InvalidParameterError),
        (422, {"message": "no"}, InvalidParameterError),
        (400, {"message": "too long", "code": "context_length_exceeded"}, PromptTooLongError),
        (401, {"message": f"wrong key {KEY}"}, RemoteFailedError),
        (404, {"message": "no such model"}, RemoteFailedError),
        (429, {"message": "slow down"}, UnavailableError),
    ],
)
async def test_refusals_are_reported_and_leave_the_breaker_closed(
    status: int, error: dict[str, str], kind: type[LockstepError]
) -> None:
    async with crooked(refuses(status, {"error": error})) as server, remote(server.url, num_failures=1) as model:
        with pytest.raises(kind) as caught:
            await events_of(model)
        assert KEY not in str(caught.value)
        assert getattr(caught.value, "param", None) == error.get("param")
        assert model.state is BreakerState.CLOSED


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (refuses(402, {"error": {"message": "account acme-7 is out of credit"}}), RemoteFailedError),
        (refuses(404, {"error": {"message": "account acme-7 has no such model"}}), RemoteFailedError),
        (refuses(429, {"error": {"message": "quota of account acme-7"}}, "Retry-After: 9"), UnavailableError),
        (refuses(500, {"error": {"message": f"at /srv/acme-7/app.py with {KEY}"}}), RemoteFailedError),
        (refuses(503, "acme-7 is down"), UnavailableError),
        (refuses(504, "acme-7 timed out"), DeadlineError),
        (says(BEGUN + event({"error": {"message": "acme-7"}})), RemoteFailedError),
        (says(BEGUN + event({"error": {"message": "acme-7", "type": "timeout_error"}})), DeadlineError),
    ],
)
async def test_text_of_a_failure_goes_to_the_log_and_not_to_the_client(
    reply: Reply, kind: type[LockstepError], caplog: pytest.LogCaptureFixture
) -> None:
    async with crooked(reply) as server, remote(server.url) as model:
        with pytest.raises(kind) as caught:
            await events_of(model)
    assert "acme-7" not in str(caught.value)
    (line,) = [record for record in caplog.records if hasattr(record, FIELDS)]
    assert "acme-7" in getattr(line, FIELDS)["reply"]
    assert KEY not in getattr(line, FIELDS)["reply"]
    assert getattr(caught.value, "retry_after_s", None) in (None, 1.0, 9.0)


async def test_text_of_a_failure_is_cut_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with crooked(refuses(500, "x" * 10_000)) as server, remote(server.url) as model:
        with pytest.raises(RemoteFailedError):
            await events_of(model)
    (line,) = [record for record in caplog.records if hasattr(record, FIELDS)]
    assert getattr(line, FIELDS)["reply"] == "x" * MAX_REASON_CHARS


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_text_of_a_refused_request_goes_to_the_client(status: int) -> None:
    error = {"message": "top_p: too high", "param": "top_p"}
    async with crooked(refuses(status, {"error": error})) as server, remote(server.url) as model:
        with pytest.raises(InvalidParameterError, match=rf"rejected the request \({status}\): top_p: too high"):
            await events_of(model)


async def test_call_may_be_ended_at_the_moment_of_its_deadline() -> None:
    """As when the server closes: whoever ends all calls gets to the end of them."""
    loop = asyncio.get_running_loop()
    deadlines = CallDeadlines(call(), loop.time())
    waiting = asyncio.create_task(deadlines.wait(asyncio.Event().wait, loop.time(), DeadlineError("late")))
    await asyncio.sleep(0)  # it waits, and its timer is the next to be called
    await asyncio.sleep(0)  # that was called, and the call is not awake yet
    deadlines.end(UnavailableError("closing"))
    with pytest.raises(UnavailableError, match="closing"):
        await waiting


async def test_a_refused_connection_is_an_error_with_a_retry_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    async with remote(f"http://127.0.0.1:{port}/v1", max_attempts=3) as model:
        with pytest.raises(RemoteFailedError, match="cannot be reached") as caught:
            await events_of(model)
    assert caught.value.retry_after_s


async def test_retry_after_is_passed_on() -> None:
    async with crooked(refuses(503, None, "Retry-After: 7")) as server, remote(server.url, max_attempts=3) as model:
        with pytest.raises(UnavailableError) as caught:
            await events_of(model)
        assert caught.value.retry_after_s == 7.0
        assert len(server.requests) == 1


async def test_attempts_are_made_again_before_the_first_byte_and_bounded() -> None:
    async with (
        crooked(says(), refuses(500), says(whole("Once"))) as server,
        remote(server.url, max_attempts=3) as model,
    ):
        assert answer_of(await events_of(model)).text == "Once"
        assert len(server.requests) == 3
    async with crooked(refuses(500)) as server, remote(server.url, max_attempts=3) as model:
        with pytest.raises(RemoteFailedError):
            await events_of(model)
        assert len(server.requests) == 3


async def test_after_the_first_byte_nothing_is_tried_again() -> None:
    async with crooked(says(BEGUN), says(whole("Once"))) as server, remote(server.url, max_attempts=3) as model:
        with pytest.raises(RemoteFailedError):
            await events_of(model)
        assert len(server.requests) == 1


async def test_the_breaker_opens_and_one_call_closes_it_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    goes_on, now_s = asyncio.Event(), 100.0
    trying = says(HEAD, goes_on, whole("Once").removeprefix(HEAD))
    replies = (says(BEGUN), refuses(500), trying, says(whole("Twice")))
    async with (
        crooked(*replies) as server,
        remote(server.url, num_failures=2, system=ClockedSystem(lambda: now_s)) as model,
    ):
        for _ in range(2):
            with pytest.raises(RemoteFailedError):
                await events_of(model)
        with pytest.raises(UnavailableError, match="gets no requests now") as caught:
            await events_of(model)
        assert caught.value.retry_after_s >= 1.0
        assert not model.health().ready
        assert len(server.requests) == 2
        now_s += 1.0
        assert model.health().ready
        trial = asyncio.create_task(events_of(model))
        await eventually(lambda: len(server.requests) == 3)
        with pytest.raises(UnavailableError, match="gets no requests now"):
            await events_of(model)
        goes_on.set()
        assert answer_of(await trial).text == "Once"
        assert answer_of(await events_of(model)).text == "Twice"
    assert "far gets no requests for 1.0 s" in caplog.text
    assert "far answers again" in caplog.text
    assert KEY not in caplog.text


async def test_a_client_that_leaves_while_it_tries_leaves_the_place_to_the_next() -> None:
    async with (
        crooked(refuses(500), says(HANG_S), says(whole("Once"))) as server,
        remote(server.url, num_failures=1, rest_s=0.01) as model,
    ):
        with pytest.raises(RemoteFailedError):
            await events_of(model)
        await eventually(lambda: model.health().ready)
        trial = asyncio.create_task(events_of(model))
        await eventually(lambda: len(server.requests) == 2)
        assert model.state is BreakerState.HALF_OPEN
        trial.cancel()
        await asyncio.gather(trial, return_exceptions=True)
        assert answer_of(await events_of(model)).text == "Once"


async def test_leaving_closes_the_connection() -> None:
    async with crooked(says(BEGUN, HANG_S)) as server, remote(server.url) as model:
        async with aclosing(model.stream(call())) as stream:
            await anext(stream)
            assert server.num_open == 1
        await eventually(lambda: server.num_open == 0)
        assert model.state is BreakerState.CLOSED


async def test_deadlines_do_not_count_as_failures_of_the_server() -> None:
    async with crooked(says(BEGUN, HANG_S), says(HANG_S)) as server, remote(server.url, num_failures=1) as model:
        with pytest.raises(DeadlineError, match=r"0\.2 s") as caught:
            await events_of(model, call(deadline_s=0.2, queue_deadline_s=HANG_S))
        assert type(caught.value) is DeadlineError
        with pytest.raises(QueueDeadlineError):
            await events_of(model, call(queue_deadline_s=0.1))
        assert model.state is BreakerState.CLOSED


async def test_the_remote_request_has_the_callers_parameters_and_the_key() -> None:
    async with crooked(says(whole("Once ", "upon"))) as server, remote(server.url) as model:
        outputs = tokens_of(await events_of(model, call(params=SamplingParams(temperature=0.0, stop=("x",)))))
        [(head, body)] = server.requests
    assert f"Authorization: Bearer {KEY}" in head
    assert head.startswith("POST /v1/chat/completions ")
    assert body == {
        "model": "served",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "stop": ["x"],
    }
    assert [output.text for output in outputs] == ["Once ", "upon", ""]
    request = outputs[-1].request
    assert request is not None
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_cached_tokens) == (5, 2, 3)
    assert request.timings.ttft_s is not None
    assert 0 <= request.timings.queue_s <= request.timings.ttft_s <= request.timings.total_s


async def test_thoughts_stay_thoughts_and_a_filter_is_named() -> None:
    answer = HEAD + chunk({"reasoning_content": "Hm."}) + chunk({"content": "Yes."}) + chunk({}, "content_filter")
    async with crooked(says(answer)) as server, remote(server.url) as model:
        completion = answer_of(await events_of(model)).completions[0]
    assert (completion.reasoning, completion.text) == ("Hm.", "Yes.")
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, "content_filter")


def endless(*pieces: bytes) -> Reply:
    """Says these again and again, until the client leaves."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(BEGUN)
        while True:
            writer.write(b"".join(pieces))
            await writer.drain()
            await asyncio.sleep(0)

    return reply


async def test_an_endless_answer_is_cut_at_max_tokens(caplog: pytest.LogCaptureFixture) -> None:
    more = [chunk({"content": " upon"}, index=index) for index in range(2)]
    async with crooked(endless(*more)) as server, remote(server.url) as model:
        answer = answer_of(await events_of(model, call(params=SamplingParams(max_tokens=4, n=2))))
        await eventually(lambda: server.num_open == 0)
        assert model.state is BreakerState.CLOSED
    assert [(each.text, each.finish_reason) for each in answer.completions] == [
        ("Once upon upon upon", FinishReason.LENGTH),
        (" upon" * 4, FinishReason.LENGTH),
    ]
    assert answer.num_output_tokens == 8, "nobody said how many, and no piece was less than one"
    assert "sent more than was requested; the answer was cut off" in caplog.text


async def test_answer_that_ends_at_the_limit_is_not_cut(caplog: pytest.LogCaptureFixture) -> None:
    pieces = [*(chunk({"content": text}) for text in "abcd"), chunk({"content": "!"}, "stop"), event(b"[DONE]")]
    async with crooked(says(HEAD, *pieces)) as server, remote(server.url) as model:
        answer = answer_of(await events_of(model, call(params=SamplingParams(max_tokens=4))))
    assert (answer.text, answer.completions[0].finish_reason) == ("abcd!", FinishReason.STOP)
    assert "cut" not in caplog.text


async def test_endless_answer_without_a_limit_is_cut_at_the_maximum_length() -> None:
    limits = AnswerLimits(max_chars=24)
    async with crooked(endless(chunk({"content": " upon"}))) as server, remote(server.url, limits=limits) as model:
        answer = answer_of(await events_of(model, call(params=SamplingParams(max_tokens=None))))
        await eventually(lambda: server.num_open == 0)
    assert (answer.text, answer.completions[0].finish_reason) == ("Once" + " upon" * 4, FinishReason.LENGTH)


async def test_events_without_end_that_bring_nothing_are_a_failure() -> None:
    limits = AnswerLimits(max_empty_events=100)
    async with (
        crooked(endless(chunk({}), event({"choices": []}))) as server,
        remote(server.url, limits=limits) as model,
    ):
        with pytest.raises(RemoteFailedError, match="empty events in a row"):
            await events_of(model)


@pytest.mark.parametrize("rest", [b": ping\n\n", chunk({}), event({"choices": []})], ids=["pings", "empty", "nobody"])
async def test_ended_answer_is_complete_regardless_of_further_events(rest: bytes) -> None:
    limits = AnswerLimits(usage_s=0.1)
    async with crooked(endless(chunk({}, "stop"), rest)) as server, remote(server.url, limits=limits) as model:
        answer = answer_of(await events_of(model))
        await eventually(lambda: server.num_open == 0)
    assert (answer.text, answer.completions[0].finish_reason) == ("Once", FinishReason.STOP)
