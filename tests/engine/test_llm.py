"""The Python API as a user calls it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest
from msgspec.structs import replace

from lockstep import LLM, AsyncEngine, EngineOptions, GenerationRequest, LoadOptions, SamplingParams
from lockstep.engine.outputs import RequestOutput
from lockstep.errors import ConfigError, ExecutorError, InvalidParameterError, RequestFailedError, UsageError
from tests.waiting import HANG_S, eventually

OPTIONS = LoadOptions(engine=EngineOptions(num_blocks=256))
SHORT = SamplingParams(max_tokens=40)


def test_one_prompt_or_several_text_or_ids() -> None:
    with LLM("stub://alpha", OPTIONS) as llm:
        assert [output.text for output in llm.generate("abc", SHORT)] == ["[stub:alpha] ok len=3 max=40"]
        mixed: list[str | Sequence[int]] = ["a", [98, 98]]
        outputs = llm.generate(mixed, [SHORT, SamplingParams(max_tokens=3)])
    assert [output.text for output in outputs] == ["[stub:alpha] ok len=1 max=40", "[st"]


def test_more_prompts_than_queue_places_are_answered_in_order() -> None:
    tight = LoadOptions(EngineOptions(num_blocks=256, max_num_queued_reqs=5, max_num_seqs=3))
    with LLM("stub://alpha", tight) as llm:
        outputs = llm.generate(["x" * length for length in range(1, 60)], replace(SHORT, n=2))
    assert [output.text for output in outputs] == [f"[stub:alpha] ok len={n} max=40" for n in range(1, 60)]


def test_chat_takes_one_conversation_or_several() -> None:
    hello = [{"role": "user", "content": "hello"}]
    with LLM("stub://alpha", OPTIONS) as llm:
        assert len(llm.chat(hello, SHORT)) == 1
        assert [output.text for output in llm.chat([hello, hello], SHORT)] == ["[stub:alpha] ok len=5 max=40"] * 2


def test_a_refused_prompt_leaves_nothing() -> None:
    with LLM("stub://alpha", OPTIONS) as llm:
        with pytest.raises(InvalidParameterError):
            llm.generate(["fine", ""], SHORT)
        with pytest.raises(ConfigError, match="2 prompts, but 1 sampling parameters"):
            llm.generate(["a", "b"], [SHORT])
        assert not llm.engine.has_work
        assert llm.generate("abc", SHORT)[0].text == "[stub:alpha] ok len=3 max=40"


def test_the_error_that_ended_a_request_is_raised() -> None:
    with LLM("stub://alpha?fail_every=3", OPTIONS) as llm, pytest.raises(ExecutorError, match="fail_every"):
        llm.generate("abc", SHORT)


async def test_async_answers_stream_and_agree() -> None:
    async with AsyncEngine("stub://alpha", OPTIONS) as engine:
        whole = await asyncio.gather(*(engine.generate("x" * n, SHORT) for n in range(1, 9)))
        pieces = [output.text async for output in engine.stream("abc", SHORT)]
        chat = await engine.chat([{"role": "user", "content": "abc"}], SHORT)
    assert [output.text for output in whole] == [f"[stub:alpha] ok len={n} max=40" for n in range(1, 9)]
    assert "".join(pieces) == chat.text == "[stub:alpha] ok len=3 max=40"


async def _idle(engine: AsyncEngine) -> None:
    await eventually(lambda: not any(engine.metrics().gauges.values()))


async def _endless(engine: AsyncEngine) -> asyncio.Task[RequestOutput]:
    """A request that runs for at least a minute."""
    task = asyncio.create_task(engine.generate("abc", SamplingParams(max_tokens=3000, ignore_eos=True)))
    await eventually(lambda: engine.metrics().gauges["num_requests_running"] > 0)
    return task


async def test_leaving_a_stream_aborts_its_request() -> None:
    async with AsyncEngine("stub://alpha?step_ms=20", OPTIONS) as engine:
        stream = engine.stream("abc", SamplingParams(max_tokens=3000, ignore_eos=True))
        async with aclosing(stream) as outputs:
            async for output in outputs:
                assert output.text
                break
        await _idle(engine)
        assert engine.metrics().finished == {"abort": 1}


async def test_cancelling_an_await_aborts_its_request() -> None:
    async with AsyncEngine("stub://alpha?step_ms=20", OPTIONS) as engine:
        task = await _endless(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _idle(engine)


async def test_closing_ends_open_streams_with_abort() -> None:
    engine = AsyncEngine("stub://alpha?step_ms=20", OPTIONS)
    task = await _endless(engine)
    await asyncio.to_thread(engine.close)
    output = await asyncio.wait_for(task, HANG_S)
    assert output.completions[0].finish_reason.value == "abort"
    engine.close()
    with pytest.raises(UsageError, match="closed"):
        engine.submit(GenerationRequest("abc"))


async def test_a_stream_raises_the_error_that_ended_it() -> None:
    async with AsyncEngine("stub://alpha?fail_every=3", OPTIONS) as engine:
        with pytest.raises(ExecutorError, match="fail_every"):
            async for _ in engine.stream("abc", SHORT):
                pass


async def test_a_broken_loop_fails_every_waiting_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncEngine("stub://alpha?step_ms=20", OPTIONS) as engine:
        task = await _endless(engine)

        def broken() -> None:
            raise AssertionError("conservation violated")

        monkeypatch.setattr(engine.engine.scheduler, "schedule", broken)
        with pytest.raises(RequestFailedError, match="conservation violated"):
            await asyncio.wait_for(task, HANG_S)
        with pytest.raises(UsageError, match="closed"):
            await engine.generate("abc")
