"""Recordings with any number of files: a real engine, recorder and files, driven by a seed on one thread."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from lockstep.engine.engine import Engine
from lockstep.engine.loading import load_model
from lockstep.engine.options import LoadOptions
from lockstep.engine.outputs import TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.executors.sampling_params import SamplingParams
from lockstep.worker.device_scheduler import DeviceScheduler
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.flight.recorder import Recorder
from tests.replay.recordings import POOL

KEY = "a"
MAX_FILES = 1 << 12
STEP_US = 10


def many_files(folder: Path, max_bytes: int, *, has_content: bool = False) -> TraceOptions:
    """Options of a recording that may have any number of files, and is flushed before every step."""
    return TraceOptions(str(folder), max_bytes, has_content, num_files=MAX_FILES, flush_interval_s=0.0)


class Flight:
    """A replica as in a device's step loop, with clients that submit, disconnect before their turn, and abort.

    Args:
        file_bytes: a file that has as many is full.
    """

    def __init__(self, folder: Path, seed: int, file_bytes: int) -> None:
        self._draw = random.Random(seed)
        self._turns = DeviceScheduler()
        self._recorder = Recorder(many_files(folder, file_bytes * MAX_FILES, has_content=True), self._turns)
        self._model, config = load_model("stub://alpha", LoadOptions(POOL))
        self._engine = Engine(self._model, config, recorder=self._recorder.of_engine(KEY, self._model, config))
        self._priorities = {KEY: 0}
        self._now_us = 0
        self._open: dict[int, None] = {}
        self.seen: Counter[str] = Counter()

    def serve(self, num_requests: int, num_users: int) -> None:
        """Serve requests from a limited number of clients; each disconnects at random, some before their first step."""
        draw, engine = self._draw, self._engine
        left = num_requests
        while left or engine.has_work:
            while self._recorder.report().num_queued_bytes:
                pass  # until what is full is known to be: the seed says where files begin
            self._recorder.begin_turn()
            if left and engine.num_open < num_users and draw.random() < 0.4:
                left -= 1
                self._ask()
            for request_id in [*self._open]:
                if draw.random() < 0.03:
                    self.seen["stopped, alone" if engine.num_open == 1 else "stopped"] += 1
                    engine.abort(request_id)
            self._turn()

    def close(self) -> None:
        """Close the replica as if it was unloaded."""
        self._engine.abort_all()
        self._recorder.closed(KEY)
        self._recorder.close()
        self._model.close()

    def _ask(self) -> None:
        draw = self._draw
        prompt = (7,) * draw.randrange(12) + tuple(draw.randrange(250) for _ in range(draw.randrange(1, 24)))
        params = SamplingParams(max_tokens=draw.randrange(1, 30), ignore_eos=True, n=1 + (draw.random() < 0.1))
        request = GenerationRequest(prompt, params, priority=draw.randrange(-1, 2), tenant=draw.choice("ab"))
        request_id = self._engine.submit(request, self._heard)
        self._open[request_id] = None
        if draw.random() < 0.3:
            self.seen["left before it ran"] += 1
            self._engine.abort(request_id)

    def _heard(self, output: TokenOutput) -> None:
        if output.is_final:
            self._open.pop(output.request_id, None)

    def _turn(self) -> None:
        with_work = frozenset({KEY} if self._engine.has_work else ())
        chosen = self._turns.choose(self._priorities, with_work)
        if chosen is None:
            self._recorder.idle(self._priorities)
            return
        self.seen["empty plans"] += self._engine.step().plan is None
        self._turns.spend(chosen, STEP_US)
        self._recorder.turn(self._priorities, with_work, chosen, self._now_us, self._now_us + STEP_US)
        self._now_us += 2 * STEP_US


def run_flight(
    folder: Path, seed: int, num_requests: int = 12, num_users: int = 6, file_bytes: int = 1500
) -> Counter[str]:
    """Run one flight from beginning to end; returns the counts of its events."""
    flight = Flight(folder, seed, file_bytes)
    flight.serve(num_requests, num_users)
    flight.close()
    return flight.seen
