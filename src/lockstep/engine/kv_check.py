"""Sampled check of KV that came back: the first block of a chain is computed again and compared, bit by bit.

Checksums tell what became of a file; this tells whether what was written is what the model computes. A check is an
ordinary request of one token that runs when the engine has nothing else to do. Its prompt has a salt of its own, so
that it finds nobody's blocks and nobody finds its. Which chains are checked is decided by counting them.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lockstep.core.scheduler import Scheduler
from lockstep.engine.generation import LiveRequest
from lockstep.engine.input_processing import prepare
from lockstep.engine.kv_store import KVStore
from lockstep.engine.loading import LoadedModel
from lockstep.engine.outputs import TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.errors import LockstepError
from lockstep.executors.base import Blocks
from lockstep.executors.sampling_params import SamplingParams

log = logging.getLogger(__name__)

MAX_DUE = 8
"""Checks that wait for an idle moment; further ones are left out."""
_SALT = "computed again to be compared"


class _Due(NamedTuple):
    tokens: tuple[int, ...]
    block_hash: bytes
    """Hash of the first block, as in the store."""
    content: Blocks
    """Of that block, as it came back."""


@dataclass(slots=True, eq=False)
class _Running:
    due: _Due
    live: LiveRequest
    is_over: bool = False

    def told(self, output: TokenOutput) -> None:
        self.is_over = self.is_over or output.finish_reason is not None


class KVCheck:
    """Checks of one engine. Engine thread only.

    Args:
        environment: of the engine's blocks in the store.
    """

    def __init__(self, scheduler: Scheduler, model: LoadedModel, store: KVStore, environment: bytes) -> None:
        self._scheduler = scheduler
        self._model = model
        self._store = store
        self._environment = environment
        self._num_chains = 0
        self._due: deque[_Due] = deque()
        self._running: _Running | None = None
        self._ids = itertools.count(-1, -1)
        """Below those of callers."""

    def has_work(self, is_idle: bool) -> bool:
        """True if a check has ended, or one can begin as nothing else is to be done.

        Args:
            is_idle: no one waits in front of the scheduler.
        """
        if self._running is not None:
            return self._running.is_over
        return is_idle and bool(self._due) and not self._scheduler.has_unfinished

    def came_back(self, live: LiveRequest, first: Blocks) -> None:
        """Take note of a chain whose first block came from the store; every 1 / share-th is checked."""
        share = self._store.options.check_share
        self._num_chains += 1
        is_its_turn = int(self._num_chains * share) > int((self._num_chains - 1) * share)
        if is_its_turn and len(self._due) < MAX_DUE:
            size = self._scheduler.config.block_size
            self._due.append(_Due(live.prompt_ids[: size + 1], live.core_request.block_hashes[0], first))

    def next(self, is_idle: bool, now_s: float) -> LiveRequest | None:
        """The next check's request, where it is time for one; what was computed for the last one is compared."""
        if self._running is not None and self._running.is_over:
            self._compare(self._running)
            self._running = None
        if not self.has_work(is_idle):
            return None
        due = self._due.popleft()
        params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
        try:
            live = prepare(self._model, self._scheduler.config, GenerationRequest(due.tokens, params, cache_salt=_SALT))
        except LockstepError as error:
            log.warning("KV that came back cannot be checked: %s", error)
            return None
        self._running = _Running(due, live)
        live.request_id, live.arrival_s, live.sink = next(self._ids), now_s, self._running.told
        return live

    def _compare(self, running: _Running) -> None:
        hashes = running.live.core_request.block_hashes[:1]
        [block] = self._scheduler.cached_blocks(hashes)
        if block is None:  # it failed, or was aborted
            return
        [computed] = self._model.executor.read_blocks([block])
        self._scheduler.pin(hashes)
        self._scheduler.sweep(hashes)
        is_same = np.array_equal(computed.view(np.uint8).ravel(), running.due.content.view(np.uint8).ravel())
        self._store.checked(self._environment, running.due.block_hash, is_same)
        if not is_same:
            self._scheduler.reset_prefix_cache()
