"""Cached answers, if the executor's decoding computes the bits of a prefill: turns, sessions, ends, stores."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.request import FinishReason
from lockstep.engine.engine import Engine
from lockstep.engine.loading import load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.outputs import RequestOutput
from lockstep.engine.request import GenerationRequest
from lockstep.executors.constraint import Constraint
from lockstep.executors.sampling_params import SamplingParams
from tests.engine.conftest import MakeEngine, OpenStore

BLOCK = 16
STUB = "stub://s"


def ask(prompt: tuple[int, ...], session: str | None = None, max_tokens: int = 40, **params: Any) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **params})
    return GenerationRequest(prompt, sampling, session_id=session)


def answer(engine: Engine, request: GenerationRequest) -> RequestOutput:
    request_id = engine.submit(request)
    engine.run_until_idle()
    output = engine.result(request_id)
    assert output is not None
    engine.scheduler.check()
    return output


def whole(output: RequestOutput, index: int = 0) -> tuple[int, ...]:
    return output.prompt_token_ids + output.completions[index].token_ids


def full_blocks(num_tokens: int) -> int:
    """Number of tokens in full blocks if the last token has no KV."""
    return (num_tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("session", [None, "s"])
def test_the_next_turn_hits_the_answer(make_engine: MakeEngine, session: str | None) -> None:
    engine = make_engine(STUB)
    prompt = tuple(b"once upon a time")
    found, expected = [], []
    for _ in range(8):
        output = answer(engine, ask(prompt, session))
        found.append(output.num_cached_tokens)
        expected.append(full_blocks(len(whole(output))))
        prompt = (*whole(output), *b"and then?")
    assert found == [0, *expected[:-1]]


def test_a_session_retains_and_reports_the_blocks_of_its_answer(make_engine: MakeEngine) -> None:
    engine = make_engine(STUB)
    output = answer(engine, ask((1,) * 70, "s", 50))
    (report,) = engine.session_reports()
    assert report.num_tokens == full_blocks(120) == BLOCK * report.num_blocks
    for letter in range(2, 60):
        answer(engine, ask((letter,) * 200))
    assert engine.scheduler.stats().num_evicted_blocks > 0
    assert answer(engine, ask((*whole(output), 5), "s")).num_cached_tokens == full_blocks(120)


def test_the_computed_part_of_an_aborted_answer_is_cached(make_engine: MakeEngine) -> None:
    engine = make_engine(STUB)
    request_id = engine.submit(ask((1,) * 40, "s", 100))
    for _ in range(45):
        engine.step()
    engine.abort(request_id)
    engine.run_until_idle()
    output = engine.result(request_id)
    assert output is not None
    assert output.completions[0].finish_reason is FinishReason.ABORT
    assert [report.num_tokens for report in engine.session_reports()] == [full_blocks(len(whole(output)))]
    assert answer(engine, ask((*whole(output), 5))).num_cached_tokens == full_blocks(len(whole(output)))


def test_a_failed_answer_is_not_cached(make_engine: MakeEngine) -> None:
    engine = make_engine(f"{STUB}?nan_every=40")
    output = answer(engine, ask((1,) * 32, max_tokens=100))
    assert (output.completions[0].finish_reason, len(whole(output))) == (FinishReason.ERROR, 71)
    assert answer(engine, ask((*whole(output), 5))).num_cached_tokens == 32


def test_answers_of_siblings_are_cached_separately_by_salt(make_engine: MakeEngine) -> None:
    """A session retains the blocks of the first sibling."""
    engine = make_engine(STUB)
    output = answer(engine, ask((1,) * 40, "s", 40, n=2, temperature=1.0, seed=3, logit_bias={7: 100.0, 8: 100.0}))
    one, two = whole(output, 0), whole(output, 1)
    assert one != two
    assert [report.num_tokens for report in engine.session_reports()] == [full_blocks(80)]
    for each in (one, two):
        assert answer(engine, ask((*each, 5), max_tokens=1)).num_cached_tokens == full_blocks(80)
    salted = GenerationRequest((*one, 5), SamplingParams(max_tokens=1), cache_salt="x")
    assert answer(engine, salted).num_cached_tokens == 0


def test_jump_forward_tokens_at_the_end_have_no_kv_and_are_recomputed(make_engine: MakeEngine) -> None:
    engine = make_engine(STUB)
    constraint = Constraint.regex("[ab]{20}cdefghijklmnop")
    output = answer(engine, ask((1,) * 3, max_tokens=100, constraint=constraint, ignore_eos=False))
    tokens = whole(output)
    found = answer(engine, ask((*tokens, 5), max_tokens=1)).num_cached_tokens
    assert 0 < found < full_blocks(len(tokens))


def test_prompts_of_one_token_are_cached_with_blocks_of_one(make_engine: MakeEngine) -> None:
    engine = make_engine(f"{STUB}?block_size=1")
    output = answer(engine, ask((65,), max_tokens=4))
    assert answer(engine, ask((*whole(output), 5), max_tokens=1)).num_cached_tokens == 4
    assert answer(engine, ask((65, 66), max_tokens=1)).num_cached_tokens == 1


def test_blocks_of_answers_are_stored_and_restored(open_store: OpenStore, tmp_path: Path) -> None:
    model, config = load_model(STUB, LoadOptions(EngineOptions(num_blocks=64)))
    engine = Engine(model, config, store=open_store(disk_bytes=1 << 26))
    output = answer(engine, ask((1,) * 70, "s", 50))
    engine.sessions.sweep()
    assert engine.sessions.kv is not None
    assert engine.sessions.kv.store.flush(10.0)
    assert engine.scheduler.stats().num_cached_blocks == 0
    back = answer(engine, ask((*whole(output), 5), "s", 20))
    assert back.num_cached_tokens == full_blocks(120)
    engine.sessions.sweep()
    assert engine.sessions.kv.store.flush(10.0)
    engine = Engine(model, config, store=open_store(disk_bytes=1 << 26))
    for path in (tmp_path / "host").rglob("*.kv"):
        path.unlink()
    assert [each.num_stored_tokens for each in engine.sessions.stored()] == [full_blocks(len(whole(back)))]
    again = answer(engine, ask((*whole(back), 6), "s", 20))
    assert again.num_cached_tokens == full_blocks(len(whole(back)))


@pytest.mark.parametrize("seed", range(6))
def test_concurrent_turns_under_pressure_equal_those_without_a_cache(make_engine: MakeEngine, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    small = {"num_blocks": 40, "max_num_seqs": 4, "preemption": rng.choice(["swap", "recompute"])}
    engine, plain = make_engine(STUB, **small), make_engine("stub://s", enable_prefix_caching=False)
    histories: list[tuple[int, ...]] = [(number,) * 10 for number in range(5)]
    for _ in range(4):
        prompts = [(*history, rng.randrange(256))[-240:] for history in histories]
        sizes = [rng.randint(1, 60) for _ in prompts]
        ids = [
            engine.submit(ask(prompt, rng.choice([None, "s", "t"]), size))
            for prompt, size in zip(prompts, sizes, strict=True)
        ]
        engine.run_until_idle()
        engine.scheduler.check()
        for number, (request_id, prompt, size) in enumerate(zip(ids, prompts, sizes, strict=True)):
            output = engine.result(request_id)
            assert output is not None
            assert whole(output) == whole(answer(plain, ask(prompt, None, size)))
            histories[number] = whole(output)
    assert engine.metrics().counters["prefix_cache_hits"] > 0
