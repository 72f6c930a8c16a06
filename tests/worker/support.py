"""A device worker alone, in this process, and all that it says."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import pytest

from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.outputs import TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.errors import (
    LockstepError,
)
from lockstep.executors.sampling_params import SamplingParams
from lockstep.system import SYSTEM, System
from lockstep.worker.device import DeviceWorker
from lockstep.worker.device_scheduler import DeviceScheduler
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.kv_events import KVEventsOptions
from lockstep.worker.messages import (
    Answer,
    Answered,
    Ask,
    Check,
    Checked,
    Command,
    Event,
    Load,
    Loaded,
    Outputs,
    Question,
    Refused,
    Stop,
    TrialOptions,
)
from tests.waiting import HANG_S

SMALL = LoadOptions(EngineOptions(num_blocks=256))
SHORT = SamplingParams(max_tokens=40)
ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True)
Kind = TypeVar("Kind", bound=Event)
Report = TypeVar("Report", bound=Answer)


class Bench:
    """A worker with its step thread, and all that it has said."""

    def __init__(
        self, system: System = SYSTEM, trace: TraceOptions | None = None, kv_events: KVEventsOptions | None = None
    ) -> None:
        self.events: list[Event] = []
        self._ask_ids = itertools.count(1)
        self._said = threading.Condition()
        self.worker = DeviceWorker(self._hear, system, trace, kv_events=kv_events)
        self.failure: BaseException | None = None
        """The error that ended the step thread; the end of `running` raises it."""
        self.steps = threading.Thread(target=self._run)
        self.steps.start()

    def _run(self) -> None:
        try:
            self.worker.run()
        except BaseException as error:
            self.failure = error

    def _hear(self, event: Event) -> None:
        with self._said:
            self.events.append(event)
            self._said.notify_all()

    def tell(self, *commands: Command) -> None:
        for command in commands:
            self.worker.handle(command)

    def heard(self, kind: type[Kind], which: Callable[[Kind], bool] = lambda event: True) -> Kind:
        """Wait for an event."""
        found: list[Kind] = []

        def is_there() -> bool:
            found.extend(event for event in self.events if isinstance(event, kind) and which(event))
            return bool(found)

        with self._said:
            assert self._said.wait_for(is_there, HANG_S), f"no {kind.__name__} among {self.events}"
        return found[0]

    def load(self, key: str, source: str, options: LoadOptions = SMALL, priority: int = 0) -> None:
        self.tell(Load(key, source, options, TrialOptions(), priority))

    def ready(self, key: str, source: str, options: LoadOptions = SMALL, priority: int = 0) -> Loaded:
        self.load(key, source, options, priority)
        return self.heard(Loaded, lambda event: event.replica == key)

    def refusal(self, request_id: int) -> LockstepError:
        return self.heard(Refused, lambda event: event.request_id == request_id).error

    def ask(self, question: Question, kind: type[Report]) -> Report:
        """The answer to a question, of the kind that it has."""
        ask_id = next(self._ask_ids)
        self.tell(Ask(ask_id, question))
        answer = self.heard(Answered, lambda event: event.ask_id == ask_id).answer
        assert isinstance(answer, kind)
        return answer

    def checked(self) -> Checked:
        return self.ask(Check(), Checked)

    def answer(self, request_id: int) -> TokenOutput:
        """A request's very last output."""
        event = self.heard(Outputs, lambda event: _last(event, request_id) is not None)
        last = _last(event, request_id)
        assert last is not None
        return last


def _last(event: Outputs, request_id: int) -> TokenOutput | None:
    outputs = (out for out in event.outputs if out.request_id == request_id and out.request is not None)
    return next(outputs, None)


def ask(text: str, params: SamplingParams = SHORT) -> GenerationRequest:
    return GenerationRequest(tuple(text.encode()), params)


class Ticking(System):
    """A system on whose clock everything takes a millisecond."""

    def __init__(self) -> None:
        self._num_calls = 0

    def now_s(self) -> float:
        self._num_calls += 1
        return self._num_calls / 1e3


@contextmanager
def running(
    system: System = SYSTEM, trace: TraceOptions | None = None, kv_events: KVEventsOptions | None = None
) -> Iterator[Bench]:
    bench = Bench(system, trace, kv_events)
    try:
        yield bench
    finally:
        bench.tell(Stop())
        bench.steps.join(HANG_S)
    assert not bench.steps.is_alive()
    if bench.failure is not None:
        raise bench.failure


@contextmanager
def broken_steps() -> Iterator[None]:
    """Let every choice of a replica in this process fail, as a defect of the step loop does."""

    def broken(*_: object, **__: object) -> NoReturn:
        raise ZeroDivisionError("a defect")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(DeviceScheduler, "choose", broken)
        yield
