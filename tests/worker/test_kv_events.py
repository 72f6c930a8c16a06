"""KV events as somebody hears them who routes by them: over ZeroMQ, decoded as vLLM's are, and whole."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.prefix import block_hashes, namespace_of
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.errors import UsageError
from lockstep.executors.sampling_params import SamplingParams
from lockstep.worker.kv_events import AllBlocksCleared, KVEventPublisher, KVEventsOptions, name_of
from lockstep.worker.link import WorkerOptions
from lockstep.worker.messages import Abort, PrefixCacheReset, ResetPrefixCache, Submit, Unload, Unloaded
from lockstep.worker.supervised import SupervisedWorker
from tests.waiting import HANG_S, until
from tests.worker.support import SMALL, Bench, running

TINY = LoadOptions(EngineOptions(num_blocks=24, max_num_seqs=3))
STUB = "stub://a"
BLOCK = 16
HANG_MS = int(HANG_S * 1e3)


class Heard:
    """Batches of one publisher, by their numbers, and the cache that they tell of."""

    def __init__(self, options: KVEventsOptions) -> None:
        self._context = zmq.Context()
        self._context.linger = 0
        self._sub = self._context.socket(zmq.SUB)
        self._sub.connect(options.endpoint)
        self._sub.subscribe("")
        self._options = options

    def live(self, wait_ms: int = 0) -> dict[int, list[Any]]:
        """What has come by itself; who has just connected hears nothing of what was before."""
        found: dict[int, list[Any]] = {}
        while self._sub.poll(wait_ms):
            topic, number, body = self._sub.recv_multipart()
            assert topic == b"a"
            found[int.from_bytes(number, "big")] = msgspec.msgpack.decode(body)
        return found

    def all_until(self, number: int) -> dict[int, list[Any]]:
        """Wait for a batch of that number, and ask for all."""
        deadline_s = time.monotonic() + HANG_S
        while number not in (found := self.replayed()):
            assert time.monotonic() < deadline_s, f"no batch {number}, only {list(found)}"
        return found

    def replayed(self, first: int = 0, *topic: bytes) -> dict[int, list[Any]]:
        """What the replay socket knows from a number on."""
        found: dict[int, list[Any]] = {}
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.connect(self._options.replay)
            dealer.send_multipart((b"", first.to_bytes(8, "big"), *topic))
            while True:
                assert dealer.poll(HANG_MS)
                _, number, body = dealer.recv_multipart()
                if not body:
                    assert number == b"\xff" * 8
                    return found
                found[int.from_bytes(number, "big")] = msgspec.msgpack.decode(body)

    def close(self) -> None:
        self._sub.close()
        self._context.term()


class View:
    """The cache as a router keeps it."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        """Parent and tokens."""

    def follow(self, batch: list[Any]) -> None:
        ts, events, rank = batch
        assert abs(ts - time.time()) < HANG_S
        assert rank == 0
        for event in events:
            match event.pop("type"):
                case "AllBlocksCleared":
                    assert event == {}
                    self.blocks.clear()
                case "BlockRemoved":
                    assert event.pop("medium") == "GPU"
                    for name in event.pop("block_hashes"):
                        del self.blocks[name]
                    assert event == {}
                case "BlockStored":
                    names, parent, tokens = (
                        event.pop(key) for key in ("block_hashes", "parent_block_hash", "token_ids")
                    )
                    assert event == {"block_size": BLOCK, "lora_id": None, "medium": "GPU", "lora_name": None}
                    assert len(tokens) == BLOCK * len(names)
                    for place, name in enumerate(names):
                        assert name not in self.blocks
                        self.blocks[name] = parent, tuple(tokens[place * BLOCK : (place + 1) * BLOCK])
                        parent = name


@pytest.fixture
def options() -> Iterator[KVEventsOptions]:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path may not be as long as pytest's folders are
        yield KVEventsOptions(f"ipc://{folder}/events", f"ipc://{folder}/replay")


@pytest.fixture
def heard(options: KVEventsOptions) -> Iterator[Heard]:
    listening = Heard(options)
    yield listening
    listening.close()


def submit(bench: Bench, number: int, tokens: tuple[int, ...], salt: str = "", max_tokens: int = 8) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    bench.tell(Submit(number, "r", GenerationRequest(tokens, params, cache_salt=salt)))


def prompt_of(number: int, num_blocks: int) -> tuple[int, ...]:
    return tuple((number * 7 + place) % 200 for place in range(num_blocks * BLOCK + 1))


def test_a_prompt_and_its_answer_are_published_block_by_block(options: KVEventsOptions, heard: Heard) -> None:
    with running(kv_events=options) as bench:
        loaded = bench.ready("r", STUB)
        tokens = prompt_of(1, 3)
        submit(bench, 1, tokens, max_tokens=40)
        answered = bench.answer(1).request
        assert answered is not None
        batches = heard.all_until(2)
    whole = (*tokens, *answered.completions[0].token_ids)
    names = [name_of(each) for each in block_hashes(namespace_of(loaded.fingerprint, ""), whole, BLOCK)]
    view = View()
    for batch in batches.values():
        view.follow(batch)
    assert len(names) == 5
    assert view.blocks == {
        name: (names[place - 1] if place else None, whole[place * BLOCK : (place + 1) * BLOCK])
        for place, name in enumerate(names)
    }


def test_missed_kv_events_can_be_replayed(options: KVEventsOptions, heard: Heard) -> None:
    with running(kv_events=options) as bench:
        bench.ready("r", STUB)
        for number in range(1, 4):
            submit(bench, number, prompt_of(number, 2))
            bench.answer(number)
        every = heard.all_until(3)
        assert list(every) == [0, 1, 2, 3]
        assert every[0][1] == [{"type": "AllBlocksCleared"}]
        assert heard.replayed(2) == {number: batch for number, batch in every.items() if number >= 2}
        assert heard.replayed(0, b"a") == every
        assert heard.replayed(0, b"another topic") == {}


def test_connected_subscriber_receives_each_batch_once(options: KVEventsOptions, heard: Heard) -> None:
    with running(kv_events=options) as bench:
        bench.ready("r", STUB)
        number, live = 0, dict[int, list[Any]]()
        while len(live) < 3:
            number += 1
            assert number < 200
            submit(bench, number, prompt_of(number, 2))
            bench.answer(number)
            live |= heard.live(50)
        every = heard.replayed()
    first = min(live)
    assert live == {number: batch for number, batch in every.items() if first <= number <= max(live)}


def test_a_reset_and_an_unloaded_model_clear_everything(options: KVEventsOptions, heard: Heard) -> None:
    with running(kv_events=options) as bench:
        bench.ready("r", STUB)
        submit(bench, 1, prompt_of(1, 3))
        bench.answer(1)
        assert bench.ask(ResetPrefixCache(), PrefixCacheReset).num_blocks
        submit(bench, 2, prompt_of(2, 3))
        bench.answer(2)
        bench.tell(Unload("r"))
        bench.heard(Unloaded)
        kinds = [[event["type"] for event in batch[1]] for batch in heard.all_until(4).values()]
    cleared, stored = ["AllBlocksCleared"], ["BlockStored"]
    assert kinds == [cleared, stored, cleared, stored, cleared]


def test_blocks_of_salted_prompts_are_not_published(options: KVEventsOptions, heard: Heard) -> None:
    with running(kv_events=options) as bench:
        bench.ready("r", STUB)
        submit(bench, 1, prompt_of(1, 3), salt="mine")
        bench.answer(1)
        submit(bench, 2, prompt_of(1, 2))
        bench.answer(2)
        _, stored = heard.all_until(1).values()
    (event,) = stored[1]
    assert event["token_ids"] == list(prompt_of(1, 2)[: 2 * BLOCK])


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_kv_events_reproduce_the_content_of_the_cache(seed: int) -> None:
    """Whatever is shared, evicted, preempted and aborted; a request with a salt is not followed."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        options = KVEventsOptions(f"ipc://{folder}/events", f"ipc://{folder}/replay")
        heard = Heard(options)
        with running(kv_events=options) as bench:
            loaded = bench.ready("r", STUB, TINY)
            salted = namespace_of(loaded.fingerprint, "mine")
            secrets: set[bytes] = set()
            for number in range(1, 40):
                tokens = prompt_of(draw.randrange(6), draw.randrange(1, 6))
                salt = "mine" if draw.random() < 0.2 else ""
                submit(bench, number, tokens, salt, draw.randrange(1, 60))
                if salt:
                    secrets.update(block_hashes(salted, tokens, BLOCK))
                if draw.random() < 0.2:
                    bench.tell(Abort("r", (number,)))
                elif draw.random() < 0.5:
                    bench.answer(number)
            bench.checked()
            submit(bench, 99, prompt_of(9, 3))
            bench.answer(99)
            deadline_s = time.monotonic() + HANG_S
            while bench.checked().num_open:
                assert time.monotonic() < deadline_s
            replica = bench.worker.registry.present.replicas["r"]
            source, held = replica.kv_events, replica.engine.scheduler.state()
            assert source is not None
            told = {name_of(each) for each in source._held}
            public = {name_of(held.contents[content]) for _, content, _ in held.kv.published} & told
            assert told == public, "nothing is told of that is not there"
            assert not told & {name_of(each) for each in secrets}
            assert not source._ended
            assert not source._positions, "no content of a sequence is kept behind its end"
            publisher = bench.worker._publisher
            assert publisher is not None
            batches = heard.all_until(publisher._next["a"] - 1)
        heard.close()
    assert list(batches) == list(range(len(batches)))
    view = View()
    for batch in batches.values():
        view.follow(batch)
    assert set(view.blocks) == told


async def test_a_worker_process_publishes_too(options: KVEventsOptions, heard: Heard) -> None:
    worker = SupervisedWorker(WorkerOptions("process", kv_events=options), lambda notice: None)
    await worker.start()
    try:
        await worker.load("r", "stub://a", SMALL)
        batches = await asyncio.to_thread(heard.all_until, 0)
    finally:
        await worker.close()
    assert batches[0][1] == [{"type": "AllBlocksCleared"}]


def test_batches_that_cannot_be_sent_are_dropped_and_leave_gaps_in_the_numbers(
    options: KVEventsOptions, heard: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    Path(options.endpoint.removeprefix("ipc://")).mkdir()
    publisher = KVEventPublisher(msgspec.structs.replace(options, max_queued=3, retry_s=0.01))
    for _ in range(5):
        publisher.publish("a", [AllBlocksCleared()])
    assert publisher.num_dropped == 2
    Path(options.endpoint.removeprefix("ipc://")).rmdir()
    until(lambda: not publisher.num_queued)
    publisher.publish("a", [AllBlocksCleared()])
    assert list(heard.all_until(5)) == [0, 1, 2, 5]
    publisher.close()
    assert caplog.text.count("KV events are not sent fast enough: 1 batches were lost") == 1
    assert caplog.text.count("KV events cannot be published at ipc://") == 1


@pytest.mark.parametrize(
    ("endpoint", "allows_remote", "words"),
    [
        ("5557", False, "it must be tcp://HOST:PORT or ipc://PATH"),
        ("tcp://127.0.0.1", False, "it must be tcp://HOST:PORT"),
        ("tcp://127.0.0.1:http", False, "it must be tcp://HOST:PORT"),
        ("http://127.0.0.1:5557", True, "it must be tcp://HOST:PORT"),
        ("tcp://*:5557", False, "other machines can reach"),
        ("tcp://10.0.0.1:5557", False, "--kv-events-allow-remote"),
    ],
)
def test_endpoints_that_cannot_be_or_may_not_are_refused(endpoint: str, allows_remote: bool, words: str) -> None:
    good = "tcp://127.0.0.1:5557"
    for options, flag in (
        (KVEventsOptions(endpoint), "--kv-events"),
        (KVEventsOptions(good, endpoint), "--kv-events-replay"),
    ):
        with pytest.raises(UsageError) as caught:
            options.check(allows_remote)
        assert str(caught.value).startswith(f"{flag} is {endpoint!r}")
        assert words in str(caught.value)


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://10.0.0.1:5557", "tcp://[::1]:5557", "ipc:///tmp/kv"])
def test_endpoints_that_may_be_are_taken(endpoint: str) -> None:
    KVEventsOptions(endpoint).check(allows_remote=True)


def test_a_missing_zeromq_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'lockstep-llm\[ray\]'"):
        KVEventsOptions("tcp://127.0.0.1:5557").check(allows_remote=False)
