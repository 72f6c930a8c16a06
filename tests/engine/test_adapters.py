"""Adapters of an engine: names, slots, waits for slots, shared blocks, and the slots of a step's tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.core.request import FinishReason
from lockstep.engine.adapters import MAX_NAMES, EngineAdapters, start_of
from lockstep.engine.engine import Engine
from lockstep.engine.loading import load_model
from lockstep.engine.metrics import AdapterUse
from lockstep.engine.options import AdapterSource, EngineOptions, LoadOptions
from lockstep.engine.outputs import RequestOutput
from lockstep.engine.request import GenerationRequest
from lockstep.errors import (
    ArtifactNotFoundError,
    ConfigError,
    ExecutorError,
    InvalidParameterError,
    QueueFullError,
    UnsupportedArtifactError,
    UsageError,
)
from lockstep.executors.base import Logits, StepBatch
from lockstep.executors.sampling_params import SamplingParams
from lockstep.executors.stub import StubExecutor, open_stub_adapter, stub_adapter_bytes
from tests.adapter_files import stub_adapters, write_pocket_adapter, write_stub_adapter

BLOCK = 16
OpenEngine = Callable[..., Engine]


@pytest.fixture
def make(tmp_path: Path) -> OpenEngine:
    def make(num: int = 3, adapters: tuple[AdapterSource, ...] | None = None, **options: object) -> Engine:
        given = stub_adapters(tmp_path, num) if adapters is None else adapters
        engine = EngineOptions(**{"num_blocks": 512, "enable_lora": True, **options})  # type: ignore[arg-type]
        model, config = load_model("stub://s", LoadOptions(engine, adapters=given))
        return Engine(model, config)

    return make


def ask(adapter: str, prompt: tuple[int, ...] = tuple(b"hello"), max_tokens: int = 48) -> GenerationRequest:
    return GenerationRequest(prompt, SamplingParams(max_tokens=max_tokens), adapter=adapter)


def answer(engine: Engine, request: GenerationRequest) -> RequestOutput:
    request_id = engine.submit(request)
    engine.run_until_idle()
    output = engine.result(request_id)
    assert output is not None
    check(engine)
    return output


def check(engine: Engine) -> None:
    engine.scheduler.check()
    engine.adapters.check()


def computed_by(engine: Engine, output: RequestOutput) -> str:
    """Name of the adapter that a stub's answer names; empty: the base."""
    text = output.completions[0].text
    names = [each.name for each in engine.adapters.names.values() if f"+{each.fingerprint[:8]}]" in text]
    assert len(names) == ("+" in text)
    return "".join(names)


# -- names ------------------------------------------------------------------------------------------------------------


def test_each_request_is_computed_with_the_adapter_that_it_names(make: OpenEngine) -> None:
    engine = make(3)
    requests = {engine.submit(ask(name)): name for name in ("a0", "", "a2", "a1", "a0")}
    engine.run_until_idle()
    for output in engine.drain_finished():
        assert computed_by(engine, output) == requests[output.request_id]
    check(engine)


def test_an_unknown_name_is_refused_with_the_nearest_one(make: OpenEngine) -> None:
    engine = make(0)
    with pytest.raises(InvalidParameterError, match="none is loaded") as found:
        engine.submit(ask("billing"))
    assert found.value.param == "adapter"


def test_a_typo_gets_a_suggestion(make: OpenEngine, tmp_path: Path) -> None:
    engine = make(adapters=(AdapterSource("billing", str(write_stub_adapter(tmp_path / "b"))),))
    with pytest.raises(InvalidParameterError, match="did you mean 'billing'"):
        engine.submit(ask("biling"))
    with pytest.raises(InvalidParameterError, match="loaded are billing"):
        engine.unload_adapter("zzz")


def test_a_model_without_adapters_takes_none(tmp_path: Path) -> None:
    model, config = load_model("stub://s", LoadOptions(EngineOptions(num_blocks=8)))
    engine = Engine(model, config)
    with pytest.raises(UsageError, match="--enable-lora"):
        engine.load_adapter(open_stub_adapter("a", str(write_stub_adapter(tmp_path / "a"))))
    with pytest.raises(InvalidParameterError):
        engine.submit(ask("a"))


def test_an_adapter_of_another_content_or_a_missing_one_fails_the_load(tmp_path: Path) -> None:
    path = str(write_stub_adapter(tmp_path / "a"))
    options = EngineOptions(num_blocks=8)
    with pytest.raises(UnsupportedArtifactError, match="has fingerprint"):
        load_model("stub://s", LoadOptions(options, adapters=(AdapterSource("a", path, "0" * 32),)))
    with pytest.raises(ArtifactNotFoundError):
        load_model("stub://s", LoadOptions(options, adapters=(AdapterSource("a", str(tmp_path / "none")),)))


def test_an_adapter_above_the_rank_of_a_slot_is_refused(make: OpenEngine, tmp_path: Path) -> None:
    engine = make(0, max_lora_rank=8)
    with pytest.raises(UsageError, match="--max-lora-rank"):
        engine.load_adapter(open_stub_adapter("a", str(write_stub_adapter(tmp_path / "big", rank=9))))
    engine.load_adapter(open_stub_adapter("a", str(write_stub_adapter(tmp_path / "fits", rank=8))))
    assert list(engine.adapters.names) == ["a"]


def test_encoders_have_no_adapters(tmp_path: Path) -> None:
    from lockstep.engine.loading import _adapter_support

    model, _ = load_model("stub://s", LoadOptions(EngineOptions(num_blocks=8)))

    class WithoutSlots:
        geometry = model.executor.geometry

    with pytest.raises(ConfigError, match="cannot have LoRA adapters"):
        _adapter_support(
            WithoutSlots(),  # type: ignore[arg-type]  # any executor that is no host
            LoadOptions(EngineOptions(enable_lora=True)),
            open_stub_adapter,
            stub_adapter_bytes,
        )


def test_the_number_of_names_is_bounded(make: OpenEngine, tmp_path: Path) -> None:
    engine = make(1)
    adapter = engine.adapters.find("a0")
    for index in range(MAX_NAMES - 1):
        engine.load_adapter(replace(adapter, name=f"more-{index}"))
    with pytest.raises(UsageError, match="unload one first"):
        engine.load_adapter(replace(adapter, name="one-more"))
    engine.load_adapter(adapter)  # a replacement needs no room


# -- slots ------------------------------------------------------------------------------------------------------------


def test_a_new_content_under_a_name_leaves_open_requests_their_own(make: OpenEngine, tmp_path: Path) -> None:
    engine = make(1)
    old = engine.adapters.find("a0")
    first = engine.submit(ask("a0"))
    engine.step()
    new = open_stub_adapter("a0", str(write_stub_adapter(tmp_path / "new", 77)))
    engine.load_adapter(new)
    second = engine.submit(ask("a0"))
    engine.run_until_idle()
    outputs = {output.request_id: output.completions[0].text for output in engine.drain_finished()}
    assert f"+{old.fingerprint[:8]}]" in outputs[first]
    assert f"+{new.fingerprint[:8]}]" in outputs[second]
    engine.step()
    assert engine.adapters.num_loaded == 1, "the old content is unloaded once it is not used"
    check(engine)


def test_an_unloaded_adapter_ends_its_open_requests_normally(make: OpenEngine) -> None:
    engine = make(2)
    request = engine.submit(ask("a1"))
    engine.step()
    fingerprint = engine.adapters.find("a1").fingerprint
    engine.unload_adapter("a1")
    with pytest.raises(InvalidParameterError):
        engine.submit(ask("a1"))
    engine.run_until_idle()
    output = engine.result(request)
    assert output is not None
    assert output.completions[0].finish_reason is FinishReason.STOP
    assert f"+{fingerprint[:8]}]" in output.completions[0].text
    engine.step()
    assert engine.adapters.num_loaded == 0


def test_the_least_recently_used_idle_adapter_is_unloaded(make: OpenEngine) -> None:
    engine = make(3, max_loras=2)
    for name in ("a0", "a1", "a0", "a2"):  # a1 is the least recently used one
        assert computed_by(engine, answer(engine, ask(name))) == name
    assert engine.adapters.num_loads == 3
    answer(engine, ask("a0"))
    assert engine.adapters.num_loads == 3
    answer(engine, ask("a1"))
    assert engine.adapters.num_loads == 4


@pytest.mark.parametrize("length", [None, 100])
def test_a_file_that_is_overwritten_fails_requests_and_not_the_process(tmp_path: Path, length: int | None) -> None:
    """Access to a map of a file that became shorter kills the process. Another content would be served, and its KV
    cached, as the old one."""
    folders = [write_pocket_adapter(tmp_path / name, seed) for seed, name in enumerate(("a0", "a1"))]
    adapters = tuple([AdapterSource(each.name, str(each)) for each in folders])
    options = EngineOptions(num_blocks=16, max_model_len=64, enable_lora=True, max_loras=1)
    engine = Engine(*load_model("pocket://", LoadOptions(options, adapters=adapters)))

    def greedy(name: str) -> RequestOutput:
        params = SamplingParams(max_tokens=4, temperature=0.0)
        return answer(engine, GenerationRequest(tuple(b"hello"), params, adapter=name))

    first = greedy("a0").completions[0].token_ids
    greedy("a1")  # unloads the other one
    weights = tmp_path / "a0" / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes((tmp_path / "a1" / "adapter_model.safetensors").read_bytes()[:length])
    assert isinstance(greedy("a0").error, ExecutorError)
    assert greedy("a1").error is None
    weights.write_bytes(content)
    assert greedy("a0").completions[0].token_ids == first


def test_requests_wait_while_all_slots_are_used(make: OpenEngine) -> None:
    engine = make(3, max_loras=1)
    requests = {engine.submit(ask(name)): name for name in ("a0", "a1", "a2", "a1", "a0")}
    engine.step()
    assert engine.adapters.num_waiting >= 3
    assert engine.num_waiting == engine.adapters.num_waiting
    engine.run_until_idle()
    outputs = engine.drain_finished()
    assert len(outputs) == 5
    for output in outputs:
        assert computed_by(engine, output) == requests[output.request_id]
    check(engine)


def test_metrics_name_the_adapters_of_open_requests(make: OpenEngine) -> None:
    engine = make(max_loras=1)
    for name in ("a1", "a1", "a0", "a2", ""):
        engine.submit(ask(name))
    engine.step()
    assert engine.metrics().adapters == AdapterUse(1, ("a1",), ("a0", "a2"))
    engine.run_until_idle()
    assert engine.metrics().adapters == AdapterUse(1, (), ())
    check(engine)


def test_an_adapter_in_steady_use_yields_its_slot(make: OpenEngine) -> None:
    """Requests of one adapter that arrive all the time do not keep another one from its turn."""
    engine = make(2, max_loras=1)
    done: list[str] = []

    def submit(name: str) -> None:
        engine.submit(ask(name), lambda output: done.append(name) if output.request is not None else None)

    submit("a0")
    engine.step()
    submit("a1")
    for _ in range(400):
        if "a1" in done:
            break
        if engine.num_open < 4:
            submit("a0")
        engine.step()
    assert "a1" in done
    engine.run_until_idle()
    check(engine)


def test_a_slot_that_becomes_free_is_not_taken_by_a_later_request(make: OpenEngine) -> None:
    """In one call, a request is aborted, which frees the only slot, and another one arrives."""
    engine = make(3, max_loras=1)
    done: list[str] = []

    def submit(name: str) -> int:
        return engine.submit(ask(name), lambda output: done.append(name) if output.request is not None else None)

    last = submit("a0")
    engine.step()
    submit("a1")
    engine.step()
    for turn in range(100):
        engine.abort(last)
        last = submit("a2" if turn % 2 == 0 else "a0")
        engine.step()
    assert "a1" in done
    engine.run_until_idle()
    check(engine)


def test_the_queue_of_an_adapter_is_bounded(make: OpenEngine) -> None:
    engine = make(2, max_loras=1, max_num_queued_reqs=3)
    errors: list[object] = []
    engine.submit(ask("a0"), lambda output: None)
    engine.step()
    for _ in range(5):
        engine.submit(ask("a1"), lambda output: errors.append(output.error) if output.error else None)
    engine.step()
    assert [type(error) for error in errors] == [QueueFullError] * 2
    engine.run_until_idle()
    check(engine)


def test_an_aborted_request_leaves_the_queue(make: OpenEngine) -> None:
    engine = make(2, max_loras=1)
    engine.submit(ask("a0"), lambda output: None)
    engine.step()
    waiting = engine.submit(ask("a1"))
    engine.step()
    assert engine.adapters.num_waiting == 1
    engine.abort(waiting)
    engine.step()
    assert engine.adapters.num_waiting == 0
    engine.run_until_idle()
    check(engine)


def test_a_storm_of_loads_unloads_and_requests_loses_nothing(make: OpenEngine, tmp_path: Path) -> None:
    """Names get new contents and vanish under requests; each answer is of the content at its submission."""
    for seed in range(4):
        print(f"seed {seed}")
        rng = random.Random(seed)
        engine = make(0, max_loras=rng.randint(1, 4))
        expected: dict[int, str] = {}
        for turn in range(150):
            name = f"a{rng.randrange(6)}"
            roll = rng.random()
            if roll < 0.15:
                folder = write_stub_adapter(tmp_path / f"{seed}" / f"{turn}", rng.randrange(20))
                engine.load_adapter(open_stub_adapter(name, str(folder)))
            elif roll < 0.25 and name in engine.adapters.names:
                engine.unload_adapter(name)
            elif roll < 0.6 and name in engine.adapters.names:
                prompt = tuple(rng.randbytes(rng.randrange(1, 40)))
                request = engine.submit(ask(name, prompt))
                expected[request] = engine.adapters.find(name).fingerprint
            elif roll < 0.65 and expected:
                engine.abort(rng.choice(list(expected)))
            engine.step()
            check(engine)
        engine.run_until_idle()
        check(engine)
        outputs = engine.drain_finished()
        assert {output.request_id for output in outputs} == set(expected)
        for output in outputs:
            completions = output.completions
            if completions and completions[0].finish_reason is FinishReason.STOP:
                assert f"+{expected[output.request_id][:8]}]" in completions[0].text
        assert engine.adapters.num_waiting == engine.adapters.num_open == 0


# -- tokens of a step -------------------------------------------------------------------------------------------------


class Watched(StubExecutor):
    """A stub that keeps the slots of each step's tokens, by sequence and position."""

    slots: dict[tuple[int, int], int]

    def execute(self, batch: StepBatch) -> Logits:
        plan, at = batch.plan, 0
        for seq_id, start, length in zip(plan.seq_ids, plan.starts, plan.lengths, strict=True):
            for position in range(start, start + length):
                self.slots[seq_id, position] = 0 if batch.adapters is None else int(batch.adapters[at])
                at += 1
        if batch.adapters is not None:
            assert batch.adapters.dtype == np.int32
            assert batch.adapters.any()
            assert batch.adapters.shape == batch.token_ids.shape
        return super().execute(batch)


INVOCATION = (7, 8, 9)


@pytest.fixture
def watched(tmp_path: Path) -> tuple[Engine, dict[tuple[int, int], int]]:
    activated = write_stub_adapter(tmp_path / "aware", 5, alora_invocation_tokens=list(INVOCATION))
    sources = (*stub_adapters(tmp_path, 1), AdapterSource("aware", str(activated)))
    options = EngineOptions(num_blocks=128, max_num_batched_tokens=24, max_num_seqs=4, max_num_decode_seqs=4)
    model, config = load_model("stub://s", LoadOptions(options, adapters=sources))
    executor = Watched(model.executor._options)  # type: ignore[attr-defined]  # the options of a stub
    executor.slots = {}
    assert model.adapters is not None
    model = replace(model, executor=executor, adapters=replace(model.adapters, host=executor))
    return Engine(model, config), executor.slots


def test_each_token_has_the_slot_of_its_request(watched: tuple[Engine, dict[tuple[int, int], int]]) -> None:
    engine, slots = watched
    prompt = (1, *INVOCATION, 2, *(3,) * 25, *INVOCATION, 4)
    for name in ("aware", "a0", ""):
        engine.submit(ask(name, prompt, 6))
    engine.run_until_idle()
    ends = {seq: max(position for each, position in slots if each == seq) + 1 for seq in range(3)}
    own = [[slots.get((seq, position), 0) for position in range(ends[seq])] for seq in range(3)]  # absent: a hit
    assert own[0] == [0] * 30 + [1] * (ends[0] - 30), "from the last invocation on"
    assert own[1] == [2] * ends[1]
    assert own[2] == [0] * ends[2]


def test_without_its_invocation_tokens_an_adapter_computes_nothing(
    watched: tuple[Engine, dict[tuple[int, int], int]],
) -> None:
    engine, slots = watched
    output = answer(engine, ask("aware", (1, 2, 3)))
    assert computed_by(engine, output) == ""
    assert not any(slots.values())
    assert engine.adapters.num_loads == 0


def test_start_of_finds_the_last_occurrence(tmp_path: Path) -> None:
    path = str(write_stub_adapter(tmp_path / "x", alora_invocation_tokens=[5, 5]))
    adapter = open_stub_adapter("x", path)
    prompts = ((5, 5, 5), (5, 5, 1), (1, 5), (), (5,))
    starts = [start_of(adapter.fingerprint, adapter.invocation_ids, prompt) for prompt in prompts]
    assert [None if start is None else start.position for start in starts] == [1, 0, None, None, None]


# -- shared blocks ----------------------------------------------------------------------------------------------------


def test_a_prompt_hits_only_blocks_of_the_same_adapter(make: OpenEngine) -> None:
    engine = make(2)
    prompt = tuple(range(1, 81))
    cached = [answer(engine, ask(name, prompt)).num_cached_tokens for name in ("", "a0", "a1", "a0", "", "a1")]
    assert cached == [0, 0, 0, 64, 64, 64]


def test_the_next_turn_with_an_adapter_hits_the_answer(make: OpenEngine) -> None:
    engine = make(2)
    first = answer(engine, ask("a0", tuple(range(1, 40))))
    whole = first.prompt_token_ids + first.completions[0].token_ids
    hit = (len(whole) - 1) // BLOCK * BLOCK
    assert answer(engine, ask("a1", (*whole, 1, 2))).num_cached_tokens == 0
    assert answer(engine, ask("a0", (*whole, 1, 2))).num_cached_tokens == hit


def test_an_activated_adapter_starts_warm_behind_the_router(watched: tuple[Engine, dict[tuple[int, int], int]]) -> None:
    """The base (the router) reads the conversation first; the specialist computes only from its invocation on."""
    engine, _ = watched
    conversation = tuple(range(20, 20 + 5 * BLOCK))
    answer(engine, ask("", (*conversation, 1)))
    specialist = answer(engine, ask("aware", (*conversation, *INVOCATION, 2)))
    assert specialist.num_cached_tokens == 5 * BLOCK
    assert answer(engine, ask("a0", (*conversation, *INVOCATION, 2))).num_cached_tokens == 0


def test_pooled_requests_name_adapters_too(make: OpenEngine) -> None:
    engine = make(1)
    request = GenerationRequest(tuple(b"hello"), logit_ids=(65, 66), adapter="a0")
    output = answer(engine, request)
    assert output.embedding is not None
    assert engine.adapters.num_loads == 1


def test_engine_adapters_without_support() -> None:
    adapters = EngineAdapters(None, 4)
    adapters.check()
    assert adapters.num_loaded == 0
