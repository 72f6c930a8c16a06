"""Tiers of KV blocks outside of the device: host memory in front of disk, each block in one of them or in both.

What is saved goes to host memory, and its copy to disk when nothing else is to be done, so that either tier may lose
any block at any time. What comes back from disk is in host memory again.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from lockstep.engine.kv_files import BlockError, BlockFiles, BlockKey, HostFolder, claim_host_folder, host_fault
from lockstep.errors import UsageError
from lockstep.executors.base import Blocks

log = logging.getLogger(__name__)

MAX_BEHIND = 1 << 16
"""Blocks that wait to be copied to disk; beyond, the oldest are not."""


class KVTierName(StrEnum):
    """Tier of a block outside of the device."""

    HOST = "host"
    DISK = "disk"


class KVStoreOptions(msgspec.Struct, frozen=True):
    """Options of a store; a tier without a folder is not there."""

    host_dir: str = ""
    host_bytes: int = 0
    disk_dir: str = ""
    disk_bytes: int = 0
    check_share: float = 0.0
    """Part of the chains that come back whose first block is computed again and compared."""

    @property
    def tiers(self) -> tuple[tuple[KVTierName, str, int], ...]:
        """Place, folder and budget of each, the fastest first."""
        return (KVTierName.HOST, self.host_dir, self.host_bytes), (KVTierName.DISK, self.disk_dir, self.disk_bytes)


class TierStats(NamedTuple):
    """Figures of one tier."""

    num_blocks: int
    num_bytes: int
    budget_bytes: int
    num_evicted: int
    num_loaded: int
    """Blocks that came back from it."""
    num_rejected: int
    """Blocks that were not what had been written, or what is computed."""
    num_checked: int
    """Blocks that came back and were computed again."""


class KVTiers:
    """Blocks of both tiers. One thread reads, writes and removes; any may ask what is there.

    Args:
        on_fault: called on that thread with a sentence on each block that was not what had been written.

    Raises:
        UsageError: a folder cannot be used, or another process uses it.
    """

    def __init__(self, options: KVStoreOptions, on_fault: Callable[[str], None]) -> None:
        self._on_fault = on_fault
        self._files: Mapping[KVTierName, BlockFiles] = {}
        """The fastest first; replaced as a whole and never changed."""
        try:
            self._open(options)
        except UsageError:
            self.close()  # or nobody could have the other folder, this process included
            raise
        self._behind: OrderedDict[BlockKey, tuple[int, int]] = OrderedDict()
        """Bytes and class of blocks that are not on disk yet."""
        self.num_loaded: Counter[KVTierName] = Counter()
        self.num_rejected: Counter[KVTierName] = Counter()
        self.num_checked: Counter[KVTierName] = Counter()

    def close(self) -> None:
        """Give the folders free."""
        for files in self._files.values():
            files.close()

    # -- any thread -----------------------------------------------------------------------------------------------

    @property
    def lasting(self) -> BlockFiles | None:
        """The slowest, which is there the longest."""
        return next(reversed([*self._files.values()]), None)

    @property
    def num_behind(self) -> int:
        """Blocks that are not on disk yet."""
        return len(self._behind)

    def __bool__(self) -> bool:
        """True if there is any."""
        return bool(self._files)

    def __contains__(self, key: BlockKey) -> bool:
        return self.place_of(key) is not None

    def place_of(self, key: BlockKey) -> KVTierName | None:
        """The fastest tier that has a block."""
        return next((place for place, files in self._files.items() if key in files), None)

    def holders(self, key: BlockKey) -> tuple[KVTierName, ...]:
        """Tiers that have a block, the fastest first."""
        return tuple(place for place, files in self._files.items() if key in files)

    def checked(self, key: BlockKey, is_same: bool) -> None:
        """Count a block that came back and was computed again."""
        place = self.place_of(key) or next(iter(self._files))
        self.num_checked[place] += 1
        self.num_rejected[place] += not is_same

    @property
    def fault(self) -> str:
        """The reason why less is kept than the budgets allow, in one sentence; empty: it is as they allow."""
        return next((files.fault for files in self._files.values() if files.fault), "")

    def stats(self) -> dict[KVTierName, TierStats]:
        """Figures of each tier."""
        return {
            place: TierStats(
                len(files),
                files.num_bytes,
                files.budget_bytes,
                files.num_evicted,
                self.num_loaded[place],
                self.num_rejected[place],
                self.num_checked[place],
            )
            for place, files in self._files.items()
        }

    # -- the thread that has them ---------------------------------------------------------------------------------

    def read(self, key: BlockKey, num_bytes: int) -> tuple[KVTierName, Blocks] | None:
        """Content of a block and the tier that had it; None: it is not there, or was not what had been written."""
        content = np.empty(num_bytes, np.uint8)
        place = next((place for place in self._files if self._read(place, key, content)), None)
        if place is None:
            return None
        self.num_loaded[place] += 1
        return place, content

    def promote(self, key: BlockKey, content: Blocks) -> None:
        """Put what came from disk into host memory."""
        if KVTierName.HOST in self._files:
            self._files[KVTierName.HOST].write(key, content, self._files[KVTierName.DISK].class_of(key))

    def save(self, key: BlockKey, content: Blocks, class_: int) -> None:
        """Keep a block: in host memory now and on disk later, or there at once where host memory has no room."""
        host, disk = self._files.get(KVTierName.HOST), self._files.get(KVTierName.DISK)
        is_on_host = host is not None and host.write(key, content, class_)
        if disk is None or key in disk:
            return
        if not is_on_host:
            disk.write(key, content, class_)
            return
        self._behind[key] = len(content), class_
        if len(self._behind) > MAX_BEHIND:
            self._behind.popitem(last=False)

    def copy_behind(self) -> None:
        """Copy the block that has waited longest from host memory to disk."""
        key, (num_bytes, class_) = self._behind.popitem(last=False)
        content = np.empty(num_bytes, np.uint8)
        if self._read(KVTierName.HOST, key, content):
            self._files[KVTierName.DISK].write(key, content, class_)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Forget blocks, wherever they are."""
        for key in keys:
            self._behind.pop(key, None)
            for files in self._files.values():
                files.remove(key)

    def drop(self, environment: bytes) -> None:
        """Forget all blocks of an environment."""
        for files in self._files.values():
            self.remove([key for key in files if key.environment == environment])

    def resize(self, options: KVStoreOptions) -> None:
        """Take over the budgets of options, and open the tiers that had none; folders stay as they are."""
        try:
            self._open(options)
        except UsageError as error:
            log.error("%s", error)
            self._on_fault(str(error))
        for place, _, num_bytes in options.tiers:
            if place in self._files:
                self._files[place].budget_bytes = num_bytes
                self._files[place].shrink()

    def classify(self, environment: bytes, class_: int) -> None:
        """Give the blocks of an environment another class."""
        for files in self._files.values():
            files.classify(environment, class_)

    def _open(self, options: KVStoreOptions) -> None:
        for place, folder, num_bytes in options.tiers:
            if folder and num_bytes and place not in self._files:
                opened = {**self._files, place: BlockFiles(Path(folder), num_bytes)}
                self._files = {each: opened[each] for each in KVTierName if each in opened}

    def _read(self, place: KVTierName, key: BlockKey, content: Blocks) -> bool:
        try:
            return self._files[place].read(key, content)
        except BlockError as error:
            self.num_rejected[place] += 1
            log.warning("%s; it is computed again", error)
            self._on_fault(str(error))
            return False


class HostStore:
    """Place of the KV that leaves a device: a folder of our own in host memory, claimed when it is needed."""

    def __init__(self) -> None:
        self.is_open = False
        """Whether KV that leaves the device is kept."""
        self.fault = ""
        """Why less is kept in host memory than was configured, in one sentence; empty: all of it is."""
        self._folder: HostFolder | None = None

    def opened(self, options: KVStoreOptions) -> KVStoreOptions:
        """The options with the folder, and with what this machine can give."""
        host_bytes = options.host_bytes
        if host_bytes and self._folder is None:
            try:
                self._folder = claim_host_folder()
            except UsageError as error:  # it is no reason to serve nothing
                self.fault = f"no KV is kept in host memory: {error}"
                log.warning("%s", self.fault)
        if self._folder is not None:
            room = self._folder.usable_bytes
            self.fault = host_fault(self._folder.path.parent, host_bytes, room)
            if self.fault:
                log.warning("%s", self.fault)
            host_bytes = min(host_bytes, room)
        host_dir = "" if self._folder is None else str(self._folder.path)
        self.is_open = bool((host_dir and host_bytes) or (options.disk_dir and options.disk_bytes))
        return replace(options, host_dir=host_dir, host_bytes=host_bytes)

    def close(self) -> None:
        """Give the folder back."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()
