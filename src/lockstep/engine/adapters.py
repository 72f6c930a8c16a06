"""Adapters of one engine: their names, and which of them are loaded into the executor's slots.

A request names its adapter, and that content stays its adapter to its end, even if the name is removed or gets another
content meanwhile. An adapter is loaded between two steps, when a request first needs it. If all slots are taken, the
least recently used adapter without open requests is unloaded. If none is without requests, the least recently used one
takes no more requests until its own have ended, so that each adapter gets its turn; its further requests wait.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep.artifacts.model import Adapter
from lockstep.core.prefix import AdapterStart
from lockstep.engine.generation import LiveRequest
from lockstep.engine.metrics import AdapterUse
from lockstep.errors import InvalidParameterError, QueueFullError, UsageError
from lockstep.executors.base import AdapterHost
from lockstep.spelling import did_you_mean, listed

MAX_NAMES = 1024
"""Maximum number of names of one engine's adapters."""
OpenAdapter = Callable[[str, str], Adapter]
"""Opens an adapter of a model under a name, from a path; ArtifactError: it cannot be used with this model."""


@dataclass(frozen=True, slots=True)
class AdapterSupport:
    """Executor and base of a loaded model that computes with adapters."""

    host: AdapterHost
    open: OpenAdapter
    max_loaded: int
    """Number of slots: maximum number of adapters that are loaded at once."""
    max_rank: int
    slot_bytes: int
    """Memory of an adapter of that rank on all layers that can have one."""
    adapters: Sequence[Adapter] = ()
    """Adapters that were opened with the model."""

    @property
    def max_bytes(self) -> int:
        """Maximum memory of all loaded adapters."""
        return self.max_loaded * self.slot_bytes

    def check(self, adapter: Adapter) -> None:
        """Raise UsageError if a slot has no room for an adapter."""
        if adapter.rank > self.max_rank or adapter.num_bytes > self.slot_bytes:
            raise UsageError(
                f"adapter {adapter.name!r} has rank {adapter.rank}; there is room for rank {self.max_rank}; "
                "raise --max-lora-rank"
            )


def start_of(fingerprint: str, invocation_ids: Sequence[int], prompt_ids: Sequence[int]) -> AdapterStart | None:
    """Beginning of an adapter in a prompt: at the last occurrence of its invocation tokens, or at the first token if it
    has none. None: the prompt does not contain them, so that the base model computes everything."""
    wanted = tuple(invocation_ids)
    if not wanted:
        return AdapterStart(0, bytes.fromhex(fingerprint))
    first = wanted[0]
    for position in range(len(prompt_ids) - len(wanted), -1, -1):
        if prompt_ids[position] == first and tuple(prompt_ids[position : position + len(wanted)]) == wanted:
            return AdapterStart(position, bytes.fromhex(fingerprint))
    return None


@dataclass(slots=True, eq=False)
class _Loaded:
    slot: int
    num_open: int = 0
    """Number of requests that compute with it."""


class EngineAdapters:
    """Adapters of one engine. `find`, `add`, `remove`, `names` and `use` are for any thread, the rest for the engine's.

    Args:
        support: how the model computes with adapters; None: it has none.
        max_waiting: maximum number of requests that wait for a slot.
    """

    def __init__(self, support: AdapterSupport | None, max_waiting: int) -> None:
        self._support = support
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._by_name: Mapping[str, Adapter] = {}
        """Replaced as a whole."""
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()
        """Loaded adapters by fingerprint, least recently used first."""
        self._waiting: deque[LiveRequest] = deque()
        self._closing: str | None = None
        """Fingerprint of the loaded adapter that takes no more requests, so that its slot becomes free; None: none."""
        self._has_changed = False
        """True if a waiting request may get its slot now, or an unused adapter be unloaded."""
        self._yielded: LiveRequest | None = None
        """The waiting request that `ready` has just yielded."""
        self.num_open = 0
        """Number of requests that compute with an adapter."""
        self._open_names: Counter[str] = Counter()
        """Number of these requests by name of the adapter, without zeros."""
        self.num_loads = 0
        """Number of loads into slots since the start."""
        for adapter in () if support is None else support.adapters:
            self.add(adapter)

    # -- any thread ---------------------------------------------------------------------------------------------------

    @property
    def names(self) -> Mapping[str, Adapter]:
        """Adapters that requests may name, in order of their addition."""
        return self._by_name

    @property
    def use(self) -> AdapterUse | None:
        """Names of the adapters of open requests; None: the model was loaded without adapters."""
        if self._support is None:
            return None
        waiting = {live.adapter.name for live in list(self._waiting) if live.adapter is not None}
        return AdapterUse(self._support.max_loaded, tuple(sorted(self._open_names)), tuple(sorted(waiting)))

    def find(self, name: str) -> Adapter:
        """Return the adapter with a name; InvalidParameterError: there is none."""
        adapter = self._by_name.get(name)
        if adapter is None:
            known = list(self._by_name)
            hint = did_you_mean(name, known) or (f"loaded are {listed(known)}" if known else "none is loaded")
            raise InvalidParameterError(f"there is no adapter {name!r}; {hint}", param="adapter")
        return adapter

    def add(self, adapter: Adapter) -> None:
        """Make an adapter available under its name. Requests that use another content of this name keep that.

        Raises:
            UsageError: the model was loaded without adapters, there are too many, or this one is too large.
        """
        if self._support is None:
            raise UsageError("this model was loaded without adapters; start the server with --enable-lora")
        self._support.check(adapter)
        with self._lock:
            if adapter.name not in self._by_name and len(self._by_name) >= MAX_NAMES:
                raise UsageError(f"there are {MAX_NAMES} adapters already; unload one first")
            self._by_name = {**self._by_name, adapter.name: adapter}
            self._has_changed = True

    def remove(self, name: str) -> None:
        """Remove a name. Requests that use the adapter keep it. InvalidParameterError: there is no such name."""
        self.find(name)
        with self._lock:
            self._by_name = {other: adapter for other, adapter in self._by_name.items() if other != name}
            self._has_changed = True

    # -- the engine's thread ------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._waiting)

    @property
    def num_loaded(self) -> int:
        return len(self._loaded)

    @property
    def has_work(self) -> bool:
        """True if a waiting request may get its slot, or an unused adapter be unloaded."""
        return self._has_changed

    def enter(self, live: LiveRequest) -> bool:
        """Give a request the slot of its adapter, loading it if needed; False: the request waits here. A new request
        does not take a slot that others wait for.

        Raises:
            QueueFullError: too many requests wait already.
            ExecutorError: the adapter cannot be loaded.
        """
        if live.adapter is None or live.adapter_start is None:
            return True
        is_first = live is self._yielded or not self._waiting or live.adapter.fingerprint in self._loaded
        slot = self._take_slot(live.adapter) if is_first else None
        if slot is None:
            if len(self._waiting) >= self._max_waiting:
                raise QueueFullError(f"{self._max_waiting} requests already wait for an adapter; try again later")
            self._waiting.append(live)
            self._has_changed = True
            return False
        live.adapter_slot = slot
        self.num_open += 1
        self._open_names[live.adapter.name] += 1
        return True

    def ready(self) -> Iterator[LiveRequest]:
        """Unload adapters without a name, and yield the waiting requests that can enter now, in order of arrival. The
        caller lets each one enter before it takes the next one."""
        if not self._has_changed:
            return
        self._has_changed = False
        self._unload_unnamed()
        for _ in range(len(self._waiting)):
            live = self._waiting.popleft()
            assert live.adapter is not None, "a request without an adapter never waits"
            if self._has_room(live.adapter.fingerprint):
                self._yielded = live
                yield live
                self._yielded = None
            else:
                self._waiting.append(live)
        self._choose_closing()

    def leave(self, live: LiveRequest) -> None:
        """Remove a request that has ended, whether it waits or computes."""
        if live.adapter is None:
            return
        if not live.adapter_slot:
            if live in self._waiting:
                self._waiting.remove(live)
                self._has_changed = True
            return
        loaded = self._loaded[live.adapter.fingerprint]
        loaded.num_open -= 1
        self.num_open -= 1
        self._open_names -= Counter([live.adapter.name])
        live.adapter_slot = 0
        self._loaded.move_to_end(live.adapter.fingerprint)
        if not loaded.num_open:
            self._has_changed = True

    def abandon(self) -> None:
        """Remove the waiting requests after a failure of the loop."""
        self._waiting.clear()

    def check(self) -> None:
        """Assert that slots and counts agree."""
        assert self.num_open == sum(each.num_open for each in self._loaded.values()), "open requests are miscounted"
        assert self.num_open == sum(self._open_names.values()), "names of open requests are miscounted"
        slots = [each.slot for each in self._loaded.values()]
        assert len(set(slots)) == len(slots), "a slot has two adapters"
        if self._support is not None:
            assert len(slots) <= self._support.max_loaded, "more adapters than slots"
            assert self._support.host.adapter_bytes <= self._support.max_bytes, "more memory than the limit"

    def _has_room(self, fingerprint: str) -> bool:
        """True if a request of this adapter can enter now."""
        assert self._support is not None, "only a model with adapters has such requests"
        if fingerprint in self._loaded:
            return fingerprint != self._closing
        return len(self._loaded) < self._support.max_loaded or self._idle() is not None

    def _idle(self) -> str | None:
        """The least recently used adapter without open requests."""
        return next((each for each, loaded in self._loaded.items() if not loaded.num_open), None)

    def _take_slot(self, adapter: Adapter) -> int | None:
        """Use the adapter's slot for one more request; None: it is closing, or all slots are in use."""
        assert self._support is not None, "only a model with adapters has such requests"
        fingerprint = adapter.fingerprint
        if not self._has_room(fingerprint):
            return None
        loaded = self._loaded.get(fingerprint)
        if loaded is None:
            if len(self._loaded) >= self._support.max_loaded:
                idle = self._idle()
                assert idle is not None, "there is room"
                self._unload(idle)
            self.num_loads += 1
            loaded = self._loaded[fingerprint] = _Loaded(self._support.host.load_adapter(adapter))
        loaded.num_open += 1
        self._loaded.move_to_end(fingerprint)
        return loaded.slot

    def _choose_closing(self) -> None:
        """Close an adapter to further requests if one that is not loaded is waited for, and none else."""
        waited_for = [live.adapter.fingerprint for live in self._waiting if live.adapter is not None]
        if all(each in self._loaded for each in waited_for):
            self._has_changed = self._has_changed or self._closing is not None
            self._closing = None
        elif self._closing is None:
            self._closing = next(iter(self._loaded))

    def _unload(self, fingerprint: str) -> None:
        assert self._support is not None, "only a model with adapters has loaded ones"
        self._support.host.unload_adapter(self._loaded.pop(fingerprint).slot)
        if self._closing == fingerprint:
            self._closing = None

    def _unload_unnamed(self) -> None:
        """Unload the adapters that no open request uses and no name has."""
        named = {adapter.fingerprint for adapter in self._by_name.values()}
        waited_for = {live.adapter.fingerprint for live in self._waiting if live.adapter is not None}
        for fingerprint in [each for each, loaded in self._loaded.items() if not loaded.num_open]:
            if fingerprint not in named and fingerprint not in waited_for:
                self._unload(fingerprint)
