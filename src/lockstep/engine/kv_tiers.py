"""Tiers of KV blocks outside of the device: stores each block in host memory, on disk, or in both.

A block is saved to host memory first and copied to disk when there is nothing else to do, so that either tier may lose
any block at any time. A block that is read from disk is also put back into host memory.
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
from lockstep.engine.kv_records import MAX_RECORDS
from lockstep.errors import UsageError
from lockstep.executors.base import Blocks
from lockstep.system import SYSTEM, System

log = logging.getLogger(__name__)

MAX_PENDING_COPIES = 1 << 16
"""Maximum number of blocks that wait to be copied to disk. Beyond it, the oldest are not copied."""


class KVTierName(StrEnum):
    """Name of a tier outside of the device."""

    HOST = "host"
    DISK = "disk"


class KVStoreOptions(msgspec.Struct, frozen=True):
    """Options of a store. A tier without a folder does not exist."""

    host_dir: str = ""
    host_bytes: int = 0
    disk_dir: str = ""
    disk_bytes: int = 0
    check_share: float = 0.0
    """Share of loaded chains whose first block is recomputed and compared."""
    max_records: int = MAX_RECORDS
    """Maximum number of session records. Beyond it, the least recently used one is removed."""
    max_unwritten_records: int = 4096
    """Maximum number of session records that wait to be written. Beyond it, the oldest ones are dropped."""
    max_saving_bytes: int = 64 << 20
    """Maximum size of contents that wait to be written. Engines keep the rest on the device until there is room."""
    max_ahead_bytes: int = 32 << 20
    """Maximum size of contents that were read for one chain and not taken yet."""

    @property
    def tiers(self) -> tuple[tuple[KVTierName, str, int], ...]:
        """Name, folder and budget of each tier, fastest first."""
        return (KVTierName.HOST, self.host_dir, self.host_bytes), (KVTierName.DISK, self.disk_dir, self.disk_bytes)


class TierStats(NamedTuple):
    """Statistics of one tier."""

    num_blocks: int
    num_bytes: int
    budget_bytes: int
    num_evicted: int
    num_loaded: int
    """Number of blocks that were loaded from it."""
    num_rejected: int
    """Number of blocks that did not match what was written or computed."""
    num_checked: int
    """Number of loaded blocks that were recomputed as a check."""


class KVTiers:
    """Blocks of both tiers. One thread reads, writes and removes; any thread may test for blocks.

    Args:
        on_fault: called on that thread with a description of each block that does not match what was written.

    Raises:
        UsageError: a folder cannot be used, or another process uses it.
    """

    def __init__(self, options: KVStoreOptions, on_fault: Callable[[str], None], system: System = SYSTEM) -> None:
        self._on_fault = on_fault
        self._system = system
        self._files: Mapping[KVTierName, BlockFiles] = {}
        """Files by tier, fastest first. The mapping is replaced and never modified."""
        try:
            self._open(options)
        except UsageError:
            self.close()  # release the locks of tiers that were opened
            raise
        self._pending_copies: OrderedDict[BlockKey, tuple[int, int]] = OrderedDict()
        """Size and priority of the blocks that are not on disk yet."""
        self.num_loaded: Counter[KVTierName] = Counter()
        self.num_rejected: Counter[KVTierName] = Counter()
        self.num_checked: Counter[KVTierName] = Counter()

    def close(self) -> None:
        """Release the folders."""
        for files in self._files.values():
            files.close()

    # -- any thread -----------------------------------------------------------------------------------------------

    @property
    def slowest(self) -> BlockFiles | None:
        """The slowest tier, which keeps blocks the longest."""
        return next(reversed([*self._files.values()]), None)

    @property
    def num_pending_copies(self) -> int:
        """Number of blocks that are not on disk yet."""
        return len(self._pending_copies)

    def __bool__(self) -> bool:
        """True if there is any tier."""
        return bool(self._files)

    def __contains__(self, key: BlockKey) -> bool:
        return self.tier_of(key) is not None

    def tier_of(self, key: BlockKey) -> KVTierName | None:
        """The fastest tier that has a block."""
        return next((tier for tier, files in self._files.items() if key in files), None)

    def holders(self, key: BlockKey) -> tuple[KVTierName, ...]:
        """Tiers that have a block, fastest first."""
        return tuple(tier for tier, files in self._files.items() if key in files)

    def count_check(self, key: BlockKey, is_same: bool) -> None:
        """Count a loaded block that was recomputed as a check."""
        tier = self.tier_of(key) or next(iter(self._files))
        self.num_checked[tier] += 1
        self.num_rejected[tier] += not is_same

    @property
    def fault(self) -> str:
        """The reason why less is stored than the budgets allow, in one sentence; empty: there is no such limit."""
        return next((files.fault for files in self._files.values() if files.fault), "")

    def stats(self) -> dict[KVTierName, TierStats]:
        """Statistics of each tier."""
        return {
            tier: TierStats(
                len(files),
                files.num_bytes,
                files.budget_bytes,
                files.num_evicted,
                self.num_loaded[tier],
                self.num_rejected[tier],
                self.num_checked[tier],
            )
            for tier, files in self._files.items()
        }

    # -- the store's thread ---------------------------------------------------------------------------------------

    def read(self, key: BlockKey, num_bytes: int) -> tuple[KVTierName, Blocks] | None:
        """Read a block. Returns its tier and content; None: it is not stored, or does not match what was written."""
        content = np.empty(num_bytes, np.uint8)
        tier = next((tier for tier in self._files if self._read(tier, key, content)), None)
        if tier is None:
            return None
        self.num_loaded[tier] += 1
        return tier, content

    def promote(self, key: BlockKey, content: Blocks) -> None:
        """Copy a block that was read from disk to host memory."""
        if KVTierName.HOST in self._files:
            self._files[KVTierName.HOST].write(key, content, self._files[KVTierName.DISK].class_of(key))

    def save(self, key: BlockKey, content: Blocks, class_: int) -> None:
        """Store a block: in host memory now and on disk later; at once on disk if host memory has no room."""
        host, disk = self._files.get(KVTierName.HOST), self._files.get(KVTierName.DISK)
        is_on_host = host is not None and host.write(key, content, class_)
        if disk is None or key in disk:
            return
        if not is_on_host:
            disk.write(key, content, class_)
            return
        self._pending_copies[key] = len(content), class_
        if len(self._pending_copies) > MAX_PENDING_COPIES:
            self._pending_copies.popitem(last=False)

    def copy_next(self) -> None:
        """Copy the block that has waited longest from host memory to disk."""
        key, (num_bytes, class_) = self._pending_copies.popitem(last=False)
        content = np.empty(num_bytes, np.uint8)
        if self._read(KVTierName.HOST, key, content):
            self._files[KVTierName.DISK].write(key, content, class_)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """Remove blocks from all tiers."""
        for key in keys:
            self._pending_copies.pop(key, None)
            for files in self._files.values():
                files.remove(key)

    def drop(self, environment: bytes) -> None:
        """Remove all blocks of an environment."""
        for files in self._files.values():
            self.remove([key for key in files if key.environment == environment])

    def resize(self, options: KVStoreOptions) -> None:
        """Apply the budgets of new options, and open tiers that had none. Folders do not change."""
        try:
            self._open(options)
        except UsageError as error:
            log.error("%s", error)
            self._on_fault(str(error))
        for tier, _, num_bytes in options.tiers:
            if tier in self._files:
                self._files[tier].budget_bytes = num_bytes
                self._files[tier].shrink()

    def classify(self, environment: bytes, class_: int) -> None:
        """Change the priority of an environment's blocks."""
        for files in self._files.values():
            files.classify(environment, class_)

    def _open(self, options: KVStoreOptions) -> None:
        for tier, folder, num_bytes in options.tiers:
            if folder and num_bytes and tier not in self._files:
                opened = {**self._files, tier: BlockFiles(Path(folder), num_bytes, self._system)}
                self._files = {each: opened[each] for each in KVTierName if each in opened}

    def _read(self, tier: KVTierName, key: BlockKey, content: Blocks) -> bool:
        try:
            return self._files[tier].read(key, content)
        except BlockError as error:
            self.num_rejected[tier] += 1
            log.warning("%s; the block is computed again", error)
            self._on_fault(str(error))
            return False


class HostStore:
    """Folder in host memory for KV that leaves the device, created on first use."""

    def __init__(self) -> None:
        self.is_open = False
        """True if KV that leaves the device is stored."""
        self.fault = ""
        """The reason why less is stored in host memory than was configured, in one sentence; empty: there is no such
        limit."""
        self._folder: HostFolder | None = None

    def opened(self, options: KVStoreOptions) -> KVStoreOptions:
        """Create the folder. Returns the options with its path, and with the budget limited to the free memory."""
        host_bytes = options.host_bytes
        if host_bytes and self._folder is None:
            try:
                self._folder = claim_host_folder()
            except UsageError as error:  # the server also works without it
                self.fault = f"KV cannot be stored in host memory: {error}"
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
        """Remove the folder."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()
