"""KV events in vLLM's shape: what each replica's prefix cache holds, for whoever routes by that, over ZeroMQ.

They carry the token ids of prompts and answers, so they are opt-in. A message of the PUB socket has three frames: the
topic, the number of the batch in its topic (8 bytes, big-endian, from 0), and the batch in msgpack: an array of the
time in seconds, its events, and 0 for the rank. An event is a map with its ``type`` and the fields of its class below,
as vLLM sends them since it has names for fields.

Who has missed something asks the replay socket, a ROUTER, from a DEALER (of several answers a REQ takes only the first
one): an empty frame, the first number that is wanted, and the topic where there are several. What is still known comes
as messages of an empty frame, number and batch; the last one has the number -1 (8 bytes, signed) and an empty batch.

A block is named by the last 8 bytes of its hash (core/prefix.py) as a number, which is as good as the hash itself to
tell blocks apart. Requests with a ``cache_salt`` share their blocks with nobody who does not know it, and are left out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from lockstep.core.prefix import ContentNews
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.engine.generation import Generation

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MODEL = "{model}"
"""What a topic has in the place of the model's name."""
MAX_QUEUED = 10_000
"""Batches that wait to be sent; more are lost, and their numbers are missing."""
MAX_REPLAYED, MAX_REPLAYED_BYTES = 10_000, 64 << 20
"""Batches that can be requested again."""
RETRY_S = 1.0
WARN_INTERVAL_S = 60.0
CLOSE_LIMIT_S = 1.0
_WAIT_S = 0.05
"""Interval at which requests for a replay are looked for."""
_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)


class KVEventsOptions(msgspec.Struct, frozen=True):
    """Endpoints of KV events."""

    endpoint: str
    replay: str = ""
    """Empty: what was missed cannot be requested."""
    topic: str = MODEL

    def check(self, allows_remote: bool) -> None:
        """Refuse endpoints that cannot be, or that other machines may reach without the flag that allows it.

        Raises:
            UsageError: one of those, or there is no ZeroMQ here.
        """
        for flag, endpoint in (("--kv-events", self.endpoint), ("--kv-events-replay", self.replay)):
            if endpoint:
                _check_endpoint(flag, endpoint, allows_remote)
        if importlib.util.find_spec("zmq") is None:
            raise UsageError("--kv-events needs pyzmq, which is not here; `pip install 'lockstep-llm[ray]'` brings it")


def _check_endpoint(flag: str, endpoint: str, allows_remote: bool) -> None:
    try:
        parts = urlsplit(endpoint)
        is_tcp = parts.scheme == "tcp" and bool(parts.hostname) and parts.port is not None
    except ValueError:
        is_tcp = False
    if not is_tcp and not (endpoint.startswith("ipc://") and len(endpoint) > len("ipc://")):
        raise UsageError(f"{flag} is {endpoint!r}; it must be tcp://HOST:PORT or ipc://PATH")
    if is_tcp and parts.hostname not in LOOPBACK and not allows_remote:
        raise UsageError(
            f"{flag} is {endpoint!r}, which others than this machine may reach, and events carry the tokens of prompts "
            "in clear; give tcp://127.0.0.1:PORT, or --kv-events-allow-remote where the network may be trusted"
        )


class _Event(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    pass


class BlockStored(_Event, frozen=True):
    """Blocks of one chain, each behind the one before it, that can be found from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """Of the block before the first one; None: it begins a prompt."""
    token_ids: list[int]
    """Of all blocks."""
    block_size: int
    lora_id: int | None
    medium: str
    """Always ``GPU``, vLLM's word for the device's own memory."""
    lora_name: str | None


class BlockRemoved(_Event, frozen=True):
    """Blocks that can be found no longer."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(_Event, frozen=True):
    """Nothing can be found any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
MEDIUM = "GPU"


class EventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Events of one replica, in order."""

    ts: float
    events: Sequence[Event]
    data_parallel_rank: int = 0


class KVEventSource:
    """Events of one replica's cache, with the tokens of the blocks of open sequences. Step thread only.

    Args:
        publish: takes the events of each step that has any.
    """

    def __init__(self, block_size: int, publish: Callable[[Sequence[Event]], None]) -> None:
        self._block_size = block_size
        self._publish = publish
        self._places: dict[bytes, tuple[Generation, int]] = {}
        """Of contents of open sequences: one that has it, and its place there."""
        self._num_open: dict[bytes, int] = {}
        """Sequences that have a content."""
        self._ended: list[Generation] = []
        """Sequences that have ended since the last news, which may be of their blocks."""
        self._held: set[bytes] = set()
        """Published blocks that can still be found."""
        publish([AllBlocksCleared()])

    def joined(self, generation: Generation) -> None:
        """Take note of a sequence that begins."""
        if not generation.live.request.cache_salt:
            self._enter(generation, 0)

    def ended(self, generation: Generation) -> None:
        """Take note of a sequence that has ended, with the blocks of its answer."""
        if not generation.live.request.cache_salt:
            self._enter(generation, len(generation.live.core_request.block_hashes))
            self._ended.append(generation)

    def changed(self, news: Sequence[ContentNews]) -> None:
        """Tell what has changed in the cache, in order."""
        events: list[Event] = []
        for content, is_held in news:
            if not is_held:
                if content in self._held:
                    self._held.discard(content)
                    _remove(events, name_of(content))
                    if not self._held:  # whatever was before
                        events = [AllBlocksCleared()]
            elif content in self._places:
                self._held.add(content)
                self._store(events, content)
        if events:
            self._publish(events)
        for generation in self._ended:
            self._leave(generation)
        self._ended.clear()

    def closed(self) -> None:
        """The replica is unloaded."""
        self._publish([AllBlocksCleared()])

    def _store(self, events: list[Event], content: bytes) -> None:
        generation, place = self._places[content]
        size, name = self._block_size, name_of(content)
        token_ids = generation.tokens[place * size : (place + 1) * size]
        parent = name_of(generation.block_hashes[place - 1]) if place else None
        last = events[-1] if events else None
        if isinstance(last, BlockStored) and parent is not None and last.block_hashes[-1] == parent:
            last.block_hashes.append(name)
            last.token_ids.extend(token_ids)
        else:
            events.append(BlockStored([name], parent, token_ids, size, None, MEDIUM, None))

    def _enter(self, generation: Generation, first: int) -> None:
        for place, content in enumerate(generation.block_hashes[first:], first):
            self._places.setdefault(content, (generation, place))
            self._num_open[content] = self._num_open.get(content, 0) + 1

    def _leave(self, generation: Generation) -> None:
        for content in generation.block_hashes:
            left = self._num_open[content] - 1
            if left:
                self._num_open[content] = left
            else:
                del self._num_open[content], self._places[content]


def _remove(events: list[Event], name: int) -> None:
    last = events[-1] if events else None
    if isinstance(last, BlockRemoved):
        last.block_hashes.append(name)
    else:
        events.append(BlockRemoved([name], MEDIUM))


def name_of(content: bytes) -> int:
    """Name of a block in events."""
    return int.from_bytes(content[-_NUMBER_BYTES:], "big")


class KVEventPublisher:
    """Sends batches, in a thread of its own; no one waits for it. `publish` is for one thread."""

    def __init__(
        self,
        options: KVEventsOptions,
        clock: Callable[[], float] = time.monotonic,
        unix_time_s: Callable[[], float] = time.time,
    ) -> None:
        self._options = options
        self._now_s, self._unix_time_s = clock, unix_time_s
        self._queue: queue.Queue[tuple[str, int, EventBatch] | None] = queue.Queue(MAX_QUEUED)
        self._next: dict[str, int] = {}
        """Number of the next batch, by topic."""
        self.num_dropped = 0
        self._warn_s = 0.0
        self._sent: deque[tuple[str, bytes, bytes]] = deque()
        """Topic, number and batch of what can be requested again."""
        self._sent_bytes = 0
        self._is_closing = threading.Event()
        self._encode = msgspec.msgpack.Encoder().encode
        self._thread = threading.Thread(target=self._run, name="lockstep-kv-events", daemon=True)
        self._thread.start()

    def source(self, model: str, block_size: int) -> KVEventSource:
        """The source of a replica's events, in the topic of its model."""
        topic = self._options.topic.replace(MODEL, model)
        return KVEventSource(block_size, lambda events: self.publish(topic, events))

    def publish(self, topic: str, events: Sequence[Event]) -> None:
        """Queue a batch; if too many wait, it is dropped, and listeners miss its number."""
        number = self._next.get(topic, 0)
        self._next[topic] = number + 1
        try:
            self._queue.put_nowait((topic, number, EventBatch(self._unix_time_s(), events)))
        except queue.Full:
            self.num_dropped += 1
            if self._now_s() >= self._warn_s:
                self._warn_s = self._now_s() + WARN_INTERVAL_S
                log.warning("KV events are not sent fast enough: %d batches were lost until now", self.num_dropped)

    def close(self) -> None:
        """Send what is queued, within a bounded time."""
        self._is_closing.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(CLOSE_LIMIT_S)

    # -- its thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        import zmq

        with zmq.Context() as context:
            context.linger = int(CLOSE_LIMIT_S * 1e3)
            told = ""
            while not self._is_closing.is_set():
                try:
                    with context.socket(zmq.PUB) as pub, context.socket(zmq.ROUTER) as replay:
                        for socket in (pub, replay):
                            socket.ipv6 = "[" in self._options.endpoint + self._options.replay
                        pub.bind(self._options.endpoint)
                        if self._options.replay:
                            replay.bind(self._options.replay)
                        self._serve(pub, replay)
                except zmq.ZMQError as error:
                    if told != str(error):
                        log.error("no KV events are published at %s: %s", self._options.endpoint, error)
                    told = str(error)
                    self._is_closing.wait(RETRY_S)

    def _serve(self, pub: Any, replay: Any) -> None:
        while True:
            if self._options.replay and replay.poll(0):
                self._replay(replay, replay.recv_multipart())
            try:
                batch = self._queue.get(timeout=_WAIT_S)
            except queue.Empty:
                continue
            if batch is None:
                return
            topic, number, body = batch[0], batch[1].to_bytes(_NUMBER_BYTES, "big"), self._encode(batch[2])
            pub.send_multipart((topic.encode(), number, body))
            self._sent.append((topic, number, body))
            self._sent_bytes += len(body)
            while len(self._sent) > MAX_REPLAYED or self._sent_bytes > MAX_REPLAYED_BYTES:
                self._sent_bytes -= len(self._sent.popleft()[2])

    def _replay(self, replay: Any, frames: Sequence[bytes]) -> None:
        """Answer requests for missed batches; anything else is ignored."""
        if len(frames) not in (3, 4) or len(frames[2]) != _NUMBER_BYTES:
            return
        who, first = frames[0], frames[2]
        topics = dict.fromkeys(topic for topic, _, _ in self._sent)
        topic = frames[3].decode(errors="replace") if len(frames) > 3 else next(iter(topics), "")
        if len(frames) > 3 or len(topics) == 1:
            for sent_topic, number, body in self._sent:
                if sent_topic == topic and number >= first:
                    replay.send_multipart((who, b"", number, body))
        replay.send_multipart((who, b"", _END, b""))
