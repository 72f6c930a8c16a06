"""The whole state of a scheduler, or of a fingerprint, as plain values, and back.

A recording that begins in the middle begins with one. Not pickle: only the classes of the core are known here, so
thawing builds nothing else, whatever the bytes say. What is thawed decides every continuation as the original would.

State is what decides; `STATE` lists it, attribute by attribute. What only saves work (a run of repeating steps, what a
planner remembers) and what nobody asked for yet is none of it: two schedulers that decide alike for ever have the same
state, whatever they were asked.

What is frozen is ``[layout, value]``. The layout lists ``[class, attribute...]`` for each class of the value, so that a
state of another version's core is refused. A value is None, a bool, an int, or a list whose first item says what it is:

- ``0 number``: the mutable value of that number, counted from 0 in the order in which freezing met them.
- ``1 class value...``: an object of the core; class counts the table below, values are its attributes by name.
- ``2 item...``, ``3 item...``: a list, a tuple.
- ``4 (key value)...``, ``5 (key value)...``: a dict, an OrderedDict.
- ``6 item...``: a set, sorted.
- ``7 class index``: a member of an enum of the core. ``8 value``, ``9 value``: bytes, and a string, as whoever froze
  them chose to show them. ``10``: the scheduler's configuration, which is not part of the state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from enum import Enum
from typing import Any

from lockstep.core.blocks import BlockPool, HostPool
from lockstep.core.fingerprint import Fingerprint
from lockstep.core.kv import KVCache
from lockstep.core.policy import SchedulerConfig
from lockstep.core.prefix import PrefixCache
from lockstep.core.queue import TenantLedger, WaitingQueue
from lockstep.core.request import FinishReason, Request
from lockstep.core.roster import Roster
from lockstep.core.scheduler import Scheduler
from lockstep.core.sequence import Sequence, SequenceState
from lockstep.core.stats import Counters
from lockstep.core.step import StepPlan
from lockstep.errors import TraceError

Frozen = Any
"""Lists of None, bools, ints, attribute names, and what ``content`` and ``name`` gave."""

_REF, _OBJECT, _LIST, _TUPLE, _DICT, _ORDERED, _SET, _ENUM, _BYTES, _STR, _CONFIG = range(11)
STATE: dict[type[Any], tuple[str, ...]] = {
    Scheduler: (
        *("config", "_kv", "_ledger", "_queue", "_roster", "_sequences", "_counters"),
        *("_next_id", "_step", "_pending", "_aborting"),
    ),
    Fingerprint: (
        *("_digest", "_body", "_repeats", "_before", "_before_ended", "_before_plain", "_shift"),
        *("_ids", "_ends", "_tables", "_samples", "_num_sampled"),
    ),
    KVCache: (
        *("_config", "_block_size", "pool", "host", "prefix"),
        *("_evicted", "_swap_out", "_swap_in", "_moved_out", "_moved_in"),
    ),
    BlockPool: ("num_blocks", "_free", "_cached", "_pinned", "_refs", "num_allocated", "num_released"),
    HostPool: ("num_blocks", "_free", "_leaving"),
    PrefixCache: ("_block_of", "_hash_of", "_pins", "_pinned", "num_published"),
    TenantLedger: ("_max_tenants", "_served", "_unfinished"),
    WaitingQueue: ("_config", "_ledger", "_lines", "num_tokens", "num_changes", "_size"),
    Roster: ("prefilling", "decoding", "preempted"),
    Counters: (
        *("num_failed_steps", "num_prompt_tokens", "num_generation_tokens", "num_preemptions"),
        *("_num_recomputed_tokens", "_prefix_queries_tokens", "_prefix_hits_tokens", "_num_evicted_blocks"),
        *("_num_swapped_out_blocks", "_num_swapped_in_blocks", "_num_finished"),
    ),
    Sequence: Sequence.__slots__,
    Request: Request.__slots__,
    StepPlan: StepPlan.__slots__,
    FinishReason: (),
    SequenceState: (),
}
"""What each class is made of, as a checkpoint has it. `Scheduler.begin_scratch` makes the rest of a scheduler."""
_CLASSES = tuple(STATE)
"""Their numbers are written."""
_ENUMS: dict[type[Any], list[Enum]] = {FinishReason: [*FinishReason], SequenceState: [*SequenceState]}


def freeze(
    root: Scheduler | Fingerprint,
    content: Callable[[bytes], object] = lambda value: value,
    name: Callable[[str], object] = lambda value: value,
) -> Frozen:
    """The state between two steps, or in one.

    Args:
        root: a scheduler first counts what a run of repeating steps has not written back yet.
        content: how bytes are shown: block hashes, and a fingerprint's digest and record.
        name: how strings are shown: tenants.
    """
    if isinstance(root, Scheduler):
        root.write_back()
    return _Freezer(content, name).freeze(root)


def thaw(
    frozen: Frozen,
    config: SchedulerConfig,
    content: Callable[[Any], bytes] = lambda value: value,
    name: Callable[[Any], str] = lambda value: value,
) -> Any:
    """What was frozen: a new `Scheduler` or `Fingerprint`.

    Args:
        config: the scheduler's.
        content: from how bytes were shown to bytes; equal ones stay equal, others others.
        name: the same for strings.

    Raises:
        TraceError: it is not the state of such an object, as this version of the core has them.
    """
    try:
        layout, value = frozen
        root = _Thawer(_checked(layout), config, content, name).value(value)
        if isinstance(root, Scheduler):
            root.begin_scratch()
    except (TypeError, ValueError, IndexError, AttributeError, KeyError, RecursionError) as error:
        raise TraceError(f"a checkpoint does not hold what this version's scheduler is made of: {error!r}") from error
    if not isinstance(root, Scheduler | Fingerprint):
        raise TraceError(f"a checkpoint holds a {type(root).__name__}, not a scheduler")
    return root


def is_of_this_version(frozen: Frozen) -> bool:
    """Whether it was frozen by a core whose objects are made of the same; if not, it cannot be thawed or compared.

    Raises:
        TraceError: it is no checkpoint of any version.
    """
    try:
        return all(sorted(names) == sorted(STATE[_CLASSES[number]]) for number, *names in frozen[0])
    except (TypeError, ValueError, IndexError) as error:
        raise TraceError(f"a checkpoint does not say what it is made of: {error!r}") from error


def _checked(layout: Frozen) -> dict[int, list[str]]:
    """The layout, if the core of this version has its objects made of the same."""
    for number, *names in layout:
        kind = _CLASSES[number]
        if sorted(names) != sorted(STATE[kind]):
            raise TraceError(
                f"a checkpoint has a {kind.__name__} made of {', '.join(names)}; here it is made of "
                f"{', '.join(STATE[kind])}: it was recorded by another version"
            )
    return {number: names for number, *names in layout}


class _Freezer:
    def __init__(self, content: Callable[[bytes], object], name: Callable[[str], object]) -> None:
        self._content = content
        self._name = name
        self._numbers: dict[int, int] = {}
        """id() to number of every mutable value met so far; all of them live as long as the root."""
        self._met: dict[int, tuple[str, ...]] = {}
        """Classes of the values met so far."""

    def freeze(self, root: Scheduler | Fingerprint) -> Frozen:
        # A subclass may have attributes of its own, which are not the core's.
        value = self._object(Scheduler if isinstance(root, Scheduler) else Fingerprint, root)
        return [[[number, *names] for number, names in self._met.items()], value]

    def value(self, value: Any) -> Frozen:
        kind = type(value)
        if value is None or kind is int or kind is bool:
            return value
        if kind is bytes:
            return [_BYTES, self._content(value)]
        if kind is str:
            return [_STR, self._name(value)]
        if kind is tuple:
            return [_TUPLE, *self._items(value)]
        if kind is SchedulerConfig:
            return [_CONFIG]
        if isinstance(value, Enum):
            return [_ENUM, _CLASSES.index(kind), [*type(value)].index(value)]
        if id(value) in self._numbers:
            return [_REF, self._numbers[id(value)]]
        if kind not in _CLASSES:
            return self._container(kind, value)
        return self._object(kind, value)

    def _object(self, kind: type[Any], value: Any) -> Frozen:
        self._numbers[id(value)] = len(self._numbers)
        number = _CLASSES.index(kind)
        names = self._met.setdefault(number, STATE[kind])
        return [_OBJECT, number, *[self.value(getattr(value, name)) for name in names]]

    def _container(self, kind: type[Any], value: Any) -> Frozen:
        self._numbers[id(value)] = len(self._numbers)
        if kind is list:
            return [_LIST, *self._items(value)]
        if kind is dict or kind is OrderedDict:
            code = _DICT if kind is dict else _ORDERED
            return [code, *[part for key, held in value.items() for part in (self.value(key), self.value(held))]]
        assert kind is set, f"the core has a {kind.__name__}, which no checkpoint can hold"
        return [_SET, *self._items(sorted(value))]

    def _items(self, items: Collection[Any]) -> Collection[Frozen]:
        """Most are numbers of blocks, which stand for themselves."""
        return items if set(map(type, items)) <= {int} else [self.value(item) for item in items]


class _Thawer:
    def __init__(
        self,
        layout: dict[int, list[str]],
        config: SchedulerConfig,
        content: Callable[[Any], bytes],
        name: Callable[[Any], str],
    ) -> None:
        self._layout = layout
        self._config = config
        self._content = content
        self._name = name
        self._met: list[Any] = []

    def value(self, frozen: Frozen) -> Any:
        if not isinstance(frozen, list | tuple):
            if frozen is None or type(frozen) in (int, bool):
                return frozen
            raise TypeError(f"{frozen!r} stands for nothing")
        code, *rest = frozen
        match code:
            case 0:
                return self._met[rest[0]]
            case 1:
                return self._object(_CLASSES[rest[0]], self._layout[rest[0]], rest[1:])
            case 3:
                return tuple(self._items(rest))
            case 7:
                return _ENUMS[_CLASSES[rest[0]]][rest[1]]
            case 8:
                return self._content(rest[0])
            case 9:
                return self._name(rest[0])
            case 10:
                return self._config
        return self._container(code, rest)

    def _object(self, kind: type[Any], names: list[str], values: list[Frozen]) -> Any:
        thawed = object.__new__(kind)
        self._met.append(thawed)
        for name, value in zip(names, self._items(values), strict=True):
            object.__setattr__(thawed, name, value)  # also of frozen ones
        return thawed

    def _container(self, code: int, rest: list[Frozen]) -> Any:
        thawed: Any = {_LIST: list, _DICT: dict, _ORDERED: OrderedDict, _SET: set}[code]()
        self._met.append(thawed)
        if code in (_LIST, _SET):
            (thawed.extend if code == _LIST else thawed.update)(self._items(rest))
        else:
            values = self._items(rest)
            thawed.update(zip(values[::2], values[1::2], strict=True))
        return thawed

    def _items(self, frozen: list[Frozen]) -> list[Any]:
        return frozen if set(map(type, frozen)) <= {int} else [self.value(item) for item in frozen]
