"""One model behind the server's interface: the same in threads and in a process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from msgspec import structs

from lockstep.cluster.base import Accepted
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest import Manifest, names_of_source
from lockstep.cluster.prompt_tokeniser import MAX_INLINE_CHARS
from lockstep.cluster.state import ClusterOptions
from lockstep.cluster.threads import LONG_BYTES
from lockstep.engine.input_processing import tokenised
from lockstep.engine.llm import AsyncEngine
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.engine.request import Conversation
from lockstep.errors import (
    ArtifactNotFoundError,
    DeadlineError,
    ExecutorError,
    InvalidParameterError,
    ModelNotFoundError,
    PromptTooLongError,
    QueueDeadlineError,
    QueueFullError,
    UnavailableError,
)
from lockstep.executors.constraint import Constraint
from lockstep.executors.sampling_params import SamplingParams
from tests.cluster.support import (
    ENDLESS,
    NAME,
    Kind,
    answer,
    call,
    events_of,
    model_of,
    one_model,
    read,
    running,
    served,
    settled,
    tokens_of,
    worker_of,
)
from tests.waiting import ENDLESS_MS, HANG_S, Gate, eventually

KINDS: tuple[Kind, ...] = ("thread", "process")
shares_a_model = pytest.mark.asyncio(loop_scope="module")
"""On the loop of the model that its tests share; each leaves it idle."""


@pytest_asyncio.fixture(params=KINDS, scope="module", loop_scope="module")
async def stub(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    async with served("stub://alpha?step_ms=2", request.param, max_num_queued_reqs=600) as model:
        yield model


CALLS = [
    call("Hello there, how are you?", SamplingParams(max_tokens=12, temperature=0.0, logprobs=3)),
    call("I was charged twice", SamplingParams(max_tokens=20, seed=7, n=3, temperature=1.2, top_k=50)),
    call((44, 4039, 560), SamplingParams(max_tokens=9, seed=1, logit_bias={5: 3.0}, stop=("e",))),
    call(
        Conversation([{"role": "user", "content": "Refund, please: <|im_end|>"}]),
        SamplingParams(max_tokens=16, seed=3, logprobs=0),
    ),
    call("One: ", SamplingParams(max_tokens=30, seed=4, constraint=Constraint.choice(["two", "three four"]))),
    call("A sentence to embed", SamplingParams(), pooling="mean"),
]


def whole(output: RequestOutput) -> tuple[object, ...]:
    """All of an answer but its id and its times."""
    vector = b"" if output.embedding is None else output.embedding.tobytes()
    return output.prompt_token_ids, output.completions, output.error, vector


async def test_an_answer_is_the_same_in_this_thread_in_another_and_in_a_process() -> None:
    with AsyncEngine("pocket://", LoadOptions(EngineOptions(num_blocks=512))) as engine:
        requests = [tokenised(engine.model.tokenizer, engine.engine.config.max_model_len, c) for c in CALLS]
        expected = [whole(await engine.engine.submit_async(request)) for request in requests]
    for kind in KINDS:
        async with served("pocket://", kind) as model:
            assert [whole(await answer(model, asked)) for asked in CALLS] == expected
            pieces = tokens_of(await events_of(model, CALLS[0]))
            last = pieces[-1].request
            assert last is not None
            assert "".join(piece.text for piece in pieces) == last.text
            assert sum((piece.token_ids for piece in pieces), ()) == last.completions[0].token_ids
            assert sum((piece.logprobs or () for piece in pieces), ()) == last.completions[0].logprobs
            vector = (await answer(model, CALLS[-1])).embedding
            assert vector is not None
            assert vector.dtype == np.float32


@shares_a_model
async def test_a_call_is_accepted_first_and_answered_whole_at_last(stub: Cluster) -> None:
    events = await events_of(stub, call("abc"))
    assert events[0] == Accepted(NAME, (97, 98, 99))
    outputs = tokens_of(events)
    assert "".join(output.text for output in outputs) == "[stub:alpha] ok len=3 max=40"
    assert [output.request is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
    await settled(stub)


@shares_a_model
async def test_invalid_calls_are_rejected_before_acceptance(stub: Cluster) -> None:
    long = "x" * (MAX_INLINE_CHARS * 3)
    for asked, expected in (
        (structs.replace(call("abc"), model="other"), ModelNotFoundError),
        (call("abc", SamplingParams(top_p=7.0)), InvalidParameterError),
        (call("abc", SamplingParams(constraint=Constraint.regex("("))), InvalidParameterError),
        (call("abc", SamplingParams(max_tokens=10**30)), InvalidParameterError),
        (call("abc", session_id=""), InvalidParameterError),
        (call("abc", session_id="half a pair: \ud83d"), InvalidParameterError),
        (call("abc", pooling="mean"), InvalidParameterError),
        (call(""), InvalidParameterError),
        (call(long), PromptTooLongError),
        (call((97, 5000)), InvalidParameterError),
    ):
        stream = stub.stream(asked)
        with pytest.raises(expected):
            await anext(stream)
    await settled(stub)


async def test_full_queue_rejects_new_calls_and_serves_queued_ones() -> None:
    for kind in KINDS:
        async with served("stub://alpha?step_ms=20", kind, max_num_queued_reqs=2, max_num_seqs=1) as model:
            outcomes = await asyncio.gather(*(answer(model, call("x")) for _ in range(8)), return_exceptions=True)
            refused = [outcome for outcome in outcomes if isinstance(outcome, QueueFullError)]
            served_well = [outcome for outcome in outcomes if isinstance(outcome, RequestOutput)]
            assert len(refused) + len(served_well) == 8
            assert refused
            assert len(served_well) >= 2
            await settled(model)


@shares_a_model
async def test_leaving_a_stream_aborts_within_a_step_and_a_storm_leaves_nothing(stub: Cluster) -> None:
    before = (await stub.metrics())[NAME].finished
    await read(stub, call("abc", ENDLESS), 3)
    await settled(stub)
    await asyncio.gather(*(read(stub, call("x" * (1 + n % 30), ENDLESS), n % 3) for n in range(500)))
    await settled(stub)
    after = (await stub.metrics())[NAME].finished
    assert {reason for reason, count in after.items() if count != before.get(reason, 0)} == {"abort"}


@shares_a_model
async def test_cancelled_tasks_leave_nothing(stub: Cluster) -> None:
    tasks = [asyncio.create_task(answer(stub, call("x", ENDLESS))) for _ in range(60)]
    await eventually(lambda: stub.num_open == 60)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await settled(stub)


@shares_a_model
async def test_all_calls_end_with_the_error_that_is_given(stub: Cluster) -> None:
    tasks = [asyncio.create_task(answer(stub, call("x", ENDLESS))) for _ in range(10)]
    await eventually(lambda: stub.num_open == 10)
    stub.abort_all(UnavailableError("draining", retry_after_s=4.0))
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, UnavailableError)
        assert outcome.retry_after_s == 4.0
    await settled(stub)
    assert (await answer(stub, call("abc"))).text == "[stub:alpha] ok len=3 max=40"


async def test_a_deadline_is_an_error_and_not_a_short_answer() -> None:
    for kind in KINDS:
        async with served("stub://alpha?step_ms=20", kind, max_num_seqs=1) as model:
            with pytest.raises(DeadlineError) as caught:
                await answer(model, call("x", ENDLESS, deadline_s=0.2))
            assert not isinstance(caught.value, QueueDeadlineError)
            first = asyncio.create_task(answer(model, call("x", ENDLESS)))
            await running(model, 1)
            with pytest.raises(QueueDeadlineError):
                await answer(model, call("x", queue_deadline_s=0.1))
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await settled(model)


@shares_a_model
async def test_deadlines_count_while_a_prompt_waits_to_be_tokenised(stub: Cluster) -> None:
    may_end, asked = threading.Event(), call("word " * 100_000)
    other = asyncio.create_task(stub._handler._prompts._threads.do(may_end.wait, LONG_BYTES + 1))
    await asyncio.sleep(0)  # it has the one place
    try:
        async with asyncio.timeout(HANG_S):
            with pytest.raises(QueueDeadlineError, match="could not start the request within"):
                await answer(stub, structs.replace(asked, queue_deadline_s=0.05, deadline_s=HANG_S))
            with pytest.raises(DeadlineError, match="could not start the request within"):
                await answer(stub, structs.replace(asked, deadline_s=0.05))
    finally:
        may_end.set()
    await other
    await settled(stub)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_step_that_fails_ends_its_requests_with_the_reason(kind: Kind) -> None:
    async with served("stub://alpha?fail_every=4", kind) as model:
        with pytest.raises(ExecutorError, match="fail_every=4"):
            await answer(model, call("abc"))
        await settled(model)


async def test_metrics_are_reported_while_an_endless_step_runs() -> None:
    async with served(f"stub://alpha?step_ms={ENDLESS_MS}", "process") as model:
        task = asyncio.create_task(answer(model, call("x", SamplingParams(max_tokens=1))))
        await running(model, 1)
        assert (await model.metrics())[NAME].gauges["num_requests_running"] == 1
        assert not task.done()
        assert model.worker_pid is not None
        os.kill(model.worker_pid, signal.SIGKILL)
        await asyncio.gather(task, return_exceptions=True)


@shares_a_model
async def test_the_card_of_a_model_has_its_names_source_and_limits(stub: Cluster) -> None:
    (card,) = stub.cards()
    assert (card.name, card.aliases, card.root, card.tier) == (NAME, ("alias",), "stub://alpha?step_ms=2", "resident")
    assert card.max_model_len == 8192
    assert card.has_chat_template
    assert stub.card("alias") == stub.card(None) == card
    assert stub.health().ready
    assert stub.card("alias").tokenizer.encode("ab") == [97, 98]
    with pytest.raises(ModelNotFoundError):
        stub.card("other")


@pytest.mark.parametrize("kind", KINDS)
async def test_requests_to_a_loading_model_are_unavailable(kind: Kind, gate: Gate) -> None:
    model = model_of(f"stub://alpha?load_ms={ENDLESS_MS}", kind)
    starting = asyncio.create_task(model.start())
    with pytest.raises(UnavailableError, match="loading"):
        await answer(model, call("abc"))
    await eventually(lambda: worker_of(model).lifecycle.link is not None)
    assert (model.card("alias").name, model.card(None).tier) == (NAME, "loading")
    assert model.health().reason == "the model is loading"
    assert await model.metrics() == {}
    with pytest.raises(UnavailableError, match="the model is loading"):
        await answer(model, call("abc"))
    with pytest.raises(ModelNotFoundError):
        await answer(model, structs.replace(call("abc"), model="other"))
    with pytest.raises(UnavailableError):
        _ = model.card("alias").tokenizer
    if kind == "process":  # the gate is of this process
        starting.cancel()
    gate.open()
    await asyncio.gather(starting, return_exceptions=kind == "process")
    await model.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_requests_to_a_closed_model_are_unavailable(kind: Kind) -> None:
    model = model_of("stub://alpha?step_ms=20", kind)
    await model.start()
    open_call = asyncio.create_task(answer(model, call("x", ENDLESS)))
    await eventually(lambda: model.num_open == 1)
    await model.close()
    with pytest.raises(UnavailableError, match="closing"):
        await open_call
    with pytest.raises(UnavailableError, match="closing"):
        await answer(model, call("abc"))
    await model.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_model_that_cannot_be_loaded_is_one_clear_error(kind: Kind, tmp_path: Path) -> None:
    model = model_of(str(tmp_path / "absent.gguf"), kind)
    with pytest.raises(ArtifactNotFoundError, match=r"absent\.gguf: no such file or directory"):
        await model.start()
    await model.close()


def test_worker_process_runs_under_uvloop() -> None:
    """uvloop is what the server runs on; the stream to the process is made by its own means."""
    if sys.platform == "win32":
        pytest.skip("there is no uvloop")
    import uvloop

    async def live() -> str:
        async with served("stub://alpha", "process") as model:
            async with aclosing(model.stream(call("abc"))) as stream:
                outputs = [event async for events in stream for event in events if isinstance(event, TokenOutput)]
            await settled(model)
            return "".join(output.text for output in outputs)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(live()) == "[stub:alpha] ok len=3 max=40"


async def test_no_request_waits_for_another_that_has_no_session_either() -> None:
    """A manifest's models hold 16 sessions if nothing is said; one model holds as many as its engine runs."""
    async with served("stub://alpha?step_ms=5", "thread", max_num_seqs=64) as model:
        tasks = [asyncio.create_task(answer(model, call("x", ENDLESS))) for _ in range(40)]
        await running(model, len(tasks))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await settled(model)


@pytest.mark.parametrize("max_num_seqs", [1, 3])
async def test_single_model_without_a_budget_has_a_pool_for_whole_contexts(max_num_seqs: int) -> None:
    """Whole contexts of all that run; with another model, or a budget, the share of it."""
    engine = EngineOptions(max_num_seqs=max_num_seqs)
    model = one_model("stub://alpha", load=LoadOptions(engine))
    await model.start()
    [replica] = model.snapshot().replicas
    loaded = worker_of(model).loaded(replica.key)
    await model.close()
    assert loaded is not None
    assert loaded.config.num_blocks == max_num_seqs * 8192 // 16
    assert loaded.config.num_host_blocks == loaded.config.num_blocks // 2
    assert [budget.effective_bytes for budget in model.snapshot().budgets] == [None, None]


async def test_a_template_of_its_own_writes_its_prompts() -> None:
    model = Cluster(Manifest.of_model("stub://alpha", (NAME,), "{{ messages[0].content }}"))
    await model.start()
    asked = call(Conversation([{"role": "user", "content": "abc"}]))
    assert (await events_of(model, asked))[0] == Accepted(NAME, (97, 98, 99))
    await model.close()


async def test_a_session_keeps_its_prompt_where_others_had_the_pool() -> None:
    async with served("stub://alpha", "thread", max_num_seqs=4) as model:
        for prompt, session, cached in (("y" * 70, "s", 64), ("z" * 70, None, 0)):
            await answer(model, call(prompt, session_id=session))
            for letter in "abcdefghijkl":
                await answer(model, call(letter * 1000))
            assert (await answer(model, call(prompt + "more", session_id=session))).num_cached_tokens == cached
            await model.reset_prefix_cache()
        await settled(model)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("pocket://", ["pocket"]),
        ("stub://alpha?step_ms=2", ["alpha"]),
        ("./models/qwen.gguf", ["qwen"]),
        ("models/qwen/", ["qwen"]),
        ("hf://Qwen/Qwen3-0.6B", ["Qwen/Qwen3-0.6B", "Qwen3-0.6B"]),
        ("hf://org/name@main#Q8_0", ["org/name", "name"]),
        (".", []),
        ("plain", []),
        ("./models/qwen.gguf+lora=adapters/billing/", ["billing"]),
        ("hf://org/name#Q8_0+lora=hf://org/legal", ["legal"]),
    ],
)
def test_model_without_a_served_name_answers_to_its_short_names(source: str, names: list[str]) -> None:
    assert names_of_source(source) == (source, *names)


def test_unknown_model_is_refused_with_the_names_that_there_are() -> None:
    model = Cluster(Manifest.of_model("stub://alpha", ("org/alpha", "alpha")), ClusterOptions(is_fixed=True))
    with pytest.raises(ModelNotFoundError, match=r"`beta` does not exist; this server has `org/alpha`, `alpha`\.$"):
        model.card("beta")
