"""The sentences of docs/coming-from.md for users of ruvllm and oxillama are true: each is run on the stub or the
scheduler alone."""

from __future__ import annotations

import asyncio
import re
import shlex
from dataclasses import fields
from typing import Any

import pytest

from lockstep import Engine, EngineOptions, GenerationRequest, LoadOptions, SamplingParams, TokenOutput, load_model
from lockstep.cli.main import command_of
from lockstep.cluster.backend import Backend, served_by
from lockstep.cluster.manifest_file import parse
from lockstep.cluster.resolve import open_manifest
from lockstep.core.policy import SchedulerConfig, SchedulerLimits, least_batched_tokens
from lockstep.core.request import FinishReason, Priority, Request
from lockstep.core.sequence import SequenceState
from lockstep.core.step import StepPlan
from lockstep.errors import ConfigError, QueueFullError
from tests.coming_from.conftest import SUPPORT, Seen
from tests.coming_from.offline import run, scheduler, step
from tests.coming_from.page import of_kind, states

SERVE = [
    claim for row in of_kind("Commands") for claim in row.claims if claim.startswith("lockstep serve stub://demo ")
]


def engine(**limits: Any) -> Engine:
    return Engine(*load_model("stub://demo", LoadOptions(engine=EngineOptions(**limits))))


def request(text: str = "Hello", max_tokens: int = 8, **more: Any) -> GenerationRequest:
    return GenerationRequest(text, SamplingParams(max_tokens=max_tokens, ignore_eos=True), **more)


# -- commands and limits ----------------------------------------------------------------------------------------------


@states("Every field of the scheduler is a flag.")
def test_fields_of_the_scheduler_are_flags() -> None:
    flags = {flag for parameter in command_of("serve").params for flag in parameter.opts}
    ours = {field.name for field in fields(SchedulerConfig)} - {"groups"}  # those of the model
    assert not {name for name in ours if f"--{name.replace('_', '-')}" not in flags}


@pytest.mark.parametrize("command", SERVE)
def test_an_engine_with_the_flags_of_a_command_answers(command: str) -> None:
    verb, *arguments = shlex.split(command)[1:]
    serve = command_of(verb)
    with serve.make_context(verb, arguments) as context:
        names = {field.name for field in fields(EngineOptions)}
        given = {name: value for name, value in context.params.items() if name in names and value is not None}
    made = engine(**given)
    id_ = made.submit(request())
    made.run_until_idle()
    found = made.result(id_)
    assert found is not None
    assert found.num_output_tokens == 8


@states("256 sequences that decode need a step of 271 tokens or more.")
def test_a_step_has_room_for_every_sequence() -> None:
    assert least_batched_tokens(256, 16) == 271


@states("`priority` is the default under a manifest, `fcfs` that of `serve MODEL`.", "`priority` under a manifest.")
def test_the_order_of_a_manifest_is_by_priority() -> None:
    opened = open_manifest(served_by(parse(SUPPORT), Backend.STUB), LoadOptions())
    assert {spec.options.engine.order for spec in opened.specs.values()} == {"priority"}
    assert engine().config.order == "fcfs"


@states(
    "The first limits sequences that get a token, the second all sequences of a step.",
    "No limit but `max_num_seqs`.",
    "Of one sequence in one step.",
)
def test_rows_of_a_step_and_tokens_of_a_chunk() -> None:
    requests = [Request(50, 4) for _ in range(6)]
    plans = run(scheduler(max_num_step_seqs=3, max_num_decode_seqs=2, max_chunk_tokens=20), *requests)
    assert max(plan.num_sequences for plan in plans) == 3
    assert max(plan.num_samples for plan in plans) == 2
    assert max(length for plan in plans for length in plan.lengths) == 20
    assert max(plan.num_sequences for plan in run(scheduler(max_num_seqs=5), *requests)) == 5


@states(
    "The default is `fixed`.",
    "The default. `decode_order=priority` is strict, `decode_order=oldest` serves the oldest first.",
    "Others are `order=priority` and `order=fair`.",
    "No aging.",
)
@pytest.mark.parametrize(("order", "first"), [("priority", 1), ("oldest", 0)])
def test_strict_orders_of_decoding(order: Any, first: int) -> None:
    core = scheduler(max_num_decode_seqs=1, decode_order=order)
    for priority in (Priority.LOW, Priority.HIGH):
        core.add(Request(8, 4, priority=priority))
    sampled = [plan.seq_ids[plan.samples.index(True)] for plan in (step(core) for _ in range(6)) if plan.num_samples]
    assert sampled[1:4] == [first] * 3
    assert (
        core.stats().num_preemptions,
        SchedulerLimits().prefill_share,
    ) == (0, "fixed")
    assert [scheduler(order=name).has_work for name in ("priority", "fair")] == [False, False]


@states("Counts steps instead of seconds, so that a recording replays.")
def test_priority_rises_by_steps() -> None:
    config = SchedulerConfig(block_size=16, num_blocks=64, max_model_len=512, priority_aging_steps=10)
    assert [config.aged_priority(1, steps) for steps in (0, 9, 10, 30)] == [1, 1, 0, -2]


@states("Both give the same tokens.")
def test_swapping_and_recomputing_give_the_same_tokens() -> None:
    answers = []
    for way in ("swap", "recompute"):
        made = engine(preemption=way, num_blocks=12, max_model_len=160, max_num_seqs=3)
        ids = [made.submit(request(f"{number} " * 10, 60)) for number in range(3)]
        made.run_until_idle()
        results = [made.result(id_) for id_ in ids]
        assert sum(found.num_preemptions for found in results if found is not None) > 0
        answers.append([found.text for found in results if found is not None])
    assert answers[0] == answers[1]


@states("Prompt and output together.", "As many as the context has room for.")
def test_the_context_holds_prompt_and_output() -> None:
    core = scheduler(max_model_len=20)
    core.add(Request(15))
    run(core)
    [ended] = core.drain_finished()
    assert (ended.num_prompt_tokens, ended.num_output_tokens, ended.reason) == (15, 5, FinishReason.LENGTH)


@states("A server takes `block_size` from its executor.")
def test_the_executor_has_the_block_size() -> None:
    assert engine().config.block_size == 16
    with pytest.raises(ConfigError, match="block_size"):
        engine(block_size=32)


@states("Waiting and running requests have a limit each. One more request is refused.")
def test_one_more_request_than_may_wait_is_refused() -> None:
    core = scheduler(max_num_seqs=1, max_num_queued_reqs=2)
    core.add(Request(8, 8))
    step(core)
    for _ in range(2):
        core.add(Request(8, 8))
    with pytest.raises(QueueFullError):
        core.add(Request(8, 8))
    assert (core.num_running, core.num_waiting) == (1, 2)


# -- calls ------------------------------------------------------------------------------------------------------------


@states("The callback is its second argument.", "`index` is the number of the answer where a request asks for several.")
def test_a_callback_gets_every_output() -> None:
    made, got = engine(), list[TokenOutput]()
    made.submit(GenerationRequest("Hello", SamplingParams(max_tokens=4, n=2)), got.append)
    made.run_until_idle()
    assert {output.index for output in got} == {0, 1}


@states("Cancelling either aborts the request.")
async def test_leaving_a_stream_aborts_the_request() -> None:
    made = engine()
    loop = asyncio.get_running_loop()
    running = loop.run_in_executor(None, made.run)
    async for _ in made.stream(request(max_tokens=4000)):
        break
    one = asyncio.ensure_future(made.submit_async(request(max_tokens=4000)))
    await asyncio.sleep(0)
    one.cancel()
    await asyncio.gather(one, return_exceptions=True)
    short = await made.submit_async(request())
    assert short.num_output_tokens == 8
    assert made.num_open == 0
    made.stop()
    await running


@states("`run` waits for work. `step` returns the outputs of one step.", "A result is read once.")
def test_a_step_returns_its_outputs_and_a_result_is_read_once() -> None:
    made = engine()
    id_ = made.submit(request(max_tokens=2))
    steps = [made.step() for _ in range(3)]
    assert [len(found.outputs) for found in steps] == [1, 1, 0]
    assert (made.result(id_) is None, made.result(id_)) == (False, None)


@states("The reason of the end is a `FinishReason`.", "The scheduler ends such a sequence by itself.", "In seconds.")
def test_an_answer_that_reaches_its_limit() -> None:
    made = engine()
    id_ = made.submit(request(max_tokens=3))
    made.run_until_idle()
    found = made.result(id_)
    assert found is not None
    assert found.completions[0].finish_reason is FinishReason.LENGTH
    assert 0 <= found.timings.queue_s <= found.timings.total_s


@states("-2, -1, 0, 1. Any integer is a priority, and the lowest goes first.")
def test_priorities_are_numbers() -> None:
    assert (Priority.CRITICAL, Priority.HIGH, Priority.NORMAL, Priority.LOW) == (-2, -1, 0, 1)
    core = scheduler(order="priority", max_num_seqs=1)
    ids = {number: core.add(Request(8, 2, priority=number)) for number in (5, -7, 0)}
    assert [plan.admitted[0] for plan in run(core) if plan.admitted] == [ids[-7], ids[0], ids[5]]


@states("`StepPlan.chunks` has its rows.", "Returns a `StepPlan`.", "One result for a whole step.")
def test_a_plan_has_a_row_for_each_sequence() -> None:
    core = scheduler()
    first, second = core.add(Request(20, 2)), core.add(Request(5, 2))
    plan = core.schedule()
    assert isinstance(plan, StepPlan)
    assert [(chunk.seq_id, chunk.length) for chunk in plan.chunks()] == [(first, 20), (second, 5)]


@states(
    "Pairs of blocks to copy.",
    "Lowest priority first, then the newest; only to let a sequence of a better rank go on.",
    "Blocks that sequences hold, that are free, and allocated since the start.",
    "oxillama's scheduler never enters this state. Here a sequence enters it when another one needs its blocks.",
)
def test_the_lowest_and_then_the_newest_is_preempted() -> None:
    """Four sequences fill the pool. The first two need a block each: they take it from the lowest priority, and then,
    of the two that are left behind them, from the newest."""
    core = scheduler(num_blocks=8, num_host_blocks=8)
    priorities = (Priority.HIGH, Priority.NORMAL, Priority.LOW, Priority.NORMAL)
    high, old, low, new = (core.add(Request(32, 20, priority=priority)) for priority in priorities)
    step(core)
    assert (core.stats().num_held_blocks, core.stats().num_free_blocks) == (8, 0)
    plan = step(core)
    assert plan.preempted == (low, new)[: len(plan.preempted)]
    assert plan.preempted[0] == low
    assert all(len(pair) == 2 for pair in plan.swap_out)
    assert plan.swap_out
    preempted = core.view(low)
    assert preempted is not None
    assert preempted.state is SequenceState.PREEMPTED
    for id_ in (high, old):
        running = core.view(id_)
        assert running is not None
        assert running.state is SequenceState.RUNNING
    later = run(core)
    assert any(low in plan.resumed for plan in later)
    assert core.stats().num_allocated_blocks > 8


@states(
    "The scheduler takes lengths, the engine text or token ids.",
    "Output only: subtract the prompt's length.",
    "`view` copies the counts of an unfinished sequence, and returns None for others.",
    "In the queue.",
    "`num_computed` of its view is below `num_prompt_tokens`.",
    "`num_computed` has reached `num_prompt_tokens`.",
    "No longer in `view`, once in `drain_finished`.",
)
def test_a_sequence_goes_through_the_states_of_oxillama() -> None:
    """A request of oxillama's `add_request(prompt of 30, 34)`: at most 34 tokens, prompt and output together."""
    core = scheduler(max_chunk_tokens=20)
    id_ = core.add(Request(30, max_output_tokens=34 - 30))
    seen = []
    while (found := core.view(id_)) is not None:
        seen.append((found.state, found.num_computed < found.num_prompt_tokens))
        step(core)
    running = SequenceState.RUNNING
    assert seen == [
        (SequenceState.WAITING, True),
        (running, True),
        (running, False),
        (running, False),
        (running, False),
    ]
    [ended] = core.drain_finished()
    assert (ended.seq_id, ended.num_prompt_tokens + ended.num_output_tokens) == (id_, 34)
    assert core.drain_finished() == ()
    made = engine()
    assert made.submit(GenerationRequest([1, 2, 3], SamplingParams(max_tokens=2))) == 0


# -- counters ---------------------------------------------------------------------------------------------------------


@states("One series for each reason of the end.", "Histograms.", "From 0 to 1.")
def test_counters_have_their_kinds(seen: Seen) -> None:
    assert re.search(r'^lockstep:request_success_total\{[^}]*finished_reason="length"', seen.metrics, re.MULTILINE)
    for name in ("e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert f"# TYPE lockstep:{name} histogram" in seen.metrics
    shares = re.findall(r"^lockstep:kv_cache_usage_perc\{[^}]*\} (\S+)", seen.metrics, re.MULTILINE)
    assert shares
    assert all(0.0 <= float(share) <= 1.0 for share in shares)
