"""Sampled check of loaded KV: computes the first block of a chain again and compares it, bit by bit.

A checksum detects a changed file. This check detects stored KV that differs from what the model computes. A check is an
ordinary request of one token that runs when the engine has no other work. Its prompt has its own cache salt, so that it
shares no blocks with other requests. Chains are selected by counting.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lockstep.artifacts.model import Adapter
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
"""Maximum number of checks that wait for an idle moment. Further ones are skipped."""
_SALT = "computed again to be compared"


class _Due(NamedTuple):
    tokens: tuple[int, ...]
    block_hash: bytes
    """Hash of the first block, as in the store."""
    content: Blocks
    """Content of that block, as loaded from the store."""
    adapter: Adapter | None
    """Adapter with which the whole block was computed; None: the base model computed it."""


@dataclass(slots=True, eq=False)
class _Running:
    due: _Due
    live: LiveRequest
    is_over: bool = False

    def on_output(self, output: TokenOutput) -> None:
        self.is_over = self.is_over or output.finish_reason is not None


class KVCheck:
    """Checks of one engine. Engine thread only.

    Args:
        environment: environment key of the engine's blocks in the store.
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
        """Ids of check requests. They are negative, unlike the ids of callers."""

    def has_work(self, is_idle: bool) -> bool:
        """True if a check has ended, or one can begin because there is no other work.

        Args:
            is_idle: no request waits outside of the scheduler.
        """
        if self._running is not None:
            return self._running.is_over
        return is_idle and bool(self._due) and not self._scheduler.has_unfinished

    def count_loaded(self, live: LiveRequest, first: Blocks) -> None:
        """Count a chain whose first block came from the store. One of every 1 / share chains is checked."""
        share = self._store.options.check_share
        self._num_chains += 1
        is_its_turn = int(self._num_chains * share) > int((self._num_chains - 1) * share)
        size = self._scheduler.config.block_size
        adapter = live.adapter if live.adapter_start is not None and live.adapter_start.position < size else None
        if adapter is not None and adapter.invocation_ids:
            return  # the block may lack the invocation tokens
        if is_its_turn and len(self._due) < MAX_DUE:
            self._due.append(_Due(live.prompt_ids[: size + 1], live.core_request.block_hashes[0], first, adapter))

    def next(self, is_idle: bool, now_s: float) -> LiveRequest | None:
        """Compare the block of a check that has ended. Returns the request of the next check if one is due."""
        if self._running is not None and self._running.is_over:
            self._compare(self._running)
            self._running = None
        if not self.has_work(is_idle):
            return None
        due = self._due.popleft()
        params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
        try:
            name = "" if due.adapter is None else due.adapter.name
            request = GenerationRequest(due.tokens, params, cache_salt=_SALT, adapter=name)
            live = prepare(self._model, self._scheduler.config, request, due.adapter)
        except LockstepError as error:
            log.warning("stored KV cannot be checked: %s", error)
            return None
        self._running = _Running(due, live)
        live.request_id, live.arrival_s, live.sink = next(self._ids), now_s, self._running.on_output
        return live

    def _compare(self, running: _Running) -> None:
        hashes = running.live.core_request.block_hashes[:1]
        [blocks] = self._scheduler.cached_blocks(hashes)
        if not blocks:  # the check failed or was aborted
            return
        [computed] = self._model.executor.read_blocks(blocks)
        self._scheduler.pin(hashes)
        self._scheduler.sweep(hashes)
        is_same = np.array_equal(computed.view(np.uint8).ravel(), running.due.content.view(np.uint8).ravel())
        self._store.count_check(self._environment, running.due.block_hash, is_same)
        if not is_same:
            self._scheduler.reset_prefix_cache()
