"""Recordings of models with windows and states: decided again from lengths and hashes, and executed with content."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lockstep.core.request import Priority
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.executors.options import ExecutorOptions
from lockstep.executors.sampling_params import SamplingParams
from lockstep.replay.execute import MachineOptions, execute
from lockstep.replay.execution import describe
from lockstep.replay.trace import open_trace
from lockstep.replay.verify import verify
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.messages import Load, Loaded, Submit, TrialOptions
from tests.engine.hybrid_engines import NAMES, Ids, text, write_hybrid
from tests.worker.support import Bench, running

LIMITS = EngineOptions(num_blocks=90, num_host_blocks=90, max_num_seqs=4, max_chunk_tokens=64)
"""Few blocks, so that sequences are preempted and snapshots evicted."""
NUM_SESSIONS, NUM_TURNS, NUM_OUTPUT = 4, 3, 40


def serve(bench: Bench, key: str, source: str) -> None:
    """Conversations whose turns repeat the prompt, but not the answer, and one that continues its answer."""
    options = LoadOptions(LIMITS, ExecutorOptions(threads=1))
    bench.tell(Load(key, source, options, TrialOptions(enabled=False), Priority.NORMAL))
    bench.heard(Loaded, lambda event: event.replica == key)
    generator = random.Random(6)
    params = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True)
    prompts: list[Ids] = [text(generator, 100) for _ in range(NUM_SESSIONS)]
    for turn in range(NUM_TURNS):
        for session, prompt in enumerate(prompts):
            request = GenerationRequest(
                prompt,
                params,
                num_lasting_tokens=len(prompt) - 4,
                session_id=str(session) if session else None,
                session_owner=key,
            )
            bench.tell(Submit(turn * NUM_SESSIONS + session, key, request))
        for session, prompt in enumerate(prompts):
            answer = bench.answer(turn * NUM_SESSIONS + session).request
            assert answer is not None
            kept = (*prompt, *answer.completions[0].token_ids) if session == 1 else prompt[:-4]
            prompts[session] = (*kept, *text(generator, 30))


@pytest.mark.parametrize("name", NAMES)
def test_every_decision_and_token_is_the_same(tmp_path: Path, name: str) -> None:
    source = str(write_hybrid(tmp_path, name))
    with running(trace=TraceOptions(str(tmp_path / "trace"), has_content=True)) as bench:
        serve(bench, name, source)
        bench.checked()
    verification = verify(open_trace(tmp_path / "trace"))
    assert verification.diverged is None, vars(verification.diverged)
    [found] = execute(open_trace(tmp_path / "trace"), source, machine=MachineOptions(threads=2, isa="avx2"))
    assert found.diverged is None, list(describe(found))
    assert found.num_tokens == NUM_SESSIONS * NUM_TURNS * NUM_OUTPUT
