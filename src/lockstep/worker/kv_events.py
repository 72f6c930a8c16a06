"""KV events in vLLM's format: publishes the contents of each replica's prefix cache over ZeroMQ, for routers.

The events contain the token ids of prompts and answers, so they are opt-in. A message of the PUB socket has three
frames: the topic, the number of the batch in its topic (8 bytes, big-endian, from 0), and the batch in msgpack: an
array of the time in seconds, its events, and 0 for the rank. An event is a map with its ``type`` and the fields of its
class below, as vLLM sends them since its events have field names.

A subscriber that has missed batches sends a request to the replay socket, a ROUTER. It must use a DEALER, since a REQ
receives only the first of several answers. The request is an empty frame, the first number to resend, and the topic if
there are several. The batches that are still stored come as messages of an empty frame, number and batch; the last
message has the number -1 (8 bytes, signed) and an empty batch.

A block is named by the last 8 bytes of its hash (core/prefix.py) as a number, which distinguishes blocks as well as the
hash itself. Requests with a ``cache_salt`` share their blocks only with requests of the same salt, and are left out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from lockstep.core.prefix import ContentNews
from lockstep.errors import UsageError
from lockstep.system import SYSTEM, System

if TYPE_CHECKING:
    from lockstep.engine.generation import Generation

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MODEL = "{model}"
"""Placeholder for the model's name in a topic."""
MAX_REPLAYED, MAX_REPLAYED_BYTES = 10_000, 64 << 20
"""Limits of the batches that are stored for replay."""
WARN_INTERVAL_S = 60.0
CLOSE_LIMIT_S = 1.0
_WAIT_S = 0.05
"""Interval in seconds between checks for replay requests."""
_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)


class KVEventsOptions(msgspec.Struct, frozen=True):
    """Endpoints of KV events."""

    endpoint: str
    replay: str = ""
    """ZeroMQ endpoint at which missed batches can be requested; empty: they cannot be replayed."""
    topic: str = MODEL
    max_queued: int = 10_000
    """Maximum number of batches that wait to be sent. Further ones are lost, and their numbers are missing."""
    retry_s: float = 1.0
    """Pause in seconds before an endpoint that cannot be used is tried again."""

    def check(self, allows_remote: bool) -> None:
        """Check the endpoints.

        Raises:
            UsageError: an endpoint is invalid or reachable from other machines without `allows_remote`, or ZeroMQ is
                not installed.
        """
        for flag, endpoint in (("--kv-events", self.endpoint), ("--kv-events-replay", self.replay)):
            if endpoint:
                _check_endpoint(flag, endpoint, allows_remote)
        if importlib.util.find_spec("zmq") is None:
            raise UsageError("--kv-events requires pyzmq; install it with `pip install 'lockstep-llm[ray]'`")


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
            f"{flag} is {endpoint!r}, which other machines can reach, and events contain the tokens of prompts "
            "unencrypted; use tcp://127.0.0.1:PORT, or --kv-events-allow-remote on a trusted network"
        )


class _Event(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    pass


class BlockStored(_Event, frozen=True):
    """Consecutive blocks of one chain that were added to the cache."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """Hash of the block before the first one; None: the first one begins a prompt."""
    token_ids: list[int]
    """Token ids of all blocks."""
    block_size: int
    lora_id: int | None
    medium: str
    """Always ``GPU``, vLLM's name for the device's own memory."""
    lora_name: str | None
    """Name of the adapter with which the blocks were computed; None: the base model computed them."""


class BlockRemoved(_Event, frozen=True):
    """Blocks that were removed from the cache."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(_Event, frozen=True):
    """The cache is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
MEDIUM = "GPU"


class EventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Events of one replica, in order."""

    ts: float
    events: Sequence[Event]
    data_parallel_rank: int = 0


class KVEventSource:
    """Creates the events of one replica's cache, using the tokens of open sequences. Step thread only.

    Args:
        publish: called with the events of each step that has any.
    """

    def __init__(self, block_size: int, publish: Callable[[Sequence[Event]], None]) -> None:
        self._block_size = block_size
        self._publish = publish
        self._positions: dict[bytes, tuple[Generation, int]] = {}
        """An open sequence that has each content, and the content's block index there."""
        self._num_open: dict[bytes, int] = {}
        """Number of sequences that have each content."""
        self._ended: list[Generation] = []
        """Sequences that have ended since the last call of `changed`, whose blocks may still be reported."""
        self._held: set[bytes] = set()
        """Published blocks that are still in the cache."""
        publish([AllBlocksCleared()])

    def joined(self, generation: Generation) -> None:
        """Record the blocks of a new sequence."""
        if not generation.live.request.cache_salt:
            self._add(generation, 0)

    def ended(self, generation: Generation) -> None:
        """Record the blocks of the answer of a sequence that has ended."""
        if not generation.live.request.cache_salt:
            self._add(generation, len(generation.live.core_request.block_hashes))
            self._ended.append(generation)

    def changed(self, news: Sequence[ContentNews]) -> None:
        """Publish the changes of the cache, in order."""
        events: list[Event] = []
        for content, is_held in news:
            if not is_held:
                if content in self._held:
                    self._held.discard(content)
                    _remove(events, name_of(content))
                    if not self._held:  # it replaces the events before it
                        events = [AllBlocksCleared()]
            elif content in self._positions:
                self._held.add(content)
                self._store(events, content)
        if events:
            self._publish(events)
        for generation in self._ended:
            self._drop(generation)
        self._ended.clear()

    def closed(self) -> None:
        """Publish that the cache is empty, since the replica is unloaded."""
        self._publish([AllBlocksCleared()])

    def _store(self, events: list[Event], content: bytes) -> None:
        generation, position = self._positions[content]
        size, name = self._block_size, name_of(content)
        token_ids = generation.tokens[position * size : (position + 1) * size]
        parent = name_of(generation.block_hashes[position - 1]) if position else None
        start = generation.live.adapter_start
        is_adapted = start is not None and start.position < (position + 1) * size
        lora_name = generation.live.request.adapter if is_adapted else None
        last = events[-1] if events else None
        follows = isinstance(last, BlockStored) and parent is not None and last.block_hashes[-1] == parent
        if follows and isinstance(last, BlockStored) and last.lora_name == lora_name:
            last.block_hashes.append(name)
            last.token_ids.extend(token_ids)
        else:
            events.append(BlockStored([name], parent, token_ids, size, None, MEDIUM, lora_name))

    def _add(self, generation: Generation, first: int) -> None:
        for position, content in enumerate(generation.block_hashes[first:], first):
            self._positions.setdefault(content, (generation, position))
            self._num_open[content] = self._num_open.get(content, 0) + 1

    def _drop(self, generation: Generation) -> None:
        for content in generation.block_hashes:
            left = self._num_open[content] - 1
            if left:
                self._num_open[content] = left
            else:
                del self._num_open[content], self._positions[content]


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
    """Sends batches in a separate thread without blocking callers. Only one thread may call `publish`."""

    def __init__(self, options: KVEventsOptions, system: System = SYSTEM) -> None:
        self._options = options
        self._now_s, self._unix_time_s = system.now_s, system.unix_time_s
        self._queue: queue.Queue[tuple[str, int, EventBatch] | None] = queue.Queue(options.max_queued)
        self._next: dict[str, int] = {}
        """Number of the next batch, by topic."""
        self.num_dropped = 0
        self._warn_s = 0.0
        self._sent: deque[tuple[str, bytes, bytes]] = deque()
        """Topic, number and bytes of the batches that can be replayed."""
        self._sent_bytes = 0
        self._is_closing = threading.Event()
        self._encode = msgspec.msgpack.Encoder().encode
        self._thread = system.start_thread(self._run, "lockstep-kv-events")

    @property
    def num_queued(self) -> int:
        """Number of batches that wait to be sent."""
        return self._queue.qsize()

    def source(self, model: str, block_size: int) -> KVEventSource:
        """Create the source of a replica's events, with the topic of its model."""
        topic = self._options.topic.replace(MODEL, model)
        return KVEventSource(block_size, lambda events: self.publish(topic, events))

    def publish(self, topic: str, events: Sequence[Event]) -> None:
        """Queue a batch. If too many wait, it is dropped, and its number is missing for subscribers."""
        number = self._next.get(topic, 0)
        self._next[topic] = number + 1
        try:
            self._queue.put_nowait((topic, number, EventBatch(self._unix_time_s(), events)))
        except queue.Full:
            self.num_dropped += 1
            if self._now_s() >= self._warn_s:
                self._warn_s = self._now_s() + WARN_INTERVAL_S
                log.warning("KV events are not sent fast enough: %d batches were lost so far", self.num_dropped)

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
            logged = ""
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
                    if logged != str(error):
                        log.error("KV events cannot be published at %s: %s", self._options.endpoint, error)
                    logged = str(error)
                    self._is_closing.wait(self._options.retry_s)

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
        """Answer a replay request. Invalid requests are ignored."""
        if len(frames) not in (3, 4) or len(frames[2]) != _NUMBER_BYTES:
            return
        client, first = frames[0], frames[2]
        topics = dict.fromkeys(topic for topic, _, _ in self._sent)
        topic = frames[3].decode(errors="replace") if len(frames) > 3 else next(iter(topics), "")
        if len(frames) > 3 or len(topics) == 1:
            for sent_topic, number, body in self._sent:
                if sent_topic == topic and number >= first:
                    replay.send_multipart((client, b"", number, body))
        replay.send_multipart((client, b"", _END, b""))
