"""Interrupts at any point: the call ends, its requests are removed, and the model remains usable."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from lockstep import LLM, AsyncEngine, EngineOptions, GenerationRequest, LoadOptions, SamplingParams
from lockstep.core.request import FinishReason
from lockstep.engine.detokenizer import Detokenizer
from lockstep.engine.engine import Engine
from lockstep.errors import RequestFailedError, UsageError
from tests.engine.conftest import MakeEngine
from tests.waiting import HANG_S

OPTIONS = LoadOptions(EngineOptions(num_blocks=256, max_num_seqs=4))
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_tokens=40)
HELLO = [{"role": "user", "content": "hello"}]
PROMPTS = [f"{'x' * 40}{number}" for number in range(10)]

INTERRUPTS = [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), MemoryError(), pytest.fail.Exception("too late")]
Raise = Callable[..., Any]


def raising(error: BaseException) -> Raise:
    def raise_it(*args: object, **kwargs: object) -> Any:
        raise error

    return raise_it


def holds_nothing(engine: Engine) -> None:
    engine.scheduler.check()
    assert not engine.has_work
    assert engine.num_open == engine.scheduler.num_held_blocks == 0
    assert not engine._requests.generations
    assert not engine._requests.results


def is_usable(llm: LLM) -> None:
    """Check that nothing remains of the interrupted call, and that the next calls work."""
    holds_nothing(llm.engine)
    assert llm.generate("abc", SHORT)[0].text == "[stub:alpha] ok len=3 max=40"
    holds_nothing(llm.engine)


def step_until(engine: Engine, is_over: Callable[[], bool], kind: type[BaseException]) -> int:
    """Step until done; returns the number of interrupts that were raised."""
    interrupts = 0
    while not is_over():
        try:
            engine.step()
        except kind:
            interrupts += 1
    return interrupts


@pytest.mark.parametrize("error", INTERRUPTS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", ["execute", "sample", "accept"])
def test_any_exception_fails_its_step_and_the_engine_continues(
    error: BaseException, place: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    ids = [engine.submit(GenerationRequest("hello", LONG)) for _ in range(3)]
    for _ in range(4):
        engine.step()
    with monkeypatch.context() as patch:
        if place == "execute":
            patch.setattr(engine.model.executor, "execute", raising(error))
        elif place == "sample":
            patch.setattr("lockstep.engine.output_processing.sample", raising(error))
            patch.setattr("lockstep.engine.output_processing.likeliest", raising(error))
        else:
            patch.setattr(Detokenizer, "append", raising(error))
        came_out = step_until(engine, lambda: all(map(engine.is_complete, ids)), type(error))
    assert came_out == (not isinstance(error, Exception)), "who steps in his own thread learns of his interrupt"
    for request_id in ids:
        output = engine.result(request_id)
        assert output is not None
        assert output.completions[0].finish_reason is FinishReason.ERROR
        assert isinstance(output.error, RequestFailedError)
        assert f"failed: {error!r}" in str(output.error)
        assert output.error.__cause__ is error
    holds_nothing(engine)
    after = engine.submit(GenerationRequest("hello", SHORT))
    engine.run_until_idle()
    output = engine.result(after)
    assert output is not None
    assert output.text == "[stub:alpha] ok len=5 max=40"


def test_a_step_that_fails_after_a_stop_ends_all_of_its_requests(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two requests in one step, the first meets its stop token, and then the second's text fails."""
    engine = make_engine()
    ids = [engine.submit(GenerationRequest("hello", SamplingParams(stop_token_ids=(ord("["),))))]
    ids.append(engine.submit(GenerationRequest("hello", LONG)))
    monkeypatch.setattr(Detokenizer, "append", raising(KeyboardInterrupt()))
    assert step_until(engine, lambda: all(map(engine.is_complete, ids)), KeyboardInterrupt) == 1
    for request_id in ids:
        output = engine.result(request_id)
        assert output is not None
        assert output.completions[0].finish_reason is FinishReason.ERROR
    holds_nothing(engine)


@pytest.mark.parametrize("who", ["callback", "observer"])
def test_an_interrupt_in_a_callback_is_raised_after_the_step(who: str, make_engine: MakeEngine) -> None:
    calls: list[object] = []

    def leave(*args: object) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise SystemExit(7)

    engine = make_engine(observer=leave if who == "observer" else None)
    asked = engine.submit(GenerationRequest("hello", SHORT), leave if who == "callback" else None)
    other = engine.submit(GenerationRequest("hello", SHORT))
    with pytest.raises(SystemExit):
        engine.run_until_idle()
    engine.scheduler.check()
    assert engine.is_complete(asked) == (who == "callback")
    engine.run_until_idle()
    output = engine.result(other)
    assert output is not None
    assert output.text == "[stub:alpha] ok len=5 max=40"
    engine.result(asked)
    holds_nothing(engine)


def test_an_interrupt_in_the_executor_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("stub://alpha", OPTIONS) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(llm.model.executor, "execute", raising(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, LONG)
        is_usable(llm)


async def test_an_interrupt_in_the_engines_thread_ends_its_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncEngine("stub://alpha", OPTIONS) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.model.executor, "execute", raising(SystemExit(1)))
            with pytest.raises(RequestFailedError, match="SystemExit"):
                await asyncio.wait_for(engine.generate("abc", LONG), HANG_S)
        output = await asyncio.wait_for(engine.generate("abc", SHORT), HANG_S)
        assert output.text == "[stub:alpha] ok len=3 max=40"


# -- at every instruction of the caller's thread ------------------------------------------------------------------


def interrupted_at(place: int, call: Callable[[], object]) -> int:
    """Call with a KeyboardInterrupt after a number of this thread's instructions; returns their total number.

    Without the garbage collector, whose callbacks are others' instructions: an interrupt there is raised to nobody.
    """
    num_done = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num_done
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            num_done += 1
            if num_done == place:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return num_done


def interrupted_everywhere(call: Callable[[], object], is_whole: Callable[[], object], num_places: int) -> None:
    """Interrupt a call at many instructions, mostly where it begins, waits and ends."""
    total = interrupted_at(0, call)
    spread = {*range(1, total, max(1, total // num_places)), *range(total - num_places, total)}
    for place in sorted(spread):
        with suppress(KeyboardInterrupt):
            interrupted_at(place, call)
        is_whole()


def stream_one(llm: LLM) -> None:
    with closing(llm.stream(GenerationRequest("hello", SamplingParams(max_tokens=12)))) as outputs:
        for output in outputs:
            assert output.token_ids


CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate(PROMPTS, SHORT),
    "chat": lambda llm: llm.chat(HELLO, SHORT),
    "stream": stream_one,
}


@pytest.mark.parametrize("num_places", [30, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_at_any_instruction_leaves_the_model_usable(call: str, num_places: int) -> None:
    with LLM("stub://alpha", OPTIONS) as llm:
        interrupted_everywhere(lambda: CALLS[call](llm), lambda: is_usable(llm), num_places)


def test_an_interrupted_close_can_be_repeated() -> None:
    before = threading.active_count()

    def close_one() -> None:
        llm = LLM("stub://alpha", OPTIONS)
        closed: list[None] = []
        llm.model.executor.close = lambda: closed.append(None)  # type: ignore[method-assign]  # to see it
        try:
            interrupted_at(next(places), llm.close)
        except KeyboardInterrupt:
            llm.close()
        assert closed
        with pytest.raises(UsageError, match="closed"):
            llm.generate("abc", SHORT)

    places: Iterator[int] = iter(range(0, 400, 11))
    for _ in range(36):
        close_one()
    assert threading.active_count() == before


def test_a_load_that_is_interrupted_leaves_no_thread_and_no_file(tmp_path: Path) -> None:
    before = threading.active_count()
    stages: list[str] = []

    def interrupt(stage: str, fraction: float) -> None:
        if stage not in stages:
            stages.append(stage)
            raise KeyboardInterrupt

    options = LoadOptions(EngineOptions(num_blocks=64), cache_dir=tmp_path)
    while True:
        try:
            llm = LLM("pocket://", options, progress=interrupt)
        except KeyboardInterrupt:
            assert threading.active_count() == before
            continue
        break
    with llm:
        assert llm.generate("a", SamplingParams(max_tokens=2))
    assert {"open", "pack", "ready"} <= set(stages)
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert not [name for name in left if "tmp" in name or "partial" in name], left


# -- at random moments --------------------------------------------------------------------------------------------


class Interrupter:
    """Sends SIGINT to the main thread after a delay; one that is too late is ignored.

    Not the process: the system would choose a thread, and one that sleeps might take it when the handler is gone.
    """

    def __init__(self) -> None:
        self._is_armed = False
        self.num_raised = 0
        self._before = signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_armed:
            self._is_armed = False
            self.num_raised += 1
            raise KeyboardInterrupt

    def during(self, call: Callable[[], object], after_s: float) -> None:
        timer = threading.Timer(after_s, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        timer.start()
        try:
            self._is_armed = True
            call()
            self._is_armed = False
        except KeyboardInterrupt:
            pass
        finally:
            timer.join()

    def close(self) -> None:
        signal.signal(signal.SIGINT, self._before)


@pytest.mark.parametrize("num_times", [8, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("call", ["generate", "chat"])
@pytest.mark.parametrize("source", ["stub://alpha?step_ms=1", "pocket://"])
def test_interrupts_at_random_moments_leave_the_model_usable(source: str, call: str, num_times: int) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    interrupter = Interrupter()
    options = LoadOptions(EngineOptions(num_blocks=40))
    params = [SamplingParams(max_tokens=rng.randrange(20, 60), seed=number, ignore_eos=True) for number in range(8)]
    try:
        with LLM(source, options) as llm:
            ask: Callable[[], object] = {
                "generate": lambda: llm.generate(PROMPTS[:8], params),
                "chat": lambda: llm.chat([HELLO] * 8, params[0]),
            }[call]
            expected = [output.text for output in llm.generate(PROMPTS[:8], params)]
            ask()  # which imports what it needs: Python leaves a file open where that is interrupted
            for _ in range(num_times):
                interrupter.during(ask, rng.choice((0.001, 0.01, 0.1)) * rng.random())
                holds_nothing(llm.engine)
            assert [output.text for output in llm.generate(PROMPTS[:8], params)] == expected
            holds_nothing(llm.engine)
    finally:
        interrupter.close()
    assert interrupter.num_raised
